"""The admin pages of rates: how many tasks may start in a time, and how many wait for that."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import Rate
from ..observe.of_rates import reading_waiting, reading_waiting_without_row
from . import base
from .base import url_about
from .filters import RoutedAdmin
from .fleet import fleet_and


def note_waiting(request: HttpRequest, rows: Sequence[Rate]) -> dict[str, int]:
    """Set `tasks_waiting` on each row; None where Redis gave no answer, and `waiting_unknown` to the reason.

    Returns: how many tasks wait for each rate without a row.
    """
    readers = reading_waiting([row.name for row in rows]), reading_waiting_without_row()
    fleet, (waiting, without_row) = fleet_and(request, *readers)
    for row in rows:
        row.tasks_waiting, row.waiting_unknown = waiting and waiting[row.name], fleet.error  # type: ignore[attr-defined]
    return without_row or {}


class RateAdmin(RoutedAdmin):
    """Edit rates. A change takes effect everywhere at once, through the signals of the model."""

    list_display = ("name", "limit", "burst", "waiting")
    search_fields = ("name",)
    search_help_text = gettext_lazy("A rate limits how many tasks start in a time. Search for a part of its name.")
    fieldsets = [
        (
            None,
            {
                "fields": ("name", "starts", "seconds", "burst", "waiting"),
                "description": gettext_lazy(
                    "A rate limits how many tasks start in a time. It overrides what the tasks of this name declare."
                ),
            },
        )
    ]
    list_per_page = 50

    missing = gettext_lazy("This rate no longer exists.")

    def get_readonly_fields(self, request: HttpRequest, obj: Rate | None = None) -> tuple[str, ...]:
        """Keep the name of an existing rate read-only, because tasks refer to it by name."""
        return ("waiting",) if obj is None else ("name", "waiting")

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read how many tasks wait for the rates on this page, and for those without a row."""
        changelist: Any = super().get_changelist_instance(request)
        may_add = self.has_add_permission(request)
        changelist.without_row = [
            SimpleNamespace(name=name, waiting=waiting, url=url_about(self, "add", name=name) if may_add else "")
            for name, waiting in note_waiting(request, changelist.result_list).items()
        ]
        return changelist

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Rate | None:
        """Read how many tasks wait for the rate too."""
        row: Rate | None = super().get_object(request, object_id, from_field)
        if row is not None:
            note_waiting(request, [row])
        return row

    @admin.display(description=gettext_lazy("limit"))
    def limit(self, row: Rate) -> str:
        """Say how many may start in which time."""
        starts = ngettext("%(count)d start", "%(count)d starts", row.starts) % {"count": row.starts}
        seconds = ngettext("%(count)d second", "%(count)d seconds", row.seconds) % {"count": row.seconds}
        return _("%(starts)s in %(seconds)s") % {"starts": starts, "seconds": seconds}

    @admin.display(description=gettext_lazy("waiting"))
    def waiting(self, row: Rate) -> SafeString | int | str:
        """Show how many tasks wait for a start."""
        if row.pk is None or not hasattr(row, "tasks_waiting"):
            return "-"
        count: int | None = row.tasks_waiting
        if count is None:
            return format_html(_("unknown: {}"), base.first_line(row.waiting_unknown))  # type: ignore[attr-defined]
        return count
