"""Push tasks that are enqueued shortly after each other from a thread, and those of a dense stream in batches.

A lone task is pushed at once by its caller. A task committed within PUSH_BATCH_SECONDS of another one is pushed by the
thread, so its caller need not wait for Redis. A push costs one round trip, for one task as for ten. So when DENSE
commits fall within PUSH_BATCH_SECONDS, the thread waits for the rest of that time and pushes all of them with one
script call per queue. The thread finishes when nothing more comes. All rows are committed: if the process dies before
the push, the reconciler pushes them.
Source: RFC 896 (Nagle), with time in place of the acknowledgement.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from django.db import connections
from django.template.defaultfilters import pluralize

from .. import conf, failpoints
from ..guard import attempt, get_logger
from ..logs import log_extra
from ..models import TaskRecord
from ..threads import LongLivedThread
from .dispatching import dispatch

logger = get_logger("django_asyncq.lifecycle")

# Commits within PUSH_BATCH_SECONDS that make a dense stream. With fewer, waiting costs each task more than it saves.
DENSE = 4
# With this many waiting, callers push their tasks themselves, so that producers cannot outrun Redis for long.
MOST_WAITING = 10_000
# Longer than a push takes when Redis does not answer.
FINISH_SECONDS = 2.0


class PushBatcher:
    """The tasks that this process has committed and not pushed yet. Safe to use from any thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start empty, in the child of a fork: the parent has the thread and pushes what waits."""
        # `add` takes the lock directly, which is in C; entering the condition is in Python. Reentrant, because the
        # handler of an operating system's signal may enqueue while the lock is held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[TaskRecord] = []
        # Monotonic times: of the last few commits, and of the last time that the thread took what waited.
        self._came_at: deque[float] = deque(maxlen=DENSE)
        self._taken_at = 0.0
        self._is_pushing = False
        self._thread: threading.Thread | None = None

    def add(self, records: Sequence[TaskRecord]) -> bool:
        """Have committed tasks pushed by the thread; False when the caller must push them now."""
        seconds = conf.current().push_batch_seconds
        if seconds <= 0:
            return False
        with self._lock:
            now = time.monotonic()
            is_lone = not self._came_at or now - self._came_at[-1] >= seconds
            self._came_at.append(now)
            if is_lone and not (self._waiting or self._is_pushing):
                return False
            if len(self._waiting) >= MOST_WAITING or not (self._thread or self._start()):
                return False
            self._waiting.extend(records)
            # In a dense stream the thread wakes by itself when the time of the batch is over.
            if not self._is_stream(now, seconds):
                self._changed.notify_all()
            return True

    def _is_stream(self, now: float, seconds: float) -> bool:
        """Whether the last commits are dense enough for the next push to wait for more."""
        return len(self._came_at) == DENSE and now - self._came_at[0] < seconds

    def flush_pushes(self) -> None:
        """Push what waits now, and wait until a push that is under way has finished."""
        with self._changed:
            records, self._waiting = self._waiting, []
            # The thread may be waiting for what this call pushes.
            self._changed.notify_all()
        if records:
            self._push(records)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_pushing, FINISH_SECONDS)

    def _start(self) -> bool:
        """Start the thread; False when no thread can be started any more, as in an exit handler."""
        # Not a daemon: an interpreter that exits waits for the last push.
        thread = LongLivedThread("asyncq-push-batcher", self._push_until_idle, daemon=False)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _push_until_idle(self) -> None:
        try:
            while records := self._take_when_due():
                self._push(records)
                # A push that parks a task writes its row. Until the next push the database may close the connection.
                for connection in connections.all(initialized_only=True):
                    connection.close()
                self._finish_push()
        finally:
            with self._changed:
                # Only after a BaseException. Otherwise the thread has removed itself, and a new one may be running.
                if self._thread is threading.current_thread():
                    self._thread, self._is_pushing = None, False

    def _take_when_due(self) -> list[TaskRecord]:
        """Wait until a push is due and return what waits; nothing when the thread is to finish."""
        with self._changed:
            while (pause := self._pause_seconds(time.monotonic())) > 0:
                self._changed.wait(pause)
            records, self._waiting = self._waiting, []
            self._taken_at = time.monotonic()
            self._is_pushing = bool(records)
            if not records:
                self._thread = None
        return records

    def _pause_seconds(self, now: float) -> float:
        """Return how long the thread must wait for more of a stream, or for anything at all."""
        seconds = conf.current().push_batch_seconds
        if self._is_stream(now, seconds):
            return self._taken_at + seconds - now
        return 0.0 if self._waiting else self._came_at[-1] + seconds - now

    def _finish_push(self) -> None:
        with self._changed:
            self._is_pushing = False
            self._changed.notify_all()

    def _push(self, records: list[TaskRecord]) -> None:
        failpoints.reach("push_batch.collected")
        count = len(records)
        # An unexpected error must stop neither the thread nor the caller of `flush_pushes`.
        if error := attempt(dispatch, records).error:
            text = "push of %d task%s failed; the reconciler will retry"
            logger.error(text, count, pluralize(count), exc_info=error, extra=log_extra(*records))


_batcher = PushBatcher()
add = _batcher.add
flush_pushes = _batcher.flush_pushes
# For tasks that exit handlers enqueue, when no thread can start: handlers registered after this one run before it.
atexit.register(flush_pushes)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_batcher.reset)
