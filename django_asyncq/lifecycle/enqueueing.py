"""Enqueue tasks: the row in the caller's transaction, the entry in Redis after its commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import failpoints, gates
from ..aliases import through_redis
from ..broker.clients import require_valid_settings
from ..broker.server_of_tests import is_foreign, require_server_of_tests
from ..exceptions import BrokerUnavailable
from ..models import TaskRecord, TaskState
from ..storage.inserting import insert
from ..storage.routing import writing_database
from . import prefix_check, push_batcher, wire_locks
from .dispatching import dispatch, is_paused, note_failed_push
from .events import announce, ask
from .following import settle_followers
from .on_commit import CommitHook


class Dispatch(CommitHook):
    """Dispatches all tasks that a transaction enqueued: at once, or through the push batcher."""

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[Callable[[], None]] = []

    def follow_up(self) -> None:
        failpoints.reach("enqueue.committed")
        records = through_redis(self.records)
        if records:
            # Here, because an error in the batcher's thread is only logged.
            require_server_of_tests()
            if not push_batcher.add(records):
                dispatch(records)
        failpoints.reach("enqueue.pushed")
        announce(self.records, None, TaskState.QUEUED)
        for follower in self.followers:
            follower()
        # Last: what this cannot do the reconciler does.
        settle_followers(self.records)


def enqueue(
    records: Sequence[TaskRecord],
    *,
    partial: bool = False,
    on_committed: Callable[[list[TaskRecord]], None] | None = None,
) -> list[TaskRecord]:
    """Queue new tasks; return those admitted: all of them, or with `partial` as many as possible.

    | check    | `task_state_changing`: receivers may veto; a gate gives each task a provisional slot |
    | row      | INSERT as QUEUED, in the caller's transaction                                        |
    | Redis    | after the commit: pending or scheduled, the slots confirmed, by `dispatch` at once   |
    |          | or by the push batcher within PUSH_BATCH_SECONDS                                     |
    | announce | after the commit: `task_state_changed`, then `on_committed`                          |

    An alias without Redis has the rows alone; its gates are counted from them.
    A rollback releases the slots. If we die before the commit, they expire. If we die after it, the reconciler
    pushes the rows.
    Tasks with a unique slot are enqueued by `enqueue_unique`.
    Raises: ImproperlyConfigured when the settings that name Redis cannot be right, PrefixTaken, EnqueueRefused, and
    what receivers veto with: nothing was written. django.db.Error when the INSERT fails.
    """
    require_redis(records)
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
    if sent := through_redis(records):
        require_valid_settings()
        _require_own_prefix(sent)


def admit(records: Sequence[TaskRecord], *, partial: bool) -> list[TaskRecord]:
    """Ask every receiver whether new tasks may be queued; return those admitted. Raises: what receivers veto with."""
    refused = ask(records, None, partial=partial)
    failpoints.reach("enqueue.slot_acquired")
    return [record for record in records if record.id not in refused] if refused else list(records)


def _require_own_prefix(records: Sequence[TaskRecord]) -> None:
    """Refuse a Redis prefix of another database; a Redis that does not answer costs the request one timeout.

    A Redis that is not the tests' is not asked: most tests roll back, and then nothing is pushed. A push is refused.
    """
    try:
        aliases = {record.backend for record in records}
        prefix_check.require_own_prefix(aliases, may_ask=not (is_paused() or is_foreign()))
    except BrokerUnavailable as error:
        note_failed_push(error, records)


def dispatch_after_commit(
    records: list[TaskRecord],
    connection: BaseDatabaseWrapper,
    on_committed: Callable[[list[TaskRecord]], None] | None,
) -> None:
    """Have inserted tasks dispatched after the commit, together with the transaction's others."""
    failpoints.reach("enqueue.row_inserted")
    hook = Dispatch.of_transaction(connection)
    hook.records.extend(records)
    hook.release_at_rollback(records, connection)
    if any(record.unique_key for record in records):
        hook.give_back_at_rollback(wire_locks.holders(records), connection, wire_locks.give_back)
    if on_committed is not None:
        hook.followers.append(lambda: on_committed(records))
    hook.register(connection)
