"""Which occurrences of a schedule are due, and which of them were missed."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from .. import conf
from ..models import Missed, Schedule

# An occurrence this late may be fired by the successor of a dead leader; one that is later counts as missed. A leader
# that pauses no longer than this between two rounds has been at work all the time.
ON_TIME_SECONDS = 60


class Round(NamedTuple):
    """When the leader looked what is due, and when it had fired all of that."""

    began_at: datetime
    ended_at: datetime


class DueOccurrences(NamedTuple):
    """The occurrences of a schedule to fire now. last_missed: the latest of those not to fire, or None."""

    to_fire: list[datetime]
    last_missed: datetime | None


def earliest_in_time(now: datetime, last: Round | None) -> datetime:
    """Return since when an occurrence is in time. now: the beginning of this round. last: the one before."""
    longest = timedelta(seconds=max(ON_TIME_SECONDS, 2 * conf.current().lock_ttl_seconds))
    if last is None or now - last.ended_at > longest:
        return now - longest
    # The leader was at work, so it is no fault of an occurrence that it came due in a long round.
    return min(now - longest, last.began_at)


def due_occurrences(row: Schedule, now: datetime, in_time_since: datetime) -> DueOccurrences:
    """Decide which occurrences of a schedule to fire now. Raises: InvalidOption.

    The latest fires if it is in time. The schedule's `missed` policy decides about the others, and about a late one.
    """
    first = row.next_occurrence_at
    if first is None:
        return DueOccurrences([], None)
    wanted = row.missed_cap if row.missed == Missed.ALL else 1
    found = row.timing.latest(first - timedelta(microseconds=1), now, wanted + 1)
    to_fire = found[-wanted:]
    if row.missed == Missed.SKIP and to_fire and to_fire[-1] < in_time_since:
        to_fire = []
    missed = found[: len(found) - len(to_fire)]
    return DueOccurrences(to_fire, missed[-1] if missed else None)
