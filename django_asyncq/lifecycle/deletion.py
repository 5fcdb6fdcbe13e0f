"""Delete tasks: follow the deletion of rows in Redis, and prune finished rows whose retention time is over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import DO_NOTHING, BooleanField, Exists, ExpressionWrapper, OuterRef, Q, QuerySet
from django.db.models.expressions import Combinable
from django.db.models.fields.reverse_related import ManyToOneRel
from django.template.defaultfilters import pluralize

from .. import gates
from ..broker import Broker
from ..core.compat import batched
from ..core.django_internals import delete_rows
from ..core.guard import get_logger
from ..core.logs import log_extra
from ..exceptions import BrokerUnavailable
from ..models import TaskEdge, TaskLogLine, TaskRecord, TaskState
from ..storage.routing import rows_of, transaction_of, writing_database
from . import dispatching
from .base import CommitHook
from .children import IDS_PER_STATEMENT, settle_deleted
from .closing import ask_to_stop
from .dispatching import by_queue
from .following import move_up, move_up_waiting
from .messages import named_rows
from .progress import delete_log_lines

logger = get_logger("django_asyncq.lifecycle")

Fenced = Callable[[], AbstractContextManager[object]]


class Removal(CommitHook):
    """Removes the tasks that a transaction deleted from Redis, and releases their gate slots."""

    deletes = True

    def follow_up(self) -> None:
        self._remove_from_redis()
        # Last: what this cannot do the reconciler does.
        if keys := {record.unique_key for record in self.records if record.unique_key}:
            move_up_waiting(keys)
        self._settle_edges()
        # Here and not with each row: many are deleted at a time. If we die before, the pruner deletes them.
        delete_log_lines([record.id for record in self.records])

    def _settle_edges(self) -> None:
        """Delete the edges to deleted tasks; fail what waits for one that had no workflow when it was read.

        Here and not with each row, as log lines.
        """
        for part in batched(self.records, IDS_PER_STATEMENT):
            with transaction_of(TaskRecord):
                rows_of(TaskEdge).filter(child_id__in=[record.id for record in part]).delete()
                move_up(settle_deleted([record for record in part if record.workflow_id is None]))

    def _remove_from_redis(self) -> None:
        records = self.records
        # A task that is pushed after its removal would stay in Redis.
        dispatching.flush_pushes()
        # A body that a worker has begun goes on for nothing: no row is left for its outcome.
        ask_to_stop([record for record in records if not record.is_final])
        gates.release_deleted(records)
        try:
            for broker, queue, group in by_queue(Broker("producer", records[0].backend), records):
                broker.remove(queue, [record.redis_id for record in group], named_rows(group))
        except BrokerUnavailable as error:
            count = len(records)
            logger.warning(
                "removal of %d deleted task%s from Redis failed; workers will not run them: %s",
                count,
                pluralize(count),
                error,
                extra=log_extra(*self.records),
            )


def follow_deletion(records: Sequence[TaskRecord], using: str) -> None:
    """Remove deleted tasks from Redis and release their gate slots, after the commit.

    using: the database they were deleted from. Rows in another than the tasks' own are copies, and the tasks stay.

    | check    | none: the rows are deleted                        |
    | row      | deleted by the caller; what waited for them fails, PARENT_FAILED (`children`) |
    | Redis    | after the commit: workers asked to stop, entries removed, slots released |
    | announce | nothing: Django's `post_delete` has announced it  |

    If we die in between, a worker that claims the entry finds no row and archives it, and the audit releases the slots.
    """
    if using != writing_database(TaskRecord):
        return
    connection = connections[using]
    hook = Removal.of_transaction(connection)
    # Copies: Django removes the id from an instance that it has deleted.
    copies = [_with_all_columns(copy.copy(record)) for record in records]
    hook.records.extend(copies)
    hook.register(connection)
    if linked := [record for record in copies if record.workflow_id is not None]:
        move_up(settle_deleted(linked))


def _with_all_columns(record: TaskRecord) -> TaskRecord:
    """Give a row that was read in part defaults for the rest, which can be read no more; it may be of a workflow."""
    for name in record.get_deferred_fields():
        field: Any = TaskRecord._meta.get_field(name)
        setattr(record, name, record.pk if name == "workflow_id" else field.get_default())
    return record


def forget_deleted_task(*, instance: TaskRecord, using: str, **kwargs: Any) -> None:
    """Do that for a row that Django has deleted; the app connects it to `post_delete`."""
    follow_deletion([instance], using)


def delete(ids: Sequence[UUID]) -> list[UUID]:
    """Delete finished tasks because a person asks for it, in the caller's transaction; return the ids of those deleted.

    ids: at most 500.

    | check    | final, and no row refers to it that the database would refuse at the commit; rows locked |
    | row      | deleted as Django deletes: `post_delete`, and what each `on_delete` of the project says  |
    | Redis    | as `follow_deletion`                                                                     |
    | announce | nothing: Django's `post_delete` announces it                                             |

    If we die after the commit, what `follow_deletion` says holds.
    Raises: ProtectedError and others of django.db.IntegrityError; nothing is deleted then.
    """
    with transaction_of(TaskRecord):
        finished = rows_of(TaskRecord).filter(id__in=ids, finished_at__isnull=False)
        # Django leaves these to the database, which may complain at the commit, when it is too late for the others.
        rows = without_referrers(finished, only=DO_NOTHING)
        found = list(rows.order_by("id").select_for_update().values_list("id", flat=True))
        if found:
            rows_of(TaskRecord).filter(id__in=found).delete()
    return found


def prune(broker: Broker, ids: Sequence[UUID], expired: Q | Combinable, *, fenced: Fenced = nullcontext) -> int:
    """Delete finished tasks whose retention time is over; return how many were deleted.

    ids: at most 500. expired: the condition that their time is over, checked again while the rows are locked.
    fenced: opens the transaction, and proves that this process still holds the lock of the pruner.

    | check    | final, expired, and no row of the project refers to it; rows locked by others are skipped |
    | row      | one DELETE that loads nothing: no `post_delete`, no cascade                               |
    | Redis    | failed tasks are removed from asynq's archive; other final tasks have no entry            |
    | announce | nothing: the outcome was announced long ago, and the gate slot was released then          |

    If we die in between, the entries stay until asynq trims its archive; a worker that claims one finds no row.
    Raises: BrokerUnavailable; the same holds then. django.db.Error and what `fenced` raises: nothing was changed.
    """
    database = writing_database(TaskRecord)
    # A constraint says that a row with `finished_at` is final. With a filter by state, SQLite would read all such rows.
    finished = rows_of(TaskRecord).filter(expired, id__in=ids, finished_at__isnull=False)
    rows = without_referrers(finished)
    # A person may be retrying one of the rows; waiting for it would delay all the others.
    skip_locked = connections[database].features.has_select_for_update_skip_locked
    with fenced(), transaction_of(TaskRecord, savepoint=False):
        locked = rows.order_by("id").select_for_update(skip_locked=skip_locked)
        has_lines = Exists(rows_of(TaskLogLine).filter(task_id=OuterRef("id")))
        is_node = ExpressionWrapper(Q(waits_for__isnull=False), BooleanField())
        found = list(locked.values_list("id", "backend", "queue_name", "state", "wire_id", is_node, has_lines))
        delete_rows(rows_of(TaskRecord).filter(id__in=[id for id, *_ in found]), database)
        if nodes := [id for id, *_, is_node, _ in found if is_node]:
            delete_rows(rows_of(TaskEdge).filter(child_id__in=nodes), database)
        if with_lines := [id for id, *_, has_lines in found if has_lines]:
            delete_log_lines(with_lines)
    failed: dict[tuple[str, str], list[TaskRecord]] = {}
    for id, alias, queue, state, wire_id, *_ in found:
        if state == TaskState.FAILED:
            failed.setdefault((alias, queue), []).append(TaskRecord(id=id, wire_id=wire_id))
    for (alias, queue), deleted in failed.items():
        broker.of_alias(alias).remove(queue, [each.redis_id for each in deleted], named_rows(deleted))
    return len(found)


def without_referrers(rows: QuerySet[TaskRecord], *, only: Any = None) -> QuerySet[TaskRecord]:
    """Exclude tasks that a foreign key with a constraint refers to, whatever its on_delete. only: those with this one.

    Pruning must never delete or change rows of the project, and a protected row must not stop it.
    """
    for relation in TaskRecord._meta.get_fields(include_hidden=True):
        if not (isinstance(relation, ManyToOneRel) and getattr(relation.field, "db_constraint", False)):
            continue
        if only is not None and relation.on_delete is not only:
            continue
        model = relation.related_model
        # No constraint reaches into another database.
        if writing_database(model) == rows.db:
            referring = model._base_manager.using(rows.db).filter(**{relation.field.name: OuterRef("pk")})
            rows = rows.filter(~Exists(referring))
    return rows
