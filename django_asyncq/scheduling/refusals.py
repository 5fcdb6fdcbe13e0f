"""Occurrences that get no task: what is written with them, and what is logged."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from ..definitions.exception_text import text_of
from ..exceptions import DuplicateTask
from ..guard import get_logger, is_a
from ..models import OccurrenceOutcome, Schedule

logger = get_logger("django_asyncq.scheduling.refusals")


def refused(row: Schedule, occurs_at: datetime, error: BaseException) -> tuple[OccurrenceOutcome, str]:
    """Log why the enqueue of an occurrence was refused; return its outcome and the note for it.

    A task that is unique has it so that an earlier one has not finished: that is no error.
    """
    is_duplicate = is_a(error, DuplicateTask)
    level, word = (logging.INFO, "skipped") if is_duplicate else (logging.ERROR, "refused")
    text = "schedule %s: its occurrence of %s was %s: %s"
    logger.log(level, text, row.name, in_words(occurs_at), word, error, extra={"task": row.task})
    return (OccurrenceOutcome.SKIPPED if is_duplicate else OccurrenceOutcome.REFUSED), text_of(error)


def in_words(moment: datetime | None) -> str:
    """Return a time in UTC for notes and log lines, "" for none."""
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
