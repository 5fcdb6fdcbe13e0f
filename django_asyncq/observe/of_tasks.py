"""The tasks, for an `Inspector`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Count, Max, ProtectedError, Q, RestrictedError

from .. import control, lifecycle
from ..broker import Broker
from ..broker.inspection import Inspection
from ..broker.reading import read
from ..broker.unknown_tasks import reading_unknown
from ..core.aliases import one_alias_per_prefix, uses_redis
from ..core.compat import batched
from ..core.names import lowest_uuid7_at
from ..core.registry import load_task_modules, registered
from ..core.several_gates import read_others
from ..core.time import Duration, moment_of
from ..exceptions import BrokerUnavailable, InvalidOption
from ..models import FailureReason, PauseKind, TaskRecord, TaskRecordQuerySet, TaskState
from ..storage.routing import ids_called, rows_of
from ..tasks import Task
from . import still_running
from .places import places_in_line
from .values import CancelCounts, FailureGroup, Outcome, TaskDetails, TaskInfo, TaskPage, UnknownInfo

# --- Find rows of tasks by what an operator knows about them, page by page, along an index.

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
    "id", "name", "state", "reason", "last_exception", "backend", "queue_name", "gate", "other_gates", "priority",
    "attempt", "max_attempts", "crash_count", "suspicion", "is_remote", "wire_id", "enqueued_at", "run_after",
    "retry_at", "started_at", "finished_at", "workflow_id", "waits_for",
)  # fmt: skip
# What says where a task waits.
PLACED = ("id", "state", "reason", "retry_at", "backend", "queue_name", "gate", "wire_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks: those that meet all that is given.

    states: words of `TaskInfo.state`. name: the whole path of the task, or its last part. id_prefix: the first digits
    of the id, at least one. error: class path of the last error, or its last part. workflow: the id of one. since,
    until: when it was enqueued, to the millisecond.
    Raises: InvalidOption.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    backend: str = ""
    queue: str = ""
    gate: str = ""
    id_prefix: str = ""
    error: str = ""
    workflow: UUID | None = None
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
        if self.workflow is not None:
            found = found.filter(workflow_id=self.workflow)
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
        reason=reason_word(row.reason),
        error=row.last_exception,
        backend=row.backend,
        queue=row.queue_name,
        gate=row.gate,
        other_gates=tuple(each.name for each in read_others(row.other_gates)),
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
        workflow=row.workflow_id,
        waits_for=row.waits_for or 0,
    )


def state_of(row: TaskRecord) -> str:
    """Return the word for a row's state."""
    return state_word(row.state, row.retry_at)


def state_word(state: int, retry_at: datetime | None) -> str:
    """Return the word for a state, and for when it is retried."""
    if state == TaskState.FAILED and retry_at is not None:
        return "retrying"
    return TaskState(state).name.lower()


def reason_word(reason: int) -> str:
    """Return the word for why a task has failed, or waits at its gate; "" for none."""
    return FailureReason(reason).name.lower() if reason else ""


def _digits(text: str) -> str:
    return text.replace("-", "").lower()


EVERYTHING = TaskFilter()


class Tasks:
    """List, show, enqueue and change tasks. Of an `Inspector` with a backend, only those of that alias."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend

    def page(self, matching: TaskFilter = EVERYTHING, *, before: UUID | None = None, most: int = 50) -> TaskPage:
        """Return the newest tasks that match. before: `TaskPage.next` of the page before. most: at most 1,000.

        Raises: InvalidOption.
        """
        return page_of(self._of_backend(matching), before=before, most=most)

    def count(self, matching: TaskFilter = EVERYTHING) -> int:
        """Count the tasks that match, finished ones included: on a large table this takes seconds."""
        return self._of_backend(matching).rows().order_by().count()

    def ids(self, matching: TaskFilter) -> Iterator[list[UUID]]:
        """Yield the ids of the tasks that match, the oldest first, 200 at a time; none that was enqueued meanwhile."""
        return pages_of_ids(self._of_backend(matching))

    def failures(self, matching: TaskFilter = EVERYTHING, *, most: int = 20) -> list[FailureGroup]:
        """Return the tasks that failed for good by name and class of error, the largest group first.

        It reads all failed tasks that match: give `since` where there are many.
        """
        return failure_groups(self._of_backend(matching), most=most)

    def unknown(self) -> list[UnknownInfo]:
        """Return which tasks wait for code that has them: no worker that took them does. Raises: BrokerUnavailable."""
        aliases = one_alias_per_prefix() if self._backend is None else [self._backend]
        return [
            UnknownInfo(alias, each.queue, each.name, each.version, each.total, moment_of(each.since))
            for alias in aliases
            if uses_redis(alias)
            for each in read("producer", reading_unknown(alias, Broker("producer", alias).queues()))
        ]

    def get(self, id: UUID) -> TaskDetails | None:
        """Return all that is known of a task; None when it has no row."""
        row = self._of_backend(EVERYTHING).rows().filter(id=id).first()
        return None if row is None else _details_of(row)

    def places_in_line(self, ids: Collection[UUID]) -> dict[UUID, int]:
        """Return the places of those that wait in a line, from 1 on: at their gate, or else in their queue.

        In a queue, only tasks with a fair key or a priority have places. A few round trips for any number of tasks.
        Raises: BrokerUnavailable.
        """
        rows = self._of_backend(EVERYTHING).rows().filter(state__in=(TaskState.QUEUED, TaskState.FAILED))
        found: dict[UUID, int] = {}
        for page in batched(ids, IDS_PER_PAGE):
            found |= places_in_line(rows.filter(id__in=page).only(*PLACED))
        return found

    def called(self, wire_id: str) -> list[TaskInfo]:
        """Return the tasks that another program calls so, the newest first: several where it used this again.

        Of more than 1,000, some are missing.
        """
        rows = self._of_backend(EVERYTHING).rows().filter(id__in=ids_called(wire_id))
        return [info_of(row) for row in rows.only(*SHOWN).order_by("-id")]

    def known(self, ids: Collection[UUID]) -> set[UUID]:
        """Return those of the ids that have a row."""
        rows = self._of_backend(EVERYTHING).rows().order_by()
        return {
            id for page in batched(ids, IDS_PER_PAGE) for id in rows.filter(id__in=page).values_list("id", flat=True)
        }

    def task(self, name: str) -> Task[Any, Any]:
        """Return the declared task of this name, to enqueue it. Imports the tasks modules of the installed apps.

        Raises: TaskNotRegistered, which says what to do.
        """
        load_task_modules()
        return registered(name)

    def retry(self, ids: Collection[UUID]) -> Outcome:
        """Queue failed and RETRYING tasks again, now. Raises: GateUnavailable; tasks before it stay retried."""
        outcome = Outcome()
        for page in batched(self._own(ids, outcome), IDS_PER_PAGE):
            result = lifecycle.retry(page, by_person=True)
            outcome.done.extend(record.id for record in result.retried)
            outcome.refused.update({record.id: f"its gate {record.gate} is full" for record in result.full})
            outcome.refused.update(dict.fromkeys(result.not_failed, "it has not failed"))
            outcome.refused.update({record.id: "a task that it waits for has failed" for record in result.blocked})
            taken = {each.record.id: "another task holds its unique key" for each in result.taken}
            outcome.refused.update(taken)
        return outcome

    def run(self, ids: Collection[UUID]) -> Outcome:
        """Make tasks run as soon as a slot is free: those that are delayed, RETRYING or failed. Raises: as `retry`."""
        outcome = Outcome()
        for page in batched(self._own(ids, outcome), IDS_PER_PAGE):
            states: dict[UUID, int] = dict(rows_of(TaskRecord).filter(id__in=page).values_list("id", "state"))
            hurried = set(lifecycle.hurry([id for id in page if states.get(id) == TaskState.QUEUED]))
            outcome.done.extend(id for id in page if id in hurried)
            failed = self.retry([id for id in page if states.get(id) == TaskState.FAILED])
            outcome.done.extend(failed.done)
            outcome.refused.update(failed.refused)
            words: dict[int | None, str] = {TaskState.QUEUED: "it is due already", TaskState.RUNNING: "it is running"}
            for id in page:
                if id not in hurried and states.get(id) != TaskState.FAILED:
                    outcome.refused[id] = words.get(states.get(id), "it has succeeded")
        return outcome

    def cancel(
        self, ids: Collection[UUID], *, by: str = "", reason: str = "", wait: Duration | None = None
    ) -> CancelCounts:
        """Cancel tasks that wait, and ask those that a worker may have to stop.

        by: a name. reason: a text for the task's error. wait: for how long to wait until none of these runs any more;
        those that have stopped are counted as cancelled, those that have finished otherwise as over.
        Raises: InvalidOption, for a wait in a transaction too.
        """
        pages, backend = batched(ids, IDS_PER_PAGE), self._backend or ""
        return CancelCounts(*lifecycle.cancel_pages(pages, by=by, reason=reason, backend=backend, wait=wait))

    def delete(self, ids: Collection[UUID]) -> Outcome:
        """Delete finished tasks. One that is waiting or running must be cancelled first."""
        outcome = Outcome()
        for page in batched(self._own(ids, outcome), IDS_PER_PAGE):
            try:
                deleted = lifecycle.delete(page)
            except (ProtectedError, RestrictedError):
                self._delete_each(page, outcome)
                continue
            outcome.done.extend(deleted)
            left = set(page).difference(deleted)
            outcome.refused.update(dict.fromkeys(left, "it has not finished, or rows of the project refer to it"))
        return outcome

    def discard(self, ids: Collection[UUID], *, by: str = "") -> Outcome:
        """Cancel tasks that wait, then delete them. One that begins meanwhile is asked to stop, and stays."""
        self.cancel(ids, by=by, reason="discarded")
        return self.delete(ids)

    def pause(self, name: str, *, by: str = "", note: str = "", wait: float | None = None) -> bool:
        """Let no call of a task begin; return whether they did. name: its path. by: who; note: why.

        wait: return only when no call of it runs and none begins, within so many seconds, which must be more than 6;
        not in a transaction. Raises: InvalidOption, StillRunning: it is paused, and workers still have calls of it.
        """
        load_task_modules()
        return still_running.pause(PauseKind.TASK, name, by=by, note=note, wait=wait)

    def resume(self, name: str) -> bool:
        """Let the calls of a task begin again, within 15 s; return whether it was paused. Raises: InvalidOption."""
        return control.resume(PauseKind.TASK, name)

    def paused(self) -> list[str]:
        """Return the paths of the paused tasks."""
        return [row.name for row in control.pauses(PauseKind.TASK)]

    def _delete_each(self, ids: Sequence[UUID], outcome: Outcome) -> None:
        """Delete tasks one by one, because rows of the project protect at least one of them."""
        for id in ids:
            try:
                deleted = lifecycle.delete([id])
            except (ProtectedError, RestrictedError):
                deleted = []
            if deleted:
                outcome.done.append(id)
            else:
                outcome.refused[id] = "it has not finished, or rows of the project refer to it"

    def _of_backend(self, matching: TaskFilter) -> TaskFilter:
        if self._backend is None:
            return matching
        if matching.backend not in ("", self._backend):
            raise InvalidOption(f"this inspector is of the backend {self._backend!r}, not of {matching.backend!r}")
        return replace(matching, backend=self._backend)

    def _own(self, ids: Collection[UUID], outcome: Outcome) -> list[UUID]:
        """Return the ids that have a row of the backend; refuse the others."""
        known = self.known(ids)
        outcome.refused.update({id: "it has no row" for id in ids if id not in known})
        return [id for id in ids if id in known]


def _details_of(row: TaskRecord) -> TaskDetails:
    info = info_of(row)
    return TaskDetails(
        **{each.name: getattr(info, each.name) for each in fields(TaskInfo)},
        group=row.group,
        args=row.args,
        kwargs=row.kwargs,
        headers=row.headers,
        return_value=row.return_value,
        progress=row.progress,
        checkpoint=row.checkpoint,
        errors=row.errors,
        worker_ids=row.worker_ids,
        expires_at=row.expires_at,
        deadline=row.deadline,
        timeout_seconds=row.timeout_seconds,
        cancel_requested_at=row.cancel_requested_at,
        cancelled_by=row.cancelled_by,
        redis_state=_redis_state(row),
    )


def _redis_state(row: TaskRecord) -> str | None:
    try:
        (entry,) = Inspection("worker", row.backend).entry_states(row.queue_name, [row.redis_id])
    except BrokerUnavailable:
        return None
    return entry.state
