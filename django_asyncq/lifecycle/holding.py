"""Hold the entries of tasks that a transaction is about to close, so that no run of them begins before its commit.

A worker claims a task in Redis, before it reads the row, and sees what another transaction has changed only after the
commit. So a call that closes a task takes its lease first, while the row is locked: either a worker has it, and the
task is not closed, or no worker gets it any more, however long the transaction lasts. After the commit the entry is
removed. After a rollback, and when the process dies, `Hold.give_back` brings it back as the row says: the thread of
`storage.rollbacks` within milliseconds, the leader once the lease has expired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import UUID, uuid4

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.template.defaultfilters import pluralize

from ..broker import Broker, task_entries
from ..core.guard import get_logger
from ..core.logs import log_extra
from ..exceptions import BrokerUnavailable
from ..models import TaskRecord, TaskState
from ..storage.routing import lock_free_rows, rows_of, transaction_of, writing_database
from .base import announce, load_rows, waiting_hooks
from .dispatching import by_queue, dispatch
from .enqueueing import Dispatch
from .messages import entry_of, later_fence, named_rows

logger = get_logger("django_asyncq.lifecycle")

# What `Hold.take` says of a task. OURS: no run of it begins any more, unless it is given back. CLAIMED: a worker has
# it. MISSING: Redis does not know it, so it is pushed at this moment, or Redis was emptied. UNKNOWN: Redis is
# unreachable.
OURS, CLAIMED, MISSING, UNKNOWN = "ours", "claimed", "missing", "unknown"


class Hold:
    """The leases of one transaction. name: as that of a worker; default a new one."""

    def __init__(self, name: str = "") -> None:
        self.name = name or f"{task_entries.HOLDER}{uuid4().hex}"

    def take(
        self, records: Sequence[TaskRecord], batches: Mapping[UUID, TaskRecord], connection: BaseDatabaseWrapper
    ) -> tuple[dict[UUID, str], list[TaskRecord]]:
        """Take the leases of tasks that wait and whose rows the caller's transaction has locked.

        batches: those that the tasks are in, locked too: a member is claimed with its batch.
        Returns: a word for each task; and the rows, of tasks and batches, that are held now. The fence of these is
        above that of their entry.
        """
        words: dict[UUID, str] = {}
        targets: dict[UUID, TaskRecord] = {}
        uncommitted = _enqueued_here(connection)
        for record in records:
            target = record if record.batch_id is None else batches.get(record.batch_id)
            needs_row = record.retry_at is not None and not record.is_remote
            is_alone = record.after_id is not None or record.waits_for_tasks
            if needs_row or record.waits_for_slot or is_alone or record.id in uncommitted:
                words[record.id] = OURS  # the row must change, or be committed, before a run of it
            elif target is None or target.state == TaskState.RUNNING or target.is_final:
                words[record.id] = CLAIMED
            else:
                targets[target.id] = target
        found = self._ask(list(targets.values()))
        for record in records:
            words.setdefault(record.id, found.get(record.batch_id or record.id, UNKNOWN))
        return words, [row for row in targets.values() if found.get(row.id) == OURS]

    def _ask(self, rows: Sequence[TaskRecord]) -> dict[UUID, str]:
        found: dict[UUID, str] = {}
        for broker, queue, group in _groups(rows):
            ids = [row.redis_id for row in group]
            try:
                replies = task_entries.hold(broker, queue, ids, self.name, named_rows(group))
            except BrokerUnavailable as error:
                count, text = len(group), "Redis cannot say whether %d task%s may be running: %s"
                logger.warning(text, count, pluralize(count), error, extra=log_extra(*group))
                continue
            for row, word in zip(group, replies, strict=True):
                found[row.id] = OURS if word.isdigit() else word
                # Its entry must not be taken for a later one when it is removed.
                row.fence = max(row.fence, int(word) - 1 if word.isdigit() else 0)
        return found

    def give_back(self, records: Sequence[TaskRecord]) -> bool:
        """Bring entries back that are still held, as their rows say; return False when that must be tried again.

        A row that is locked stays held: its transaction is open. Raises: BrokerUnavailable, django.db.Error.
        """
        connection = connections[writing_database(TaskRecord)]
        if not records or connection.in_atomic_block:
            return not records  # the rows would stay locked until the caller's commit
        ids = [record.id for record in records]
        with transaction_of(TaskRecord):
            free = lock_free_rows(rows_of(TaskRecord).filter(id__in=ids))
            found = load_rows(map(str, ids))
            ours = [found.get(str(each.id), each) for each in records if each.id in free or str(each.id) not in found]
            gone: list[TaskRecord] = []
            for broker, queue, group in _groups(ours):
                entries = [(row.redis_id, None) for row in group]
                said = task_entries.take_out(broker, queue, entries, named_rows(group), holder=self.name)
                # Missing: the reply of an earlier call was lost, or Redis was emptied.
                gone += [row for row, word in zip(group, said, strict=True) if word in ("removed", "missing")]
            _push([row for row in gone if str(row.id) in found])
        return len(ours) == len(records)


def _enqueued_here(connection: BaseDatabaseWrapper) -> set[UUID]:
    """Return the ids of tasks that the open transaction has enqueued: nobody else sees them."""
    if not connection.in_atomic_block:
        return set()
    hooks = [hook for hook in waiting_hooks(connection) if isinstance(hook, Dispatch)]
    return {record.id for hook in hooks for record in hook.records}


def _groups(rows: Sequence[TaskRecord]) -> Iterator[tuple[Broker, str, list[TaskRecord]]]:
    return by_queue(Broker("producer", rows[0].backend), rows) if rows else iter(())


def _push(rows: Iterable[TaskRecord]) -> None:
    """Push what is not final; announce those that were closed and not announced, which releases the slot of a gate."""
    rows = list(rows)
    dispatch([row for row in rows if row.state == TaskState.QUEUED], again=True)
    retrying = [row for row in rows if row.state == TaskState.FAILED and row.retry_at is not None]
    for broker, queue, group in _groups(retrying):
        broker.park(queue, [entry_of(row, fence=later_fence(row)) for row in group])
    announce([row for row in rows if row.is_final and row.gate], TaskState.QUEUED, TaskState.FAILED)
