"""Wakes a thread that sleeps: from other threads, each with a reason, and from signals. Does no work by itself."""

from __future__ import annotations

import enum
import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

# Bytes to read at once; fewer than that were all there were.
READ_BYTES = 4096
# `select` can look at descriptors below this.
FD_SETSIZE = 1024


class Reason(enum.StrEnum):
    """Why the main thread of a worker process, or of a supervisor, is woken."""

    SIGNAL = "a signal has arrived"
    PUSH = "a queue may have work, or there is a new queue"
    CAPACITY_FREED = "enough slots are free to dequeue more"
    QUEUE_FREED = "a task of a queue with a limit of slots has left this process"
    IDLE = "no task is left in this process"
    REPORTED = "the reporter has written a batch"
    STOPPED = "the owner is to stop"
    STARTED = "a worker process has been started"
    USED_UP = "this process has run as many tasks, or used as much memory, as it may"


class Woken(NamedTuple):
    """What ended a sleep; both are empty when its time was over. ready: those of `also` that have become readable."""

    reasons: set[Reason]
    ready: list[Any]


def readable(descriptors: Sequence[Any], timeout_seconds: float | None) -> list[Any]:
    """Sleep until one of them is readable; return those that are."""
    numbers = [each if isinstance(each, int) else each.fileno() for each in descriptors]
    if max(numbers) < FD_SETSIZE:
        return select.select(descriptors, [], [], timeout_seconds)[0]
    # In whole milliseconds, but of any number: a task may open a thousand files before a connection is made anew.
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    found = {number for number, _ in poll.poll(None if timeout_seconds is None else timeout_seconds * 1000)}
    return [each for each, number in zip(descriptors, numbers, strict=True) if number in found]


class Wakeup:
    """A self-pipe with reasons. `notify` from any thread ends the `wait` of the one thread that owns it.

    The owner says with `expect` which reasons it waits for, before it looks at what they are about: what changes after
    the look notifies. A reason that is not expected, or that the owner is still to read, costs no system call.
    Source: Bernstein, "The self-pipe trick"; Python's `signal.set_wakeup_fd`.
    """

    def __init__(self, expected: Sequence[Reason] = ()) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._expected = set(expected)
        self._given: set[Reason] = set()

    # --- called by the owner

    def attach_signals(self) -> None:
        """Let every signal that has a handler wake the owner too. Main thread only."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def disconnect(self) -> None:
        """Let this process's copy wake nobody. For a forked child, which would share the pipe with its parent."""
        nothing = os.open(os.devnull, os.O_RDWR)
        # Replaced, not closed: another file could get the number, and be written to.
        for descriptor in (self._read, self._write):
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    def expect(self, reason: Reason) -> None:
        """Be woken for a reason from now on."""
        self._expected.add(reason)

    def ignore(self, reason: Reason) -> None:
        """Be woken for a reason no longer."""
        self._expected.discard(reason)

    def wait(self, timeout_seconds: float | None, also: Sequence[Any] = ()) -> Woken:
        """Sleep until a reason is given, one of `also` becomes readable, or the time is over."""
        ready = readable([self._read, *also], timeout_seconds)
        if self._read not in ready:
            return Woken(set(), ready)
        ready.remove(self._read)
        return Woken(self._take_reasons(), ready)

    def _take_reasons(self) -> set[Reason]:
        reasons = {Reason.SIGNAL} if self._empty_pipe() else set()
        # After the pipe is empty: a reason that is given from here on is either taken now or in the pipe again.
        while self._given:
            reasons.add(self._given.pop())
        return reasons

    def _empty_pipe(self) -> bool:
        """Read all that is in the pipe; return whether a signal wrote into it. A signal writes its number."""
        is_signal = False
        try:
            while True:
                found = os.read(self._read, READ_BYTES)
                is_signal = is_signal or found.strip(b"\0") != b""
                if len(found) < READ_BYTES:
                    return is_signal
        except BlockingIOError:
            return is_signal

    # --- called by any thread

    def notify(self, reason: Reason) -> None:
        """End the current or the next `wait`, if the owner expects this reason."""
        if reason not in self._expected or reason in self._given:
            return
        self._given.add(reason)
        with suppress(BlockingIOError):  # the pipe is full, so the owner wakes anyway
            os.write(self._write, b"\0")


@dataclass(frozen=True, slots=True)
class Notice:
    """One reason of a wake-up as an event, for a listener that calls `set`."""

    wakeup: Wakeup
    reason: Reason

    def set(self) -> None:
        """Notify."""
        self.wakeup.notify(self.reason)
