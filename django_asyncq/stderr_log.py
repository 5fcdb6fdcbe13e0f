"""Where the lines of this package go when the project has configured no logging: to standard error."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TextIO

from .logs import PACKAGE_LOGGER, RUN_LOGGER
from .masking import MaskingFormatter

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
