"""The page *Failures*: what fails, grouped by task and class of error, with the button that retries a group.

It looks at the newest `MOST_FAILURES` FAILED tasks, along the index of states, so it stays fast beside a million of
them; when there are more, the page says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..exceptions import InvalidOption
from ..models import BulkKind, FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.matching import checked
from ..storage.routing import rows_of
from . import display
from .bulk_page import start_or_ask
from .display import Text
from .pages import paths, render_page, url_of
from .permissions import has_right, only_post, requires
from .tabs import as_count

MOST_FAILURES = 20_000
MOST_GROUPS = 100
HOURS = 24
SPARK_WIDTH, SPARK_HEIGHT, BAR = 96, 20, 4
SPANS: dict[str, tuple[timedelta | None, Text]] = {
    "1h": (timedelta(hours=1), gettext_lazy("1 hour")),
    "24h": (timedelta(hours=24), gettext_lazy("24 hours")),
    "7d": (timedelta(days=7), gettext_lazy("7 days")),
    "all": (None, gettext_lazy("All")),
}
DEFAULT_SPAN = "24h"


@dataclass
class Group:
    """The failures of one task with one class of error, or with a reason that is no error.

    count: of those that failed for good; retrying: of those that are retried by themselves. hours: how many failed in
    each of the last 24 hours, the oldest first.
    """

    name: str
    error: str
    reason: int
    count: int = 0
    retrying: int = 0
    first: datetime | None = None
    last: datetime | None = None
    hours: list[int] = field(default_factory=lambda: [0] * HOURS)

    @property
    def reason_word(self) -> str:
        """The reason as filters write it."""
        return FailureReason(self.reason).name.lower()

    def add(self, at: datetime, now: datetime, *, is_final: bool) -> None:
        """Count a failure. at: when it failed."""
        self.count += is_final
        self.retrying += not is_final
        self.first = at if self.first is None else min(self.first, at)
        self.last = at if self.last is None else max(self.last, at)
        hour = HOURS - 1 - int((now - at).total_seconds() // 3600)
        if 0 <= hour < HOURS:
            self.hours[hour] += 1


@dataclass(frozen=True)
class ShownGroup:
    """A row of the table. url: of the list of its tasks."""

    group: Group
    task: str
    error: str
    first: SafeString | str
    last: SafeString | str
    spark: SafeString
    url: str


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the addresses of the page and of its button."""
    return paths(model_admin, {"failures": failures_view, "retry-group": retry_group_view})


@requires("view_taskrecord")
def failures_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Show the groups of failed tasks, the largest first."""
    chosen = request.GET.get("span", DEFAULT_SPAN)
    chosen = chosen if chosen in SPANS else DEFAULT_SPAN
    now = database_clock.now()
    groups, is_cut = read_groups(now, SPANS[chosen][0])
    may_retry = has_right(request, "retry_task")
    context = {
        "groups": [_shown(model_admin, group, now) for group in groups[:MOST_GROUPS]],
        "not_shown": max(0, len(groups) - MOST_GROUPS),
        "spans": [(f"?span={name}", label, name == chosen) for name, (_span, label) in SPANS.items()],
        "is_cut": is_cut,
        "most": as_count(MOST_FAILURES),
        "may_retry": may_retry,
    }
    return render_page(model_admin, request, "failures.html", _("Failures"), context)


def read_groups(now: datetime, span: timedelta | None = None) -> tuple[list[Group], bool]:
    """Return the groups of the newest FAILED tasks, the largest first, and whether there are more such tasks.

    span: only failures of that long ago at most. Costs one query.
    """
    # The state stands in the order too: see `queries.in_order`.
    newest = rows_of(TaskRecord).filter(state__gte=TaskState.FAILED).order_by("-state", "-id")
    columns = ("name", "last_exception", "reason", "finished_at", "last_attempted_at", "enqueued_at")
    found: dict[tuple[str, str, int], Group] = {}
    rows = list(newest.values_list(*columns)[: MOST_FAILURES + 1])
    for name, error, reason, finished_at, attempted_at, enqueued_at in rows[:MOST_FAILURES]:
        at = finished_at or attempted_at or enqueued_at
        if span is not None and now - at > span:
            continue
        key = (name, error, 0 if error else reason)
        found.setdefault(key, Group(*key)).add(at, now, is_final=finished_at is not None)
    groups = sorted(found.values(), key=lambda group: (-group.count - group.retrying, group.name, group.error))
    return groups, len(rows) > MOST_FAILURES


def _shown(model_admin: ModelAdmin[Any], group: Group, now: datetime) -> ShownGroup:
    query = {"name": group.name, **({"error": group.error} if group.error else {"reason": group.reason_word})}
    return ShownGroup(
        group,
        group.name.rpartition(".")[2],
        group.error.rpartition(".")[2] or str(FailureReason(group.reason).label),
        display.time_element(group.first, now),
        display.time_element(group.last, now),
        spark_line(group.hours),
        f"{url_of(model_admin, 'changelist')}?{urlencode(query)}",
    )


def spark_line(hours: Iterable[int]) -> SafeString:
    """Return small bars, one for each hour, as SVG with a text alternative."""
    counts = list(hours)
    most = max(counts, default=0)
    bars = [
        (index * BAR, SPARK_HEIGHT - height, BAR - 1, height)
        for index, count in enumerate(counts)
        if (height := max(2, round(SPARK_HEIGHT * count / most)) if count else 0)
    ]
    total = sum(counts)
    text = ngettext("%(count)d failure in 24 hours", "%(count)d failures in 24 hours", total) % {"count": total}
    return format_html(
        '<svg class="asyncq-spark" role="img" aria-label="{}" width="{}" height="{}"><title>{}</title>{}</svg>',
        text,
        SPARK_WIDTH,
        SPARK_HEIGHT,
        text,
        format_html_join("", '<rect x="{}" y="{}" width="{}" height="{}"/>', bars),
    )


@only_post
@requires("view_taskrecord", "retry_task")
def retry_group_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Ask, then start an action that retries the tasks of a group that failed for good. POST only."""
    matching = {"state": "failed", "name": request.POST.get("name", "")}
    if error := request.POST.get("error", ""):
        matching["last_exception"] = error
    else:
        # Those that failed without an error, for the same reason: not all tasks of the name.
        matching["reason"] = request.POST.get("reason", "")
    try:
        found = checked(BulkKind.RETRY, matching)
    except InvalidOption:
        return HttpResponseRedirect(url_of(model_admin, "failures"))
    return start_or_ask(model_admin, request, BulkKind.RETRY, found)
