"""The chart of the overview: how many tasks were processed and failed per minute, as SVG with axes, and as a table.

The numbers are the counters that Redis keeps for eight days; what it has lost is a gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from ..definitions.names import lowest_uuid7_at
from ..inspector import MinuteInfo
from .display import Text

WIDTH, HEIGHT = 760, 200
LEFT, TOP, BOTTOM = 52, 8, 24
STEPS = (1, 2, 5)
EPOCH = datetime(1970, 1, 1)


class Span(NamedTuple):
    """How far a chart looks back. minutes: in all; per_bar: of one bar; per_label: between two labels of the axis."""

    label: Text
    minutes: int
    per_bar: int
    per_label: int
    time_format: str


SPANS = {
    "1h": Span(_("1 hour"), 60, 1, 10, "H:i"),
    "24h": Span(_("24 hours"), 1_440, 15, 240, "H:i"),
    "7d": Span(_("7 days"), 10_080, 120, 1_440, "MONTH_DAY_FORMAT"),
}
DEFAULT_SPAN = "1h"


class Bucket(NamedTuple):
    """What one bar shows: means per minute; None for both where Redis knows nothing of the time."""

    at: datetime
    processed: float | None
    failed: float | None


class Bar(NamedTuple):
    """A bar in the units of the SVG. failed_y, failed_height: of its lower part, which failed.

    before: the lowest id of a task that is enqueued after the time of the bar.
    """

    x: float
    width: float
    y: float
    height: float
    failed_y: float
    failed_height: float
    title: str
    before: str


class Label(NamedTuple):
    """A label of an axis."""

    position: float
    label: str


def buckets_of(minutes: Iterable[MinuteInfo], per_bar: int) -> list[Bucket]:
    """Return the means of so many minutes each, the oldest first. minutes: of all queues, in any order."""
    sums: dict[datetime, list[int]] = {}
    for each in minutes:
        minute = each.at.replace(second=0, microsecond=0)
        start = minute - timedelta(minutes=int(minute.timestamp() // 60) % per_bar)
        found = sums.setdefault(start, [0, 0, 0])
        if each.processed is not None:
            found[0] += each.processed
            found[1] += each.failed or 0
            found[2] += 1
    return [
        Bucket(at, processed / per_bar, failed / per_bar) if known else Bucket(at, None, None)
        for at, (processed, failed, known) in sorted(sums.items())
    ]


def nice_maximum(value: float) -> float:
    """Return the lowest number from 1, 2, 5, 10, 20 … that is not below a value."""
    power = 1.0
    while True:
        for step in STEPS:
            if step * power >= value:
                return step * power
        power *= 10


@dataclass(frozen=True)
class Chart:
    """A chart as its template draws it."""

    span: Span
    buckets: Sequence[Bucket]
    width = WIDTH
    height = HEIGHT
    left = LEFT
    bottom = HEIGHT - BOTTOM

    @cached_property
    def maximum(self) -> float:
        """The number at the top of the axis."""
        return nice_maximum(max((each.processed or 0 for each in self.buckets), default=0))

    @cached_property
    def bars(self) -> list[Bar]:
        """The bars; none where nothing is known or nothing was processed."""
        found = []
        step = (WIDTH - LEFT) / max(len(self.buckets), 1)
        for index, each in enumerate(self.buckets):
            if not each.processed:
                continue
            top, failed_top = self._y(each.processed), self._y(each.failed or 0)
            found.append(
                Bar(
                    round(LEFT + index * step, 1),
                    round(max(step - 1, 1), 1),
                    round(top, 1),
                    round(self.bottom - top, 1),
                    round(failed_top, 1),
                    round(self.bottom - failed_top, 1),
                    self.text_of(each),
                    self.end_of(each),
                )
            )
        return found

    @cached_property
    def gaps(self) -> list[tuple[float, float]]:
        """Where Redis knows nothing: x and width."""
        step = (WIDTH - LEFT) / max(len(self.buckets), 1)
        return [
            (round(LEFT + index * step, 1), round(step, 1))
            for index, each in enumerate(self.buckets)
            if each.processed is None
        ]

    @cached_property
    def y_labels(self) -> list[Label]:
        """The labels of the axis of numbers."""
        return [Label(round(self._y(value), 1), as_rate(value)) for value in (0, self.maximum / 2, self.maximum)]

    @cached_property
    def x_labels(self) -> list[Label]:
        """The labels of the axis of times: at the first bar of each period of local time."""
        step = (WIDTH - LEFT) / max(len(self.buckets), 1)
        found, last = [], None
        for index, each in enumerate(self.buckets):
            local = timezone.localtime(each.at).replace(tzinfo=None)
            period = int((local - EPOCH).total_seconds() // 60) // self.span.per_label
            if last is not None and period != last:
                found.append(Label(round(LEFT + index * step, 1), date_format(local, self.span.time_format)))
            last = period
        return found

    def text_of(self, bucket: Bucket) -> str:
        """Say what a bar shows."""
        text = _("%(at)s: %(processed)s per minute, %(failed)s of them failed")
        return str(text) % {
            "at": date_format(timezone.localtime(bucket.at), "SHORT_DATETIME_FORMAT"),
            "processed": as_rate(bucket.processed),
            "failed": as_rate(bucket.failed),
        }

    def end_of(self, bucket: Bucket) -> str:
        """Return the lowest id of a task that is enqueued after a bar: before it the list shows what the bar counts."""
        return str(lowest_uuid7_at(bucket.at + timedelta(minutes=self.span.per_bar)))

    @cached_property
    def rows(self) -> list[tuple[datetime, str, str, str]]:
        """The same numbers for a table, the newest first, with the end of each."""
        return [
            (each.at, as_rate(each.processed), as_rate(each.failed), self.end_of(each))
            for each in reversed(self.buckets)
        ]

    def _y(self, value: float) -> float:
        return self.bottom - (self.bottom - TOP) * value / self.maximum


def as_rate(value: float | None) -> str:
    """Return a number per minute as text; a dash where nothing is known."""
    if value is None:
        return "–"
    # Django's function cuts digits off, so the number is rounded before.
    is_whole = value >= 10 or value == int(value)
    return number_format(round(value) if is_whole else round(value, 1), force_grouping=True)
