"""Enqueue the tasks of schedules: of one occurrence, of many together, and when a person asks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Case, Model, OuterRef, Q, Subquery, Value, When
from django.db.models.signals import post_save, pre_save

from ..core.calls import check_call
from ..core.compat import task_backends
from ..core.guard import attempt
from ..core.headers import with_schedule
from ..core.registry import find, registered
from ..core.typed import is_typed
from ..core.versions import upgraded
from ..exceptions import InvalidOption, UpgradeFailed
from ..models import Occurrence, Schedule, TaskRecord, TaskState
from ..signals import task_state_changing
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of
from ..tasks import Arguments, Task

# How many of the latest occurrences are checked for an unfinished task. An older unfinished task cannot exist.
OCCURRENCES_CHECKED = 100
_UNFINISHED = Q(task__state__in=[TaskState.QUEUED, TaskState.RUNNING]) | Q(
    task__state=TaskState.FAILED, task__retry_at__isnull=False
)


def enqueue(row: Schedule, occurs_at: datetime | None = None) -> UUID:
    """Enqueue the schedule's task in the caller's transaction; return its id.

    occurs_at: the time of the occurrence; None means now, without jitter.
    Raises: TaskNotRegistered, InvalidOption (not schedulable, wrong arguments), EnqueueRefused, InvalidTask.
    """
    task, call = _call_of(row, occurs_at)
    return UUID(task.enqueue(*call.args, **call.kwargs).id)


def enqueue_together(occurrences: Sequence[Occurrence]) -> None:
    """Enqueue the tasks of occurrences with one INSERT for each alias, and set their `task_id`.

    In the caller's transaction, which an error spoils. `task_id` stays None where a task cannot be enqueued together
    with others, or is refused: the caller tries it with `enqueue`, which says why.
    """
    if has_receivers(TaskRecord) or _asks_project():
        return
    made: dict[str, list[tuple[Occurrence, TaskRecord, Task[Any, Any]]]] = {}
    for occurrence in occurrences:
        # It runs code of the project, such as a gate's callable.
        found = attempt(_row_of, occurrence).value
        if found is not None:
            record, task = found
            made.setdefault(task.backend, []).append((occurrence, record, task))
    for alias, of_alias in made.items():
        backend: Any = task_backends[alias]
        admitted = backend.enqueue_rows([record for _, record, _ in of_alias], [task for *_, task in of_alias])
        for occurrence, record, _ in of_alias:
            if record.id in admitted:
                occurrence.task_id = record.id


def has_receivers(model: type[Model]) -> bool:
    """Return whether the project listens to the INSERT of single rows of a model; one for many sends no signal."""
    return pre_save.has_listeners(model) or post_save.has_listeners(model)


def _asks_project() -> bool:
    """Return whether receivers of the project decide which tasks are queued: they get each task by itself.

    One receiver is that of the gates.
    """
    return len(task_state_changing.receivers) > 1


def may_share(row: Schedule) -> bool:
    """Return whether the schedule may be fired in one transaction with others.

    Not that of a unique task: its INSERT waits for any transaction that has the same key, and with several keys in one
    transaction two of them may wait for each other.
    """
    task = find(row.task)
    return task is None or not task.unique


def run_now(row: Schedule) -> Occurrence:
    """Enqueue the schedule's task at once because a person asked, whether or not another of its tasks is running.

    Raises: what `enqueue` raises; then nothing has been written.
    """
    with transaction_of(Occurrence):
        now = database_clock.now()
        occurrence = rows_of(Occurrence).create(schedule=row, occurs_at=now, by_person=True, created_at=now)
        occurrence.task_id = enqueue(row)
        occurrence.save(update_fields=["task"])
    return occurrence


def with_unfinished_task(schedules: Collection[Any]) -> set[Any]:
    """Return those of these schedules of which a recent occurrence has a task that is QUEUED, RUNNING or RETRYING.

    schedules: ids.
    """
    if not schedules:
        return set()
    with_task = rows_of(Occurrence).filter(task_id__isnull=False)
    latest = with_task.filter(schedule=OuterRef("pk")).order_by("-occurs_at").values("occurs_at")
    oldest_checked = Subquery(latest[OCCURRENCES_CHECKED - 1 : OCCURRENCES_CHECKED])
    since = rows_of(Schedule).filter(pk__in=schedules).annotate(since=oldest_checked).values_list("pk", "since")
    recent = Q(pk__in=[])
    for pk, moment in since:
        recent |= Q(schedule=pk) if moment is None else Q(schedule=pk, occurs_at__gte=moment)
    # As CASE it is only a check: a database must not begin with all tasks that are queued.
    checked = with_task.filter(recent).annotate(is_unfinished=Case(When(_UNFINISHED, then=Value(1)), default=Value(0)))
    return set(checked.filter(is_unfinished=1).order_by().values_list("schedule", flat=True))


def arguments_of(row: Schedule, task: Task[Any, Any]) -> Arguments:
    """Return the arguments of a schedule as the code of its task takes them. Raises: InvalidOption."""
    try:
        given = upgraded(task, row.args, row.kwargs, row.version, has_typed=is_typed(task))
    except UpgradeFailed as error:
        raise InvalidOption(str(error)) from error
    check_call(task, given.args, given.kwargs)
    return Arguments(tuple(given.args), dict(given.kwargs))


def _call_of(row: Schedule, occurs_at: datetime | None) -> tuple[Task[Any, Any], Arguments]:
    """Return the task of an occurrence with its options, and what it is called with. Raises: as `enqueue`."""
    task = registered(row.task)
    if not row.is_declared and not task.schedulable:
        raise InvalidOption(f"task {row.task} may not be scheduled by people: declare it with schedulable=True")
    call = arguments_of(row, task)
    if not hasattr(task.get_backend(), "enqueue_many"):
        raise InvalidOption(f"task {row.task} uses the backend {task.backend!r}, which has no rows")
    task = task.using(headers=with_schedule(task.headers, row.name))
    if row.jitter_seconds and occurs_at is not None:
        task = task.using(run_after=occurs_at + _jitter(row, occurs_at))
    return task, call


def _row_of(occurrence: Occurrence) -> tuple[TaskRecord, Task[Any, Any]] | None:
    """Return the new row and the task of an occurrence; None if it must be enqueued alone. Raises: as `enqueue`."""
    schedule = occurrence.schedule
    task, call = _call_of(schedule, occurrence.occurs_at)
    backend: Any = task.get_backend()
    if task.unique or not backend.enqueues_rows:
        return None
    (record,) = backend.new_rows(task, [call])
    return record, task


def _jitter(row: Schedule, occurs_at: datetime) -> timedelta:
    """Return the delay of an occurrence, the same in every process."""
    digest = hashlib.sha256(f"{row.pk} {occurs_at.timestamp()}".encode()).digest()
    return timedelta(seconds=row.jitter_seconds) * (int.from_bytes(digest[:4]) / 2**32)
