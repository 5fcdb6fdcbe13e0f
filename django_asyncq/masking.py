"""Mask the secrets of one task: those of the setting SENSITIVE_KEYS, and those that it declares as `sensitive`.

What is masked is what is shown of a row, what its runs log, and with `MaskingFormatter` every line of a log. The row
itself stays as it is. Needs no models, so LOGGING may name the formatter before any app is loaded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from .definitions.calls import parameter_names
from .logs import PACKAGE_LOGGER, record_in_question
from .redaction import Masker, mask_text
from .registry import find, find_remote

if TYPE_CHECKING:
    from .models import TaskRecord

__all__ = ["MaskingFormatter"]


def masker_of(record: TaskRecord) -> Masker:
    """Return what masks the secrets of a task; of one that the code does not have, only those of the setting."""
    return masker_of_call(record.name, record.args, record.kwargs, record.backend)


def masker_of_call(name: str, args: Any, kwargs: Any, backend: str = "") -> Masker:
    """Return what masks the secrets of a call. name, backend: of its task."""
    task: Any = find(name) or find_remote(name, backend)
    return Masker(getattr(task, "sensitive", ()), parameter_names(task), args, kwargs, name)


class MaskingFormatter(logging.Formatter):
    """Format a line as `logging.Formatter` does, and mask the secrets in it, those of its traceback too.

    Known are the secrets of the setting SENSITIVE_KEYS, and in lines of a run and about its failure those that the task
    declares as `sensitive`. A formatter of another package is given the same by `class Own(MaskingFormatter, Theirs)`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of the line."""
        text = super().format(record)
        row = record_in_question()
        tasks = _tasks_of(record)
        try:
            return mask_text(text, tasks) if row is None else masker_of(row).text(text, tasks)
        except ImproperlyConfigured:
            # The line may be the one that says what is wrong with the settings. No task runs with such.
            return text


def _tasks_of(record: logging.LogRecord) -> list[str]:
    """Return the path of the task that a line of this package is about; another line may say `task` of anything."""
    task = getattr(record, "task", None)
    return [task] if isinstance(task, str) and f"{record.name}.".startswith(f"{PACKAGE_LOGGER}.") else []
