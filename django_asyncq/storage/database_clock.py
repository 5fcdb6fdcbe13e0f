"""The time by the database's clock, which decides what rows say and how their times are judged.

It is measured with one statement and carried on by this host's monotonic clock, so asking for it is free most of the
time. Workers measure with each beat, and other processes when they need the time and the last measurement is older than
a minute. A plain `enqueue` never needs it: `enqueued_at` is a default of the column.

SQLite has no clock but that of its host, so there the host's clock is used and no statement is sent.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import connections, router
from django.db.models import DateTimeField, Model, Value
from django.utils import timezone

from ..core.fields import AfterNow
from ..core.guard import get_logger
from ..core.time import MEASURED_SECONDS, Delay, MeasuredClock, steady_seconds

logger = get_logger("django_asyncq.storage")

# Microseconds since 1970, in whatever time zone the session is. Unlike `now()`, they are not those of the transaction's
# start.
STATEMENTS = {
    "postgresql": "SELECT EXTRACT(EPOCH FROM CLOCK_TIMESTAMP()) * 1000000",
    "mysql": "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
}
# After a failure the database is not asked for this time: callers must not pay for each attempt.
FAILED_SECONDS = 1.0
# How long an event loop waits for the first measurement of its process, which a thread makes.
LOOP_SECONDS = 1.0

# The delay of a time that is that of the statement itself.
AT_ONCE = Delay(timedelta())

_clocks: dict[str, MeasuredClock] = {}
# Aliases of databases without a clock of their own.
_without_clock: set[str] = set()
# Alias → steady seconds before which the database is not asked again.
_ask_from: dict[str, float] = {}
# Alias → the thread that measures for event loops.
_askers: dict[str, threading.Thread] = {}
# How far the clock was moved from the real one; only the test kit moves it (`testing.travel`).
_offset = timedelta()


def now(database: str | None = None) -> datetime:
    """Return the database's time, in the form of `timezone.now()`; measure it if that was over a minute ago.

    database: its alias; default: where tasks are written. Never raises for the database: while it cannot be asked, the
    last measurement is used, or the host's clock if there is none.
    """
    moment = _now(database, MEASURED_SECONDS)
    return moment + _offset if _offset else moment


def estimate(database: str | None = None) -> datetime:
    """Return what `now` does, but measure only if this process never has: for the slots of a worker."""
    alias = database or (router.db_for_write(_model()) if apps.models_ready else "")
    if alias in _without_clock:
        return of_host()
    if (clock := _clocks.get(alias)) is not None and (found := clock.measurement) is not None:
        moment = datetime.fromtimestamp(found.base + steady_seconds(), UTC)
        moment = moment if settings.USE_TZ else timezone.make_naive(moment)
    else:
        moment = _now(database, math.inf)
    return moment + _offset if _offset else moment


def of_host() -> datetime:
    """Return this host's time, in the form of `timezone.now()`."""
    moment = timezone.now()
    return moment + _offset if _offset else moment


def set_offset(offset: timedelta) -> timedelta:
    """Move the clock that far from the real one, in this process; return how far it was before. For tests only."""
    global _offset
    before, _offset = _offset, offset
    return before


def offset() -> timedelta:
    """Return how far the clock was moved from the real one; zero outside tests."""
    return _offset


def expression(connection: Any, delay: Delay = AT_ONCE) -> Any:
    """Return the time at which a statement runs, plus a delay, for a query or an UPDATE: no estimate decides then.

    It is a value, that of now, where the database's own clock is not right for the connection.
    """
    if is_column_default(connection):
        return AfterNow(delay)
    return Value(delay.after(now(connection.alias)), output_field=DateTimeField())


def unix_seconds(database: str | None = None) -> float:
    """Return what `now` does, in Unix seconds."""
    moment = now(database)
    return (timezone.make_aware(moment) if timezone.is_naive(moment) else moment).timestamp()


def measure(database: str | None = None) -> float:
    """Ask the database for its time, with one statement unless it is SQLite; return it in Unix seconds.

    Raises: django.db.Error.
    """
    alias = database or _of_tasks()
    connection = connections[alias]
    statement = STATEMENTS.get(connection.vendor)
    if statement is None:
        return time.time()
    # A connection that is opened first would count as part of the round trip.
    connection.ensure_connection()
    asked_at = steady_seconds()
    with connection.cursor() as cursor:
        cursor.execute(statement)
        (microseconds,) = cursor.fetchone()
    clock = _clocks.setdefault(alias, MeasuredClock())
    clock.note(asked_at, steady_seconds(), float(microseconds) / 1_000_000)
    return clock.seconds() or 0.0


def is_column_default(connection: Any) -> bool:
    """Return whether the default of a time column is right for this connection.

    It is not where Django stores times without a time zone in another zone than UTC. SQLite's has milliseconds only,
    and the host's clock is its own. Nor is it while a test has moved the clock.
    """
    if _offset:
        return False
    if connection.vendor == "mysql":
        return bool(connection.timezone_name == "UTC")
    return bool(connection.vendor == "postgresql")


def _of_tasks() -> str:
    return str(router.db_for_write(_model()))


@cache
def _model() -> type[Model]:
    # Not imported: user code declares tasks before Django has loaded the models.
    return apps.get_model("django_asyncq", "TaskRecord")


def _now(database: str | None, oldest_seconds: float) -> datetime:
    if database is None and not apps.models_ready:
        return timezone.now()
    alias = database or _of_tasks()
    if connections[alias].vendor not in STATEMENTS:
        _without_clock.add(alias)
        return timezone.now()
    clock = _clocks.setdefault(alias, MeasuredClock())
    if clock.age_seconds > oldest_seconds or not clock.is_measured:
        _ask(alias, clock)
    seconds = clock.seconds()
    if seconds is None:
        return timezone.now()
    return _moment(seconds)


def _moment(seconds: float) -> datetime:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment if settings.USE_TZ else timezone.make_naive(moment)


def _ask(alias: str, clock: MeasuredClock) -> None:
    """Measure, if that is possible here and now."""
    if steady_seconds() < _ask_from.get(alias, 0.0):
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # In a transaction that can only be rolled back, Django refuses every statement.
        if not connections[alias].needs_rollback:
            _try_to_measure(alias)
        return
    # Django refuses statements in an event loop. An old measurement is good enough, and the thread renews it. There is
    # one at a time: it opens a connection, and a loop may ask a thousand times until it has an answer.
    asker = _askers.get(alias)
    if asker is not None and asker.is_alive():
        return
    run = contextvars.Context().run
    thread = threading.Thread(target=run, args=[_measure_apart, alias], name="asyncq-clock", daemon=True)
    _askers[alias] = thread
    thread.start()
    if not clock.is_measured:
        thread.join(LOOP_SECONDS)


def _measure_apart(alias: str) -> None:
    try:
        _try_to_measure(alias)
    finally:
        connections[alias].close()


def _try_to_measure(alias: str) -> None:
    try:
        measure(alias)
    except Exception as error:  # noqa: BLE001 - Django's test cases raise an AssertionError where they allow no database
        _ask_from[alias] = steady_seconds() + FAILED_SECONDS
        logger.debug("the clock of the database %r cannot be measured: %s", alias, error)
