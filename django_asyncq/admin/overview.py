"""The overview, the first page of the app: it answers the six questions of an operator at three in the morning.

Is it moving, who is working, what is failing, can I stop the bleeding, can I mend it, did a colleague do something?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, count
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.contrib.admin.models import LogEntry
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.functional import cached_property
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..broker.reading import Reader, side_by_side
from ..broker.run_counts import RunCounts
from ..core.aliases import is_redis_used
from ..core.names import lowest_uuid7_at
from ..core.redaction import mask_text
from ..models import BulkAction, BulkState, Gate
from ..observe.backlog import QueueKey, live_rows, reading_known, reading_queues
from ..observe.counts import reading_processed, reading_runs_by_task
from ..observe.fleet import Fleet
from ..observe.of_queues import queue_infos
from ..observe.values import MinuteInfo, QueueInfo
from ..storage import database_clock
from ..storage.routing import counts_by_state, rows_of, writing_database
from . import base
from .banner import warnings_of
from .base import Text, has_right, visible_text
from .details import RUN_COLUMNS, cells_of_runs
from .failures import read_groups
from .fleet import fleet_and
from .gates import reading_taken
from .history import in_readers_language
from .navigation import as_count

# --- The chart of the overview: how many tasks were processed and failed per minute, as SVG with axes, and as a table.
#
# The numbers are the counters that Redis keeps for eight days; what it has lost is a gap.

STEPS = (1, 2, 5)
# In percent of the width. Beyond it a label ends at its bar, so that the last one is whole.
LAST_CENTERED = 90
EPOCH = datetime(1970, 1, 1)


class Span(NamedTuple):
    """How far a chart looks back. minutes: in all; per_bar: of one bar; per_label: between two labels of the axis."""

    label: Text
    minutes: int
    per_bar: int
    per_label: int
    time_format: str


SPANS = {
    "1h": Span(gettext_lazy("1 hour"), 60, 1, 10, "H:i"),
    "24h": Span(gettext_lazy("24 hours"), 1_440, 15, 240, "H:i"),
    "7d": Span(gettext_lazy("7 days"), 10_080, 120, 1_440, "D j"),
}
DEFAULT_SPAN = "1h"


class Bucket(NamedTuple):
    """What one bar shows: means per minute; None for both where Redis knows nothing of the time."""

    at: datetime
    processed: float | None
    failed: float | None


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
    return next(step * 10.0**power for power in count() for step in STEPS if step * 10.0**power >= value)


@dataclass(frozen=True)
class Chart:
    """A chart as its template draws it. Places and sizes are percentages, so that it is as wide as its page."""

    span: Span
    buckets: Sequence[Bucket]

    @cached_property
    def maximum(self) -> float:
        """The number at the top of the axis."""
        return nice_maximum(max((each.processed or 0 for each in self.buckets), default=0))

    @cached_property
    def step(self) -> float:
        """The width of a bucket."""
        return 100 / max(len(self.buckets), 1)

    def _x(self, index: int) -> float:
        return round(index * self.step, 2)

    @cached_property
    def bars(self) -> list[SimpleNamespace]:
        """The bars; none where nothing is known or nothing was processed.

        failed_height: of the lower part of one, which failed. before: the lowest id of a task that is enqueued after
        its time.
        """
        found = []
        for index, each in enumerate(self.buckets):
            if each.processed:
                found.append(
                    SimpleNamespace(
                        x=self._x(index),
                        width=round(0.9 * self.step, 2),
                        height=self._height(each.processed),
                        failed_height=self._height(each.failed or 0),
                        title=self.text_of(each),
                        before=self.end_of(each),
                    )
                )
        return found

    @cached_property
    def gaps(self) -> list[tuple[float, float]]:
        """Where Redis knows nothing: x and width."""
        return [
            (self._x(index), round(self.step, 2)) for index, each in enumerate(self.buckets) if each.processed is None
        ]

    @cached_property
    def y_labels(self) -> list[str]:
        """The labels of the axis of numbers, from its top to its middle and its bottom."""
        return [as_rate(share * self.maximum) for share in (1, 0.5, 0)]

    @cached_property
    def x_labels(self) -> list[SimpleNamespace]:
        """The labels of the axis of times: at the first bar of each period of local time."""
        found, last = [], None
        for index, each in enumerate(self.buckets):
            local = timezone.localtime(each.at).replace(tzinfo=None)
            period = int((local - EPOCH).total_seconds() // 60) // self.span.per_label
            if last is not None and period != last:
                label, x = date_format(local, self.span.time_format), self._x(index)
                found.append(SimpleNamespace(x=x, label=label, is_last=x > LAST_CENTERED))
            last = period
        return found

    def text_of(self, bucket: Bucket) -> str:
        """Say what a bar shows."""
        return _("%(at)s: %(processed)s per minute, %(failed)s of them failed") % {
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

    def _height(self, value: float) -> float:
        return round(100 * value / self.maximum, 2)


def as_rate(value: float | None) -> str:
    """Return a number per minute as text; a dash where nothing is known."""
    if value is None:
        return "–"
    # Django's function cuts digits off, so the number is rounded before.
    is_whole = value >= 10 or value == int(value)
    return number_format(round(value) if is_whole else round(value, 1), force_grouping=True)


# A page is to stay fast however many there are.
MOST_QUEUES = 50
MOST_TASKS = 20
MOST_HOURS = 24
MOST_GATES = 50
SHOWN = 5
ENTRIES_SHOWN = 10
RATE_MINUTES = 5


class Fact(NamedTuple):
    """A line of a panel. url: "" for none."""

    text: SafeString | str
    url: str = ""


def panel_of(id: str, question: str, facts: list[Fact], *, is_bad: bool = False) -> SimpleNamespace:
    """Return a question with its answers. is_bad: something is wrong there.

    Django renders this page, so its hidden characters are shown here.
    """
    shown = [fact if isinstance(fact.text, SafeString) else Fact(visible_text(fact.text), fact.url) for fact in facts]
    return SimpleNamespace(id=id, question=question, facts=shown, is_bad=is_bad)


def overview_of(request: HttpRequest, app: str) -> dict[str, Any]:
    """Return what the template shows; nothing to users who may not see tasks. app: the name of the admin site."""
    if not has_right(request, "view_taskrecord"):
        return {}
    chosen = request.GET.get("span", DEFAULT_SPAN)
    chosen = chosen if chosen in SPANS else DEFAULT_SPAN
    span = SPANS[chosen]
    fleet, found = fleet_and(request, *((_reading(span), _reading_full()) if is_redis_used() else ()))
    (queues, parts, runs, rates), full = found if fleet.is_known else (([], [], {}, Rates()), [])
    links = _Links(app)
    return {
        "panels": [
            _moving(queues, rates, links),
            _working(fleet, links),
            _failing(fleet, links),
            _bleeding(fleet, full, links),
            _mending(links),
        ],
        "entries": _entries(fleet.now),
        "chart": Chart(span, buckets_of(parts, span.per_bar)) if fleet.is_known else None,
        "runs": [_runs_row(*item) for item in list(runs.items())[:MOST_TASKS]],
        "run_columns": RUN_COLUMNS,
        "hours": _hours_of(span),
        "spans": [(f"?span={name}", each.label, name == chosen) for name, each in SPANS.items()],
        "tasks_url": links.to("taskrecord_changelist"),
        "task_url": links.to("taskrecord_task"),
        "error": fleet.error,
        **warnings_of(request),
    }


class _Links:
    """Addresses of pages; "" for one that the admin site does not have."""

    def __init__(self, app: str) -> None:
        self.app = app

    def to(self, view: str) -> str:
        try:
            return reverse(f"admin:django_asyncq_{view}", current_app=self.app)
        except NoReverseMatch:
            return ""


class Rates(NamedTuple):
    """Tasks per minute in the last full minutes, and in those of a day before; None where nothing is known."""

    now: float | None = None
    yesterday: float | None = None


def _hours_of(span: Span) -> int:
    """Return for how many hours before this one the table of tasks is."""
    return min(span.minutes // 60, MOST_HOURS)


def _runs_row(name: str, counts: RunCounts) -> SimpleNamespace:
    """Return the line of a task."""
    return SimpleNamespace(
        name=visible_text(name),
        query=f"?{urlencode({'name': name})}",
        cells=list(zip(RUN_COLUMNS, cells_of_runs(counts), strict=True)),
    )


def _reading(span: Span) -> Reader[tuple[list[QueueInfo], list[MinuteInfo], dict[str, RunCounts], Rates]]:
    """Read the queues, what all of them did in parts of the span and by task, and rates."""
    at = database_clock.now()
    now, live = base.aware(at), live_rows(at)
    names = (yield from reading_known(live))[:MOST_QUEUES]
    contents, parts, runs, *rates = yield from side_by_side(
        reading_queues(names),
        reading_processed(names, now - timedelta(minutes=span.minutes - 1), now, min(span.per_bar, 60)),
        reading_runs_by_task(names, _hours_of(span)),
        *(_reading_rate(names, now - ago) for ago in (timedelta(), timedelta(days=1))),
    )
    return queue_infos(live, contents, at), list(chain.from_iterable(parts)), runs, Rates(*rates)


def _reading_rate(names: list[QueueKey], moment: datetime) -> Reader[float | None]:
    """Read the mean per minute of the last full minutes before a time; None when nothing is known of them."""
    end = moment.replace(second=0, microsecond=0)
    found = yield from reading_processed(names, end - timedelta(minutes=RATE_MINUTES), end - timedelta(minutes=1), 1)
    known = [each.processed for each in chain.from_iterable(found) if each.processed is not None]
    return sum(known) / RATE_MINUTES if known else None


# --- the six questions


def _moving(queues: list[QueueInfo], rates: Rates, links: _Links) -> SimpleNamespace:
    facts = [Fact(_("%(rate)s tasks per minute in the last 5 minutes") % {"rate": as_rate(rates.now)})]
    facts.append(Fact(_("%(rate)s per minute at this time yesterday") % {"rate": as_rate(rates.yesterday)}))
    ages = [(each.oldest_waiting_seconds, each.queue) for each in queues if each.oldest_waiting_seconds is not None]
    if ages:
        age, queue = max(ages)
        text = _("The oldest task has waited for %(span)s, in the queue %(queue)s.")
        facts.append(Fact(text % {"span": base.whole_duration(age), "queue": queue}, links.to("taskrecord_queues")))
    else:
        facts.append(Fact(_("No task waits."), links.to("taskrecord_queues")))
    return panel_of("moving", _("Is it moving?"), facts)


def _working(fleet: Fleet, links: _Links) -> SimpleNamespace:
    url = links.to("taskrecord_workers")
    if not fleet.is_known:
        return panel_of("working", _("Who is working?"), [Fact(_("It is not known."), url)])
    workers = fleet.own_workers
    text = ngettext("%(count)d worker is alive.", "%(count)d workers are alive.", len(workers))
    facts = [Fact(text % {"count": len(workers)}, url)]
    slots, busy = sum(each.slots for each in workers), sum(each.busy for each in workers)
    if slots:
        facts.append(Fact(_("%(busy)d of %(slots)d slots are in use.") % {"busy": busy, "slots": slots}))
    running = [task for each in workers for task in each.running]
    if running:
        longest = min(running, key=lambda task: task.started_at)
        age = base.whole_duration((base.aware(fleet.now) - longest.started_at).total_seconds())
        text = _("The longest has run for %(span)s: %(task)s.")
        facts.append(Fact(text % {"span": age, "task": longest.name.rpartition(".")[2][:100]}))
    stuck = len(fleet.stuck())
    if stuck:
        text = ngettext("%(count)d task is stuck.", "%(count)d tasks are stuck.", stuck) % {"count": stuck}
        facts.append(Fact(text, f"{links.to('taskrecord_changelist')}?state=stuck"))
    return panel_of("working", _("Who is working?"), facts, is_bad=not workers or bool(stuck))


def _failing(fleet: Fleet, links: _Links) -> SimpleNamespace:
    found, url = read_groups(fleet.now, timedelta(days=1)), links.to("taskrecord_failures")
    if not found.groups:
        text = _("Nothing in 24 hours.")
        if found.behind is not None:
            text = _("Nothing in 24 hours, among the tasks enqueued last.")
        return panel_of("failing", _("What is failing?"), [Fact(text, url)])
    facts, tasks = [], links.to("taskrecord_changelist")
    for group in found.groups[:SHOWN]:
        number, matching = group.count, found.final(group)
        text = ngettext("%(count)s time %(error)s in %(task)s", "%(count)s times %(error)s in %(task)s", number)
        if not number:
            number, matching = group.retrying, found.retrying(group)
            text = ngettext(
                "%(count)s task is retried after %(error)s in %(task)s",
                "%(count)s tasks are retried after %(error)s in %(task)s",
                number,
            )
        values = {"count": found.counted(number), "error": group.title, "task": group.name.rpartition(".")[2]}
        facts.append(Fact(text % values, f"{tasks}{matching.query}" if tasks else ""))
    if (more := len(found.groups) - SHOWN) > 0:
        text = ngettext("and %(count)d more group", "and %(count)d more groups", more)
        facts.append(Fact(text % {"count": more}, url))
    return panel_of("failing", _("What is failing?"), facts, is_bad=True)


def _reading_full() -> Reader[list[Gate]]:
    """Read which gates are full."""
    found = list(rows_of(Gate).filter(limit__gt=0).order_by("name")[:MOST_GATES])
    taken = yield from reading_taken([gate.name for gate in found])
    return [gate for gate in found if taken[gate.name] >= gate.limit]


def _bleeding(fleet: Fleet, full: list[Gate], links: _Links) -> SimpleNamespace:
    url = links.to("taskrecord_queues")
    facts = [
        Fact(_("%(kind)s %(name)s is paused.") % {"kind": each.get_kind_display(), "name": each.name}, url)
        for each in fleet.pauses[:SHOWN]
    ]
    if not facts:
        facts.append(Fact(_("Nothing is paused. Pause a queue or a task here."), url))
    gates_url = links.to("gate_changelist")
    facts += [Fact(_("Gate %(name)s is full.") % {"name": gate.name}, gates_url) for gate in full[:SHOWN]]
    return panel_of("bleeding", _("Can I stop the bleeding?"), facts)


def _mending(links: _Links) -> SimpleNamespace:
    failed = counts_by_state()["failed"]
    text = ngettext("%(count)s task has failed for good.", "%(count)s tasks have failed for good.", failed)
    facts = [Fact(text % {"count": as_count(failed)}, f"{links.to('taskrecord_changelist')}?state=failed")]
    running = rows_of(BulkAction).filter(state=BulkState.RUNNING).order_by("-id")
    for action in running[:SHOWN]:
        text = _("%(kind)s of many tasks: %(done)d of %(total)d done")
        values = {"kind": action.get_kind_display(), "done": action.done, "total": action.total}
        facts.append(Fact(text % values, links.to("bulkaction_changelist")))
    return panel_of("mending", _("Can I mend it?"), facts)


def _entries(now: datetime) -> list[SimpleNamespace]:
    """Return the latest that people did, by the admin's history."""
    entries = LogEntry.objects.using(writing_database(LogEntry)).filter(content_type__app_label="django_asyncq")
    latest = entries.select_related("user").order_by("-action_time")[:ENTRIES_SHOWN]
    return [
        SimpleNamespace(
            at=base.time_element(each.action_time, now),
            who=visible_text(each.user.get_username()),
            what=visible_text(each.object_repr),
            text=visible_text(mask_text(in_readers_language(each))),
        )
        for each in latest
    ]
