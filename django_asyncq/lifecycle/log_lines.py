"""The log lines of tasks that keep them: stored when a run has finished, and deleted with the row of the task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.utils import timezone

from .. import conf
from ..django_internals import delete_rows
from ..guard import get_logger
from ..logs import log_extra_of_ids
from ..models import TaskLogLine, TaskRecord
from ..run_log import KeptLog, cut
from ..storage import database_clock
from ..storage.errors import ErrorKind, kind_of
from ..storage.routing import rows_of, transaction_of, writing_database

logger = get_logger("django_asyncq.lifecycle")

ROWS_PER_STATEMENT = 500
IDS_PER_STATEMENT = 500


def record_log_lines(logs: Sequence[KeptLog]) -> None:
    """Store the lines of runs; those that are stored already stay as they are.

    Lines that the database refuses are dropped, and a log line says so. If we die in between, some are missing.
    Raises: django.db.Error for other reasons; the call may be repeated.
    """
    try:
        _insert(logs)
    except DatabaseError as error:
        if kind_of(error) is not ErrorKind.ROW:
            raise
        if len(logs) > 1:
            for log in logs:
                record_log_lines([log])
            return
        (log,) = logs
        text = "task %s: the database refuses its log lines: %d"
        logger.exception(text, log.id, len(log.lines), extra=log_extra_of_ids([str(log.id)]))


def record_lines_of_dead(logs: Sequence[KeptLog]) -> None:
    """Store the lines that the runs of a dead process have left, except those of deleted tasks. Raises: as above."""
    ids = set(rows_of(TaskRecord).filter(id__in=[log.id for log in logs]).values_list("id", flat=True))
    record_log_lines([log for log in logs if log.id in ids])


def _insert(logs: Sequence[KeptLog]) -> None:
    rows = [row for log in logs for row in _rows(log)]
    if rows:
        with transaction_of(TaskLogLine):
            rows_of(TaskLogLine).bulk_create(rows, ignore_conflicts=True, batch_size=ROWS_PER_STATEMENT)


def delete_log_lines(ids: Sequence[UUID]) -> None:
    """Delete the lines of tasks whose rows are deleted. Raises: django.db.Error."""
    database = writing_database(TaskLogLine)
    for start in range(0, len(ids), IDS_PER_STATEMENT):
        delete_rows(rows_of(TaskLogLine).filter(task_id__in=ids[start : start + IDS_PER_STATEMENT]), database)


def _rows(log: KeptLog) -> Iterator[TaskLogLine]:
    """Yield unsaved rows, with secrets masked and with times of the database's clock."""
    most_bytes = conf.current().max_log_line_bytes
    skew = database_clock.estimate() - database_clock.of_host() + database_clock.offset()
    for line in log.lines:
        yield TaskLogLine(
            task_id=log.id,
            fence=log.fence,
            attempt=log.attempt,
            number=line.number,
            logged_at=_moment(line.logged_at, skew),
            level=line.level,
            logger=line.logger,
            text=cut(line.text, most_bytes),
        )


def _moment(seconds: float, skew: timedelta) -> datetime:
    moment = datetime.fromtimestamp(seconds, UTC) + skew
    return moment if settings.USE_TZ else timezone.make_naive(moment)
