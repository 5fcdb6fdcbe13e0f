"""The queue before the slots: in order, nothing twice, no thread sleeps while a job waits, few are woken."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from django_asyncq.worker.job import JobQueue

from ..workers import wait_until

THREADS = 8
# Stops the thread that takes it.
STOP = -1


@pytest.fixture
def crew() -> Iterator[Callable[[JobQueue[int], Callable[[int], object]], None]]:
    """Starts threads that take from a queue, each number with a call, and stops them after the test."""
    started: list[tuple[JobQueue[int], list[threading.Thread]]] = []

    def start(queue: JobQueue[int], call: Callable[[int], object]) -> None:
        def work() -> None:
            while (number := queue.take()) != STOP:
                call(number)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
        started.append((queue, threads))
        for thread in threads:
            thread.start()

    yield start
    for queue, threads in started:
        queue.extend([STOP] * THREADS)
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads), "a thread sleeps while a job waits"


def test_first_in_first_out() -> None:
    """And an empty queue says so at once to a thread that does not want to wait."""
    queue: JobQueue[int] = JobQueue()
    queue.extend([1, 2])
    queue.extend([])
    queue.extend([3])
    assert [queue.take_now() for _ in range(4)] == [1, 2, 3, None]


def test_several_threads_put_and_several_take_and_each_job_is_taken_once(crew: Callable[..., None]) -> None:
    """With the interpreter changing hands as often as it can."""
    queue: JobQueue[int] = JobQueue()
    taken: list[int] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        crew(queue, taken.append)
        each = 2_000

        def put(first: int) -> None:
            for number in range(first, first + each, 2):
                queue.extend([number, number + 1])

        putting = [threading.Thread(target=put, args=(number * each,)) for number in range(4)]
        for thread in putting:
            thread.start()
        for thread in putting:
            thread.join(30)
        wait_until(lambda: len(taken) >= 4 * each, "last job")
    finally:
        sys.setswitchinterval(interval)
    assert sorted(taken) == list(range(4 * each))


def test_a_thread_that_is_busy_keeps_no_other_from_the_next_job(crew: Callable[..., None]) -> None:
    """All jobs that came together are begun while each waits for the others."""
    queue: JobQueue[int] = JobQueue()
    met = threading.Barrier(THREADS)
    begun: list[int] = []

    def meet(number: int) -> None:
        met.wait(20)
        begun.append(number)

    crew(queue, meet)
    queue.extend(range(THREADS))
    wait_until(lambda: len(begun) == THREADS, "meeting of all threads")


class CountedBell:
    """The lock that wakes waiting threads, and how many it has woken."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self.waiting = self.woken = 0
        self.locked, self.release = lock.locked, lock.release

    def acquire(self, timeout: float) -> bool:
        """Wait for at most these seconds; return whether the thread was woken."""
        self.waiting += 1
        is_woken = self.lock.acquire(timeout=timeout)
        self.waiting -= 1
        self.woken += is_woken
        return is_woken


def test_short_jobs_are_left_to_the_first_thread_that_wakes(crew: Callable[..., None]) -> None:
    """Each thread that wakes wants the interpreter: one for each job would compete for it."""
    queue: JobQueue[int] = JobQueue()
    bell = queue.bell = CountedBell(queue.bell)  # type: ignore[assignment]
    takers: list[str] = []

    def compute(number: int) -> None:
        takers.append(threading.current_thread().name)
        sum(range(2_000))

    crew(queue, compute)
    wait_until(lambda: bell.waiting == THREADS, "sleep of all threads")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        for _ in range(5):
            takers.clear()
            queue.extend(range(500))
            wait_until(lambda: len(takers) == 500 and bell.waiting == THREADS, "sleep of all threads")
            assert len(set(takers)) == 1
    finally:
        sys.setswitchinterval(interval)
    # Each time the thread that took them, and the one that it woke.
    assert bell.woken <= 2 * 5


def test_a_thread_may_wait_for_a_while_only() -> None:
    """It gets nothing then, and takes no job from those that wait on."""
    queue: JobQueue[int] = JobQueue()
    assert queue.take_within(0.01) is None
    queue.extend([1, 2])
    assert (queue.take_within(0.01), queue.take(), queue.take_within(0.01)) == (1, 2, None)
