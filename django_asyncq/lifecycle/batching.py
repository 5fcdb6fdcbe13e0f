"""Make batches of the members of ripe groups.

Taking a group and writing rows are two stores, so a taken set stays in Redis until the rows are committed. If the
process dies in between, `reclaim` returns the members to their group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from django.db import connections

from ..broker import Broker
from ..broker.groups import Groups, Taken
from ..core.names import uuid7
from ..models import TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage import database_clock
from ..storage.inserting import insert
from ..storage.routing import as_check, lock_free_rows, rows_of, transaction_of, writing_database
from .base import announce, look_up, rows_of_entries, rules_of_groups
from .dispatching import dispatch

# In one call; the caller calls again at once when there may be more.
MOST_AT_ONCE = 100
# When a group is taken again that has members whose rows are locked, or that nobody here can run.
POSTPONE_SECONDS = 2
# Whether a row still waits in no batch.
FREE = as_check(IS_READY, state=TaskState.QUEUED, batch_id=None)
# What the batch has of its first member: whoever began the group has the say.
FROM_FIRST = (
    "name",
    "version",
    "backend",
    "queue_name",
    "group",
    "timeout_seconds",
    "soft_timeout_seconds",
    "keep_logs",
)


GiveRows = Callable[[Taken, Sequence[str]], object]


def form_batches(broker: Broker, queue: str, give_rows: GiveRows | None = None) -> tuple[int, float | None]:
    """Make batches of every group of a queue that is ripe; return how many, and the seconds until the next is ripe.

    give_rows: called with the ids of members that have no row, before those without one go back (see `interop`).

    | check    | a member is QUEUED and in no batch; rows that another transaction has locked go back |
    | row      | INSERT of the batch as QUEUED, and `batch_id` of its members, in one transaction     |
    | Redis    | the members are taken before, and dropped after the commit; the batch is pending     |
    | announce | `task_state_changed` of the batch                                                    |

    If we die before the commit, the members go back after TAKEN_SECONDS. If we die after it, they are dropped when they
    are taken again, and the reconciler pushes the batch.
    Any number of processes may do this at once. Raises: BrokerUnavailable, django.db.Error.
    """
    groups = Groups(broker.role, broker.alias)
    groups.reclaim(queue)
    formed = 0
    for _ in range(MOST_AT_ONCE):
        taken = groups.take(queue)
        if not taken.group:
            return formed, taken.next_seconds
        formed += _form(broker, groups, queue, taken, give_rows)
    return formed, 0.0


def _form(broker: Broker, groups: Groups, queue: str, taken: Taken, give_rows: GiveRows | None) -> int:
    rows, missing, _ = look_up(broker, queue, taken.ids)
    if missing and give_rows is not None:
        give_rows(taken, missing)
        rows |= rows_of_entries(broker, queue, missing)
    waiting = [row for row in rows.values() if _is_free(row)]
    batches = make_batches(waiting)
    left = set()
    if waiting:
        free = rows_of(TaskRecord).filter(FREE, id__in=[row.id for row in waiting])
        # They were locked by a transaction that is still open.
        left = set(free.values_list("id", flat=True))
    groups.drop(queue, taken, [id for id, row in rows.items() if row.id not in left])
    if left:
        groups.ensure(queue, rules_of_groups([row for row in waiting if row.id in left]))
    if left or len(rows) < len(taken.ids):
        # Else they would be taken again and again, and those that joined later never.
        groups.postpone(queue, taken.group, POSTPONE_SECONDS, [id for id in taken.ids if id not in rows])
    dispatch(batches)
    announce(batches, None, TaskState.QUEUED)
    return len(batches)


def _is_free(row: TaskRecord) -> bool:
    return (
        row.state == TaskState.QUEUED
        and row.batch_id is None
        and row.after_id is None
        and not row.waits_for
        and not row.is_batch
    )


def make_batches(records: Sequence[TaskRecord]) -> list[TaskRecord]:
    """Write a batch of waiting tasks, one for each name and version among them; return the rows of the batches.

    Members that do not wait any more, or whose rows another transaction has locked, are in none.
    """
    by_code: dict[tuple[str, int], list[TaskRecord]] = {}
    for record in records:
        by_code.setdefault((record.name, record.version), []).append(record)
    made = [_make_batch(of_code) for of_code in by_code.values()]
    return [batch for batch in made if batch is not None]


def _make_batch(records: Sequence[TaskRecord]) -> TaskRecord | None:
    connection = connections[writing_database(TaskRecord)]
    batch_id, rows = uuid7(), rows_of(TaskRecord)
    free = rows.filter(FREE, id__in=[record.id for record in records])
    with transaction_of(TaskRecord):
        if connection.features.has_select_for_update_skip_locked:
            free = rows.filter(FREE, id__in=lock_free_rows(free))
        # On SQLite the first statement is a write, so that it takes its lock before anything is read.
        count = free.update(batch_id=batch_id)
        if not count:
            return None
        batch = _row_of(batch_id, rows.filter(batch_id=batch_id).order_by("id")[0], count)
        insert([batch], connection)
    return batch


def _row_of(id: UUID, first: TaskRecord, count: int) -> TaskRecord:
    own = {name: getattr(first, name) for name in FROM_FIRST}
    return TaskRecord(id=id, batch_size=count, enqueued_at=database_clock.now(), **own)
