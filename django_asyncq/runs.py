"""What is said about runs: a log line for each failure, on request one for each start and success, and signals.

The lines have a logger of their own, `django_asyncq.runs`, so that a project can have them without all else that is
logged at DEBUG. A final failure is one ERROR with its traceback, wherever it is noticed: an error monitor counts those
lines.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

from django.dispatch import Signal

from .definitions.exception_text import text_of
from .guard import class_name, get_logger
from .logs import RUN_LOGGER, about, log_extra
from .models import FailureReason, TaskRecord
from .signals import task_failed

logger = get_logger(RUN_LOGGER)

LONGEST_TEXT = 500
# Such a failure was no attempt of its own: the attempt did not count, or there was none.
NO_ATTEMPT = (FailureReason.WORKER_LOST, FailureReason.NOT_REGISTERED, FailureReason.EXPIRED)


def announce(signal: Signal, record: TaskRecord, **more: Any) -> None:
    """Send a signal about a run, if anybody listens."""
    if not signal.receivers:
        return
    try:
        signal.send_robust(TaskRecord, record=record, **more)
    except BaseException:  # `send_robust` outlives an Exception only
        logger.exception("task %s: a receiver of a signal about its run failed", record.id, extra=log_extra(record))


def log_started(record: TaskRecord) -> None:
    """Log at DEBUG that a run has started."""
    if logger.isEnabledFor(logging.DEBUG):
        text = "task %s %s: attempt %d of %d started"
        logger.debug(text, record.id, record.name, record.attempt, record.max_attempts, extra=log_extra(record))


def log_returned(record: TaskRecord, seconds: float) -> None:
    """Log at DEBUG that the body of a task has returned. seconds: how long it ran."""
    if logger.isEnabledFor(logging.DEBUG):
        text = "task %s %s: attempt %d of %d returned after %.3f s"
        logger.debug(
            text, record.id, record.name, record.attempt, record.max_attempts, seconds, extra=log_extra(record)
        )


def log_failed(record: TaskRecord, exception: BaseException | None = None, *, has_backoff_failed: bool = False) -> None:
    """Log a failure that the row shows: ERROR when it is final, WARNING when the task is retried.

    exception: adds the traceback, to a WARNING only where the logger takes DEBUG too; None where nothing was raised.
    A task that somebody has cancelled is no error: that is INFO.
    """
    if record.reason == FailureReason.CANCELLED:
        text = "task %s %s: cancelled: %s"
        with about(record):
            logger.info(text, record.id, record.name, _last_error(record), extra=log_extra(record))
        return
    is_final = record.retry_at is None
    with_traceback = is_final or logger.isEnabledFor(logging.DEBUG)
    attempt = "" if record.reason in NO_ATTEMPT else f"attempt {record.attempt} of {record.max_attempts} "
    if has_backoff_failed:
        then = "; its backoff failed; it is not retried"
    elif record.retry_at is None:
        then = "; it is not retried"
    else:
        then = f"; next attempt at {_due_second(record.retry_at):%Y-%m-%dT%H:%M:%SZ}"
    with about(record):
        logger.log(
            logging.ERROR if is_final else logging.WARNING,
            "task %s %s: %sfailed%s: %s",
            record.id,
            record.name,
            attempt,
            then,
            _last_error(record),
            exc_info=exception if with_traceback else None,
            extra=log_extra(record),
        )
    if is_final:
        announce(task_failed, record, exception=exception)


def log_uncounted(record: TaskRecord, reason: str) -> None:
    """Log at DEBUG that a run used no attempt, and that the task runs again. reason: what the run did."""
    if logger.isEnabledFor(logging.DEBUG):
        text = "task %s %s: its run %s; it runs again later, without using an attempt"
        logger.debug(text, record.id, record.name, reason, extra=log_extra(record))


def log_crashed(record: TaskRecord, reason: str) -> None:
    """Log that the process of an isolated task died: ERROR when the task has failed, else WARNING. reason: how."""
    then = "it has failed" if record.is_final else "it is queued again, without using an attempt"
    logger.log(
        logging.ERROR if record.is_final else logging.WARNING,
        "task %s %s: %s; %s",
        record.id,
        record.name,
        _one_line(reason),
        then,
        extra=log_extra(record),
    )
    if record.is_final:
        announce(task_failed, record, exception=None)


def log_cut(record: TaskRecord, error: BaseException) -> None:
    """Log that the database connection of a run was cut: ERROR when the task has failed, else WARNING."""
    then = "it has failed" if record.is_final else "it is queued again, without using an attempt"
    with about(record):
        logger.log(
            logging.ERROR if record.is_final else logging.WARNING,
            "task %s %s: its database connection was cut, and nothing was committed; %s: %s",
            record.id,
            record.name,
            then,
            _one_line(f"{class_name(error)}: {text_of(error)}"),
            extra=log_extra(record),
        )
    if record.is_final:
        announce(task_failed, record, exception=error)


def _due_second(retry_at: datetime) -> datetime:
    """Return the whole second at which a retry is due in Redis, which is never earlier than the row says."""
    return retry_at.replace(microsecond=0) + timedelta(seconds=retry_at.microsecond > 0)


def _last_error(record: TaskRecord) -> str:
    """Return the class and the text of the row's last error, as the last line of a traceback has them."""
    error = record.errors[-1]
    return _one_line(f"{error['exception'].removeprefix('builtins.')}: {error['message']}")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
