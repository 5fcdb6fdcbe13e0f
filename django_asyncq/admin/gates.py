"""The gates in the admin: their limits, and how many of their slots are taken now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import gates
from ..exceptions import BrokerUnavailable
from ..models import Gate

if TYPE_CHECKING:
    GateAdminBase = admin.ModelAdmin[Gate]
else:
    GateAdminBase = admin.ModelAdmin

METER_WIDTH, METER_HEIGHT = 100, 10


def slots_taken(name: str) -> int:
    """Return how many slots of a gate are taken. Raises: BrokerUnavailable."""
    now = time.time()
    return sum(slot.expires_at > now for slot in gates.slots(name))


def read_occupancy(rows: Sequence[Gate]) -> None:
    """Note on each row how many slots are taken; None where Redis did not say.

    Once Redis has failed it is not asked for the rows that follow: each would wait for a time-out.
    """
    is_away = False
    for row in rows:
        taken = None
        if not is_away:
            try:
                taken = slots_taken(row.name)
            except BrokerUnavailable:
                is_away = True
        row.slots_taken = taken  # type: ignore[attr-defined]


class GateAdmin(GateAdminBase):
    """Limits, effective at once everywhere: the rows' signals see to it."""

    list_display = ("name", "limit", "expected_seconds", "occupancy")
    search_fields = ("name",)
    fields = ("name", "limit", "expected_seconds", "occupancy")
    list_per_page = 50

    class Media:
        css = {"all": ["django_asyncq/admin.css"]}

    def get_readonly_fields(self, request: HttpRequest, obj: Gate | None = None) -> tuple[str, ...]:
        """Tasks name their gate, so a gate that exists keeps its name."""
        return ("occupancy",) if obj is None else ("name", "occupancy")

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read the occupancy of the gates on this page, one call to Redis each."""
        changelist = super().get_changelist_instance(request)
        read_occupancy(changelist.result_list)
        return changelist

    @admin.display(description=gettext_lazy("queued or running"))
    def occupancy(self, row: Gate) -> SafeString | str:
        """How many of the slots are taken, as words and as a meter."""
        if row.pk is None:
            return "-"
        if not hasattr(row, "slots_taken"):
            read_occupancy([row])
        taken: int | None = row.slots_taken  # type: ignore[attr-defined]
        if taken is None:
            return _("unknown: Redis is away")
        if row.limit <= 0:
            return _("%(taken)d, no limit") % {"taken": taken}
        return format_html("{} {}", _meter(taken, row.limit), _words(taken, row.limit))


def _words(taken: int, limit: int) -> str:
    text = _("%(taken)d of %(limit)d, full") if taken >= limit else _("%(taken)d of %(limit)d")
    return text % {"taken": taken, "limit": limit}


def _meter(taken: int, limit: int) -> SafeString:
    """Return the meter as a picture: a strict content security policy forbids style attributes."""
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
