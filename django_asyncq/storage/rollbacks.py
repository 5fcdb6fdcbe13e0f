"""Release what a rolled-back transaction took outside the database, such as gate slots.

A slot is acquired before its row is committed. When the transaction or a savepoint is rolled back, Django drops the
commit hook of the tasks without calling it. So a finalizer of the hook notes what has to be released. It does nothing
else: it may run in any thread, within any call. What it noted is released by the next call that acquires something,
and by a thread within milliseconds. Both look at the rows first: what turns out to be committed is kept.

Whatever was taken expires by itself. That is left to happen where nobody can know the outcome: after a COMMIT whose
reply was lost, after the death of the process, and in the child of a fork, where it belongs to the parent.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from queue import Empty, SimpleQueue

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.template.defaultfilters import pluralize

from .. import conf
from ..core.django_internals import may_have_committed
from ..core.guard import LongLivedThread, attempt, get_logger
from ..models import TaskRecord, TaskState
from .routing import lock_free_rows, rows_of

logger = get_logger("django_asyncq.storage")

IDS_PER_QUERY = 500
# After the database could not be read.
RETRY_SECONDS = 1.0
# How long a caller waits while another thread releases. Longer than Redis and the database usually take.
PATIENCE_SECONDS = 1.0
LIVE_STATES = (TaskState.QUEUED, TaskState.RUNNING)

Release = Callable[[Sequence[TaskRecord]], object]


class Acquired:
    """What the tasks of one commit hook hold outside the database until the commit.

    hook: what Django drops at a rollback. release: called with the tasks that hold something and are not committed.
    looks_itself: it is called with all of them, and returns False when it must be tried again.
    """

    def __init__(
        self, hook: object, connection: BaseDatabaseWrapper, release: Release, *, looks_itself: bool = False
    ) -> None:
        self.database = connection.alias, _name(connection)
        self.release = release
        self.looks_itself = looks_itself
        self.records: list[TaskRecord] = []
        # Monotonic time at which the last of it has expired.
        self.expires_at = 0.0
        self._has_thread = not _is_in_memory(connection)
        # The connection holds the hook, so a reference to it from here would keep both for ever.
        self._finalizer = weakref.finalize(hook, _note_dropped, self, weakref.ref(connection), os.getpid())
        self._finalizer.atexit = False

    def add(self, records: Iterable[TaskRecord]) -> None:
        """Note tasks that have just taken something; start the thread that releases."""
        self.records.extend(records)
        self.expires_at = time.monotonic() + conf.PROVISIONAL_SECONDS
        if self._has_thread:
            _rolled_back.expect(self.expires_at)

    def keep(self) -> None:
        """Release nothing: the transaction is committed, and the hook has been called."""
        self._finalizer.detach()


def _note_dropped(acquired: Acquired, connection: weakref.ref[BaseDatabaseWrapper], made_by: int) -> None:
    """Finalize a hook that was dropped without being called."""
    wrapper = connection()
    if os.getpid() == made_by and wrapper is not None and not may_have_committed(wrapper):
        _rolled_back.note(acquired)


def _name(connection: BaseDatabaseWrapper) -> str:
    return str(connection.settings_dict["NAME"])


def _is_in_memory(connection: BaseDatabaseWrapper) -> bool:
    """Whether the database is in the memory of this process, as in most tests on SQLite.

    A thread that reads there makes a write of another thread fail at once, whatever the timeout. Nobody else can use
    the database, so it is enough that the next call releases.
    """
    name = _name(connection)
    return connection.vendor == "sqlite" and (":memory:" in name or "mode=memory" in name)


class RolledBack:
    """What this process has to release. Safe to use from any thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start empty, in the child of a fork: the parent releases what it took."""
        # Reentrant, because the handler of an operating system's signal may enqueue while a lock is held.
        self._lock = threading.RLock()
        self._thread_lock = threading.RLock()
        # The finalizer may interrupt any line of Python, and may do nothing but put into these.
        self._noted: SimpleQueue[Acquired] = SimpleQueue()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._left: list[Acquired] = []
        self._thread: threading.Thread | None = None
        self._expects_until = 0.0

    def note(self, acquired: Acquired) -> None:
        """Note what has to be released, and wake the thread. The only method that a finalizer may call."""
        self._noted.put(acquired)
        self._wakeups.put(None)

    def expect(self, until: float) -> None:
        """Have a thread release what is noted until this monotonic time."""
        with self._thread_lock:
            self._expects_until = max(self._expects_until, until)
            if self._thread is not None:
                return
            thread = LongLivedThread("asyncq-rollbacks", self._release_until_idle)
            try:
                thread.start()
            except RuntimeError:
                return  # as in an exit handler; the handler of this module comes after it
            self._thread = thread

    def release(self) -> None:
        """Release all that is noted; wait for another thread that is doing so.

        Raises nothing of the database or of Redis: what cannot be released now is left for later, until it expires.
        """
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):
            return
        try:
            todo, self._left = self._left, []
            while not self._noted.empty():
                todo.append(self._noted.get())
            left = todo
            try:
                left = _release_all(todo) if todo else []
            finally:
                self._left += left
        finally:
            self._lock.release()

    def _release_until_idle(self) -> None:
        try:
            while self._wait():
                self.release()
                for connection in connections.all(initialized_only=True):
                    # As after an outage: a connection that cannot be closed is no reason to end.
                    attempt(connection.close)
        finally:
            with self._thread_lock:
                # Only after an error. Otherwise the thread has removed itself, and a new one may be running.
                if self._thread is threading.current_thread():
                    self._thread = None

    def _wait(self) -> bool:
        """Wait until there is something to do; False when the thread is to finish."""
        seconds = self._expects_until - time.monotonic()
        try:
            self._wakeups.get(timeout=max(min(seconds, RETRY_SECONDS) if self._left else seconds, 0.0))
        except Empty:
            with self._thread_lock:
                if time.monotonic() >= self._expects_until:
                    self._thread = None
                    return False
        return True


def _release_all(todo: Sequence[Acquired]) -> list[Acquired]:
    """Release what has not expired; return what has to be tried again."""
    left: list[Acquired] = []
    groups: dict[tuple[tuple[str, str], Release, bool], list[Acquired]] = {}
    for acquired in todo:
        if time.monotonic() < acquired.expires_at:
            groups.setdefault((acquired.database, acquired.release, acquired.looks_itself), []).append(acquired)
    for (database, release, looks_itself), group in groups.items():
        records = [record for acquired in group for record in acquired.records]
        act = _release_held if looks_itself else _release_uncommitted
        is_done, error = attempt(act, database, release, records)
        if not is_done:
            left += group
        if error is not None:
            count = len(records)
            text = "cannot give back the slots and locks of %d rolled-back task%s yet (retried, or they expire): %s"
            logger.info(text, count, pluralize(count), error)
    return left


def _release_held(database: tuple[str, str], release: Release, records: Sequence[TaskRecord]) -> bool:
    alias, name = database
    # A test database that no longer exists: now the alias is that of the project, which must not be looked at.
    return _name(connections[alias]) != name or bool(release(records))


def _release_uncommitted(database: tuple[str, str], release: Release, records: Sequence[TaskRecord]) -> bool:
    """Release what tasks hold that are neither QUEUED nor RUNNING; return whether all were looked at.

    database: alias and name. Raises: django.db.Error.
    """
    alias, name = database
    if _name(connections[alias]) != name:
        # A test database that no longer exists: now the alias is that of the project, which must not be looked at.
        release(records)
        return True
    is_done = True
    for start in range(0, len(records), IDS_PER_QUERY):
        part = records[start : start + IDS_PER_QUERY]
        rows = rows_of(TaskRecord).using(alias).filter(id__in=[record.id for record in part])
        states = dict(rows.values_list("id", "state"))
        release([record for record in part if record.id not in states])
        # Rows whose retry was rolled back.
        final = [record for record in part if states.get(record.id, TaskState.QUEUED) not in LIVE_STATES]
        if final:
            is_done &= _release_final(alias, release, final)
    return is_done


def _release_final(database: str, release: Release, records: Collection[TaskRecord]) -> bool:
    """Release what tasks hold that were not retried after all; return False when that has to be tried again.

    The rows are locked, so that nobody retries them in the meantime and loses what was taken for that. A row that
    another transaction has locked is skipped: if that is a retry, it needs the same things.
    """
    connection = connections[database]
    if connection.in_atomic_block and connection.features.has_select_for_update:
        return False  # the rows would stay locked until the caller's commit; the thread does it
    with transaction.atomic(using=database):
        rows = rows_of(TaskRecord).using(database).filter(id__in=[record.id for record in records])
        ids = lock_free_rows(rows.exclude(state__in=LIVE_STATES))
        release([record for record in records if record.id in ids])
    return True


_rolled_back = RolledBack()
release_rolled_back = _rolled_back.release
# A process that exits soon after a rollback, as a failed command does. Its own finalizers note nothing any more.
atexit.register(release_rolled_back)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_rolled_back.reset)
