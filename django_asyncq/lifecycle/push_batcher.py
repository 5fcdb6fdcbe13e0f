"""Pushes that follow each other closely are made behind the caller's back; those that come in a dense stream together.

A lone push is made at once, by the caller. What this process commits within PUSH_BATCH_SECONDS of another is pushed by a
thread, at once too: the caller goes on. A push costs a round trip, whether it is of one task or of ten, so from DENSE
in that time on they wait for the rest of it, and are pushed with one script call per queue. When nothing comes the
thread ends. The rows are committed: should the process die meanwhile, the reconciler pushes them.
Source: RFC 896 (Nagle), with time in place of the acknowledgement.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from django.db import connections

from .. import conf, failpoints
from ..models import TaskRecord
from .dispatching import dispatch

logger = logging.getLogger("django_asyncq.lifecycle")

# So many within PUSH_BATCH_SECONDS are a stream. For fewer a wait would cost each more than it saves of pushes.
DENSE = 4
# With so many waiting, who commits more pushes it himself: nobody gets ahead of Redis for long.
MOST_WAITING = 10_000
# Longer than a push may take whose Redis does not answer.
FINISH_SECONDS = 2.0


class PushBatcher:
    """What this process has committed and not pushed yet. Safe to use from any thread."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have nothing to push, as the child of a fork: its parent pushes what waits, and has the thread."""
        # Each call takes it by itself: a condition's own way to it is in Python. A signal's handler may enqueue too.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[TaskRecord] = []
        # Of the monotonic clock: when the last few were committed, and when the thread last took what waited.
        self._came_at: deque[float] = deque(maxlen=DENSE)
        self._taken_at = 0.0
        self._is_pushing = False
        self._thread: threading.Thread | None = None

    def add(self, records: Sequence[TaskRecord]) -> bool:
        """Have committed tasks pushed by the thread; False when the caller is to push them himself, now."""
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
            # Of a stream the thread takes the next when their time has come.
            if not self._is_stream(now, seconds):
                self._changed.notify_all()
            return True

    def _is_stream(self, now: float, seconds: float) -> bool:
        """Whether so many came lately that the next push is to wait for more."""
        return len(self._came_at) == DENSE and now - self._came_at[0] < seconds

    def flush_pushes(self) -> None:
        """Push what waits, and wait for the end of the push that is under way."""
        with self._changed:
            records, self._waiting = self._waiting, []
        if records:
            self._push(records)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_pushing, FINISH_SECONDS)

    def _start(self) -> bool:
        """Start the thread; False where there can be none any more, as in an exit handler."""
        # No daemon: an interpreter that ends waits for its last push.
        thread = threading.Thread(target=self._push_while_there_is_any, name="asyncq-gathering", daemon=False)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _push_while_there_is_any(self) -> None:
        try:
            while records := self._take_when_due():
                self._push(records)
                # Who parks a task writes its row; the next push may be long after, and the server gone by then.
                for connection in connections.all(initialized_only=True):
                    connection.close()
                self._has_pushed()
        finally:
            with self._changed:
                # Ended by what is no Exception. Else it has taken itself out, and may have a successor by now.
                if self._thread is threading.current_thread():
                    self._thread, self._is_pushing = None, False

    def _take_when_due(self) -> list[TaskRecord]:
        """Return what waits when its time has come; when nothing does for a while, the thread ends."""
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
        """Return how long the thread is to wait: for more of a stream, or for anything at all."""
        seconds = conf.current().push_batch_seconds
        if self._is_stream(now, seconds):
            return self._taken_at + seconds - now
        return 0.0 if self._waiting else self._came_at[-1] + seconds - now

    def _has_pushed(self) -> None:
        with self._changed:
            self._is_pushing = False
            self._changed.notify_all()

    def _push(self, records: list[TaskRecord]) -> None:
        failpoints.reach("push_batch.collected")
        try:
            dispatch(records)
        except Exception:
            # What nobody foresaw must not end the thread, nor whatever the caller of `flush_pushes` goes on with.
            logger.exception("%d tasks not pushed now, the reconciler will", len(records))


_gathering = PushBatcher()
add = _gathering.add
flush_pushes = _gathering.flush_pushes
# For what exit handlers enqueue, too late for any thread: those registered after this one run before it.
atexit.register(flush_pushes)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_gathering.begin_anew)
