"""How far the clocks of the two stores differ: what a monitor asks, and the leader warns of."""

from __future__ import annotations

from .broker import redis_clock
from .storage import database_clock


def clock_difference_seconds() -> float:
    """Measure both clocks; return the database's time minus Redis's.

    On SQLite it is the clock of this host. Raises: BrokerUnavailable, django.db.Error.
    """
    database_clock.measure()
    redis_clock.measure()
    return database_clock.unix_seconds() - redis_clock.seconds()
