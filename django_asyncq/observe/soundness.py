"""Check that tasks are being run: the questions of a monitor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..broker import ownership, redis_clock
from ..broker.ownership import ALIVE_MS, MESSAGE, PURPOSE, read_key_check
from ..broker.reading import Reader, read, side_by_side
from ..core.aliases import DEFAULT_ALIAS, is_redis_used, owned_prefixes
from ..lifecycle import spill
from ..models import Pause, PauseKind
from ..storage import database_clock, identity
from ..storage.errors import STORE_ERRORS, as_not_set_up, one_line
from ..storage.routing import rows_of
from .backlog import Backlog, LiveRows, QueueKey, backlog_of, contents_of, live_rows
from .of_queues import Workers
from .values import Health

# --- How far the clocks of the two stores differ: what a monitor asks, and the leader warns of.


def clock_difference_seconds() -> float:
    """Measure both clocks; return the database's time minus Redis's.

    On SQLite it is the clock of this host. Raises: BrokerUnavailable, django.db.Error.
    """
    database_clock.measure()
    redis_clock.measure()
    return database_clock.unix_seconds() - redis_clock.seconds()


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
    supervisors = silence = difference = None
    found: dict[QueueKey, Backlog] = {}
    is_known = False
    try:
        now = database_clock.now()
        live = live_rows(now, backend=only)
        found, is_known = {queue: backlog_of(rows, None, now) for queue, rows in live.items()}, True
        if is_redis_used():
            contents = contents_of(live, backend=only)
            found = {queue: backlog_of(live.get(queue, LiveRows()), each, now) for queue, each in contents.items()}
            supervisors, silence = read_silence()
            difference = clock_difference_seconds()
            problems += [each.text for each in mismatches(difference)]
    except STORE_ERRORS as error:
        not_set_up = as_not_set_up(error)
        problems.append(str(not_set_up) if not_set_up else f"a store is unreachable: {one_line(error)}")
    waiting = sum(each.waiting for each in found.values()) if is_known else None
    oldest = max((each.oldest_seconds for each in found.values() if each.oldest_seconds is not None), default=None)
    if waiting is not None and max_waiting is not None and waiting > max_waiting:
        problems.append(f"{waiting:,} tasks are waiting, more than {max_waiting:,}")
    if oldest is not None and max_age_seconds is not None and oldest > max_age_seconds:
        text = f"a task has been waiting for {oldest:.0f} s, longer than {max_age_seconds:g} s"
        problems.append(f"{text}{_where_oldest_waits(found)}")
    if supervisors is not None and max_silence_seconds is not None:
        if silence is None:
            problems.append("no supervisor is known: no workers run")
        elif silence > max_silence_seconds:
            problems.append(f"no supervisor has reported for {silence:.0f} s, longer than {max_silence_seconds:g} s")
    return Health(not problems, problems, waiting, oldest, supervisors, silence, difference)


def _where_oldest_waits(found: Mapping[QueueKey, Backlog]) -> str:
    """Return in which queue something has waited longest, and why; asked only when it is a problem."""
    (alias, queue), _ = max(found.items(), key=lambda each: each[1].oldest_seconds or 0.0)
    where = f", in queue {queue}" + (f" of TASKS[{alias!r}]" if alias != DEFAULT_ALIAS else "")
    try:
        if rows_of(Pause).filter(kind=PauseKind.QUEUE, backend=alias, name=queue).exists():
            return f"{where}, which is paused"
        return where if Workers(alias).serving(queue) else f"{where}, which no worker serves"
    except STORE_ERRORS as error:
        return f"{where}: {one_line(error)}"


def mismatches(difference: float) -> list[Mismatch]:
    """Return what is always a problem. difference: of the clocks. Raises: BrokerUnavailable, django.db.Error."""
    return [*_of_clocks(difference), *_of_owner(), *_of_key()]


def read_silence() -> tuple[int, float | None]:
    """Return what `reading_silence` finds. Raises: BrokerUnavailable."""
    return read("producer", reading_silence())


def reading_silence() -> Reader[tuple[int, float | None]]:
    """Read how many supervisors are alive, and the seconds since one last reported; None when none is known."""
    now, *reports = yield from side_by_side(
        redis_clock.reading_seconds(), *map(ownership.reading_last_report, owned_prefixes())
    )
    until = [end for _, end in reports if end is not None]
    silence = max(now - (max(until) - ALIVE_MS / 1000), 0.0) if until else None
    return max((count for count, _ in reports), default=0), silence


def vanished_supervisors() -> list[ownership.Supervisor]:
    """Return those that died in the last hour without a word, and whose place none on their host has taken.

    Raises: BrokerUnavailable.
    """
    known = ownership.supervisors()
    return [each for each in known if not each.is_alive and not any(map(each.is_replaced_by, known))]


def _of_clocks(difference: float) -> Iterator[Mismatch]:
    if abs(difference) > MOST_CLOCK_DIFFERENCE_SECONDS:
        title = "the clocks of the database and of Redis differ"
        yield Mismatch("clocks", title, f"{title} by {abs(difference):.1f} s: synchronize both servers")


def _of_owner() -> Iterator[Mismatch]:
    database = identity.read()
    for prefix in owned_prefixes():
        owner = ownership.read_owner(prefix)
        if owner is not None and database is not None and owner != database:
            title = f"the Redis prefix {prefix!r} belongs to another database"
            yield Mismatch(f"prefix {prefix}", title, f"{title} ({owner}): see asyncq adopt")


def _of_key() -> Iterator[Mismatch]:
    found = read_key_check(spill.SIGNATURE_BYTES)
    if found and not spill.is_signed(PURPOSE, MESSAGE, found):
        title = "SECRET_KEY differs between hosts"
        yield Mismatch("SECRET_KEY", title, f"what the leader has signed cannot be verified here: {title}")
