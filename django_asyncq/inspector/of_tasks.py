"""The tasks, for an `Inspector`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any
from uuid import UUID

from django.db.models import ProtectedError, RestrictedError

from .. import lifecycle, pausing
from ..aliases import uses_redis
from ..broker.inspection import Inspection
from ..exceptions import BrokerUnavailable, InvalidOption
from ..models import PauseKind, TaskRecord, TaskState
from ..registry import load_task_modules, registered
from ..storage.routing import rows_of
from ..tasks import Task
from .selecting import IDS_PER_PAGE, TaskFilter, failure_groups, info_of, page_of, pages_of_ids
from .values import CancelCounts, FailureGroup, Outcome, TaskDetails, TaskInfo, TaskPage

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

    def get(self, id: UUID) -> TaskDetails | None:
        """Return all that is known of a task; None when it has no row."""
        row = self._of_backend(EVERYTHING).rows().filter(id=id).first()
        return None if row is None else _details_of(row)

    def task(self, name: str) -> Task[Any, Any]:
        """Return the declared task of this name, to enqueue it. Imports the tasks modules of the installed apps.

        Raises: TaskNotRegistered, which says what to do.
        """
        load_task_modules()
        return registered(name)

    def retry(self, ids: Collection[UUID]) -> Outcome:
        """Queue failed and RETRYING tasks again, now. Raises: GateUnavailable; tasks before it stay retried."""
        outcome = Outcome()
        for page in _pages(self._own(ids, outcome)):
            result = lifecycle.retry(page, by_person=True)
            outcome.done.extend(record.id for record in result.retried)
            outcome.refused.update({record.id: f"its gate {record.gate} is full" for record in result.full})
            outcome.refused.update(dict.fromkeys(result.not_failed, "it has not failed"))
            taken = {each.record.id: "another task holds its unique key" for each in result.taken}
            outcome.refused.update(taken)
        return outcome

    def run(self, ids: Collection[UUID]) -> Outcome:
        """Make tasks run as soon as a slot is free: those that are delayed, RETRYING or failed. Raises: as `retry`."""
        outcome = Outcome()
        for page in _pages(self._own(ids, outcome)):
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

    def cancel(self, ids: Collection[UUID], *, by: str = "", reason: str = "") -> CancelCounts:
        """Cancel tasks that wait, and ask those that run to stop. by: a name; reason: a text for the task's error."""
        counts = [0, 0, 0]
        for page in _pages(list(ids)):
            found = lifecycle.cancel(page, by=by, reason=reason, backend=self._backend or "")
            counts = [total + new for total, new in zip(counts, found, strict=True)]
        return CancelCounts(*counts)

    def delete(self, ids: Collection[UUID]) -> Outcome:
        """Delete finished tasks. One that is waiting or running must be cancelled first."""
        outcome = Outcome()
        for page in _pages(self._own(ids, outcome)):
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

    def pause(self, name: str, *, by: str = "", note: str = "") -> bool:
        """Let no call of a task begin; return whether they did. name: its path. by: who; note: why.

        Raises: InvalidOption.
        """
        load_task_modules()
        return pausing.pause(PauseKind.TASK, name, by=by, note=note)

    def resume(self, name: str) -> bool:
        """Let the calls of a task begin again, within 15 s; return whether it was paused. Raises: InvalidOption."""
        return pausing.resume(PauseKind.TASK, name)

    def paused(self) -> list[str]:
        """Return the paths of the paused tasks."""
        return [row.name for row in pausing.pauses(PauseKind.TASK)]

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
        found: list[UUID] = []
        for page in _pages(list(ids)):
            rows = self._of_backend(EVERYTHING).rows().filter(id__in=page)
            known = set(rows.values_list("id", flat=True))
            found += [id for id in page if id in known]
            outcome.refused.update({id: "it has no row" for id in page if id not in known})
        return found


def _pages(ids: Sequence[UUID]) -> Iterator[list[UUID]]:
    for start in range(0, len(ids), IDS_PER_PAGE):
        yield list(ids[start : start + IDS_PER_PAGE])


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
    if not uses_redis(row.backend):
        return ""
    try:
        (entry,) = Inspection("worker", row.backend).entry_states(row.queue_name, [row.redis_id])
    except BrokerUnavailable:
        return None
    return entry.state
