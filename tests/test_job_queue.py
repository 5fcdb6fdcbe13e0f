"""The line before the slots: in order, nothing twice, nobody sleeps while something waits, few are woken."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from django_asyncq.worker.execute.job_queue import JobQueue

from .workers import wait_until

THREADS = 8
# Ends a thread that takes it.
END = -1


@pytest.fixture
def crew() -> Iterator[Callable[[JobQueue[int], Callable[[int], object]], None]]:
    """Starts threads that take from a line, each number with a call, and ends them after the test."""
    started: list[tuple[JobQueue[int], list[threading.Thread]]] = []

    def start(line: JobQueue[int], call: Callable[[int], object]) -> None:
        def work() -> None:
            while (number := line.take()) != END:
                call(number)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
        started.append((line, threads))
        for thread in threads:
            thread.start()

    yield start
    for line, threads in started:
        line.extend([END] * THREADS)
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads), "a thread sleeps while something waits"


def test_first_come_first_served() -> None:
    """And an empty line says so at once, to who does not want to rest."""
    line: JobQueue[int] = JobQueue()
    line.extend([1, 2])
    line.extend([])
    line.extend([3])
    assert [line.take_now() for _ in range(4)] == [1, 2, 3, None]


def test_several_put_and_several_take_and_each_is_taken_once(crew: Callable[..., None]) -> None:
    """With the interpreter changing hands as often as it can."""
    line: JobQueue[int] = JobQueue()
    taken: list[int] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        crew(line, taken.append)
        each = 2_000

        def put(first: int) -> None:
            for number in range(first, first + each, 2):
                line.extend([number, number + 1])

        putting = [threading.Thread(target=put, args=(number * each,)) for number in range(4)]
        for thread in putting:
            thread.start()
        for thread in putting:
            thread.join(30)
        wait_until(lambda: len(taken) >= 4 * each, "the last of them")
    finally:
        sys.setswitchinterval(interval)
    assert sorted(taken) == list(range(4 * each))


def test_who_is_busy_with_one_keeps_nobody_from_the_next(crew: Callable[..., None]) -> None:
    """All that came together are begun while each waits for the others."""
    line: JobQueue[int] = JobQueue()
    met = threading.Barrier(THREADS)
    begun: list[int] = []

    def meet(number: int) -> None:
        met.wait(20)
        begun.append(number)

    crew(line, meet)
    line.extend(range(THREADS))
    wait_until(lambda: len(begun) == THREADS, "the meeting of all of them")


class CountedBell:
    """The lock that wakes those who rest, and how many it has woken."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self.resting = self.woken = 0
        self.locked, self.release = lock.locked, lock.release

    def acquire(self) -> None:
        """Rest."""
        self.resting += 1
        self.lock.acquire()
        self.resting -= 1
        self.woken += 1


def test_short_ones_are_left_to_the_first_that_wakes(crew: Callable[..., None]) -> None:
    """Each thread that wakes wants the interpreter: with one for each job they fight for it."""
    line: JobQueue[int] = JobQueue()
    bell = line._bell = CountedBell(line._bell)  # type: ignore[assignment]
    takers: list[str] = []

    def compute(number: int) -> None:
        takers.append(threading.current_thread().name)
        sum(range(2_000))

    crew(line, compute)
    wait_until(lambda: bell.resting == THREADS, "the rest of all")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        for _ in range(5):
            takers.clear()
            line.extend(range(500))
            wait_until(lambda: len(takers) == 500 and bell.resting == THREADS, "the rest of all")
            assert len(set(takers)) == 1
    finally:
        sys.setswitchinterval(interval)
    # Each time who took them, and the one that it woke.
    assert bell.woken <= 2 * 5
