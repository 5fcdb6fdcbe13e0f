"""The page *Workers*: which processes are alive, what they run, which were lost; and the buttons that drain them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.defaultfilters import filesizeformat
from django.urls import URLPattern
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..exceptions import BrokerUnavailable
from ..inspector import Inspector, RunningTask, WorkerInfo
from ..models import TaskRecord
from ..storage.routing import rows_of
from . import display, history
from .fleet import Fleet, fleet_of
from .pages import Question, ask, is_confirmed, paths, render_page, unreachable_text, url_of
from .permissions import has_right, only_post, requires

# A process runs as many as it has slots; those of another program may say anything.
MOST_RUNNING = 20
MOST_LOST = 100


class ShownTask(NamedTuple):
    """A task that a process runs. url: of its page; "" for a message without a row. age: since it began."""

    name: str
    url: str
    age: SafeString | str


class ShownWorker(NamedTuple):
    """A row of the table. state: words. more: how many of its tasks are not shown."""

    info: WorkerInfo
    state: str
    state_class: str
    queues: str
    memory: str
    started: SafeString | str
    beat: SafeString | str
    tasks: list[ShownTask]
    more: int


class LostWorker(NamedTuple):
    """A process that is not alive, though rows say that it runs tasks."""

    id: str
    tasks: list[ShownTask]


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the addresses of the page and of its buttons."""
    return paths(model_admin, {"workers": workers_view, "drain": drain_view, "undrain": undrain_view})


@requires("view_taskrecord")
def workers_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Show every process, and those that were lost."""
    fleet = fleet_of(request)
    running = _rows_of(each for worker in fleet.workers for each in worker.running[:MOST_RUNNING])
    context = {
        "workers": [_shown(model_admin, fleet, worker, running) for worker in fleet.workers],
        "hosts": sorted({worker.host for worker in fleet.own_workers}),
        "lost": _lost(model_admin, fleet),
        "fleet": fleet,
        "may_drain": has_right(request, "drain_worker"),
    }
    return render_page(model_admin, request, "workers.html", _("Workers"), context)


def _rows_of(tasks: Iterable[RunningTask]) -> dict[str, TaskRecord]:
    """Return the rows of running tasks by the ids of their entries; one query."""
    ids = []
    for task in tasks:
        try:
            ids.append(UUID(task.id))
        except ValueError:
            continue
    rows = rows_of(TaskRecord).filter(pk__in=ids).only("id", "name", "queue_name") if ids else []
    return {str(row.id): row for row in rows}


def _shown(
    model_admin: ModelAdmin[Any], fleet: Fleet, worker: WorkerInfo, rows: Mapping[str, TaskRecord]
) -> ShownWorker:
    word, state_class = _state(worker)
    return ShownWorker(
        worker,
        word,
        state_class,
        ", ".join(name if weight == 1 else f"{name}={weight}" for name, weight in sorted(worker.queues.items())),
        filesizeformat(worker.rss_bytes) if worker.rss_bytes else "",
        display.time_element(worker.started_at, fleet.now),
        display.time_element(worker.beat_at, fleet.now),
        [_task(model_admin, fleet, each, rows) for each in worker.running[:MOST_RUNNING]],
        max(0, len(worker.running) - MOST_RUNNING),
    )


def _state(worker: WorkerInfo) -> tuple[str, str]:
    """Return the state of a process in a word, and the class of its badge."""
    if worker.is_quarantined:
        return _("runs a suspect alone"), "running"
    if worker.is_draining:
        return _("quiet"), "off"
    if worker.status != "active":
        return _("stopping"), "off"
    return _("busy") if worker.busy else _("idle"), "succeeded"


def _task(model_admin: ModelAdmin[Any], fleet: Fleet, task: RunningTask, rows: Mapping[str, TaskRecord]) -> ShownTask:
    row = rows.get(task.id)
    age = display.time_element(task.started_at, fleet.now)
    if row is None:
        return ShownTask(display.excerpt(task.name[:200]).text, "", age)
    return ShownTask(str(row), url_of(model_admin, "change", quote(row.pk)), age)


def _lost(model_admin: ModelAdmin[Any], fleet: Fleet) -> list[LostWorker]:
    """Return the processes that are not alive, and what rows say that they run."""
    stuck = [id for id, why in fleet.stuck().items() if why == "worker"][:MOST_LOST]
    rows = rows_of(TaskRecord).filter(pk__in=stuck).only("id", "name", "worker_ids", "last_attempted_at")
    found: dict[str, list[ShownTask]] = {}
    for row in rows:
        url = url_of(model_admin, "change", quote(row.pk))
        age = display.time_element(row.last_attempted_at, fleet.now)
        found.setdefault(str(row.worker_ids[-1]), []).append(ShownTask(str(row), url, age))
    return [LostWorker(id, tasks) for id, tasks in sorted(found.items())]


# --- drain


@only_post
@requires("view_taskrecord", "drain_worker")
def drain_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Ask, then have a process, or all of a host, take no more tasks. POST only."""
    name, back = request.POST.get("name", ""), url_of(model_admin, "workers")
    question = Question(
        title=_("Stop %(name)s from taking tasks?") % {"name": name},
        lines=[
            _("It finishes what it runs and takes no more, until somebody lets it take tasks again."),
            _("The request holds for a day at most."),
        ],
        button=_("Stop taking tasks"),
        back=back,
    )
    if not is_confirmed(request, question):
        return ask(model_admin, request, question)
    try:
        meant = Inspector().workers.drain(name)
    except BrokerUnavailable as error:
        messages.error(request, unreachable_text(error))
        return HttpResponseRedirect(back)
    if meant:
        history.note(request, TaskRecord, f"worker {name}", "Asked to take no more tasks.")
        messages.success(request, _drained_text(meant))
    else:
        messages.warning(request, _("No living worker is called %(name)s.") % {"name": name})
    return HttpResponseRedirect(back)


@only_post
@requires("view_taskrecord", "drain_worker")
def undrain_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Let a process, or all of a host, take tasks again. POST only."""
    name = request.POST.get("name", "")
    try:
        was_drained = Inspector().workers.resume(name)
    except BrokerUnavailable as error:
        messages.error(request, unreachable_text(error))
    else:
        if was_drained:
            history.note(request, TaskRecord, f"worker {name}", "Let take tasks again.")
            messages.success(request, _("%(name)s takes tasks again.") % {"name": name})
        else:
            messages.warning(request, _("Nobody had asked %(name)s to stop taking tasks.") % {"name": name})
    return HttpResponseRedirect(url_of(model_admin, "workers"))


def _drained_text(meant: Sequence[WorkerInfo]) -> str:
    text = ngettext(
        "%(count)d worker takes no more tasks after its next beat.",
        "%(count)d workers take no more tasks after their next beat.",
        len(meant),
    )
    return text % {"count": len(meant)}
