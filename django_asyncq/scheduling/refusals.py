"""Occurrences that get no task: what is written with them, and what is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from ..definitions.exception_text import text_of
from ..exceptions import DuplicateTask
from ..guard import class_name, get_logger, is_a
from ..models import OccurrenceOutcome, Schedule

logger = get_logger("django_asyncq.scheduling.refusals")


class Refusal(NamedTuple):
    """The outcome and the note of an occurrence. log: logs why; to be called when that is written."""

    outcome: OccurrenceOutcome
    note: str
    log: Callable[[], None]


def refused(row: Schedule, occurs_at: datetime, error: BaseException) -> Refusal:
    """Return what is written of an occurrence whose enqueue was refused.

    A task that is unique has it so that an earlier one has not finished: that is no error.
    """
    is_duplicate = is_a(error, DuplicateTask)
    level, word = (logging.INFO, "skipped") if is_duplicate else (logging.ERROR, "refused")
    text = "schedule %s: its occurrence of %s was %s: %s"
    log = partial(logger.log, level, text, row.name, in_words(occurs_at), word, error, extra={"task": row.task})
    return Refusal(OccurrenceOutcome.SKIPPED if is_duplicate else OccurrenceOutcome.REFUSED, text_of(error), log)


def spoiled(row: Schedule, occurs_at: datetime, error: BaseException) -> Refusal:
    """Return what is written of an occurrence whose enqueue ran code of the project that raised an error."""
    text = "schedule %s: its occurrence of %s could not be queued"
    log = partial(logger.error, text, row.name, in_words(occurs_at), exc_info=error, extra={"task": row.task})
    return Refusal(OccurrenceOutcome.REFUSED, f"{class_name(error)}: {text_of(error)}", log)


def in_words(moment: datetime | None) -> str:
    """Return a time in UTC for notes and log lines, "" for none."""
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
