"""How a task gets in: the row in the caller's transaction, the entry in Redis after its commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from .. import failpoints, gates
from ..models import TaskRecord, TaskState
from ..storage.inserting import insert
from . import push_batcher
from .dispatching import dispatch
from .events import announce, ask


class CommitHook(ABC):
    """What one transaction has to follow up after its commit, gathered into one call."""

    def __init__(self) -> None:
        self.records: list[TaskRecord] = []

    @abstractmethod
    def __call__(self) -> None:
        """Follow up. Called once, after the commit."""

    @classmethod
    def of_transaction(cls, connection: BaseDatabaseWrapper) -> Self:
        """Return the hook of this kind that this very transaction or savepoint registered last, or a new one.

        A savepoint that is rolled back takes its hooks along, so a hook is shared within one savepoint only.
        """
        if connection.in_atomic_block and connection.run_on_commit:
            savepoints, hook, *_ = connection.run_on_commit[-1]
            if type(hook) is cls and savepoints == set(connection.savepoint_ids):
                return hook
        return cls()

    def register(self, connection: BaseDatabaseWrapper) -> None:
        """Have it called after the commit; at once when there is no transaction."""
        hooks = connection.run_on_commit
        if not (hooks and hooks[-1][1] is self):
            # robust: a failing push must not turn a committed request into an error, nor skip other hooks.
            connection.on_commit(self, robust=True)


class Dispatch(CommitHook):
    """Pushes all that a transaction enqueued with one script call per queue, or has it pushed together with more."""

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[Callable[[], None]] = []

    def __call__(self) -> None:
        failpoints.reach("enqueue.committed")
        if not push_batcher.add(self.records):
            dispatch(self.records)
        failpoints.reach("enqueue.pushed")
        announce(self.records, None, TaskState.QUEUED)
        for follower in self.followers:
            follower()


def enqueue(
    records: Sequence[TaskRecord],
    *,
    partial: bool = False,
    on_committed: Callable[[list[TaskRecord]], None] | None = None,
) -> list[TaskRecord]:
    """Queue new tasks; return those admitted, all of them unless `partial`.

    | check    | `task_state_changing`: receivers may veto; the gate's takes a provisional slot each |
    | row      | INSERT in state 0, in the caller's transaction                                      |
    | Redis    | after the commit: pending or scheduled, the slots confirmed (`dispatch`), alone or  |
    |          | a moment later with what else this process commits (`gathering`)                    |
    | announce | after the commit: `task_state_changed`, then `on_committed`                         |

    If we die before the commit, the provisional slots expire; after it, the reconciler pushes the rows.
    Raises: EnqueueRefused and what other receivers veto with; nothing has been written then.
    """
    refused = ask(records, None, partial=partial)
    failpoints.reach("enqueue.slot_acquired")
    admitted = [record for record in records if record.id not in refused] if refused else list(records)
    if not admitted:
        return []
    connection = connections[router.db_for_write(TaskRecord)]
    try:
        insert(admitted, connection)
    except BaseException:
        gates.release_uncommitted(admitted)
        raise
    failpoints.reach("enqueue.row_inserted")
    after_commit(admitted, connection, on_committed)
    return admitted


def after_commit(
    records: list[TaskRecord],
    connection: BaseDatabaseWrapper,
    on_committed: Callable[[list[TaskRecord]], None] | None,
) -> None:
    """Have the records dispatched after the commit, together with the transaction's others."""
    hook = Dispatch.of_transaction(connection)
    hook.records.extend(records)
    if on_committed is not None:
        hook.followers.append(lambda: on_committed(records))
    hook.register(connection)
