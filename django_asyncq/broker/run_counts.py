"""How runs ended, how long they took and how long their tasks had waited: counted by queue, task and hour.

What is counted in one process is added up there (`lifecycle.counting`) and written about once a second. Redis keeps a
hash of totals for each queue, which is what a monitor reads, and one for each hour of the last days.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from . import entries, redis_clock, scripts
from .access import Access
from .clients import Role
from .keys import hour_of, keys_of
from .reading import Command, Reader, asking, read

# How a run, or a task that did not begin any more, ended. retried: it failed and begins again later.
OUTCOMES = ("succeeded", "discarded", "retried", "failed", "timeout", "crashed", "cancelled", "expired")
# Upper bounds of the buckets, in seconds; one more bucket holds what took longer.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
# Of one queue. All further names are counted as one.
MOST_NAMES = 500
OTHER = "other"
HOURS_KEPT = 8 * 24


@dataclass
class Times:
    """How long something took. buckets: how many, by BOUNDS. seconds: in all."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, other: Times) -> None:
        """Add what another one has counted."""
        self.buckets = [one + more for one, more in zip(self.buckets, other.buckets, strict=True)]
        self.seconds += other.seconds

    def quantile(self, share: float) -> float | None:
        """Return within how many seconds this share of all lies, linear within a bucket; None without any.

        Beyond the last bound nothing more is known than that bound.
        """
        wanted, lower = share * sum(self.buckets), 0.0
        if not wanted:
            return None
        for count, upper in zip(self.buckets, BOUNDS, strict=False):
            if count >= wanted:
                return lower + (upper - lower) * wanted / count
            wanted, lower = wanted - count, upper
        return float(BOUNDS[-1])


@dataclass
class RunCounts:
    """Of one task in one queue: how many runs ended how; how long they took, and had been due when they began."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    took: Times = field(default_factory=Times)
    waited: Times = field(default_factory=Times)

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        """How many of them were final failures: of their own, by a timeout or by a crash."""
        return sum(self.outcomes[each] for each in ("failed", "timeout", "crashed"))

    def add(self, other: RunCounts) -> None:
        """Add what another one has counted."""
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] += count
        self.took.add(other.took)
        self.waited.add(other.waited)

    def fields(self) -> list[str | int]:
        """Return what is not zero, as fields and counts of a hash, without the name of the task."""
        found: list[str | int] = []
        for name, count in self.outcomes.items():
            found += [name, count] if count else []
        for letter, times in (("t", self.took), ("w", self.waited)):
            for place, count in enumerate(times.buckets):
                found += [f"{letter}{place}", count] if count else []
            found += [f"{letter}ms", max(round(times.seconds * 1000), 0)] if any(times.buckets) else []
        return found

    def set(self, what: str, count: int) -> None:
        """Take over one field of a hash; one that is unknown is left out."""
        times, place = {"t": self.took, "w": self.waited}.get(what[:1]), what[1:]
        if what in self.outcomes:
            self.outcomes[what] = count
        elif times is not None and place == "ms":
            times.seconds = count / 1000
        elif times is not None and place.isascii() and place.isdigit() and int(place) <= len(BOUNDS):
            times.buckets[int(place)] = count


class RunCounting(Access):
    """Write and read the counts of queues. Every method raises BrokerUnavailable when Redis is unreachable."""

    def add(self, queue: str, counts: Mapping[str, RunCounts]) -> None:
        """Add counts by the names of tasks. A repeated call, whose first reply was lost, counts them twice."""
        now = redis_clock.seconds(self.role, self.alias)
        keys = [self.keys(queue).runs(), self.keys(queue).runs(hour_of(datetime.fromtimestamp(now, UTC)))]
        arguments: list[str | int] = [MOST_NAMES, OTHER, int(now) + HOURS_KEPT * 3600]
        for name, of_task in counts.items():
            fields = of_task.fields()
            arguments += [name, len(fields), *fields]
        scripts.run("count_runs", self.client, keys, arguments)


def read_runs(
    role: Role, queues: Iterable[tuple[str, str]], *, hours: int | None = None
) -> dict[tuple[str, str], dict[str, RunCounts]]:
    """Return what `reading_runs` finds. Raises: BrokerUnavailable."""
    return read(role, reading_runs(queues, hours=hours))


def reading_runs(
    queues: Iterable[tuple[str, str]], *, hours: int | None = None
) -> Reader[dict[tuple[str, str], dict[str, RunCounts]]]:
    """Read what was counted of the runs in queues, by the names of tasks. queues: alias and name of each.

    hours: of this hour and so many before it; None: since Redis lost its memory.
    """
    parts, pairs = [""], list(queues)
    if pairs and hours is not None:
        now = datetime.fromtimestamp((yield from redis_clock.reading_seconds(pairs[0][0])), UTC)
        parts = [hour_of(now - timedelta(hours=number)) for number in range(hours + 1)]
    scripts_of = (
        Command("sum_runs", [keys_of(queue, alias).runs(part) for part in parts], alias=alias) for alias, queue in pairs
    )
    return dict(zip(pairs, map(_counts_of, (yield from asking(*scripts_of))), strict=True))


def _counts_of(flat: Sequence[bytes]) -> dict[str, RunCounts]:
    found: dict[str, RunCounts] = {}
    for field_name, value in zip(flat[::2], flat[1::2], strict=True):
        what, _, name = entries.text(field_name).partition(" ")
        if name and what != "=":
            found.setdefault(name, RunCounts()).set(what, entries.count(value))
    return found
