"""The progress of running tasks: to Redis within a second, to the row less often, and read from where it is newer.

Only runs that report progress cost anything here, and only their readers ask Redis. The final value is written with the
outcome of the run (`storage.batches`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.utils import timezone

from ..broker import Broker
from ..broker.task_entries import ProgressNotes
from ..core.django_internals import delete_rows
from ..core.guard import get_logger
from ..core.logs import log_extra, log_extra_of_ids
from ..core.payload import json_bytes, loads_untrusted, shown_progress
from ..core.run_log import RunLog
from ..exceptions import BrokerUnavailable
from ..models import TaskLogLine, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.batches import FencedWrite, write_fenced
from ..storage.errors import ErrorKind, kind_of
from ..storage.routing import rows_of, transaction_of, writing_database
from .base import Run
from .dispatching import by_queue

logger = get_logger("django_asyncq.lifecycle")

# A row's value may have been written by a release with other limits; Redis may hold anything.
LARGEST_BYTES = 1_048_576
DEEPEST = 32


def note_progress(broker: Broker, runs: Sequence[Run]) -> None:
    """Note the progress of runs in Redis, for those who ask before it is in the row.

    | check    | the fence: a task that another run holds is left alone |
    | row      | nothing                                                |
    | Redis    | the progress in the hash of the task, if it has one    |
    | announce | nothing                                                |

    If we die in between, the row has an older value. Raises: BrokerUnavailable.
    """
    runs_by_id = {run.record.id: run for run in runs}
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs]):
        notes = ProgressNotes(of_alias.role, of_alias.alias)
        notes.write(queue, [(runs_by_id[record.id].lease, json_bytes(record.progress)) for record in group])


def record_progress(runs: Sequence[Run]) -> None:
    """Write the progress of runs to their rows.

    | check    | the fence: a run that lost its lease changes nothing |
    | row      | RUNNING, with the progress                           |
    | Redis    | nothing                                              |
    | announce | nothing                                              |

    runs: those whose rows say RUNNING, and that write no row themselves. Raises: django.db.Error.
    """
    writes = [FencedWrite(run.record, run.lease.fence, run.read_fence) for run in runs]
    # A row that a transaction of the project has locked must not hold up the outcomes behind it.
    write_fenced(writes, writing_database(TaskRecord), patient=False)


def newest_progress(record: TaskRecord, *, may_be_unwritten: bool = False) -> dict[str, Any] | None:
    """Return the progress of a task; that of a running one from Redis, where it is newer. None if there is none.

    may_be_unwritten: whether the row of a running task may lack it, because the run is a transaction. For all others
    the first value is written at once, so the rows of tasks that report none say so, and Redis is not asked.
    """
    in_row = shown_progress(record.progress)
    is_in_redis = record.state == TaskState.RUNNING and (record.progress is not None or may_be_unwritten)
    if not is_in_redis:
        return in_row
    notes = ProgressNotes("producer", record.backend)
    try:
        found = notes.read(record.queue_name, record.redis_id, record.fence, largest_bytes=LARGEST_BYTES)
    except BrokerUnavailable as error:
        text = "task %s: its progress is that of its row, because Redis is unreachable: %s"
        logger.debug(text, record.id, error, extra=log_extra(record))
        return in_row
    noted = loads_untrusted(found, max_bytes=LARGEST_BYTES, max_depth=DEEPEST) if found else None
    return shown_progress(noted) or in_row


# --- The log lines of tasks that keep them: stored with the outcome of a run, and deleted with the row of the task.

ROWS_PER_STATEMENT = 500
IDS_PER_STATEMENT = 500


def record_log_lines(logs: Sequence[RunLog]) -> None:
    """Store the lines of runs that have finished; those that are stored already stay as they are.

    Lines that the database refuses are dropped, and a log line says so. If we die in between, some are missing.
    Raises: django.db.Error for other reasons; the call may be repeated.
    """
    rows = [row for log in logs for row in _rows(log)]
    if not rows:
        return
    try:
        with transaction_of(TaskLogLine):
            rows_of(TaskLogLine).bulk_create(rows, ignore_conflicts=True, batch_size=ROWS_PER_STATEMENT)
    except DatabaseError as error:
        if kind_of(error) is not ErrorKind.ROW:
            raise
        if len(logs) > 1:
            for log in logs:
                record_log_lines([log])
            return
        text = "task %s: the database refuses its log lines: %d"
        logger.exception(text, logs[0].id, len(rows), extra=log_extra_of_ids([str(logs[0].id)]))


def delete_log_lines(ids: Sequence[UUID]) -> None:
    """Delete the lines of tasks whose rows are deleted. Raises: django.db.Error."""
    database = writing_database(TaskLogLine)
    for start in range(0, len(ids), IDS_PER_STATEMENT):
        delete_rows(rows_of(TaskLogLine).filter(task_id__in=ids[start : start + IDS_PER_STATEMENT]), database)


def _rows(log: RunLog) -> Iterator[TaskLogLine]:
    """Yield unsaved rows, with times of the database's clock."""
    skew = database_clock.estimate() - database_clock.of_host() + database_clock.offset()
    for line in log.lines:
        values = {**line._asdict(), "logged_at": _moment(line.logged_at, skew)}
        yield TaskLogLine(task_id=log.id, fence=log.fence, attempt=log.attempt, **values)


def _moment(seconds: float, skew: timedelta) -> datetime:
    moment = datetime.fromtimestamp(seconds, UTC) + skew
    return moment if settings.USE_TZ else timezone.make_naive(moment)
