"""How a task goes for good: deleted by a person, or pruned when it has been kept for long enough."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from uuid import UUID

from django.db import connections, router, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.expressions import Combinable
from django.db.models.fields.reverse_related import ManyToOneRel

from .. import failpoints, gates
from ..broker import Broker
from ..exceptions import BrokerUnavailable
from ..models import TaskRecord, TaskState
from . import push_batcher
from .dispatching import by_queue
from .enqueueing import CommitHook

logger = logging.getLogger("django_asyncq.lifecycle")

Fenced = Callable[[], AbstractContextManager[object]]


class Removal(CommitHook):
    """Follows the rows a transaction deleted."""

    def __call__(self) -> None:
        failpoints.reach("delete.committed")
        # What is pushed after its removal would stay.
        push_batcher.flush_pushes()
        gates.release_uncommitted(self.records)
        broker = Broker("producer")
        try:
            for queue, group in by_queue(self.records):
                broker.remove(queue, [str(record.id) for record in group])
        except BrokerUnavailable as error:
            logger.warning("%d deleted tasks not removed from Redis now: %s", len(self.records), error)


def follow_deletion(records: Sequence[TaskRecord]) -> None:
    """Follow the deletion of rows: after the commit their entries leave Redis and their gate slots are given back.

    If we die before, a taker finds no row and parks the entry, and the auditor gives the slots back.
    """
    connection = connections[router.db_for_write(TaskRecord)]
    hook = Removal.of_transaction(connection)
    # Copies: Django takes the id from an instance it has deleted.
    hook.records.extend(copy.copy(record) for record in records)
    hook.register(connection)


def prune(broker: Broker, ids: Sequence[UUID], over: Q | Combinable, *, fenced: Fenced = nullcontext) -> int:
    """Delete ended tasks that have been kept for long enough; return how many went.

    ids: at most 500. over: the condition of being so, asked once more while the rows are locked.
    fenced: the transaction to do it in, where only the holder of a lock may.

    | check    | final, over, and no row of the project refers to it; rows that others hold are left out |
    | row      | one DELETE, nothing loaded: no `post_delete`, no cascade                                |
    | Redis    | what failed leaves asynq's archive; nothing else of a final task is there               |
    | announce | nothing: its end was announced long ago, and it holds no gate slot since                |

    If we die in between, the entries stay until asynq trims its archive; whoever runs one from there finds no row.
    Raises: BrokerUnavailable, with the same outcome; django.db.Error, and what `fenced` raises: nothing has changed.
    """
    database = router.db_for_write(TaskRecord)
    # What has `finished_at` is final, says a constraint. Asked for states, SQLite would read all rows of these states.
    ended = TaskRecord.objects.using(database).filter(over, id__in=ids, finished_at__isnull=False)
    rows = _without_referrers(ended)
    # A row that a person retries at this moment is theirs; waiting for it would hold up all the others.
    skip_locked = connections[database].features.has_select_for_update_skip_locked
    with fenced(), transaction.atomic(using=database, savepoint=False):
        found = list(rows.select_for_update(skip_locked=skip_locked).values_list("id", "queue_name", "state"))
        # Not delete(): a receiver of `post_delete` is connected, so it would load every row with all its columns.
        TaskRecord.objects.using(database).filter(id__in=[id for id, _, _ in found])._raw_delete(database)
    failpoints.reach("prune.rows_deleted")
    failed: dict[str, list[str]] = {}
    for id, queue, state in found:
        if state == TaskState.FAILED:
            failed.setdefault(queue, []).append(str(id))
    for queue, gone in failed.items():
        broker.remove(queue, gone)
    return len(found)


def _without_referrers(rows: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
    """Leave out tasks that a foreign key with a constraint points at, whatever its on_delete.

    Age alone must never delete or change rows of the project, nor stop the pruner at those that are protected.
    """
    for relation in TaskRecord._meta.get_fields(include_hidden=True):
        if isinstance(relation, ManyToOneRel) and getattr(relation.field, "db_constraint", False):
            referring = relation.related_model._base_manager.filter(**{relation.field.name: OuterRef("pk")})
            rows = rows.filter(~Exists(referring))
    return rows
