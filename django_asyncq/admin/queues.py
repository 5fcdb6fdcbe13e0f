"""The page *Queues*: what waits, runs and fails in each queue, what it rejected, and the buttons that pause and resume.

The numbers of rows come from the database, those of entries and rates from Redis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..broker.reading import Reader, side_by_side
from ..control import checked_target, pause, resume
from ..core.aliases import DEFAULT_ALIAS
from ..core.redaction import mask_text
from ..exceptions import BrokerUnavailable, InvalidOption
from ..models import Pause, PauseKind, TaskRecord
from ..observe.backlog import live_rows, reading_known, reading_queues
from ..observe.counts import reading_processed
from ..observe.fleet import Fleet
from ..observe.inspector import Inspector
from ..observe.of_queues import queue_infos, reading_rejected_infos
from ..observe.still_running import held_of
from ..observe.values import MinuteInfo, QueueInfo
from ..storage import database_clock
from ..storage.errors import one_line
from ..storage.routing import rows_of
from . import base, history
from .base import AnyModelForm, Asking, Question, has_right, pause_note, reason_of, unreachable_text, url_about
from .code import known_names
from .filters import RoutedAdmin
from .fleet import ask, fleet_and
from .history import Did

MINUTES_OF_RATE = 5
MINUTES_OF_FAILURES = 60
MOST_REJECTED = 100


def queues(model_admin: ModelAdmin[Any], request: HttpRequest) -> dict[str, Any]:
    """Show every queue."""
    fleet, (read,) = fleet_and(request, _reading())
    found = [_shown(model_admin, fleet, *each) for each in read or ()]
    # Those that have no row in the table.
    shown = [each.pause for each in found]
    others = [each for each in fleet.pauses if each.kind != PauseKind.QUEUE or each not in shown]
    may_pause = has_right(request, "pause_queue")
    return {
        "queues": found,
        "several_aliases": len({each.info.backend for each in found}) > 1,
        "error": fleet.error,
        "other_pauses": [(each, pause_note(each, fleet.now)) for each in others],
        "may_pause": may_pause,
        "tasks_to_pause": [name for name in known_names() if may_pause and fleet.task_pause(name) is None],
    }


def _reading() -> Reader[list[tuple[QueueInfo, list[MinuteInfo]]]]:
    """Read every queue, and what it did in the last hour, minute by minute; that which is not over yet is the last."""
    at = database_clock.now()
    now, live = base.aware(at), live_rows(at)
    names = yield from reading_known(live)
    contents, minutes = yield from side_by_side(
        reading_queues(names), reading_processed(names, now - timedelta(minutes=MINUTES_OF_FAILURES), now, 1)
    )
    return list(zip(queue_infos(live, contents, at), minutes, strict=True))


def _shown(model_admin: ModelAdmin[Any], fleet: Fleet, info: QueueInfo, minutes: list[MinuteInfo]) -> SimpleNamespace:
    """Return a row of the table. minutes: of the last hour, the oldest first.

    rate: tasks per minute; None when Redis does not know it. failed: attempts in the last hour. oldest: when the task
    that has waited longest was due. links: of the numbers, by the word in the address of the list.
    """
    failed = [each.failed for each in minutes[-MINUTES_OF_FAILURES:] if each.failed is not None]
    pause, waited = fleet.queue_pause(info.backend, info.queue), info.oldest_waiting_seconds
    return SimpleNamespace(
        info=info,
        servers=len(fleet.serving(info.backend, info.queue)),
        rate=rate_of(minutes[-MINUTES_OF_RATE - 1 : -1]),
        failed=sum(failed) if failed else None,
        oldest="" if waited is None else base.time_element(fleet.now - timedelta(seconds=waited), fleet.now),
        pause=pause,
        note=pause_note(pause, fleet.now) if pause else "",
        links=links_of(model_admin, info),
    )


def links_of(model_admin: ModelAdmin[Any], info: QueueInfo) -> dict[str, str]:
    """Return where the numbers of a queue lead to, and its page."""
    of_queue = {"backend": info.backend, "queue": info.queue}
    return {
        # The other numbers are those of entries, of which some have no row.
        **{state: url_about(model_admin, "changelist", **of_queue, state=state) for state in ("queued", "running")},
        "page": url_about(model_admin, "queue", **of_queue),
        "rejected": url_about(model_admin, "rejected", **of_queue),
    }


def rate_of(minutes: Iterable[MinuteInfo]) -> float | None:
    """Return the mean number of tasks per minute, of the minutes that Redis has not lost; None when it has lost all."""
    known = [each.processed for each in minutes if each.processed is not None]
    return sum(known) / len(known) if known else None


# --- The page of what other programs have sent to a queue that can be no task, and why.


def rejected(model_admin: ModelAdmin[Any], request: HttpRequest) -> dict[str, Any]:
    """Show what was rejected, the newest first, with secrets masked."""
    backend, queue = request.GET.get("backend") or DEFAULT_ALIAS, request.GET.get("queue", "")
    error, found = "", []
    try:
        # One more than is shown tells whether there are more.
        Inspector(backend)  # checks the alias
        found = ask(reading_rejected_infos(queue, backend, MOST_REJECTED + 1))
    except (BrokerUnavailable, InvalidOption) as raised:
        error = one_line(raised)
    now = database_clock.now()
    return {
        "title": _("Rejected messages of queue %(name)s") % {"name": queue},
        "items": [
            {
                "at": base.time_element(each.at, now),
                "source": _("inbox") if each.source == "inbox" else _("queue"),
                "id": each.id or "–",
                "reason": mask_text(each.reason),
                "data": base.excerpt(mask_text(each.data.decode("utf-8", "backslashreplace"))),
            }
            for each in found[:MOST_REJECTED]
        ],
        "is_cut": len(found) > MOST_REJECTED,
        "shown": MOST_REJECTED,
        "error": error,
        "backend": backend,
        "queue": queue,
        "may_forget": has_right(request, "delete_taskrecord"),
    }


def forget(model_admin: ModelAdmin[Any], request: HttpRequest) -> Asking:
    """Remove all that a queue has rejected."""
    backend, queue = request.POST.get("backend") or DEFAULT_ALIAS, request.POST.get("queue", "")
    yield Question(
        title=_("Forget the rejected messages of queue %(name)s?") % {"name": queue},
        lines=[_("They are no tasks, and none of them runs. They are removed from Redis and cannot be shown again.")],
        button=_("Forget them"),
        back=url_about(model_admin, "rejected", backend=backend, queue=queue),
        is_destructive=True,
    )
    count = Inspector(backend).queues.forget_rejected(queue)
    history.note(request, TaskRecord, f"queue {queue}", Did.FORGOTTEN, count=f"{count:,}")
    text = ngettext("%(count)d message was forgotten.", "%(count)d messages were forgotten.", count)
    messages.success(request, text % {"count": count})
    return None


# --- pause and resume


class Target(NamedTuple):
    """What is to be paused or resumed."""

    kind: str
    backend: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def _target(request: HttpRequest) -> Target:
    values = request.POST
    return Target(values.get("kind", ""), values.get("backend", "") or DEFAULT_ALIAS, values.get("name", ""))


def pause_target(model_admin: ModelAdmin[Any], request: HttpRequest) -> Asking:
    """Pause a queue, a task or a gate."""
    target = _target(request)
    yield Question(title=_title(target), lines=list(_effects(target.kind)), button=_("Pause"), asks_reason=True)
    note = reason_of(request)
    by = request.user.get_username()
    if pause(target.kind, target.name, backend=target.backend, by=by, note=note):
        row = rows_of(Pause).filter(kind=target.kind, name=target.name).order_by("-pk").first()
        did = Did.PAUSED_BECAUSE if note else Did.PAUSED
        history.note(request, Pause, str(target), did, row_id=None if row is None else str(row.pk), reason=note)
        messages.success(request, _("Paused: %(what)s.") % {"what": target} + _held_text(target))
    else:
        messages.warning(request, _("It was paused already: %(what)s.") % {"what": target})
    return None


def resume_target(model_admin: ModelAdmin[Any], request: HttpRequest) -> None:
    """Resume a queue, a task or a gate."""
    target = _target(request)
    if resume(target.kind, target.name, backend=target.backend):
        history.note(request, Pause, str(target), Did.RESUMED)
        messages.success(request, _("Resumed: %(what)s.") % {"what": target})
    else:
        messages.warning(request, _("It was not paused: %(what)s.") % {"what": target})


def _held_text(target: Target) -> str:
    """Say how many tasks go on; nothing when there are none."""
    try:
        count = len(held_of(target.kind, target.name, target.backend))
    except BrokerUnavailable as error:
        return f" {unreachable_text(error)}"
    # As a number behind a colon, it is right in each language.
    text = _("Taken or admitted before, and may still begin or go on: %(count)s.")
    return f" {text % {'count': count}}" if count else ""


def _title(target: Target) -> str:
    texts: dict[str, str] = {
        PauseKind.QUEUE: _("Pause queue %(name)s?"),
        PauseKind.TASK: _("Pause task %(name)s?"),
        PauseKind.GATE: _("Pause gate %(name)s?"),
    }
    return texts.get(target.kind, _("Pause %(name)s?")) % {"name": target.name}


def _effects(kind: str) -> Iterator[str]:
    if kind == PauseKind.QUEUE:
        yield _(
            "Workers take no more tasks from this queue. What they have taken goes on, and may still begin. Tasks can "
            "still be enqueued; they wait."
        )
    elif kind == PauseKind.TASK:
        yield _(
            "Workers begin no more calls of this task, once they have noticed it: at once, or within six seconds. What "
            "they have taken goes on. It can still be enqueued; its calls wait."
        )
    elif kind == PauseKind.GATE:
        yield _(
            "The gate admits nothing: an attempt to enqueue one of its tasks is refused. What was admitted goes on."
        )
    yield _("It stays paused until somebody resumes it.")


# --- The admin pages of pauses: what is paused, since when, by whom and why. To add one pauses, to delete one resumes.


class PauseForm(AnyModelForm):
    """What to pause, and why."""

    class Meta:
        model = Pause
        fields = ("kind", "name", "backend", "note")

    def clean(self) -> dict[str, Any]:
        """Refuse what cannot be paused, with the reason."""
        found: dict[str, Any] = super().clean() or self.cleaned_data
        if "kind" in found and "name" in found:
            try:
                backend = found.get("backend") or DEFAULT_ALIAS
                _, found["backend"] = checked_target(found["kind"], found["name"], backend)
            except InvalidOption as error:
                raise ValidationError(str(error)) from error
        return found


class PauseAdmin(RoutedAdmin):
    """List what is paused. A pause is not edited: it begins and ends."""

    form = PauseForm
    list_display = ("name", "kind", "backend", "paused_at", "paused_by", "note")
    list_filter = ("kind",)
    search_fields = ("name", "note")
    search_help_text = gettext_lazy("Search for a part of the name or of the note.")
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest, obj: Pause | None = None) -> bool:
        """Allow those who may pause."""
        return has_right(request, "pause_queue")

    # To delete a pause resumes.
    has_delete_permission = has_add_permission

    def has_change_permission(self, request: HttpRequest, obj: Pause | None = None) -> bool:
        """Allow nobody to edit a pause, because it says what happened."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Pause | None = None) -> bool:
        """Allow those who may pause or view."""
        return super().has_view_permission(request, obj) or has_right(request, "pause_queue")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show the list to the same."""
        return super().has_module_permission(request) or has_right(request, "pause_queue")

    def save_model(self, request: HttpRequest, obj: Pause, form: Any, change: bool) -> None:
        """Pause, in the name of the user."""
        pause(obj.kind, obj.name, backend=obj.backend or DEFAULT_ALIAS, by=request.user.get_username(), note=obj.note)
        obj.pk = rows_of(Pause).get(kind=obj.kind, backend=obj.backend, name=obj.name).pk

    def delete_model(self, request: HttpRequest, obj: Pause) -> None:
        """Resume."""
        resume(obj.kind, obj.name, backend=obj.backend or DEFAULT_ALIAS)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Pause]) -> None:
        """Resume each."""
        for row in queryset:
            self.delete_model(request, row)
