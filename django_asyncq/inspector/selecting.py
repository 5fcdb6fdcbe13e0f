"""Find rows of tasks by what an operator knows about them, page by page, along an index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Count, Max, Q

from ..definitions.names import lowest_uuid7_at
from ..exceptions import InvalidOption
from ..models import FailureReason, TaskRecord, TaskRecordQuerySet, TaskState
from ..storage.routing import rows_of
from .values import FailureGroup, TaskInfo, TaskPage

IDS_PER_PAGE = 200
MOST_PER_PAGE = 1_000
HIGHEST_ID = UUID(int=2**128 - 1)
STATES: dict[str, Q] = {
    "queued": Q(state=TaskState.QUEUED),
    "running": Q(state=TaskState.RUNNING),
    "succeeded": Q(state=TaskState.SUCCEEDED),
    "failed": Q(state=TaskState.FAILED, retry_at=None),
    "retrying": Q(state=TaskState.FAILED, retry_at__isnull=False),
}
SHOWN = (
    "id", "name", "state", "reason", "last_exception", "backend", "queue_name", "gate", "priority", "attempt",
    "max_attempts", "crash_count", "is_suspect", "is_remote", "wire_id", "enqueued_at", "run_after", "retry_at",
    "started_at", "finished_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks: those that meet all that is given.

    states: words of `TaskInfo.state`. name: the whole path of the task, or its last part. id_prefix: the first digits
    of the id, at least one. error: class path of the last error, or its last part. since, until: when it was enqueued,
    to the millisecond.
    Raises: InvalidOption.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    backend: str = ""
    queue: str = ""
    gate: str = ""
    id_prefix: str = ""
    error: str = ""
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.states) - STATES.keys()):
            raise InvalidOption(f"no state is called {unknown[0]!r}: use {', '.join(STATES)}")
        if self.id_prefix and not re.fullmatch(r"[0-9a-f]{1,32}", _digits(self.id_prefix)):
            raise InvalidOption(f"{self.id_prefix!r} is not the beginning of an id: use hexadecimal digits")

    def rows(self) -> TaskRecordQuerySet:
        """Return the rows."""
        found = rows_of(TaskRecord)
        if self.gate:
            found = found.at_gate(self.gate)
        exact = {"backend": self.backend, "queue_name": self.queue}
        found = found.filter(**{column: value for column, value in exact.items() if value})
        if self.states:
            condition = Q()
            for state in self.states:
                condition |= STATES[state]
            found = found.filter(condition)
        for column, value in (("name", self.name), ("last_exception", self.error)):
            if value:
                # The last part alone is what people remember. The whole path is found along an index.
                is_path = "." in value
                found = found.filter(**({column: value} if is_path else {f"{column}__endswith": f".{value}"}))
        if self.id_prefix:
            digits = _digits(self.id_prefix)
            found = found.filter(id__range=(UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))))
        if self.since is not None:
            found = found.filter(id__gte=lowest_uuid7_at(self.since))
        if self.until is not None:
            found = found.filter(id__lt=lowest_uuid7_at(self.until))
        return found


def page_of(matching: TaskFilter, *, before: UUID | None, most: int) -> TaskPage:
    """Return the newest tasks that match. before: only older ones."""
    if not 1 <= most <= MOST_PER_PAGE:
        raise InvalidOption(f"a page has 1 to {MOST_PER_PAGE:,} tasks, not {most}")
    rows = matching.rows().only(*SHOWN).order_by("-id")
    found = list((rows if before is None else rows.filter(id__lt=before))[: most + 1])
    return TaskPage([info_of(row) for row in found[:most]], found[most - 1].id if len(found) > most else None)


def pages_of_ids(matching: TaskFilter) -> Iterator[list[UUID]]:
    """Yield the ids of the tasks that match, the oldest first, IDS_PER_PAGE at a time.

    Tasks that were enqueued after the first page was read are not among them.
    """
    ids = matching.rows().order_by("id").values_list("id", flat=True)
    newest = rows_of(TaskRecord).order_by("-id").values_list("id", flat=True).first() or HIGHEST_ID
    rest = ids.filter(id__lte=newest)
    while page := list(rest[:IDS_PER_PAGE]):
        yield page
        rest = ids.filter(id__gt=page[-1], id__lte=newest)


def failure_groups(matching: TaskFilter, *, most: int) -> list[FailureGroup]:
    """Return the groups of failed tasks, the largest first."""
    rows = matching.rows().filter(STATES["failed"]).order_by().values_list("name", "last_exception")
    # MySQL has no largest of two UUIDs, but all three databases have the latest time.
    groups = rows.annotate(count=Count("id"), latest=Max("finished_at")).order_by("-count", "name", "last_exception")
    found = []
    for name, error, count, latest in groups[:most]:
        of_group = matching.rows().filter(STATES["failed"], name=name, last_exception=error, finished_at=latest)
        id = of_group.order_by("-id").values_list("id", flat=True).first()
        if id is not None:
            found.append(FailureGroup(name, error, count, id))
    return found


def info_of(row: TaskRecord) -> TaskInfo:
    """Return what a list shows of a row."""
    return TaskInfo(
        id=row.id,
        name=row.name,
        state=state_of(row),
        reason=FailureReason(row.reason).name.lower() if row.reason else "",
        error=row.last_exception,
        backend=row.backend,
        queue=row.queue_name,
        gate=row.gate,
        priority=row.priority,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        crash_count=row.crash_count,
        is_suspect=row.is_suspect,
        is_remote=row.is_remote,
        wire_id=row.wire_id,
        enqueued_at=row.enqueued_at,
        run_after=row.run_after,
        retry_at=row.retry_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def state_of(row: TaskRecord) -> str:
    """Return the word for a row's state."""
    if row.state == TaskState.FAILED and row.retry_at is not None:
        return "retrying"
    return TaskState(row.state).name.lower()


def _digits(text: str) -> str:
    return text.replace("-", "").lower()
