"""Measure the clocks of both stores with each beat, so that no run sends a statement to know the time."""

from __future__ import annotations

import time

from django.db import connections

from .. import conf
from ..broker import redis_clock
from ..guard import get_logger
from ..storage import database_clock

logger = get_logger("django_asyncq.worker")


class ClockBeat:
    """Called by the reporter, whose thread has a database connection and is on no task's way."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def tick(self) -> None:
        """Measure, if that is due. While a store is unreachable its last measurement is used."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + conf.current().beat_seconds
        for measure in (database_clock.measure, redis_clock.measure):
            try:
                measure()
            except Exception as error:  # noqa: BLE001 - whatever it is, outcomes must still be written
                connections.close_all()
                logger.debug("a clock could not be measured: %s", error)
