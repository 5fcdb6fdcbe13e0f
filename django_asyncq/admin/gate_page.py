"""What the page of a gate shows below its form: who holds its slots, who waits, whether both stores agree; and buttons.

A slot is held by a task that is QUEUED or RUNNING. One whose worker is not alive, or without such a task, can be
released here; every other one is released by its task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote, unquote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import NoReverseMatch, URLPattern
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import gates, lifecycle
from ..aliases import is_redis_used
from ..exceptions import BrokerUnavailable
from ..faults import one_line
from ..inspector import GateDrift, Inspector
from ..models import Gate, Pause, TaskRecord
from ..storage.routing import rows_of
from . import display, history
from .fleet import Fleet, fleet_of
from .pages import Question, ask, is_confirmed, paths, unreachable_text, url_of
from .permissions import has_right, only_post, require
from .queue_pages import pause_note

MOST_SHOWN = 100
# Where the year has four digits; a score may be any number.
LATEST = 253_370_764_800


@dataclass(frozen=True)
class ShownSlot:
    """A slot. row: the task that holds it; None where this database has no such task. why: why it can be released."""

    id: str
    row: TaskRecord | None
    url: str
    until: SafeString | str
    state: SafeString | str
    why: str = ""


class ShownWaiter(NamedTuple):
    """A task that waits for a slot; text: its name, or its id where it has no row."""

    text: str
    url: str


@dataclass(frozen=True)
class GatePage:
    """The content of the sections. error: why Redis gave no answer. more: how many slots are not shown."""

    slots: list[ShownSlot] = field(default_factory=list)
    more: int = 0
    waiters: list[ShownWaiter] = field(default_factory=list)
    drift: GateDrift | None = None
    pause: Pause | None = None
    pause_text: SafeString | str = ""
    error: str = ""


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the addresses that the buttons post to."""
    return paths(model_admin, {"release": release_view, "repair": repair_view}, of_object=True)


def page_of(model_admin: ModelAdmin[Any], request: HttpRequest, gate: Gate) -> GatePage:
    """Read what the sections show: two queries for rows, and a few calls of Redis."""
    fleet = fleet_of(request)
    pause = fleet.gate_pause(gate.name)
    text = pause_note(pause, fleet.now) if pause else ""
    if fleet.error or not is_redis_used():
        return GatePage(pause=pause, pause_text=text, error=fleet.error)
    try:
        slots, waiting = gates.slots(gate.name), gates.waiters(gate.name)[:MOST_SHOWN]
        drift = Inspector().gates.audit(gate.name, dry_run=True)
    except BrokerUnavailable as error:
        return GatePage(pause=pause, pause_text=text, error=one_line(error))
    shown = sorted(slots, key=lambda slot: slot.expires_at)[:MOST_SHOWN]
    rows = _rows_of([*(slot.id for slot in shown), *waiting])
    return GatePage(
        [_shown(model_admin, fleet, slot, rows.get(slot.id)) for slot in shown],
        max(0, len(slots) - MOST_SHOWN),
        [_waiter(model_admin, id, rows.get(id)) for id in waiting],
        drift,
        pause,
        text,
    )


def _rows_of(ids: list[str]) -> dict[str, TaskRecord]:
    known = []
    for id in ids:
        try:
            known.append(UUID(id))
        except ValueError:
            continue
    columns = ("id", "name", "state", "backend", "is_remote", "worker_ids", "last_attempted_at", "timeout_seconds")
    rows = rows_of(TaskRecord).filter(pk__in=known).only(*columns, "retry_at") if known else []
    return {str(row.id): row for row in rows}


def _shown(model_admin: ModelAdmin[Any], fleet: Fleet, slot: gates.Slot, row: TaskRecord | None) -> ShownSlot:
    until = display.time_element(_moment(slot.expires_at, fleet.now), fleet.now)
    if row is None:
        why = _("No task of this project holds it: another program does, or its task was deleted.")
        return ShownSlot(slot.id, None, "", until, "", why)
    return ShownSlot(slot.id, row, _task_url(model_admin, row), until, display.state_badge(row.state), _why(fleet, row))


def _why(fleet: Fleet, row: TaskRecord) -> str:
    """Return why the slot of a task can be released; "" when its task does that."""
    if row.state not in gates.LIVE_STATES:
        return _("Its task is neither queued nor running.")
    return _("Its worker is not alive.") if fleet.why_stuck(row) == "worker" else ""


def _moment(seconds: float, now: datetime) -> datetime:
    found = datetime.fromtimestamp(min(max(seconds, 0), LATEST), UTC)
    return found if now.tzinfo else found.replace(tzinfo=None)


def _waiter(model_admin: ModelAdmin[Any], id: str, row: TaskRecord | None) -> ShownWaiter:
    return ShownWaiter(id[:40], "") if row is None else ShownWaiter(str(row), _task_url(model_admin, row))


def _task_url(model_admin: ModelAdmin[Any], row: TaskRecord) -> str:
    try:
        return url_of(model_admin, "change", quote(row.pk), model="taskrecord")
    except NoReverseMatch:
        return ""


# --- what is changed


@only_post
def release_view(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> HttpResponse:
    """Ask, then release one slot. POST only."""
    require(request, "view_gate", "release_slot")
    gate, back = _gate_of(model_admin, request, object_id)
    if gate is None:
        return HttpResponseRedirect(back)
    id, fleet = request.POST.get("slot", ""), fleet_of(request)
    try:
        held = any(slot.id == id for slot in gates.slots(gate.name))
    except BrokerUnavailable as error:
        messages.error(request, unreachable_text(error))
        return HttpResponseRedirect(back)
    row = _rows_of([id]).get(id)
    if not held or (row is not None and not _why(fleet, row)):
        messages.warning(request, _("This slot is released by its task, so nothing was changed."))
        return HttpResponseRedirect(back)
    is_running = row is not None and row.state in gates.LIVE_STATES
    lines = [_("The slot is free for another task at once.")]
    if is_running:
        lines = [
            _("Its worker is not alive. The task fails as cancelled, and its slot is free. You can retry it then.")
        ]
    question = Question(
        title=_("Release a slot of gate %(name)s?") % {"name": gate.name},
        lines=lines,
        examples=[str(row) if row is not None else id[:100]],
        button=_("Release slot"),
        back=back,
        is_destructive=True,
    )
    if not is_confirmed(request, question):
        return ask(model_admin, request, question)
    released = _fail(request, row) if row is not None and is_running else bool(gates.release_ids(gate.name, [id]))
    if released:
        history.note(request, Gate, str(gate), f"Released the slot of {row or id}.", id=str(gate.pk))
        messages.success(request, _("The slot is free."))
    else:
        messages.warning(request, _("The slot was released meanwhile, so nothing was changed."))
    return HttpResponseRedirect(back)


def _fail(request: HttpRequest, row: TaskRecord) -> bool:
    """Fail a task whose worker is not alive, as cancelled; the signals release its slot, as for every task.

    A requeued task would keep the slot.
    """
    lifecycle.cancel([row.pk], by=request.user.get_username(), reason="its slot was released")
    found = lifecycle.load_rows([str(row.pk)]).get(str(row.pk))
    return found is not None and lifecycle.abandon(found, "its worker is not alive, and its slot was released")


@only_post
def repair_view(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> HttpResponse:
    """Make the slots of a gate agree with the rows. POST only."""
    require(request, "view_gate", "change_gate")
    gate, back = _gate_of(model_admin, request, object_id)
    if gate is None:
        return HttpResponseRedirect(back)
    try:
        drift = Inspector().gates.audit(gate.name)
    except BrokerUnavailable as error:
        messages.error(request, unreachable_text(error))
        return HttpResponseRedirect(back)
    added = ngettext("%(count)d slot was added", "%(count)d slots were added", drift.added) % {"count": drift.added}
    removed = ngettext("%(count)d was removed", "%(count)d were removed", drift.removed) % {"count": drift.removed}
    history.note(request, Gate, str(gate), f"Repaired: {drift.added} added, {drift.removed} removed.", id=str(gate.pk))
    messages.success(request, _("%(added)s, %(removed)s.") % {"added": added, "removed": removed})
    return HttpResponseRedirect(back)


def _gate_of(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> tuple[Gate | None, str]:
    """Return the gate, and where to go afterwards."""
    gate: Gate | None = model_admin.get_object(request, unquote(object_id))
    if gate is None:
        messages.warning(request, _("This gate no longer exists."))
        return None, url_of(model_admin, "changelist")
    return gate, url_of(model_admin, "change", quote(gate.pk))


def rights_of(request: HttpRequest) -> dict[str, bool]:
    """Return what the user may do on the page."""
    return {
        "may_release": has_right(request, "release_slot"),
        "may_repair": has_right(request, "change_gate"),
        "may_pause": has_right(request, "pause_queue") and has_right(request, "view_taskrecord"),
    }
