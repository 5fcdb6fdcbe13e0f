"""The page *Queues*: what waits, runs and fails in each queue, and the buttons that pause and resume.

The numbers of rows come from the database, those of entries and rates from Redis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from .. import pausing
from ..exceptions import BrokerUnavailable, InvalidOption
from ..faults import one_line
from ..inspector import Inspector, MinuteInfo, QueueInfo
from ..models import Pause, PauseKind
from ..prefixes import DEFAULT_ALIAS
from ..redaction import mask_text
from ..storage.routing import rows_of
from . import display, history
from .code import known_names
from .fleet import Fleet, fleet_of
from .pages import Question, ask, is_confirmed, next_url, paths, reason_of, render_page, url_of
from .permissions import has_right, only_post, requires
from .rejected_page import address_of

MINUTES_OF_RATE = 5
MINUTES_OF_FAILURES = 60


class ShownQueue(NamedTuple):
    """A row of the table. rate: tasks per minute; None when Redis does not know it. failed: attempts in the last hour.

    oldest: when the task that has waited longest was due. pause: None when the queue is not paused by a row.
    links: of the numbers, by the word in the address of the list; of "rejected" to its page.
    """

    info: QueueInfo
    servers: int
    rate: float | None
    failed: int | None
    oldest: SafeString | str
    pause: Pause | None
    note: SafeString | str
    links: dict[str, str]


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the addresses of the page and of its buttons."""
    return paths(model_admin, {"queues": queues_view, "pause": pause_view, "resume": resume_view})


@requires("view_taskrecord")
def queues_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Show every queue."""
    fleet = fleet_of(request)
    queues, error = _read_queues(model_admin, fleet)
    may_pause = has_right(request, "pause_queue")
    context = {
        "queues": queues,
        "several_aliases": len({each.info.backend for each in queues}) > 1,
        "error": error,
        "other_pauses": [(each, pause_note(each, fleet.now)) for each in fleet.pauses if _is_other(each, queues)],
        "may_pause": may_pause,
        "tasks_to_pause": _tasks_to_pause(fleet) if may_pause else [],
    }
    return render_page(model_admin, request, "queues.html", _("Queues"), context)


def _read_queues(model_admin: ModelAdmin[Any], fleet: Fleet) -> tuple[list[ShownQueue], str]:
    """Return the queues, or why they cannot be shown."""
    if fleet.error:
        return [], fleet.error
    inspector = Inspector()
    try:
        return [_shown(model_admin, inspector, fleet, info) for info in inspector.queues.all()], ""
    except BrokerUnavailable as error:
        return [], one_line(error)


def _shown(model_admin: ModelAdmin[Any], inspector: Inspector, fleet: Fleet, info: QueueInfo) -> ShownQueue:
    minutes = inspector.queues.minutes(info.queue, minutes=MINUTES_OF_FAILURES + 1, backend=info.backend)
    pause = fleet.queue_pause(info.backend, info.queue)
    oldest: SafeString | str = ""
    if info.oldest_waiting_seconds is not None:
        oldest = display.time_element(fleet.now - timedelta(seconds=info.oldest_waiting_seconds), fleet.now)
    tasks = url_of(model_admin, "changelist")
    states = ("queued", "running", "retrying")
    return ShownQueue(
        info,
        fleet.servers(info.backend, info.queue),
        rate_of(minutes[1 : MINUTES_OF_RATE + 1]),
        _failed(minutes[:MINUTES_OF_FAILURES]),
        oldest,
        pause,
        pause_note(pause, fleet.now) if pause else "",
        {
            **{state: f"{tasks}?{urlencode({'queue': info.queue, 'state': state})}" for state in states},
            "rejected": address_of(model_admin, info.backend, info.queue),
        },
    )


def rate_of(minutes: Iterable[MinuteInfo]) -> float | None:
    """Return the mean number of tasks per minute, of the minutes that Redis has not lost; None when it has lost all."""
    known = [each.processed for each in minutes if each.processed is not None]
    return sum(known) / len(known) if known else None


def _failed(minutes: Iterable[MinuteInfo]) -> int | None:
    known = [each.failed for each in minutes if each.failed is not None]
    return sum(known) if known else None


def _is_other(pause: Pause, queues: Iterable[ShownQueue]) -> bool:
    """Whether a pause has no row in the table of queues."""
    return pause.kind != PauseKind.QUEUE or all(each.pause != pause for each in queues)


def _tasks_to_pause(fleet: Fleet) -> list[str]:
    return [name for name in known_names() if fleet.task_pause(name) is None]


def pause_note(pause: Pause, now: datetime) -> SafeString:
    """Say since when something is paused, by whom and why, with secrets masked."""
    since = display.time_element(pause.paused_at, now)
    by, note = mask_text(pause.paused_by), mask_text(pause.note)
    text = format_html(_("Paused by {}, {}"), format_html("<bdi>{}</bdi>", by), since)
    if not by:
        text = format_html(_("Paused {}"), since)
    return format_html('{}: <bdi class="asyncq-pause-note">{}</bdi>', text, note) if note else text


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


@only_post
@requires("view_taskrecord", "pause_queue")
def pause_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Ask, then pause a queue, a task or a gate. POST only."""
    target, back = _target(request), next_url(request, url_of(model_admin, "queues"))
    question = Question(
        title=_title(target),
        lines=list(_effects(target.kind)),
        button=_("Pause"),
        back=back,
        asks_reason=True,
    )
    if not is_confirmed(request, question):
        return ask(model_admin, request, question)
    by, note = request.user.get_username(), reason_of(request)
    try:
        is_new = pausing.pause(target.kind, target.name, backend=target.backend, by=by, note=note)
    except InvalidOption as error:
        messages.error(request, str(error))
        return HttpResponseRedirect(back)
    if is_new:
        row = rows_of(Pause).filter(kind=target.kind, name=target.name).order_by("-pk").first()
        text = f"Paused: {note}" if note else "Paused."
        history.note(request, Pause, str(target), text, id=None if row is None else str(row.pk))
        messages.success(request, _("Paused: %(what)s.") % {"what": target})
    else:
        messages.warning(request, _("It was paused already: %(what)s.") % {"what": target})
    return HttpResponseRedirect(back)


@only_post
@requires("view_taskrecord", "pause_queue")
def resume_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Resume a queue, a task or a gate. POST only."""
    target = _target(request)
    try:
        was_paused = pausing.resume(target.kind, target.name, backend=target.backend)
    except InvalidOption as error:
        messages.error(request, str(error))
        return HttpResponseRedirect(url_of(model_admin, "queues"))
    if was_paused:
        history.note(request, Pause, str(target), "Resumed.")
        messages.success(request, _("Resumed: %(what)s.") % {"what": target})
    else:
        messages.warning(request, _("It was not paused: %(what)s.") % {"what": target})
    return HttpResponseRedirect(next_url(request, url_of(model_admin, "queues")))


def _title(target: Target) -> str:
    texts = {
        PauseKind.QUEUE: _("Pause queue %(name)s?"),
        PauseKind.TASK: _("Pause task %(name)s?"),
        PauseKind.GATE: _("Pause gate %(name)s?"),
    }
    return {str(kind): text for kind, text in texts.items()}.get(target.kind, _("Pause %(name)s?")) % {
        "name": target.name
    }


def _effects(kind: str) -> Iterator[str]:
    if kind == PauseKind.QUEUE:
        yield _(
            "Workers take no more tasks from this queue. What runs now goes on. Tasks can still be enqueued; they wait."
        )
    elif kind == PauseKind.TASK:
        yield _("No call of this task begins. What runs now goes on. It can still be enqueued; its calls wait.")
    elif kind == PauseKind.GATE:
        yield _(
            "The gate admits nothing: an attempt to enqueue one of its tasks is refused. What was admitted goes on."
        )
    yield _("It stays paused until somebody resumes it.")
