"""Notices an event loop that a coroutine blocks: it does blocking work, and no other `async def` task goes on."""

from __future__ import annotations

import sys
import traceback

from ...guard import get_logger
from .executors import AsyncExecutor

logger = get_logger("django_asyncq.worker")

WARN_SECONDS = 5.0
# With a longer gap between two checks something held the interpreter, and the event loop could not answer either.
LONGEST_GAP_SECONDS = 3.0


class LoopBlock:
    """Asks the event loop for an answer from time to time while it runs tasks. Called by the heartbeat thread."""

    def __init__(self, executor: AsyncExecutor) -> None:
        self.executor = executor
        # When the question was put that is not answered yet; 0 for none.
        self._asked_at = 0.0
        self._checked_at = 0.0
        self._is_warned = False

    def check(self, now: float) -> float:
        """Warn once of each block; return since when tasks wait for the event loop, 0 if none do.

        now: monotonic seconds.
        """
        had_gap, self._checked_at = now - self._checked_at > LONGEST_GAP_SECONDS, now
        if had_gap and self._asked_at:
            self._asked_at = now
        if not self._asked_at and self.executor.is_busy:
            self._asked_at = now
            self.executor.loop.call_soon_threadsafe(self._answer)
        if self._asked_at and now - self._asked_at >= WARN_SECONDS and not self._is_warned:
            self._is_warned = True
            self._warn(now - self._asked_at)
        waiting_since = self.executor.waiting_since
        return waiting_since if waiting_since and now - waiting_since >= WARN_SECONDS else 0.0

    def _answer(self) -> None:
        self._asked_at, self._is_warned = 0.0, False

    def _warn(self, seconds: float) -> None:
        frame = sys._current_frames().get(self.executor.thread.ident or 0)
        logger.warning(
            "a coroutine has blocked the event loop for %.0f s; all async tasks of this process wait. Use "
            "`asyncio.to_thread` for blocking work, or make the task a `def`. It is at:\n%s",
            seconds,
            "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)",
        )
