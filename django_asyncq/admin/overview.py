"""The overview, the first page of the app: it answers the six questions of an operator at three in the morning.

Is it moving, who is working, what is failing, can I stop the bleeding, can I mend it, did a colleague do something?
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.contrib.admin.models import LogEntry
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..exceptions import BrokerUnavailable
from ..faults import one_line
from ..inspector import Inspector, MinuteInfo, QueueInfo
from ..inspector.counts import processed
from ..models import BulkAction, BulkState, FailureReason, Gate
from ..redaction import mask_text
from ..storage.bounded_reads import counts_by_state
from ..storage.routing import rows_of, writing_database
from . import display
from .charts import DEFAULT_SPAN, SPANS, Chart, Span, as_rate, buckets_of
from .failure_page import read_groups
from .fleet import Fleet, fleet_of
from .gate_admin import read_occupancy
from .permissions import has_right
from .tabs import as_count
from .visible_text import visible_text

# A page is to stay fast however many there are.
MOST_QUEUES = 50
MOST_GATES = 50
SHOWN = 5
ENTRIES_SHOWN = 10
RATE_MINUTES = 5


class Fact(NamedTuple):
    """A line of a panel. url: "" for none."""

    text: SafeString | str
    url: str = ""


class Panel(NamedTuple):
    """A question with its answers. is_bad: something is wrong there."""

    id: str
    question: str
    facts: list[Fact]
    is_bad: bool = False


class Entry(NamedTuple):
    """What a person did."""

    at: SafeString | str
    who: str
    what: str
    text: str


def overview_of(request: HttpRequest, app: str) -> dict[str, Any]:
    """Return what the template shows; nothing to users who may not see tasks. app: the name of the admin site."""
    if not has_right(request, "view_taskrecord"):
        return {}
    fleet = fleet_of(request)
    chosen = request.GET.get("span", DEFAULT_SPAN)
    chosen = chosen if chosen in SPANS else DEFAULT_SPAN
    span = SPANS[chosen]
    queues, parts, rates, error = _read(fleet, span)
    links = _Links(app)
    panels = [
        _moving(queues, rates, links),
        _working(fleet, links),
        _failing(fleet, links),
        _bleeding(fleet, links),
        _mending(links),
    ]
    return {
        "panels": [panel._replace(facts=[_visible(fact) for fact in panel.facts]) for panel in panels],
        "entries": _entries(fleet.now),
        "chart": None if error or not fleet.needs_redis else Chart(span, buckets_of(parts, span.per_bar)),
        "spans": [(f"?span={name}", each.label, name == chosen) for name, each in SPANS.items()],
        "tasks_url": links.to("taskrecord_changelist"),
        "error": error,
    }


def _visible(fact: Fact) -> Fact:
    # Django renders this page, so its hidden characters are shown here.
    return fact if isinstance(fact.text, SafeString) else fact._replace(text=visible_text(fact.text))


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


def _read(fleet: Fleet, span: Span) -> tuple[list[QueueInfo], list[MinuteInfo], Rates, str]:
    """Return the queues, what all of them did in parts of the span, the rates, and why Redis gave no answer."""
    if fleet.error or not fleet.needs_redis:
        return [], [], Rates(), fleet.error
    try:
        queues = Inspector().queues.all()[:MOST_QUEUES]
        names = [(each.backend, each.queue) for each in queues]
        now = display.aware(fleet.now)
        since = now - timedelta(minutes=span.minutes - 1)
        parts = processed(names, since, now, min(span.per_bar, 60))
        rates = Rates(*(_rate(names, now - ago) for ago in (timedelta(), timedelta(days=1))))
    except BrokerUnavailable as error:
        return [], [], Rates(), one_line(error)
    return queues, parts, rates, ""


def _rate(names: list[tuple[str, str]], moment: datetime) -> float | None:
    """Return the mean per minute of the last full minutes before a time; None when nothing is known of them."""
    end = moment.replace(second=0, microsecond=0)
    found = processed(names, end - timedelta(minutes=RATE_MINUTES), end - timedelta(minutes=1), 1)
    known = [each.processed for each in found if each.processed is not None]
    return sum(known) / RATE_MINUTES if known else None


# --- the six questions


def _moving(queues: list[QueueInfo], rates: Rates, links: _Links) -> Panel:
    facts = [Fact(_("%(rate)s tasks per minute now") % {"rate": as_rate(rates.now)})]
    facts.append(Fact(_("%(rate)s per minute at this time yesterday") % {"rate": as_rate(rates.yesterday)}))
    ages = [(each.oldest_waiting_seconds, each.queue) for each in queues if each.oldest_waiting_seconds is not None]
    if ages:
        age, queue = max(ages)
        text = _("The oldest task has waited for %(span)s, in the queue %(queue)s.")
        facts.append(Fact(text % {"span": display.whole_duration(age), "queue": queue}, links.to("taskrecord_queues")))
    else:
        facts.append(Fact(_("No task waits."), links.to("taskrecord_queues")))
    return Panel("moving", _("Is it moving?"), facts)


def _working(fleet: Fleet, links: _Links) -> Panel:
    url = links.to("taskrecord_workers")
    if not fleet.is_known:
        return Panel("working", _("Who is working?"), [Fact(_("It is not known."), url)])
    workers = fleet.own_workers
    text = ngettext("%(count)d worker is alive.", "%(count)d workers are alive.", len(workers))
    facts = [Fact(text % {"count": len(workers)}, url)]
    slots, busy = sum(each.slots for each in workers), sum(each.busy for each in workers)
    if slots:
        facts.append(Fact(_("%(busy)d of %(slots)d slots are in use.") % {"busy": busy, "slots": slots}))
    running = [task for each in workers for task in each.running]
    if running:
        longest = min(running, key=lambda task: task.started_at)
        age = display.whole_duration((display.aware(fleet.now) - longest.started_at).total_seconds())
        text = _("The longest has run for %(span)s: %(task)s.")
        facts.append(Fact(text % {"span": age, "task": longest.name.rpartition(".")[2][:100]}))
    stuck = len(fleet.stuck())
    if stuck:
        text = ngettext("%(count)d task is stuck.", "%(count)d tasks are stuck.", stuck) % {"count": stuck}
        facts.append(Fact(text, f"{links.to('taskrecord_changelist')}?state=stuck"))
    return Panel("working", _("Who is working?"), facts, is_bad=not workers or bool(stuck))


def _failing(fleet: Fleet, links: _Links) -> Panel:
    groups, is_cut = read_groups(fleet.now, timedelta(days=1))
    url = links.to("taskrecord_failures")
    if not groups:
        text = _("Nothing in 24 hours, among the tasks enqueued last.") if is_cut else _("Nothing in 24 hours.")
        return Panel("failing", _("What is failing?"), [Fact(text, url)])
    facts = []
    for group in groups[:SHOWN]:
        number = group.count + group.retrying
        text = ngettext("%(count)d time %(error)s in %(task)s", "%(count)d times %(error)s in %(task)s", number)
        kind = group.error.rpartition(".")[2] or str(FailureReason(group.reason).label)
        facts.append(Fact(text % {"count": number, "error": kind, "task": group.name.rpartition(".")[2]}, url))
    if (more := len(groups) - SHOWN) > 0:
        facts.append(
            Fact(ngettext("and %(count)d more group", "and %(count)d more groups", more) % {"count": more}, url)
        )
    return Panel("failing", _("What is failing?"), facts, is_bad=True)


def _bleeding(fleet: Fleet, links: _Links) -> Panel:
    url = links.to("taskrecord_queues")
    facts = [
        Fact(_("%(kind)s %(name)s is paused.") % {"kind": each.get_kind_display(), "name": each.name}, url)
        for each in fleet.pauses[:SHOWN]
    ]
    if not facts:
        facts.append(Fact(_("Nothing is paused. Pause a queue or a task here."), url))
    gates = list(rows_of(Gate).filter(limit__gt=0).order_by("name")[:MOST_GATES]) if fleet.is_known else []
    read_occupancy(gates)
    full = [gate for gate in gates if (gate.slots_taken or 0) >= gate.limit]  # type: ignore[attr-defined]
    gates_url = links.to("gate_changelist")
    facts += [Fact(_("Gate %(name)s is full.") % {"name": gate.name}, gates_url) for gate in full[:SHOWN]]
    return Panel("bleeding", _("Can I stop the bleeding?"), facts)


def _mending(links: _Links) -> Panel:
    failed = counts_by_state()["failed"]
    text = ngettext("%(count)s task has failed for good.", "%(count)s tasks have failed for good.", failed)
    facts = [Fact(text % {"count": as_count(failed)}, f"{links.to('taskrecord_changelist')}?state=failed")]
    running = rows_of(BulkAction).filter(state__in=(BulkState.RUNNING, BulkState.PAUSED)).order_by("-id")
    for action in running[:SHOWN]:
        text = _("%(kind)s of many tasks: %(done)d of %(total)d done")
        values = {"kind": action.get_kind_display(), "done": action.done, "total": action.total}
        facts.append(Fact(text % values, links.to("bulkaction_changelist")))
    return Panel("mending", _("Can I mend it?"), facts)


def _entries(now: datetime) -> list[Entry]:
    """Return the latest that people did, by the admin's history."""
    entries = LogEntry.objects.using(writing_database(LogEntry)).filter(content_type__app_label="django_asyncq")
    latest = entries.select_related("user").order_by("-action_time")[:ENTRIES_SHOWN]
    return [
        Entry(
            display.time_element(each.action_time, now),
            visible_text(each.user.get_username()),
            visible_text(each.object_repr),
            visible_text(mask_text(str(each.get_change_message()))),
        )
        for each in latest
    ]
