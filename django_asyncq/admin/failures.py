"""The page *Failures*: what fails, in groups, with the button that retries a group. What failed last is first.

It looks at the newest `MOST_FAILURES` FAILED tasks, along the index of states, so it stays fast beside a million of
them; when there are more, the page says so, and its numbers say "at least".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib.admin import ModelAdmin
from django.db.models import Exists, Q
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import BulkKind, FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import rows_of
from . import base
from .base import REASONS_WITH_ERROR, Text, has_right
from .filters import LastError
from .matching import Matching
from .navigation import as_count

MOST_FAILURES = 20_000
GROUPS_PER_PAGE = 50
HOURS = 24
SPARK_WIDTH, SPARK_HEIGHT, BAR = 96, 20, 4
SPANS: dict[str, tuple[timedelta | None, Text]] = {
    "1h": (timedelta(hours=1), gettext_lazy("1 hour")),
    "24h": (timedelta(hours=24), gettext_lazy("24 hours")),
    "7d": (timedelta(days=7), gettext_lazy("7 days")),
    "all": (None, gettext_lazy("All")),
}
DEFAULT_SPAN = "24h"
# What the tasks of a group have in common.
GROUPINGS: dict[str, Text] = {
    "both": gettext_lazy("Task and error"),
    "task": gettext_lazy("Task"),
    "error": gettext_lazy("Error"),
}


@dataclass
class Group:
    """The failures of one task with one class of error, or with a reason that is no error.

    name: "" for all tasks. error: "" for one of a reason, and for all errors. reasons: of those that failed.
    count: of those that failed for good since the page's time; retrying: of all that are retried by themselves.
    first, last: of all that were looked at. first_id, last_id: of their tasks. hours: how many failed in each of the
    last 24 hours, the oldest first. is_new: none failed before the page's time.
    """

    name: str
    error: str
    reasons: set[int] = field(default_factory=set)
    count: int = 0
    retrying: int = 0
    first: datetime | None = None
    last: datetime | None = None
    first_id: UUID | None = None
    last_id: UUID | None = None
    hours: list[int] = field(default_factory=lambda: [0] * HOURS)
    is_new: bool = False

    @property
    def title(self) -> str:
        """The class of the error, or the reason; "" for all errors of a task."""
        if self.error:
            return self.error.rpartition(".")[2]
        return str(FailureReason(*self.reasons).label) if len(self.reasons) == 1 else ""

    @property
    def keys(self) -> dict[str, Any]:
        """What its tasks have in common, as a filter."""
        found: dict[str, Any] = {"reason": [FailureReason(reason).name.lower() for reason in sorted(self.reasons)]}
        found |= {"name": self.name} if self.name else {}
        return found | ({"last_exception": self.error} if self.error else {})

    def add(self, id: UUID, reason: int, at: datetime, now: datetime, *, is_final: bool, is_within: bool) -> None:
        """Count a failure. at: when it failed. is_within: in the page's time."""
        self.reasons.add(reason)
        self.count += is_final and is_within
        self.retrying += not is_final
        if self.first is None or at < self.first:
            self.first, self.first_id = at, id
        if self.last is None or at > self.last:
            self.last, self.last_id = at, id
        hour = HOURS - 1 - int((now - at).total_seconds() // 3600)
        if 0 <= hour < HOURS:
            self.hours[hour] += 1


class Found(NamedTuple):
    """The groups of failures within a time, that of the last failure first.

    since: the beginning of the time; None for all. until: its end. behind: the oldest task that was looked at, when
    there are more; else None.
    """

    groups: list[Group]
    since: datetime | None
    until: datetime
    behind: UUID | None

    def final(self, group: Group) -> Matching:
        """Return the tasks of a group that failed for good, as many as `Group.count` says."""
        times = {"finished_since": self.since, "finished_until": self.until}
        return Matching({"state": ["failed"], **group.keys, **{key: base.aware(at) for key, at in times.items() if at}})

    def retrying(self, group: Group) -> Matching:
        """Return the tasks of a group that are retried by themselves."""
        return Matching({"state": ["retrying"], **group.keys})

    def counted(self, count: int) -> str:
        """Return a number of a group as text: when not all failures were looked at, there may be more."""
        text = as_count(count)
        return text if self.behind is None else _("at least %(count)s") % {"count": text}


def failures(model_admin: ModelAdmin[Any], request: HttpRequest) -> dict[str, Any]:
    """Show a page of the groups of failed tasks."""
    chosen = {
        "span": _choice(request, "span", SPANS, DEFAULT_SPAN),
        "by": _choice(request, "by", GROUPINGS, "both"),
        "q": request.GET.get("q", "").strip(),
    }
    found = read_groups(database_clock.now(), SPANS[chosen["span"]][0], by=chosen["by"])
    wanted = chosen["q"].lower()
    groups = [each for each in found.groups if wanted in f"{each.name} {each.error} {each.title}".lower()]
    start = GROUPS_PER_PAGE * _page_number(request, len(groups))
    shown = groups[start : start + GROUPS_PER_PAGE]
    _settle_what_is_new(found, shown)
    versions = _versions_of([id for each in shown for id in (each.first_id, each.last_id) if id is not None])

    def link(**changes: Any) -> str:
        return f"?{urlencode({name: value for name, value in {**chosen, **changes}.items() if value})}"

    page = start // GROUPS_PER_PAGE
    return {
        "groups": [_shown(model_admin, found, group, versions) for group in shown],
        "has_versions": any(versions.values()),
        "spans": [(link(span=name), label, name == chosen["span"]) for name, (_span, label) in SPANS.items()],
        "groupings": [(link(by=name), label, name == chosen["by"]) for name, label in GROUPINGS.items()],
        "chosen": chosen,
        "previous_url": link(page=page) if page else "",
        "next_url": link(page=page + 2) if start + GROUPS_PER_PAGE < len(groups) else "",
        "is_cut": found.behind is not None,
        "most": as_count(MOST_FAILURES),
        "may_retry": has_right(request, "retry_task"),
    }


def _choice(request: HttpRequest, name: str, choices: Collection[str], default: str) -> str:
    chosen = request.GET.get(name, default)
    return chosen if chosen in choices else default


def _page_number(request: HttpRequest, groups: int) -> int:
    """Return the number of the page, from 0 on; the last one for a number behind it."""
    text = request.GET.get("page", "")
    wanted = int(text) - 1 if text.isdecimal() and len(text) < 9 else 0
    return max(0, min(wanted, (groups - 1) // GROUPS_PER_PAGE))


def read_groups(now: datetime, span: timedelta | None = None, *, by: str = "both") -> Found:
    """Return the groups of the newest FAILED tasks. Costs one query.

    span: only groups with a failure of that long ago at most. by: of `GROUPINGS`.
    """
    # The state stands in the order too: see `filters.in_order`.
    newest = rows_of(TaskRecord).filter(state__gte=TaskState.FAILED).order_by("-state", "-id")
    columns = ("id", "name", "last_exception", "reason", "finished_at", "last_attempted_at", "enqueued_at")
    since = None if span is None else now - span
    found: dict[tuple[str, str, int], Group] = {}
    rows = list(newest.values_list(*columns)[: MOST_FAILURES + 1])
    for id, name, error, reason, finished_at, attempted_at, enqueued_at in rows[:MOST_FAILURES]:
        at = finished_at or attempted_at or enqueued_at
        # What failed after `now` was read belongs to the next look.
        if reason == FailureReason.DISCARDED or (finished_at is not None and finished_at >= now):
            continue
        # Any other reason says more than the last error, which is an older one then.
        error = error if by != "task" and reason in REASONS_WITH_ERROR else ""
        name = name if by != "error" else ""
        key = (name, error, 0 if error or by == "task" else reason)
        group = found.get(key)
        if group is None:
            group = found[key] = Group(name, error)
        group.add(id, reason, at, now, is_final=finished_at is not None, is_within=since is None or at >= since)
    groups = [each for each in found.values() if each.last and (since is None or each.last >= since)]
    for each in groups:
        each.is_new = since is not None and each.first is not None and each.first >= since
    groups.sort(key=lambda group: (-(group.last or now).timestamp(), group.name, group.error))
    return Found(groups, since, now, rows[MOST_FAILURES - 1][0] if len(rows) > MOST_FAILURES else None)


def _settle_what_is_new(found: Found, groups: Sequence[Group]) -> None:
    """Take the mark from groups that have failed before, where not all failures were looked at. Costs one query."""
    doubtful = [group for group in groups if group.is_new]
    if found.behind is None or not doubtful:
        return
    failed = rows_of(TaskRecord).filter(state=TaskState.FAILED)
    older = {
        f"older_{number}": Exists(failed.filter(_as_q(each), id__lt=found.behind))
        for number, each in enumerate(doubtful)
    }
    answers = failed.order_by("-state", "-id").annotate(**older).values_list(*older)[:1]
    for group, is_older in zip(doubtful, next(iter(answers), ()), strict=False):
        group.is_new = not is_older


def _as_q(group: Group) -> Q:
    columns = {"name": group.name, "last_exception": group.error}
    return Q(reason__in=group.reasons, **{column: value for column, value in columns.items() if value})


def _versions_of(ids: Collection[UUID]) -> dict[UUID, str]:
    """Return the version of the project's code (`APP_VERSION`) in which each of these tasks failed last."""
    rows = rows_of(TaskRecord).filter(pk__in=ids).annotate(app_version=LastError("app_version"))
    return {id: version or "" for id, version in rows.values_list("pk", "app_version")}


def _shown(model_admin: ModelAdmin[Any], found: Found, group: Group, versions: dict[UUID, str]) -> SimpleNamespace:
    """Return a row of the table. url: of the list of its tasks; retry_url: of the question."""
    tasks, final = base.url_of(model_admin, "changelist"), found.final(group)
    pair = [versions.get(id, "") for id in (group.first_id, group.last_id) if id is not None]
    return SimpleNamespace(
        group=group,
        task=group.name.rpartition(".")[2],
        error=group.title,
        count=found.counted(group.count),
        retrying=found.counted(group.retrying),
        url=f"{tasks}{Matching(group.keys).query}",
        count_url=f"{tasks}{final.query}",
        retrying_url=f"{tasks}{found.retrying(group).query}",
        retry_url=final.url_of_action(model_admin.admin_site.name, BulkKind.RETRY),
        first=base.time_element(group.first, found.until),
        last=base.time_element(group.last, found.until),
        versions=" – ".join(dict.fromkeys(each or "?" for each in pair)) if any(pair) else "",
        spark=spark_line(group.hours),
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
