"""When a worker process asks its queues: at once after a lull, in groups under load, later after failures."""

from __future__ import annotations

import pytest

from django_asyncq.conf import Settings
from django_asyncq.lifecycle.push_batcher import DENSE
from django_asyncq.worker.fetch.pacing import (
    GROUP,
    LONGEST_PAUSE_SECONDS,
    LONGEST_REST_SECONDS,
    REST_AFTER_GROUP_SECONDS,
    SHORTEST_REST_SECONDS,
    STREAM_PER_SECOND,
    Pacing,
)

from .clock import Clock

LOOK_SECONDS = 5.0
TINY = 1e-6


@pytest.fixture
def clock() -> Clock:
    """The time of a test."""
    return Clock()


def take(turns: Pacing, got: int, *, is_more_left: bool = False) -> bool:
    """Ask the queues, which is due, and find so many; return whether the process wants to be told of the next."""
    assert turns.is_due()
    turns.begin()
    return turns.end(got, is_more_left=is_more_left, look_seconds=LOOK_SECONDS)


def test_asks_at_its_start_and_then_when_told_or_when_it_is_time_to_look(clock: Clock) -> None:
    """Nothing found: no rest, for the next task is taken at once."""
    turns = Pacing(clock)
    assert take(turns, 0)
    assert not turns.is_due()
    assert turns.pause_seconds(0.04) == LOOK_SECONDS
    turns.told()
    assert take(turns, 0)
    clock.now += LOOK_SECONDS
    assert take(turns, 0)


def test_asks_again_at_once_while_more_is_left(clock: Clock) -> None:
    """A backlog knows no rest, and needs nobody to tell of it."""
    turns = Pacing(clock)
    for _ in range(10):
        assert not take(turns, 200, is_more_left=True)


def test_lone_tasks_are_taken_at_once_and_those_right_behind_after_a_short_rest(clock: Clock) -> None:
    """Who is told within the rest waits for its end, and sleeps so long; who is told later does not wait."""
    turns = Pacing(clock)
    assert take(turns, 1)
    clock.now += SHORTEST_REST_SECONDS / 2
    turns.told()
    assert not turns.is_due()
    assert turns.pause_seconds(0.04) == pytest.approx(SHORTEST_REST_SECONDS / 2)
    clock.now += SHORTEST_REST_SECONDS
    assert turns.is_due()
    turns = Pacing(clock)
    for _ in range(10):
        assert take(turns, 1)
        assert turns.pause_seconds(0.04) == LOOK_SECONDS, "a rest nobody waits for is no reason to wake"
        clock.now += SHORTEST_REST_SECONDS + TINY
        turns.told()


def test_after_a_group_the_next_of_a_producer_that_gathers_comes_within_the_rest(clock: Clock) -> None:
    """So groups that keep coming are a load, and need nobody to wake the process."""
    turns = Pacing(clock)
    assert take(turns, GROUP)
    clock.now += Settings().push_batch_seconds
    turns.told()
    assert not turns.is_due()
    assert turns.pause_seconds(0.04) == pytest.approx(REST_AFTER_GROUP_SECONDS - Settings().push_batch_seconds)
    clock.now += turns.pause_seconds(0.04)
    assert not take(turns, GROUP + 1)


def test_what_is_a_group_to_a_worker_is_a_stream_to_a_producer() -> None:
    """Whoever gathers makes groups, whoever does not makes none."""
    assert GROUP == DENSE == STREAM_PER_SECOND * Settings().push_batch_seconds


def test_under_load_rests_grow_to_their_longest_and_nobody_need_tell(clock: Clock) -> None:
    """Until a rest ends without work: then it waits to be told again, and takes the next at once."""
    turns = Pacing(clock)
    take(turns, 1)
    turns.told()
    rests = []
    for _ in range(6):
        rests.append(turns.pause_seconds(0.04))
        clock.now += rests[-1]
        assert not take(turns, 8)
    assert rests == pytest.approx([SHORTEST_REST_SECONDS, 0.005, 0.01, 0.02, 0.02, 0.02])
    assert rests[-1] == pytest.approx(LONGEST_REST_SECONDS)
    clock.now += rests[-1]
    assert take(turns, 0)
    assert not turns.is_due()
    turns.told()
    assert turns.is_due()


@pytest.mark.parametrize(("rest", "enough"), [(1, 1), (2, 2), (3, 4), (4, 8)])
def test_a_rest_that_was_not_worth_its_wait_is_the_last(clock: Clock, rest: int, enough: int) -> None:
    """Many came at a time, then few: a process that went on resting would let each wait for nothing."""

    def rested() -> Pacing:
        turns = Pacing(clock)
        take(turns, 1)
        turns.told()
        for _ in range(rest - 1):
            clock.now += turns.pause_seconds(0.04)
            assert not take(turns, 8), "a longer rest may bring more"
        clock.now += turns.pause_seconds(0.04)
        return turns

    assert not take(rested(), enough), "it goes on"
    turns = rested()
    assert take(turns, enough - 1), "it wants to be told again"
    turns.told()
    assert turns.is_due() or turns.pause_seconds(0) <= SHORTEST_REST_SECONDS + TINY


def test_a_task_each_few_milliseconds_waits_for_no_rest(clock: Clock) -> None:
    """Fewer than a stream: each is taken as it comes."""
    turns = Pacing(clock)
    for _ in range(20):
        assert take(turns, 1)
        clock.now += 1 / STREAM_PER_SECOND + TINY
        assert not turns.is_due()
        turns.told()


def test_after_a_failure_asks_at_once_then_after_growing_pauses_whoever_tells(clock: Clock) -> None:
    """A Redis that comes back is not asked by all at the same instant; the first success forgets the failures."""
    turns = Pacing(clock)
    pauses = []
    for _ in range(8):
        turns.begin()
        turns.fail()
        turns.told()
        pauses.append(turns.pause_seconds(0) if not turns.is_due() else 0.0)
        clock.now += pauses[-1]
    assert pauses[0] == 0
    assert all(0.4 * 2**step <= pause <= 0.8 * 2**step + TINY for step, pause in enumerate(pauses[1:4]))
    assert max(pauses) <= LONGEST_PAUSE_SECONDS
    assert turns.failures == 8
    assert not take(turns, 1), "what came meanwhile counts as load"
    assert turns.failures == 0
    assert turns.pause_seconds(0) == pytest.approx(SHORTEST_REST_SECONDS)


def test_may_bring_tasks_while_it_asks_and_while_more_is_left(clock: Clock) -> None:
    """Not when the queues were empty, nor within a rest; again from the end of the rest for which tasks wait."""
    turns = Pacing(clock)
    turns.begin()
    assert turns.may_bring()
    turns.end(200, is_more_left=True, look_seconds=LOOK_SECONDS)
    assert turns.may_bring()
    turns.begin()
    turns.end(1, is_more_left=False, look_seconds=LOOK_SECONDS)
    assert not turns.may_bring()
    turns.told()
    assert not turns.may_bring()
    clock.now += SHORTEST_REST_SECONDS + TINY
    assert turns.may_bring()
    for _ in range(2):
        turns.begin()
        turns.fail()
    assert not turns.may_bring()
