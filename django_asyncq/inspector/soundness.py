"""Whether tasks are being run: what a monitor asks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, Min

from ..aliases import is_redis_used
from ..broker import prefix_owner, redis_clock
from ..broker.key_check import MESSAGE, PURPOSE, read_key_check
from ..broker.prefix_owner import ALIVE_MS
from ..clock_difference import clock_difference_seconds
from ..faults import STORE_ERRORS, as_not_set_up, one_line
from ..lifecycle import signatures
from ..models import Pause, PauseKind, TaskRecordQuerySet
from ..prefixes import DEFAULT_ALIAS, owned_prefixes
from ..storage import database_clock, identity
from ..storage.routing import rows_of
from .due import DUE_SINCE, due_rows
from .of_workers import Workers
from .values import Health

# A retry or a delayed task starts that much too late or too early.
MOST_CLOCK_DIFFERENCE_SECONDS = 5.0


class Mismatch(NamedTuple):
    """What does not match between stores or hosts. subject: in a word. title: without numbers. text: a sentence."""

    subject: str
    title: str
    text: str


def check(
    *,
    only: str | None,
    max_age_seconds: float | None,
    max_waiting: int | None,
    max_silence_seconds: float | None,
) -> Health:
    """Return what `Inspector.health` says. only: the alias whose tasks count; None for all."""
    problems: list[str] = []
    waiting = oldest = supervisors = silence = difference = None
    try:
        waiting, oldest = _waiting(only)
        if is_redis_used():
            supervisors, silence = read_silence()
            difference = clock_difference_seconds()
            problems += [each.text for each in mismatches(difference)]
    except STORE_ERRORS as error:
        not_set_up = as_not_set_up(error)
        problems.append(str(not_set_up) if not_set_up else f"a store is unreachable: {one_line(error)}")
    if waiting is not None and max_waiting is not None and waiting > max_waiting:
        problems.append(f"{waiting:,} tasks are waiting, more than {max_waiting:,}")
    if oldest is not None and max_age_seconds is not None and oldest > max_age_seconds:
        text = f"a task has been waiting for {oldest:.0f} s, longer than {max_age_seconds:g} s"
        problems.append(f"{text}{_where_oldest_waits(only)}")
    if supervisors is not None and max_silence_seconds is not None:
        if silence is None:
            problems.append("no supervisor is known: no workers run")
        elif silence > max_silence_seconds:
            problems.append(f"no supervisor has reported for {silence:.0f} s, longer than {max_silence_seconds:g} s")
    return Health(not problems, problems, waiting, oldest, supervisors, silence, difference)


def _waiting(only: str | None) -> tuple[int, float | None]:
    """Return how many tasks are due, and how long the oldest has been. Reads QUEUED rows only."""
    now = database_clock.now()
    found = _due(now, only).aggregate(count=Count("id"), oldest=Min(DUE_SINCE))
    oldest = found["oldest"]
    return found["count"], None if oldest is None else max((now - oldest).total_seconds(), 0.0)


def _due(now: datetime, only: str | None) -> TaskRecordQuerySet:
    rows = due_rows(now)
    return rows if only is None else rows.filter(backend=only)


def _where_oldest_waits(only: str | None) -> str:
    """Return in which queue the task waits that has been due longest, and why; read only when it is a problem.

    "" when it has begun meanwhile.
    """
    try:
        oldest = _due(database_clock.now(), only).order_by(DUE_SINCE).values_list("backend", "queue_name").first()
        if oldest is None:
            return ""
        alias, queue = oldest
        where = f", in queue {queue}" + (f" of TASKS[{alias!r}]" if alias != DEFAULT_ALIAS else "")
        if rows_of(Pause).filter(kind=PauseKind.QUEUE, backend=alias, name=queue).exists():
            return f"{where}, which is paused"
        return where if Workers(alias).serving(queue) else f"{where}, which no worker serves"
    except STORE_ERRORS as error:
        return f", in a queue that cannot be read: {one_line(error)}"


def mismatches(difference: float) -> list[Mismatch]:
    """Return what is always a problem. difference: of the clocks. Raises: BrokerUnavailable, django.db.Error."""
    return [*_of_clocks(difference), *_of_owner(), *_of_key()]


def read_silence() -> tuple[int, float | None]:
    """Return how many supervisors are alive, and the seconds since one last reported; None when none is known."""
    now, reports = redis_clock.seconds(), [prefix_owner.last_report(prefix) for prefix in owned_prefixes()]
    until = [end for _, end in reports if end is not None]
    silence = max(now - (max(until) - ALIVE_MS / 1000), 0.0) if until else None
    return max((count for count, _ in reports), default=0), silence


def _of_clocks(difference: float) -> Iterator[Mismatch]:
    if abs(difference) > MOST_CLOCK_DIFFERENCE_SECONDS:
        title = "the clocks of the database and of Redis differ"
        yield Mismatch("clocks", title, f"{title} by {abs(difference):.1f} s: synchronize both servers")


def _of_owner() -> Iterator[Mismatch]:
    database = identity.read()
    for prefix in owned_prefixes():
        owner = prefix_owner.read_owner(prefix)
        if owner is not None and database is not None and owner != database:
            title = f"the Redis prefix {prefix!r} belongs to another database"
            yield Mismatch(f"prefix {prefix}", title, f"{title} ({owner}): see asyncq adopt")


def _of_key() -> Iterator[Mismatch]:
    found = read_key_check(signatures.SIGNATURE_BYTES)
    if found and not signatures.is_genuine(PURPOSE, MESSAGE, found):
        title = "SECRET_KEY differs between hosts"
        yield Mismatch("SECRET_KEY", title, f"what the leader has signed cannot be verified here: {title}")
