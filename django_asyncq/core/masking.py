"""Mask the secrets of one task: those of the setting SENSITIVE_KEYS, and those that it declares as `sensitive`.

What is masked is what is shown of a row, what its runs log, and with `MaskingFormatter` every line of a log. The row
itself stays as it is. Needs no models, so LOGGING may name the formatter before any app is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from django.core.exceptions import ImproperlyConfigured

from .calls import parameter_names
from .logs import PACKAGE_LOGGER, RUN_LOGGER, record_in_question
from .redaction import Masker, mask_text
from .registry import find, find_remote

if TYPE_CHECKING:
    from ..models import TaskRecord

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


# --- Where the lines of this package go when the project has configured no logging: to standard error.

# By `-v`: nothing but errors; what matters; the runs of tasks too (see `log_to_stderr`); everything.
LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.INFO, 3: logging.DEBUG}


class StderrHandler(logging.StreamHandler[TextIO]):
    """Write the lines of this package to standard error. process: of which kind this one is, such as "supervisor"."""

    def __init__(self, process: str, verbosity: int) -> None:
        super().__init__()
        self.verbosity = verbosity
        self.setFormatter(MaskingFormatter(f"%(asctime)s %(levelname)-8s {process} %(process)d: %(message)s"))


def log_to_stderr(process: str, verbosity: int) -> None:
    """Write the lines of this package to standard error, if they would reach no handler; else change nothing.

    process: of which kind this one is, for the lines. verbosity: 0 to 3, as `-v` of Django's commands.
    A second call replaces the handler of the first: a worker process has that of its fork server.
    """
    logger = logging.getLogger(PACKAGE_LOGGER)
    for handler in logger.handlers.copy():
        if isinstance(handler, StderrHandler):
            logger.removeHandler(handler)
    if logger.hasHandlers():
        return
    logger.addHandler(StderrHandler(process, verbosity))
    _set_level(logger, LEVELS[verbosity])
    if verbosity > 1:
        _set_level(logging.getLogger(RUN_LOGGER), logging.DEBUG)


def stderr_verbosity() -> int | None:
    """Return the verbosity with which this process logs to standard error; None when the project's logging does it."""
    handlers: Sequence[logging.Handler] = logging.getLogger(PACKAGE_LOGGER).handlers
    return next((each.verbosity for each in handlers if isinstance(each, StderrHandler)), None)


def _set_level(logger: logging.Logger, level: int) -> None:
    """Set a level, unless the project has set one."""
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
