"""The numbers above the task list: how many tasks are in each state, each with a link to them."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from ..models import TaskState
from ..storage.bounded_reads import MOST_COUNTED, counts_by_state
from .fleet import fleet_of


class Tab(NamedTuple):
    """A link. number: as text, "" for none; is_chosen: the list shows these."""

    text: str
    number: str
    query: str
    is_chosen: bool


def tabs_of(request: HttpRequest, changelist: Any) -> list[Tab]:
    """Return the links, with the numbers of all tasks of each state whatever else the list is filtered by."""
    chosen, counts = request.GET.get("state", ""), counts_by_state()
    shown = {
        "": (pgettext("tasks", "All"), ""),
        "queued": (str(TaskState.QUEUED.label), as_count(counts["queued"])),
        "running": (str(TaskState.RUNNING.label), as_count(counts["running"])),
        "retrying": (_("Retrying"), as_count(counts["retrying"])),
        "failed": (str(TaskState.FAILED.label), as_count(counts["failed"])),
        "succeeded": (str(TaskState.SUCCEEDED.label), as_count(counts["succeeded"])),
    }
    stuck = len(fleet_of(request).stuck()) if counts["running"] else 0
    if stuck or chosen == "stuck":
        shown["stuck"] = (_("Stuck"), as_count(stuck))
    return [
        Tab(text, number, changelist.get_query_string({"state": state or None}), state == chosen)
        for state, (text, number) in shown.items()
    ]


def as_count(count: int) -> str:
    """Return a count as text; one above `MOST_COUNTED` is not exact."""
    if count > MOST_COUNTED:
        return _("over %(count)s") % {"count": number_format(MOST_COUNTED, force_grouping=True)}
    return number_format(count, force_grouping=True)
