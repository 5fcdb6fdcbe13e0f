"""The event loop of `async def` tasks; on Linux it waits no longer than it was asked to.

asyncio waits with epoll, whose time-outs are whole milliseconds, and rounds up: a sleep is up to a millisecond longer.
`select` counts microseconds, and can wait for an epoll. Source: Linux, epoll(7).
"""

from __future__ import annotations

import asyncio
import select
import selectors
import sys

# `select` knows no file beyond that. Source: Linux, select(2), FD_SETSIZE.
SELECTABLE_FILES = 1024


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return what `asyncio.new_event_loop` returns; in place of asyncio's own on epoll one that waits exactly."""
    loop = asyncio.new_event_loop()
    if sys.platform != "linux" or type(loop) is not asyncio.SelectorEventLoop:
        return loop  # of the project's choice, such as uvloop's
    if type(getattr(loop, "_selector", None)) is not selectors.EpollSelector:
        return loop  # it does not round, or was chosen too
    loop.close()
    return asyncio.SelectorEventLoop(ExactSelector())


if sys.platform == "linux":

    class ExactSelector(selectors.EpollSelector):
        """epoll that waits for microseconds."""

        def __init__(self) -> None:
            super().__init__()
            self._is_selectable = self.fileno() < SELECTABLE_FILES

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """Return what is ready, after `timeout` seconds at the latest, never before without any; None: no limit."""
            if timeout is not None and timeout > 0 and self._is_selectable:
                select.select([self], [], [], timeout)
                timeout = 0
            return super().select(timeout)
