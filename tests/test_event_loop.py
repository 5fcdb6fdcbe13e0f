"""The event loop of `async def` tasks waits as long as it is asked to: no longer, no shorter, and wakes when called."""

from __future__ import annotations

import asyncio
import fcntl
import resource
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from django_asyncq.worker.board import Board
from django_asyncq.worker.event_loop import SELECTABLE_FILES, new_event_loop
from django_asyncq.worker.slots import LoopSlots, Runner

if sys.platform != "linux":
    pytest.skip("only epoll rounds", allow_module_level=True)

from django_asyncq.worker.event_loop import ExactSelector

# A machine that stands still makes a wait longer, never shorter; one of so many is not disturbed.
TRIES_SECONDS = 30.0
SHORT_SECONDS = 0.0003
ROUNDED_SECONDS = 0.001


@pytest.fixture
def selector() -> Iterator[ExactSelector]:
    """A selector that is closed at the end."""
    made = ExactSelector()
    yield made
    made.close()


def waits(selector: selectors.BaseSelector, seconds: float) -> float:
    """Return how long the selector waited."""
    begun_at = time.monotonic()
    assert selector.select(seconds) == []
    return time.monotonic() - begun_at


def shortest_wait(selector: selectors.BaseSelector) -> float:
    """Return the shortest of many waits, or the first that was not rounded."""
    shortest, until = float("inf"), time.monotonic() + TRIES_SECONDS
    for _ in range(100):
        shortest = min(shortest, waits(selector, SHORT_SECONDS))
        if shortest < ROUNDED_SECONDS or time.monotonic() > until:
            break
    return shortest


def test_a_wait_is_not_rounded_up(selector: ExactSelector) -> None:
    """epoll's own never take less than a millisecond."""
    assert SHORT_SECONDS <= shortest_wait(selector) < ROUNDED_SECONDS


def test_a_wait_is_never_shorter_than_asked(selector: ExactSelector) -> None:
    """Else a loop would turn for nothing until the time has come."""
    for _ in range(100):
        assert waits(selector, SHORT_SECONDS) >= SHORT_SECONDS


def test_what_is_ready_ends_a_wait(selector: ExactSelector) -> None:
    """With a time-out, without one, and with one that is over; what is not ready is not returned."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        selector.register(ours, selectors.EVENT_READ, "ours")
        assert selector.select(0) == selector.select(-1) == selector.select(SHORT_SECONDS) == []
        theirs.send(b"x")
        for timeout in (60.0, None, 0, -1):
            ((key, events),) = selector.select(timeout)
            assert (key.data, events) == ("ours", selectors.EVENT_READ)


def test_a_file_that_select_cannot_know_is_waited_for_as_before(selector: ExactSelector) -> None:
    """In a process with more than a thousand open files; then waits are rounded, and nothing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= SELECTABLE_FILES:
        pytest.skip("no file may have so high a number here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SELECTABLE_FILES + 1), hard))
    made = select.epoll
    high: list[int] = []

    def epoll_with_high_number() -> select.epoll:
        with made() as low:
            high.append(fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, SELECTABLE_FILES))
        return made.fromfd(high[-1])

    class HighSelector(ExactSelector):
        _selector_cls = staticmethod(epoll_with_high_number)

    try:
        with pytest.raises(ValueError, match="out of range"):
            select.select([SELECTABLE_FILES], [], [], 0)
        beyond = HighSelector()
        assert beyond.fileno() >= SELECTABLE_FILES
        assert waits(beyond, SHORT_SECONDS) >= ROUNDED_SECONDS
        beyond.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_slots_for_coroutines_have_it() -> None:
    """And who calls into the loop from another thread ends its wait, with and without a timer."""
    slots = LoopSlots(Runner("w", Board(1), lambda outcome: None, lambda: None, lambda job: None), 0, 1)
    loop = slots._loop
    assert isinstance(loop._selector, ExactSelector)  # type: ignore[attr-defined]
    called = threading.Event()
    for _ in range(2):
        loop.call_soon_threadsafe(called.set)
        assert called.wait(10)
        called.clear()
        loop.call_soon_threadsafe(loop.call_later, 3600, called.set)
    loop.call_soon_threadsafe(loop.stop)
    slots._thread.join(10)
    assert not slots._thread.is_alive()
    loop.close()


def test_a_loop_of_the_projects_own_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another class, though it waits with epoll, or asyncio's own with another selector."""

    class Loop(asyncio.SelectorEventLoop):
        pass

    for own in (Loop(), asyncio.SelectorEventLoop(selectors.PollSelector())):
        monkeypatch.setattr(asyncio, "new_event_loop", lambda own=own: own)
        assert new_event_loop() is own
        assert not own.is_closed()
        own.close()


def test_the_loop_that_is_not_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are not left open."""
    made = asyncio.SelectorEventLoop()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: made)
    new_event_loop().close()
    assert made.is_closed()
