"""The admin pages of gates: their limits, how many of their slots are taken, and how many tasks wait for one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.db.models import Count
from django.http import HttpRequest
from django.urls import NoReverseMatch
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import gates, lifecycle
from ..broker.reading import Reader, side_by_side
from ..core.aliases import is_redis_used
from ..models import Gate, TaskRecord
from ..observe.fleet import Fleet
from ..observe.inspector import Inspector
from ..storage.routing import rows_of
from . import base, history
from .base import AnyModelForm, Asking, Question, has_right, pause_note, url_of
from .filters import RoutedAdmin
from .fleet import fleet_and, fleet_of
from .history import Did

# --- What the page of a gate shows below its form: who holds its slots, who waits, whether both stores agree; and
# buttons.
#
# A slot is held by a task that is QUEUED or RUNNING. One whose worker is not alive, or without such a task, can be
# released here; every other one is released by its task.

MOST_SHOWN = 100
COLUMNS = (
    "id", "name", "state", "backend", "is_remote", "worker_ids", "last_attempted_at", "timeout_seconds", "retry_at",
    "reason", "is_ordered", "waits_for", "enqueued_at",
)  # fmt: skip
# Where the year has four digits; a score may be any number.
LATEST = 253_370_764_800


def page_of(model_admin: ModelAdmin[Any], request: HttpRequest, gate: Gate) -> SimpleNamespace:
    """Read what the sections show: two queries for rows, and a few calls of Redis.

    error: why Redis gave no answer. more: how many slots are not shown.
    """
    readers = [
        gates.reading_slots(gate.name),
        gates.reading_waiters(gate.name, MOST_SHOWN),
        gates.auditing(gate.name, dry_run=True),
    ]
    fleet, (taken, *read) = fleet_and(request, reading_taken([gate.name]), *(readers if is_redis_used() else ()))
    note_taken([gate], taken, fleet.error)
    pause = fleet.gate_pause(gate.name)
    found = {"pause": pause, "pause_text": pause_note(pause, fleet.now) if pause else "", "error": fleet.error}
    if not fleet.is_known:
        return SimpleNamespace(**found)
    slots, waiting, drift = read
    shown = sorted(slots, key=lambda slot: slot.expires_at)[:MOST_SHOWN]
    rows = base.rows_by_id([*(slot.id for slot in shown), *waiting], *COLUMNS)
    return SimpleNamespace(
        **found,
        slots=[_shown(model_admin, fleet, slot, rows.get(slot.id)) for slot in shown],
        more=max(0, len(slots) - MOST_SHOWN),
        # By name, or by the id where a task has no row.
        waiters=[
            SimpleNamespace(
                text=str(rows[id]),
                url=_task_url(model_admin, rows[id]),
                since=base.time_element(rows[id].enqueued_at, fleet.now),
            )
            if id in rows
            else SimpleNamespace(text=id[:40], url="", since="")
            for id in waiting
        ],
        drift=drift,
    )


def _shown(model_admin: ModelAdmin[Any], fleet: Fleet, slot: gates.Slot, row: TaskRecord | None) -> SimpleNamespace:
    """Return a slot. row: the task that holds it; None where this database has no such task."""
    until = datetime.fromtimestamp(min(max(slot.expires_at, 0), LATEST), UTC)
    if not fleet.now.tzinfo:
        until = until.replace(tzinfo=None)
    return SimpleNamespace(
        id=slot.id,
        row=row,
        url="" if row is None else _task_url(model_admin, row),
        until=base.time_element(until, fleet.now),
        state="" if row is None else base.state_badge(row.state),
        why=_why(fleet, row),
    )


def _why(fleet: Fleet, row: TaskRecord | None) -> str:
    """Return why a slot can be released; "" when its task does that."""
    if row is None:
        return _("No task of this project holds it: another program does, or its task was deleted.")
    if not row.holds_slot and not row.waits_for_slot:
        return _("Its task is neither queued nor running.")
    return _("Its worker is not alive.") if fleet.why_stuck(row) == "worker" else ""


def _task_url(model_admin: ModelAdmin[Any], row: TaskRecord) -> str:
    try:
        return url_of(model_admin, "change", quote(row.pk), model="taskrecord")
    except NoReverseMatch:
        return ""


# --- what is changed


def release(model_admin: ModelAdmin[Any], request: HttpRequest, gate: Gate) -> Asking:
    """Release one slot."""
    id, fleet = request.POST.get("slot", ""), fleet_of(request)
    held = any(slot.id == id for slot in gates.slots(gate.name))
    row = base.rows_by_id([id], *COLUMNS).get(id)
    if not held or not _why(fleet, row):
        messages.warning(request, _("This slot is released by its task, so nothing was changed."))
        return None
    is_running = row is not None and row.state in gates.LIVE_STATES
    line = _("The slot is free for another task at once.")
    if is_running:
        line = _("Its worker is not alive. The task fails as cancelled, and its slot is free. You can retry it then.")
    yield Question(
        title=_("Release a slot of gate %(name)s?") % {"name": gate.name},
        lines=[line],
        examples=[str(row) if row is not None else id[:100]],
        button=_("Release slot"),
        is_destructive=True,
    )
    if _fail(request, row) if row is not None and is_running else gates.release_ids(gate.name, [id]):
        history.note(request, Gate, str(gate), Did.SLOT_RELEASED, row_id=str(gate.pk), task=row or id)
        messages.success(request, _("The slot is free."))
    else:
        messages.warning(request, _("The slot was released meanwhile, so nothing was changed."))
    return None


def _fail(request: HttpRequest, row: TaskRecord) -> bool:
    """Fail a task whose worker is not alive, as cancelled; the signals release its slot, as for every task.

    A requeued task would keep the slot.
    """
    lifecycle.cancel([row.pk], by=request.user.get_username(), reason="its slot was released")
    found = lifecycle.load_rows([str(row.pk)]).get(str(row.pk))
    return found is not None and lifecycle.abandon(found, "its worker is not alive, and its slot was released")


def repair(model_admin: ModelAdmin[Any], request: HttpRequest, gate: Gate) -> None:
    """Make the slots of a gate agree with the rows."""
    drift = Inspector().gates.audit(gate.name)
    added = ngettext("%(count)d slot was added", "%(count)d slots were added", drift.added) % {"count": drift.added}
    removed = ngettext("%(count)d was removed", "%(count)d were removed", drift.removed) % {"count": drift.removed}
    history.note(request, Gate, str(gate), Did.REPAIRED, row_id=str(gate.pk), added=drift.added, removed=drift.removed)
    messages.success(request, _("%(added)s, %(removed)s.") % {"added": added, "removed": removed})


METER_WIDTH, METER_HEIGHT = 100, 10


def reading_taken(names: Sequence[str]) -> Reader[dict[str, int]]:
    """Read how many slots of some gates are taken."""
    if not is_redis_used():
        return {name: gates.slots_taken(name) for name in names}
    return dict(zip(names, (yield from side_by_side(*map(gates.reading_held, names))), strict=True))


def note_taken(rows: Sequence[Gate], taken: dict[str, int] | None, reason: str) -> None:
    """Set `slots_taken` on each row; None where Redis gave no answer, and `slots_unknown` to the reason."""
    for row in rows:
        row.slots_taken, row.slots_unknown = taken and taken[row.name], reason  # type: ignore[attr-defined]


def read_waiting(rows: Sequence[Gate]) -> None:
    """Set `tasks_waiting` on each row, with one query."""
    waiting = rows_of(TaskRecord).waiting_at_gate().filter(gate__in=[row.name for row in rows]).order_by()
    counts = dict(waiting.values_list("gate").annotate(Count("id")))
    for row in rows:
        row.tasks_waiting = counts.get(row.name, 0)  # type: ignore[attr-defined]


class LimitForm(AnyModelForm):
    """The limit of one gate in the list."""

    class Meta:
        model = Gate
        fields = ("limit",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The head of the column is no label of the field.
        label = _("Limit of gate %(name)s") % {"name": self.instance.name}
        self.fields["limit"].widget.attrs["aria-label"] = label


class GateAdmin(RoutedAdmin):
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
                    "A gate is an admission limit. While it is full, a call is refused, or waits if its task may wait."
                ),
            },
        )
    ]
    list_per_page = 50

    missing = gettext_lazy("This gate no longer exists.")

    class Media:
        js = ["django_asyncq/live.js"]

    def get_readonly_fields(self, request: HttpRequest, obj: Gate | None = None) -> tuple[str, ...]:
        """Keep the name of an existing gate read-only, because tasks refer to it by name."""
        return ("occupancy", "waiting") if obj is None else ("name", "occupancy", "waiting")

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> type[LimitForm]:
        """Return the form of a row of the list."""
        return super().get_changelist_form(request, **{"form": LimitForm, **kwargs})  # type: ignore[return-value]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read the occupancy of the gates on this page, and how many tasks wait."""
        changelist = super().get_changelist_instance(request)
        rows = changelist.result_list
        fleet, (taken,) = fleet_and(request, reading_taken([row.name for row in rows]))
        for row in rows:
            row.pause = fleet.gate_pause(row.name)
        note_taken(rows, taken, fleet.error)
        read_waiting(rows)
        return changelist

    @admin.display(description=gettext_lazy("queued or running"))
    def occupancy(self, row: Gate) -> SafeString | str:
        """Show how many of the slots are taken, in words and as a meter."""
        if row.pk is None:
            return "-"
        taken: int | None = row.slots_taken  # type: ignore[attr-defined]
        if taken is None:
            return format_html(_("unknown: {}"), base.first_line(row.slots_unknown))  # type: ignore[attr-defined]
        if row.limit <= 0:
            return _("%(taken)d, no limit") % {"taken": taken}
        return format_html("{} {}", _meter(taken, row.limit), _words(taken, row.limit))

    @admin.display(description=gettext_lazy("paused"))
    def paused(self, row: Gate) -> SafeString | str:
        """Show whether it is paused."""
        if getattr(row, "pause", None) is None:
            return ""
        return format_html('<span class="asyncq-mark">{}</span>', _("Paused"))

    def add_to_page(self, request: HttpRequest, context: dict[str, Any], obj: Gate) -> None:
        """Show below the form who holds the slots, and who waits."""
        context |= {
            "gate_page": page_of(self, request, obj),
            "may_release": has_right(request, "release_slot"),
            "may_repair": has_right(request, "change_gate"),
            "may_pause": has_right(request, "pause_queue") and has_right(request, "view_taskrecord"),
        }
        for name in ("pause", "resume"):
            try:
                context[f"{name}_url"] = url_of(self, name, model="taskrecord")
            except NoReverseMatch:
                context["may_pause"] = False

    @admin.display(description=gettext_lazy("waiting"))
    def waiting(self, row: Gate) -> int | str:
        """Show how many tasks wait for a slot."""
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
