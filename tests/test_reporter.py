"""How outcomes are gathered into groups: a lone one is written at once, a stream of them in ever larger groups."""

from __future__ import annotations

import time
from typing import Any

import pytest

from django_asyncq.broker import Broker
from django_asyncq.worker.reporter import LARGEST_GROUP, LONGEST_GATHER_SECONDS, SHORTEST_GATHER_SECONDS, Reporter


class Waits:
    """Stands where the reporter waits; notes for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.is_more_to_come = True

    def wait(self, seconds: float) -> bool:
        """Note the wait."""
        self.seconds.append(seconds)
        return False

    def clear(self) -> None:
        """Nobody tells anything here."""


@pytest.fixture
def waits() -> Waits:
    """The waits of one test."""
    return Waits()


@pytest.fixture
def reporter(waits: Waits) -> Reporter:
    """A reporter that was not started: it gathers when it is told to."""
    made = Reporter(Broker("worker"), "here:1", lambda: None, lambda: waits.is_more_to_come)
    made._last_has_ended = waits  # type: ignore[assignment]
    return made


def gather(reporter: Reporter, count: int) -> int:
    """Report so many and gather; return the size of the group. What is reported is not looked at."""
    for _ in range(count):
        reporter.events.put(None)
    found: list[Any] = reporter._gather()
    return len(found)


def test_lone_outcomes_are_never_kept_waiting(reporter: Reporter, waits: Waits) -> None:
    """However many come, if each is alone."""
    assert [gather(reporter, 1) for _ in range(5)] == [1] * 5
    assert waits.seconds == []


def test_groups_wait_longer_while_several_come_and_not_after_a_lone_one(reporter: Reporter, waits: Waits) -> None:
    """The first group of a stream does not wait; then each twice as long, to the longest; a lull ends it."""
    assert [gather(reporter, 2) for _ in range(5)] == [2] * 5
    doubling = [SHORTEST_GATHER_SECONDS, 2 * SHORTEST_GATHER_SECONDS, LONGEST_GATHER_SECONDS, LONGEST_GATHER_SECONDS]
    assert waits.seconds == pytest.approx(doubling)
    assert gather(reporter, 1) == 1  # the last that waits for others
    waits.seconds.clear()
    assert gather(reporter, 1) == 1
    assert gather(reporter, 2) == 2
    assert waits.seconds == []


def test_group_that_is_full_does_not_wait(reporter: Reporter, waits: Waits) -> None:
    """The rest is the next group."""
    gather(reporter, 2)
    assert gather(reporter, LARGEST_GROUP + 1) == LARGEST_GROUP
    assert waits.seconds == []
    assert gather(reporter, 1) == 2


def test_group_after_which_nothing_can_come_does_not_wait(reporter: Reporter, waits: Waits) -> None:
    """The last of a backlog are written at once; the next stream waits again."""
    gather(reporter, 2)
    waits.is_more_to_come = False
    assert gather(reporter, 2) == 2
    assert waits.seconds == []
    waits.is_more_to_come = True
    gather(reporter, 2)
    assert len(waits.seconds) == 1


def test_wait_ends_when_the_last_has_ended() -> None:
    """Also when that is told between the look and the wait: the reporter is told after its look, before it waits."""

    def look_and_be_told() -> bool:
        reporter.last_has_ended()
        return True

    reporter = Reporter(Broker("worker"), "here:1", lambda: None, look_and_be_told)
    reporter._gather_seconds = 60.0
    began = time.monotonic()
    assert gather(reporter, 2) == 2
    assert time.monotonic() - began < 30
