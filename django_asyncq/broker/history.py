"""Read how many tasks a queue has processed: by the minute, for 8 days, and by the day, for 90.

The scripts that acknowledge a task count it. asynq's servers count only the days. The counters lie in Redis alone: what
was counted before Redis lost its memory is missing, and shown as a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from . import commands, redis_clock, replies, scripts
from .access import Access
from .keys import alive_key

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
# As long as Redis keeps them.
LONGEST = timedelta(days=8)
MOST_DAYS = 90
HOURS_PER_CALL = 24


class Minute(NamedTuple):
    """What a queue did in one minute, failed attempts included in both numbers; None for both: it is not known."""

    at: datetime
    processed: int | None
    failed: int | None


class Day(NamedTuple):
    """What a queue did on one day of UTC, by the counters that asynq's tools show too."""

    day: date
    processed: int
    failed: int


class History(Access):
    """Read the counters of one queue at a time. Every method raises BrokerUnavailable when Redis is unreachable."""

    def minutes(self, queue: str, since: datetime) -> list[Minute]:
        """Return every minute from a time on, at most 8 days ago, the oldest first; the last one is not over yet.

        since: aware. A minute in which nothing was counted is a gap when Redis has lost its memory since.
        """
        now = datetime.fromtimestamp(redis_clock.seconds(), UTC)
        first = max(since.astimezone(UTC), now - LONGEST).replace(second=0, microsecond=0)
        remembered = replies.whole(commands.send(self.client, "get", alive_key()), 0)
        counts = self._counts(queue, first, now)
        found = []
        while first <= now:
            processed, failed = (counts.get((first, letter)) for letter in "pf")
            # Redis was marked as alive within this minute or before: what it does not know was not there.
            is_known = processed is not None or (remembered is not None and (first + MINUTE).timestamp() > remembered)
            found.append(Minute(first, processed or 0, failed or 0) if is_known else Minute(first, None, None))
            first += MINUTE
        return found

    def _counts(self, queue: str, first: datetime, last: datetime) -> dict[tuple[datetime, str], int]:
        """Return the counters of some hours by minute and letter; skip what was not written here."""
        found = {}
        for hours in _hours(first, last):
            keys = [self.keys(queue).minutes(f"{hour:%Y-%m-%dT%H}") for hour in hours]
            for hour, flat in zip(hours, scripts.run("minutes", self.client, keys), strict=True):
                for field, value in zip(replies.texts(flat[::2]), flat[1::2], strict=False):
                    count, minute = replies.whole(value, 0), field[1:]
                    if count is not None and field[:1] in ("p", "f") and minute.isdecimal() and int(minute) < 60:
                        found[hour + int(minute) * MINUTE, field[0]] = count
        return found

    def days(self, queue: str, count: int) -> list[Day]:
        """Return the latest days, the oldest first; today is not over yet. count: at most 90."""
        today = datetime.fromtimestamp(redis_clock.seconds(), UTC).date()
        days = [today - timedelta(days=number) for number in reversed(range(min(count, MOST_DAYS)))]
        keys = self.keys(queue)
        names = [name for day in days for name in (keys.processed_on(str(day)), keys.failed_on(str(day)))]
        counts = [replies.count(reply) for reply in scripts.run("days", self.client, names)] if names else []
        return [Day(*each) for each in zip(days, counts[::2], counts[1::2], strict=True)]


def _hours(first: datetime, last: datetime) -> Iterator[list[datetime]]:
    """Yield the hours from one time to another, some at a time."""
    hour, hours = first.replace(minute=0), []
    while hour <= last:
        hours.append(hour)
        hour += HOUR
    for start in range(0, len(hours), HOURS_PER_CALL):
        yield hours[start : start + HOURS_PER_CALL]
