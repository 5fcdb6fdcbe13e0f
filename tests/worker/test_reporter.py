"""How outcomes are written in batches: a single one at once, a stream of them in ever larger batches."""

from __future__ import annotations

import threading
import time

import pytest

from django_asyncq.broker import Broker
from django_asyncq.worker.report import LARGEST_BATCH, LONGEST_WAIT_SECONDS, SHORTEST_WAIT_SECONDS, Reporter
from django_asyncq.worker.wakeup import Wakeup


class Quiet(threading.Event):
    """Stands in for the event that says that no outcome follows; notes for how long it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Note the wait, if there is one."""
        if not self.is_set():
            self.seconds.append(timeout or 0.0)
        return self.is_set()


@pytest.fixture
def quiet() -> Quiet:
    """The event of one test."""
    return Quiet()


@pytest.fixture
def reporter(quiet: Quiet) -> Reporter:
    """A reporter that was not started: it takes a batch when the test says so."""
    return Reporter(Broker("worker"), "here:1", Wakeup(), quiet)


def batch(reporter: Reporter, count: int) -> int:
    """Report so many outcomes and take a batch; return its size. What is reported is not looked at."""
    for _ in range(count):
        reporter.events.put(None)
    return len(reporter.take_batch())


def test_single_outcomes_never_wait(reporter: Reporter, quiet: Quiet) -> None:
    """However many come, if each is alone."""
    assert [batch(reporter, 1) for _ in range(5)] == [1] * 5
    assert quiet.seconds == []


def test_batches_wait_longer_while_several_come_and_not_after_a_single_one(reporter: Reporter, quiet: Quiet) -> None:
    """The first batch of a stream does not wait; then each twice as long, up to the longest; a lull resets it."""
    assert [batch(reporter, 2) for _ in range(5)] == [2] * 5
    doubling = [SHORTEST_WAIT_SECONDS, 2 * SHORTEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS]
    assert quiet.seconds == pytest.approx(doubling)
    assert batch(reporter, 1) == 1  # the last that waits for others
    quiet.seconds.clear()
    assert batch(reporter, 1) == 1
    assert batch(reporter, 2) == 2
    assert quiet.seconds == []


def test_full_batch_does_not_wait(reporter: Reporter, quiet: Quiet) -> None:
    """The rest is the next batch."""
    batch(reporter, 2)
    assert batch(reporter, LARGEST_BATCH + 1) == LARGEST_BATCH
    assert quiet.seconds == []
    assert batch(reporter, 1) == 2


def test_batch_that_nothing_can_follow_does_not_wait(reporter: Reporter, quiet: Quiet) -> None:
    """The last outcomes of a backlog are written at once; the next stream waits again."""
    batch(reporter, 2)
    quiet.set()
    assert batch(reporter, 2) == 2
    assert quiet.seconds == []
    quiet.clear()
    batch(reporter, 2)
    assert len(quiet.seconds) == 1


def test_wait_ends_once_nothing_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot that finishes sets the event while the reporter waits."""
    monkeypatch.setattr("django_asyncq.worker.report.SHORTEST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr("django_asyncq.worker.report.LONGEST_WAIT_SECONDS", 60.0)
    quiet = threading.Event()
    reporter = Reporter(Broker("worker"), "here:1", Wakeup(), quiet)
    batch(reporter, 2)
    began = time.monotonic()
    timer = threading.Timer(0.05, quiet.set)
    timer.start()
    assert batch(reporter, 2) == 2
    assert time.monotonic() - began < 30
    timer.join()
