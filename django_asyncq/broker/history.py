"""Read how many tasks a queue has processed: by the minute, for 8 days, and by the day, for 90.

The scripts that acknowledge a task count it. asynq's servers count only the days. The counters lie in Redis alone: what
was counted before Redis lost its memory is missing, and shown as a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from . import commands, redis_clock, replies, scripts
from .access import Access
from .clients import Client
from .keys import alive_key

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
# As long as Redis keeps them.
LONGEST = timedelta(days=8)
MOST_DAYS = 90
HOURS_PER_CALL = 24
# From its begin on: no worker counts in an hour any more that was over two minutes ago.
SETTLED_SECONDS = 3_600 + 120
# Of 50 queues a week in two sizes of parts.
MOST_HOURS_KEPT = 20_000
# A chart of a week is asked for again and again; adding up the counters of 50 queues takes Redis a second.
_of_hours_over: WeakKeyDictionary[Client, dict[tuple[str, int], list[int]]] = WeakKeyDictionary()


class Minute(NamedTuple):
    """What a queue did in one minute, or in a longer part of an hour, failed attempts included in both numbers.

    None for both: it is not known.
    """

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
        return self.parts(queue, first, now, 1)

    def parts(self, queue: str, since: datetime, until: datetime, minutes: int) -> list[Minute]:
        """Return the sums of equal parts of an hour, the oldest first; Redis adds them up.

        since, until: aware, at most 8 days ago; the parts in which they lie are whole. minutes: of a part; they divide
        60. A part in which nothing was counted is a gap when Redis has lost its memory since.
        """
        remembered = replies.whole(commands.send(self.client, "get", alive_key()), 0)
        size, found = minutes * MINUTE, []
        first, last = since.astimezone(UTC), until.astimezone(UTC)
        for hours in _hours(first, last):
            for hour, sums in zip(hours, self._sums(queue, hours, minutes), strict=True):
                for index in range(0, len(sums), 2):
                    at = hour + index // 2 * size
                    if at + size <= first or at > last:
                        continue
                    processed, failed = (replies.whole(each, 0) for each in sums[index : index + 2])
                    is_known = processed is not None or (
                        remembered is not None and (at + size).timestamp() > remembered
                    )
                    found.append(Minute(at, processed or 0, failed or 0) if is_known else Minute(at, None, None))
        return found

    def _sums(self, queue: str, hours: list[datetime], minutes: int) -> list[Any]:
        """Return the sums of hours, each as the script gives it. Those of hours that are over are read once."""
        over = _of_hours_over.setdefault(self.client, {})
        keys = [(self.keys(queue).minutes(f"{hour:%Y-%m-%dT%H}"), minutes) for hour in hours]
        found = {key: over[key] for key in keys if key in over}
        if missing := [key for key in keys if key not in found]:
            now = redis_clock.seconds()
            read = scripts.run("hour_parts", self.client, [name for name, _ in missing], [minutes])
            found |= zip(missing, read, strict=True)
            if len(over) > MOST_HOURS_KEPT:
                over.clear()
            # An empty hour is read again: Redis may get it back, and it costs nothing.
            ends = dict(zip(keys, (hour.timestamp() + SETTLED_SECONDS for hour in hours), strict=True))
            over.update({key: found[key] for key in missing if ends[key] < now and max(found[key]) >= 0})
        return [found[key] for key in keys]

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
    hour, hours = first.replace(minute=0, second=0, microsecond=0), []
    while hour <= last:
        hours.append(hour)
        hour += HOUR
    for start in range(0, len(hours), HOURS_PER_CALL):
        yield hours[start : start + HOURS_PER_CALL]
