"""The ways from page to page: the links above each page, and the states above the task list with their numbers."""

from __future__ import annotations

from types import SimpleNamespace

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.formats import number_format
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from ..models import TaskState
from ..storage.routing import MOST_COUNTED, STATES, counts_by_state
from .base import Text, has_right
from .fleet import fleet_of
from .matching import NO_FILTERS

# The name of each in the admin, and the permission to see it.
PAGES: tuple[tuple[Text, str, str], ...] = (
    (gettext_lazy("Overview"), "app_list", "view_taskrecord"),
    (gettext_lazy("Tasks"), "django_asyncq_taskrecord_changelist", "view_taskrecord"),
    (gettext_lazy("Workflows"), "django_asyncq_taskrecord_workflows", "view_taskrecord"),
    (gettext_lazy("Failures"), "django_asyncq_taskrecord_failures", "view_taskrecord"),
    (gettext_lazy("Queues"), "django_asyncq_taskrecord_queues", "view_taskrecord"),
    (gettext_lazy("Workers"), "django_asyncq_taskrecord_workers", "view_taskrecord"),
    (gettext_lazy("Gates"), "django_asyncq_gate_changelist", "view_gate"),
    (gettext_lazy("Rates"), "django_asyncq_rate_changelist", "view_rate"),
    (gettext_lazy("Schedules"), "django_asyncq_schedule_changelist", "view_schedule"),
    (gettext_lazy("Actions on many tasks"), "django_asyncq_bulkaction_changelist", "view_bulkaction"),
)


def links_of(request: HttpRequest) -> list[SimpleNamespace]:
    """Return the links for a request's user. A page that the admin site does not have is skipped.

    view: its name in the admin. is_here: the link leads to the page that is shown.
    """
    found = []
    for text, view, permission in PAGES:
        # The overview of a user who may not see tasks lists the models.
        is_overview = view == "app_list"
        if not (is_overview or has_right(request, permission)):
            continue
        try:
            args = ["django_asyncq"] if is_overview else []
            url = reverse(f"admin:{view}", args=args, current_app=site_of(request))
        except NoReverseMatch:
            if is_overview:
                return []
            continue
        found.append(SimpleNamespace(view=view, text=text, url=url, is_here=request.path == url))
    return found


def site_of(request: HttpRequest) -> str:
    """Return the name of the admin site that answers a request."""
    found = getattr(request, "current_app", None) or getattr(request.resolver_match, "namespace", None)
    return found or "admin"


# --- The numbers above the task list: how many tasks are in each state, each with a link to them.


def tabs_of(request: HttpRequest) -> list[SimpleNamespace]:
    """Return the links. Beside other filters they have no numbers: a link keeps those, and leads to fewer tasks.

    number: as text, "" for none. is_chosen: the list shows these.
    """
    chosen = request.GET.get("state", "")
    # A link leads to the first page.
    others = {name: str(value) for name, value in request.GET.items() if name not in ("state", "before", "after")}
    is_narrowed = bool({name for name, value in others.items() if value} - NO_FILTERS)
    counts: dict[str, int | None] = dict.fromkeys(STATES) if is_narrowed else {**counts_by_state()}
    shown = {
        "": (pgettext("tasks", "All"), ""),
        "queued": (str(TaskState.QUEUED.label), as_count(counts["queued"])),
        "running": (str(TaskState.RUNNING.label), as_count(counts["running"])),
        "retrying": (_("Retrying"), as_count(counts["retrying"])),
        "failed": (str(TaskState.FAILED.label), as_count(counts["failed"])),
        "succeeded": (str(TaskState.SUCCEEDED.label), as_count(counts["succeeded"])),
    }
    stuck = len(fleet_of(request).stuck()) if counts["running"] else 0
    if stuck or is_narrowed or chosen == "stuck":
        shown["stuck"] = (_("Stuck"), as_count(None if is_narrowed else stuck))
    return [
        SimpleNamespace(
            text=text,
            number=number,
            query=f"?{urlencode({**others, **({'state': state} if state else {})})}",
            is_chosen=state == chosen,
        )
        for state, (text, number) in shown.items()
    ]


def as_count(count: int | None) -> str:
    """Return a count as text; one above `MOST_COUNTED` is not exact. None: ""."""
    if count is None:
        return ""
    if count > MOST_COUNTED:
        return _("over %(count)s") % {"count": number_format(MOST_COUNTED, force_grouping=True)}
    return number_format(count, force_grouping=True)
