"""Keep what a test has caused out of its output: how a task failed under the test kit is in its result.

The log lines about it are written at DEBUG, with their tracebacks, so a test that asks for this level gets them. Other
lines keep their level, such as that of a receiver of a signal that has failed: nothing else says it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..core.guard import get_logger
from ..core.logs import RUN_LOGGER, is_about_a_run, lowered

REDIS_IS_LOST = "lose_redis() is in force"

_is_kit = ContextVar("django_asyncq_is_kit", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Note that the block runs tasks for a test."""
    token = _is_kit.set(True)
    try:
        yield
    finally:
        _is_kit.reset(token)


class QuietFilter(logging.Filter):
    """Lower the lines about failed runs of the test kit, and about a Redis that the test has taken away."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the logger takes the line."""
        if record.levelno <= logging.INFO:
            return True
        is_of_test = (_is_kit.get() and is_about_a_run()) or REDIS_IS_LOST in record.getMessage()
        return not is_of_test or lowered(record, logging.DEBUG)


for _name in (RUN_LOGGER, "django_asyncq.lifecycle", "django_asyncq.gates"):
    get_logger(_name).logger.addFilter(QuietFilter())
