"""When a worker process asks its queues: at once after a lull, in batches under load, later after failures."""

from __future__ import annotations

import pytest

from django_asyncq.conf import Settings
from django_asyncq.lifecycle.dispatching import DENSE
from django_asyncq.worker.fetch import (
    BATCH,
    LONGEST_BACKOFF_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PAUSE_AFTER_BATCH_SECONDS,
    SHORTEST_PAUSE_SECONDS,
    STREAM_PER_SECOND,
    Pacing,
)

from ..clock import Clock

LOOK_SECONDS = 5.0
TINY = 1e-6


@pytest.fixture
def clock() -> Clock:
    """The time of a test."""
    return Clock()


def take(pacing: Pacing, got: int, *, is_more_left: bool = False) -> bool:
    """Ask the queues, which is due, and get so many; return whether the process is to wait for the next push."""
    assert pacing.is_due()
    pacing.begin()
    return pacing.finish(got, is_more_left=is_more_left, look_seconds=LOOK_SECONDS)


def test_asks_at_its_start_and_then_after_a_push_or_when_it_is_time_to_look(clock: Clock) -> None:
    """Nothing found: no pause, so the next task is taken at once."""
    pacing = Pacing(clock)
    assert take(pacing, 0)
    assert not pacing.is_due()
    assert pacing.sleep_seconds(0.04) == LOOK_SECONDS
    pacing.note_push()
    assert take(pacing, 0)
    clock.now += LOOK_SECONDS
    assert take(pacing, 0)


def test_asks_again_at_once_while_more_is_left(clock: Clock) -> None:
    """A backlog is fetched without a pause, and needs no push."""
    pacing = Pacing(clock)
    for _ in range(10):
        assert not take(pacing, 200, is_more_left=True)


def test_single_tasks_are_taken_at_once_and_those_right_behind_after_a_short_pause(clock: Clock) -> None:
    """A push within the pause waits until it is over, and the process sleeps that long; a later one does not wait."""
    pacing = Pacing(clock)
    assert take(pacing, 1)
    clock.now += SHORTEST_PAUSE_SECONDS / 2
    pacing.note_push()
    assert not pacing.is_due()
    assert pacing.sleep_seconds(0.04) == pytest.approx(SHORTEST_PAUSE_SECONDS / 2)
    clock.now += SHORTEST_PAUSE_SECONDS
    assert pacing.is_due()
    pacing = Pacing(clock)
    for _ in range(10):
        assert take(pacing, 1)
        assert pacing.sleep_seconds(0.04) == LOOK_SECONDS, "a pause that no task waits for is no reason to wake"
        clock.now += SHORTEST_PAUSE_SECONDS + TINY
        pacing.note_push()


def test_after_a_batch_the_next_one_of_a_producer_that_batches_comes_within_the_pause(clock: Clock) -> None:
    """So batches that keep coming are a stream, and nobody need wake the process."""
    pacing = Pacing(clock)
    assert take(pacing, BATCH)
    clock.now += Settings().push_batch_seconds
    pacing.note_push()
    assert not pacing.is_due()
    assert pacing.sleep_seconds(0.04) == pytest.approx(PAUSE_AFTER_BATCH_SECONDS - Settings().push_batch_seconds)
    clock.now += pacing.sleep_seconds(0.04)
    assert not take(pacing, BATCH + 1)


def test_what_is_a_batch_to_a_worker_is_a_stream_to_a_producer() -> None:
    """A producer that batches makes batches of that size; any other makes none."""
    assert BATCH == DENSE == STREAM_PER_SECOND * Settings().push_batch_seconds


def test_under_load_pauses_grow_to_the_longest_and_need_no_push(clock: Clock) -> None:
    """Until a pause brings no work: then it waits for a push again, and takes the next task at once."""
    pacing = Pacing(clock)
    take(pacing, 1)
    pacing.note_push()
    pauses = []
    for _ in range(6):
        pauses.append(pacing.sleep_seconds(0.04))
        clock.now += pauses[-1]
        assert not take(pacing, 8)
    assert pauses == pytest.approx([SHORTEST_PAUSE_SECONDS, 0.005, 0.01, 0.02, 0.02, 0.02])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_SECONDS)
    clock.now += pauses[-1]
    assert take(pacing, 0)
    assert not pacing.is_due()
    pacing.note_push()
    assert pacing.is_due()


@pytest.mark.parametrize(("pause", "enough"), [(1, 1), (2, 2), (3, 4), (4, 8)])
def test_a_pause_that_was_not_worth_its_wait_is_the_last(clock: Clock, pause: int, enough: int) -> None:
    """Many came at a time, then few: a process that went on pausing would let each task wait for nothing."""

    def after_pauses() -> Pacing:
        pacing = Pacing(clock)
        take(pacing, 1)
        pacing.note_push()
        for _ in range(pause - 1):
            clock.now += pacing.sleep_seconds(0.04)
            assert not take(pacing, 8), "a longer pause may bring more"
        clock.now += pacing.sleep_seconds(0.04)
        return pacing

    assert not take(after_pauses(), enough), "it goes on"
    pacing = after_pauses()
    assert take(pacing, enough - 1), "it waits for a push again"
    pacing.note_push()
    assert pacing.is_due() or pacing.sleep_seconds(0) <= SHORTEST_PAUSE_SECONDS + TINY


def test_a_task_each_few_milliseconds_waits_for_no_pause(clock: Clock) -> None:
    """They are no stream: each is taken as it comes."""
    pacing = Pacing(clock)
    for _ in range(20):
        assert take(pacing, 1)
        clock.now += 1 / STREAM_PER_SECOND + TINY
        assert not pacing.is_due()
        pacing.note_push()


def test_after_a_failure_asks_at_once_then_after_growing_pauses_despite_pushes(clock: Clock) -> None:
    """A Redis that comes back is not asked by all at the same instant; the first success resets the failures."""
    pacing = Pacing(clock)
    pauses = []
    for _ in range(8):
        pacing.begin()
        pacing.fail()
        pacing.note_push()
        pauses.append(pacing.sleep_seconds(0) if not pacing.is_due() else 0.0)
        clock.now += pauses[-1]
    assert pauses[0] == 0
    assert all(0.4 * 2**step <= pause <= 0.8 * 2**step + TINY for step, pause in enumerate(pauses[1:4]))
    assert max(pauses) <= LONGEST_BACKOFF_SECONDS
    assert pacing.failures == 8
    assert not take(pacing, 1), "what came meanwhile counts as load"
    assert pacing.failures == 0
    assert pacing.sleep_seconds(0) == pytest.approx(SHORTEST_PAUSE_SECONDS)


def test_waits_for_pushes_begin_after_their_pause(clock: Clock) -> None:
    """The process sleeps until then."""
    pacing = Pacing(clock)
    assert pacing.until_wait() == 0
    pacing.wait_later(0.5)
    assert pacing.until_wait() == pytest.approx(0.5)
    clock.now += 0.6
    assert pacing.until_wait() == 0


def test_waits_that_fail_begin_again_after_growing_pauses(clock: Clock) -> None:
    """Several that fail at once are one failure; the second in a row is to be logged, and so is the recovery."""
    pacing = Pacing(clock)
    logged = []
    for failures in range(1, 8):
        logged.append(pacing.wait_failed())
        assert not pacing.wait_failed()
        assert pacing.wait_failures == failures
        assert pacing.until_wait() <= LONGEST_BACKOFF_SECONDS
        clock.now += LONGEST_BACKOFF_SECONDS
        assert pacing.until_wait() == 0
    assert logged == [False, True, False, False, False, False, False]
    assert pacing.wait_succeeded()
    assert not pacing.wait_succeeded()
