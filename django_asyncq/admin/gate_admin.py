"""The admin pages of gates: their limits, how many of their slots are taken, and how many tasks wait for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, URLPattern
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import gates
from ..aliases import is_redis_used
from ..broker import redis_clock
from ..exceptions import BrokerUnavailable
from ..faults import one_line
from ..models import Gate, TaskRecord
from ..storage.routing import rows_of
from . import display, gate_page
from .fleet import fleet_of
from .pages import url_of
from .queries import RoutedAdmin

if TYPE_CHECKING:
    GateAdminBase = admin.ModelAdmin[Gate]
    GateFormBase = forms.ModelForm[Gate]
else:
    GateAdminBase = admin.ModelAdmin
    GateFormBase = forms.ModelForm

METER_WIDTH, METER_HEIGHT = 100, 10


def slots_taken(name: str) -> int:
    """Return how many slots of a gate are taken. Raises: BrokerUnavailable."""
    if not is_redis_used():
        return gates.slots_taken(name)
    now = redis_clock.seconds("producer")
    return sum(slot.expires_at > now for slot in gates.slots(name))


def read_occupancy(rows: Sequence[Gate]) -> None:
    """Set `slots_taken` on each row; None where Redis gave no answer, and `slots_unknown` to the reason.

    After the first failure Redis is not asked again, because each further row would wait for a timeout.
    """
    reason = ""
    for row in rows:
        taken = None
        if not reason:
            try:
                taken = slots_taken(row.name)
            except BrokerUnavailable as error:
                reason = one_line(error)
        row.slots_taken, row.slots_unknown = taken, reason  # type: ignore[attr-defined]


def read_waiting(rows: Sequence[Gate]) -> None:
    """Set `tasks_waiting` on each row, with one query."""
    waiting = rows_of(TaskRecord).waiting_at_gate().filter(gate__in=[row.name for row in rows]).order_by()
    counts = dict(waiting.values_list("gate").annotate(Count("id")))
    for row in rows:
        row.tasks_waiting = counts.get(row.name, 0)  # type: ignore[attr-defined]


class LimitForm(GateFormBase):
    """The limit of one gate in the list."""

    class Meta:
        model = Gate
        fields = ("limit",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The head of the column is no label of the field.
        label = _("Limit of gate %(name)s") % {"name": self.instance.name}
        self.fields["limit"].widget.attrs["aria-label"] = label


class GateAdmin(RoutedAdmin, GateAdminBase):
    """Edit the limits of gates. A change takes effect everywhere at once, through the signals of the model."""

    list_display = ("name", "limit", "expected_seconds", "occupancy", "waiting", "paused")
    list_editable = ("limit",)
    change_form_template = "admin/django_asyncq/gate/change_form.html"
    search_fields = ("name",)
    search_help_text = gettext_lazy("A gate is an admission limit for tasks. Search for a part of its name.")
    fieldsets = [
        (
            None,
            {
                "fields": ("name", "limit", "expected_seconds", "occupancy", "waiting"),
                "description": gettext_lazy(
                    "A gate is an admission limit. While it is full, no more of its tasks can be enqueued."
                ),
            },
        )
    ]
    list_per_page = 50

    class Media:
        css = {"all": ["django_asyncq/admin.css"]}

    def get_readonly_fields(self, request: HttpRequest, obj: Gate | None = None) -> tuple[str, ...]:
        """Keep the name of an existing gate read-only, because tasks refer to it by name."""
        return ("occupancy", "waiting") if obj is None else ("name", "occupancy", "waiting")

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> type[LimitForm]:
        """Return the form of a row of the list."""
        return super().get_changelist_form(request, **{"form": LimitForm, **kwargs})  # type: ignore[return-value]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read the occupancy of the gates on this page, with one call to Redis for each, and how many tasks wait."""
        changelist = super().get_changelist_instance(request)
        fleet = fleet_of(request)
        for row in changelist.result_list:
            row.pause = fleet.gate_pause(row.name)
        read_occupancy(changelist.result_list)
        read_waiting(changelist.result_list)
        return changelist

    @admin.display(description=gettext_lazy("queued or running"))
    def occupancy(self, row: Gate) -> SafeString | str:
        """Show how many of the slots are taken, in words and as a meter."""
        if row.pk is None:
            return "-"
        if not hasattr(row, "slots_taken"):
            read_occupancy([row])
        taken: int | None = row.slots_taken  # type: ignore[attr-defined]
        if taken is None:
            return format_html(_("unknown: {}"), display.first_line(row.slots_unknown))  # type: ignore[attr-defined]
        if row.limit <= 0:
            return _("%(taken)d, no limit") % {"taken": taken}
        return format_html("{} {}", _meter(taken, row.limit), _words(taken, row.limit))

    @admin.display(description=gettext_lazy("paused"))
    def paused(self, row: Gate) -> SafeString | str:
        """Show whether it is paused."""
        if getattr(row, "pause", None) is None:
            return ""
        return format_html('<span class="asyncq-mark">{}</span>', _("Paused"))

    def get_urls(self) -> list[URLPattern]:
        """Add the addresses that the buttons of the page post to."""
        return [*gate_page.urls(self), *super().get_urls()]

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Gate | None = None,
    ) -> HttpResponse:
        """Show below the form who holds the slots, and who waits."""
        if obj is not None:
            context |= {"gate_page": gate_page.page_of(self, request, obj), **gate_page.rights_of(request)}
            for name in ("pause", "resume"):
                try:
                    context[f"{name}_url"] = url_of(self, name, model="taskrecord")
                except NoReverseMatch:
                    context["may_pause"] = False
        return super().render_change_form(request, context, add, change, form_url, obj)

    @admin.display(description=gettext_lazy("waiting"))
    def waiting(self, row: Gate) -> int | str:
        """Show how many tasks wait to be retried."""
        if row.pk is None:
            return "-"
        if not hasattr(row, "tasks_waiting"):
            read_waiting([row])
        count: int = row.tasks_waiting  # type: ignore[attr-defined]
        return count


def _words(taken: int, limit: int) -> str:
    text = _("%(taken)d of %(limit)d, full") if taken >= limit else _("%(taken)d of %(limit)d")
    return text % {"taken": taken, "limit": limit}


def _meter(taken: int, limit: int) -> SafeString:
    """Return the meter as SVG, because a strict content security policy forbids style attributes."""
    shown = min(taken, limit)
    return format_html(
        '<svg class="asyncq-meter{}" role="meter" aria-label="{}" aria-valuemin="0" aria-valuenow="{}" '
        'aria-valuemax="{}" aria-valuetext="{}" width="{}" height="{}">'
        '<rect class="asyncq-meter-ground" width="{}" height="{}"/>'
        '<rect class="asyncq-meter-bar" width="{}" height="{}"/></svg>',
        " asyncq-meter-full" if taken >= limit else "",
        _("slots taken"),
        shown,
        limit,
        _words(taken, limit),
        METER_WIDTH,
        METER_HEIGHT,
        METER_WIDTH,
        METER_HEIGHT,
        round(METER_WIDTH * shown / limit),
        METER_HEIGHT,
    )
