"""Enqueue tasks: the row in the caller's transaction, the entry in Redis after its commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial as partial_of

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import gates
from ..broker.clients import require_valid_settings
from ..core.aliases import prefix_of, uses_redis
from ..exceptions import BrokerUnavailable, RedisNotForTests
from ..models import TaskRecord, TaskState
from ..storage.inserting import insert
from ..storage.routing import writing_database
from . import dispatching
from .base import CommitHook, announce, ask
from .dispatching import dispatch, is_paused, note_failed_push
from .following import settle_followers
from .parents import enqueue_after


class Dispatch(CommitHook):
    """Dispatches all tasks that a transaction enqueued: at once, or through the push batcher."""

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[Callable[[], None]] = []

    def follow_up(self) -> None:
        if not dispatching.add(self.records):
            dispatch(self.records)
        announce(self.records, None, TaskState.QUEUED)
        for announce_here in self.followers:
            announce_here()
        # Last: what this cannot do the reconciler does.
        if followers := [record for record in self.records if record.after_id is not None]:
            settle_followers(followers)


def enqueue(
    records: Sequence[TaskRecord],
    *,
    partial: bool = False,
    on_committed: Callable[[list[TaskRecord]], None] | None = None,
) -> list[TaskRecord]:
    """Queue new tasks; return those admitted: all of them, or with `partial` as many as possible.

    | check    | `task_state_changing`: receivers may veto; a gate gives each task a provisional slot, |
    |          | or a place in its line where the task may wait                                       |
    | row      | INSERT as QUEUED, in the caller's transaction                                        |
    | Redis    | after the commit: pending or scheduled, the slots confirmed, by `dispatch` at once   |
    |          | or by the push batcher within PUSH_BATCH_SECONDS                                     |
    | announce | after the commit: `task_state_changed`, then `on_committed`                          |

    A rollback releases the slots. If we die before the commit, they expire. If we die after it, the reconciler
    pushes the rows.
    Tasks with a unique slot are enqueued by `enqueue_unique`; those that wait for others as `enqueue_after` says.
    Raises: ImproperlyConfigured when the settings that name Redis cannot be right, PrefixTaken, EnqueueRefused, and
    what receivers veto with: nothing was written. django.db.Error when the INSERT fails.
    """
    require_redis(records)
    if [record for record in records if record.edges]:
        return enqueue_after(records, partial_of(enqueue_rows, records, partial=partial, on_committed=on_committed))
    return enqueue_rows(records, partial=partial, on_committed=on_committed)


def enqueue_rows(
    records: Sequence[TaskRecord], *, partial: bool, on_committed: Callable[[list[TaskRecord]], None] | None
) -> list[TaskRecord]:
    """Do what `enqueue` does, behind what it checks for all."""
    admitted = admit(records, partial=partial)
    if not admitted:
        return []
    connection = connections[writing_database(TaskRecord)]
    try:
        insert(admitted, connection)
    except BaseException:
        gates.release_uncommitted(admitted)
        raise
    dispatch_after_commit(admitted, connection, on_committed)
    return admitted


def require_redis(records: Sequence[TaskRecord]) -> None:
    """Refuse to enqueue where the settings that name Redis cannot be right. Raises: as `enqueue`."""
    settled, now = dispatching.settled_until, time.monotonic()
    if [record for record in records if settled.get(prefix_of(record.backend), 0.0) <= now]:
        _require_own_prefix(records)


def admit(records: Sequence[TaskRecord], *, partial: bool) -> list[TaskRecord]:
    """Ask every receiver whether new tasks may be queued; return those admitted. Raises: what receivers veto with."""
    refused = ask(records, None, partial=partial)
    return [record for record in records if record.id not in refused] if refused else list(records)


def _require_own_prefix(records: Sequence[TaskRecord]) -> None:
    """Refuse wrong settings and a Redis prefix of another database; a Redis that does not answer costs one timeout.

    A Redis that is not the tests' is not asked: most tests roll back, and then nothing is pushed. A push is refused.
    """
    aliases = {record.backend for record in records if uses_redis(record.backend)}
    if not aliases:
        return
    require_valid_settings()
    try:
        with suppress(RedisNotForTests):
            dispatching.require_own_prefix(aliases, may_ask=not is_paused())
    except BrokerUnavailable as error:
        note_failed_push(error, records)


def dispatch_after_commit(
    records: list[TaskRecord],
    connection: BaseDatabaseWrapper,
    on_committed: Callable[[list[TaskRecord]], None] | None,
) -> None:
    """Have inserted tasks dispatched after the commit, together with the transaction's others."""
    hook = Dispatch.of_transaction(connection)
    hook.records.extend(records)
    if [record for record in records if record.gate]:
        hook.release_at_rollback(records, connection, gates.release_uncommitted)
    if on_committed is not None:
        hook.followers.append(lambda: on_committed(records))
    hook.register(connection)
