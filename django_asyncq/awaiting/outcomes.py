"""A finished row as what `wait` returns or raises, and in the results that were waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any
from uuid import UUID

from ..exceptions import TaskFailed
from ..models import FailureReason, TaskRecord, TaskState
from ..results import result_of

LONGEST_TEXT = 500


def results_by_id(results: Iterable[Any]) -> dict[UUID, list[Any]]:
    """Return the results of each task; one may be waited for through several."""
    found: dict[UUID, list[Any]] = defaultdict(list)
    for result in results:
        found[UUID(result.id)].append(result)
    return found


def take_outcomes(results: Mapping[UUID, Iterable[Any]], finished: Iterable[TaskRecord]) -> None:
    """Refresh the results whose rows are finished. Raises: TaskFailed for the first of these rows that has failed."""
    failed = None
    for record in finished:
        for result in results.get(record.id, ()):
            _refresh(result, record)
        if record.state == TaskState.FAILED:
            failed = failed or record
    if failed is not None:
        raise _failure(failed)


def values_of(results: Sequence[Any], finished: Mapping[UUID, TaskRecord]) -> list[Any]:
    """Return the return values of tasks that have succeeded, in the order of their results."""
    return [finished[UUID(result.id)].return_value for result in results]


def _refresh(result: Any, record: TaskRecord) -> None:
    """Have a result show its row, as its method `refresh` does with one more query."""
    fresh = result_of(record, result.task)
    for field in fields(fresh):
        # The class is frozen, for the project's code.
        object.__setattr__(result, field.name, getattr(fresh, field.name))


def _failure(record: TaskRecord) -> TaskFailed:
    text = str(FailureReason(record.reason).label) if record.reason else "its row says no reason"
    if record.reason == FailureReason.CANCELLED and record.cancelled_by:
        text = f"{text}: {record.cancelled_by}"
    elif record.errors:
        # Not the last line of the traceback: of a process that died this is a line of its stacks, else perhaps a note.
        message = " ".join(str(record.errors[-1].get("message", "")).split())
        error = f"{record.last_exception.removeprefix('builtins.')}: {message}".removesuffix(": ")
        text = f"{text}: {error[:LONGEST_TEXT]}"
    return TaskFailed(str(record.id), reason=record.reason, exception=record.last_exception, text=text)
