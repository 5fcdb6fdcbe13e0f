"""Waking a loop that sleeps: from threads, and from signals without doing work in the handler."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from typing import Any

# Read at once; fewer than that were all there were.
MOST_RINGS = 4096
# What `select` can look at: numbers below.
FD_SETSIZE = 1024


def readable(descriptors: Sequence[int], timeout_seconds: float | None) -> list[int]:
    """Sleep until one of them is readable; return those that are."""
    if max(descriptors) < FD_SETSIZE:
        return select.select(descriptors, [], [], timeout_seconds)[0]
    # In whole milliseconds, but of any number: a task may have opened a thousand files before Redis was reached anew.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout_seconds is None else timeout_seconds * 1000)]


class Wakeup:
    """A self-pipe. `ring` from any thread ends the `wait` of the one thread that owns it.

    Only the first ring after a `wait` costs a system call.
    Source: Bernstein, "The self-pipe trick"; Python's `signal.set_wakeup_fd`.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._has_rung = False

    def attach_signals(self) -> None:
        """Let every signal that has a handler ring as well. Main thread only."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def ring(self) -> None:
        """End the current or the next `wait`."""
        if self._has_rung:
            return
        self._has_rung = True
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # the pipe is full of rings already

    # The watch on the queues knows an object with a `set` method.
    set = ring

    def wait(self, timeout_seconds: float | None, also: Sequence[Any] = ()) -> list[Any]:
        """Sleep until somebody rings or one of `also` becomes readable; return what has become so, the pipe too."""
        ready = readable([self._read, *also], timeout_seconds)
        if self._read in ready:
            self.clear()
        return ready

    def clear(self) -> None:
        """Forget the rings so far."""
        # In this order: a ring in between is forgotten too, but its owner is awake and looks at everything anew.
        try:
            while len(os.read(self._read, MOST_RINGS)) == MOST_RINGS:
                continue
        except BlockingIOError:
            pass  # as many as that, or none
        self._has_rung = False
