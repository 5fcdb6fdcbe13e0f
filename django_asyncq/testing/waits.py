"""`result.wait()` under the test kit: no worker runs the task, so the wait runs what is due."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from .. import compat
from ..awaiting import refuse_deadlocks, results_by_id, take_outcomes, values_of
from ..definitions.moments import moment_after
from ..exceptions import WaitTimeout
from ..logs import current_task
from ..models import TaskRecord
from ..storage.routing import rows_of
from .clock import travel
from .faults import ProcessDied
from .running import Runner, load_tasks_once

MOST_RUNS = 1000


def run_until_finished(alias: str, results: Sequence[Any], seconds: float, *, allow_in_task: bool) -> list[Any]:
    """Run what is due, and what becomes due within some seconds, until the tasks have succeeded; return their values.

    The clock is moved on to each next due time, and restored at the end, as `run_tasks(until=…)` does. Within a task
    only the tasks that are waited for run.
    Raises: as `AsyncqResult.wait`; WaitTimeout as soon as nothing more is due in time. TooManyRuns.
    """
    refuse_deadlocks(results, allow_in_task=allow_in_task, in_test_kit=True)
    load_tasks_once()
    by_id = results_by_id(results)
    ids = list(by_id)
    rows = rows_of(TaskRecord).filter(backend=alias)
    runner = Runner(rows if current_task() is None else rows.filter(id__in=ids), MOST_RUNS)
    with travel() as clock:
        until = moment_after("the timeout of wait()", clock.now(), seconds)
        while True:
            finished = _finished(ids)
            if len(finished) < len(ids):
                with suppress(ProcessDied):
                    runner.recover_lost()
                    runner.run_due()
                finished = _finished(ids)
            take_outcomes(by_id, [finished[id] for id in by_id if id in finished])
            if len(finished) == len(ids):
                return values_of(results, finished)
            next_at = runner.next_due_at()
            if next_at is None or next_at > until:
                unfinished = next(id for id in ids if id not in finished)
                raise WaitTimeout(str(unfinished), seconds)
            clock.move(seconds=(next_at - clock.now()).total_seconds())


def _finished(ids: Sequence[UUID]) -> dict[UUID, TaskRecord]:
    """Return the rows of the tasks that are final. Raises: TaskResultDoesNotExist."""
    found = {record.id: record for record in rows_of(TaskRecord).filter(id__in=ids)}
    if missing := [id for id in ids if id not in found]:
        raise compat.TaskResultDoesNotExist(str(missing[0]))
    return {id: record for id, record in found.items() if record.is_final}
