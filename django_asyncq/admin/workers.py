"""The page *Workers*: which processes are alive, what they run, which were lost; and the buttons that drain them."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import Any

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import TaskRecord
from ..observe.fleet import Fleet
from ..observe.inspector import Inspector, WorkerInfo
from ..storage.routing import rows_of
from . import base, history
from .base import Asking, Question, has_right, rows_by_id
from .fleet import fleet_of
from .history import Did

# A process runs as many as it has slots; those of another program may say anything.
MOST_RUNNING = 20
MOST_LOST = 100
MOST_LACKING = 20


def workers(model_admin: ModelAdmin[Any], request: HttpRequest) -> dict[str, Any]:
    """Show every process, and those that were lost."""
    fleet = fleet_of(request)
    ids = [task.id for worker in fleet.workers for task in worker.running[:MOST_RUNNING]]
    running = rows_by_id(ids, "id", "name", "queue_name")
    return {
        "workers": [_shown(model_admin, fleet, worker, running) for worker in fleet.workers],
        "codes": _codes(fleet),
        "hosts": sorted({worker.host for worker in fleet.own_workers}),
        "lost": _lost(model_admin, fleet),
        "fleet": fleet,
        "may_drain": has_right(request, "drain_worker"),
    }


def _shown(
    model_admin: ModelAdmin[Any], fleet: Fleet, worker: WorkerInfo, rows: dict[str, TaskRecord]
) -> SimpleNamespace:
    """Return a row of the table. more: how many of its tasks are not shown."""
    state, state_class = state_of(worker)
    return SimpleNamespace(
        info=worker,
        url=url_of_worker(model_admin, worker),
        state=state,
        state_class=state_class,
        queues=", ".join(_queue(worker, name, weight) for name, weight in sorted(worker.queues.items())),
        memory=filesizeformat(worker.rss_bytes) if worker.rss_bytes else "",
        started=base.time_element(worker.started_at, fleet.now),
        beat=base.time_element(worker.beat_at, fleet.now),
        tasks=[
            _task(model_admin, fleet, rows.get(each.id), each.started_at, each.name)
            for each in worker.running[:MOST_RUNNING]
        ],
        more=max(0, len(worker.running) - MOST_RUNNING),
    )


def _queue(worker: WorkerInfo, name: str, weight: int) -> str:
    """Return a queue as `runworkers --queues` reads it, with a weight and slots that are not those of most."""
    text = name if weight == 1 else f"{name}={weight}"
    return f"{text}:{worker.queue_slots[name]}" if name in worker.queue_slots else text


def _codes(fleet: Fleet) -> list[SimpleNamespace]:
    """Return what processes of each version of the project have done; none while all have one that says nothing."""
    found: dict[str, list[WorkerInfo]] = {}
    for worker in fleet.own_workers:
        found.setdefault(worker.app_version, []).append(worker)
    names = {name for worker in fleet.own_workers for name in worker.tasks}
    return [
        SimpleNamespace(
            version=version,
            processes=len(of_code),
            busy=sum(worker.busy for worker in of_code),
            finished=number_format(sum(worker.finished for worker in of_code), force_grouping=True),
            # Such tasks wait for the others.
            lacking=sorted(names.difference(*(worker.tasks for worker in of_code)))[:MOST_LACKING],
            since=base.time_element(min(worker.started_at for worker in of_code), fleet.now),
        )
        for version, of_code in sorted(found.items(), key=lambda each: min(worker.started_at for worker in each[1]))
        if found.keys() != {""}
    ]


def url_of_worker(model_admin: ModelAdmin[Any], worker: WorkerInfo) -> str:
    """Return the address of the page of a process; "" for a server of another program, which says too little."""
    return base.url_about(model_admin, "worker", id=worker.id) if worker.is_ours else ""


def state_of(worker: WorkerInfo) -> tuple[str, str]:
    """Return the state of a process in a word, and the class of its badge."""
    if worker.is_quarantined:
        return _("runs a suspect alone"), "running"
    if worker.is_draining:
        return _("quiet"), "off"
    if worker.status != "active":
        return _("stopping"), "off"
    return _("busy") if worker.busy else _("idle"), "succeeded"


def _task(
    model_admin: ModelAdmin[Any], fleet: Fleet, row: TaskRecord | None, began_at: datetime | None, name: str = ""
) -> SimpleNamespace:
    """Return a task that a process runs. row: None for a message without one, which has no page."""
    return SimpleNamespace(
        name=base.excerpt(name[:200]).text if row is None else str(row),
        url="" if row is None else base.url_of(model_admin, "change", quote(row.pk)),
        age=base.time_element(began_at, fleet.now),
    )


def _lost(model_admin: ModelAdmin[Any], fleet: Fleet) -> list[SimpleNamespace]:
    """Return the processes that are not alive, and what rows say that they run."""
    stuck = [id for id, why in fleet.stuck().items() if why == "worker"][:MOST_LOST]
    found: dict[str, list[SimpleNamespace]] = {}
    for row in rows_of(TaskRecord).filter(pk__in=stuck).only("id", "name", "worker_ids", "last_attempted_at"):
        found.setdefault(str(row.worker_ids[-1]), []).append(_task(model_admin, fleet, row, row.last_attempted_at))
    return [SimpleNamespace(id=id, tasks=tasks) for id, tasks in sorted(found.items())]


def drain(model_admin: ModelAdmin[Any], request: HttpRequest) -> Asking:
    """Have a process, or all of a host, take no more tasks."""
    name = request.POST.get("name", "")
    yield Question(
        title=_("Stop %(name)s from taking tasks?") % {"name": name},
        lines=[
            _("It finishes what it runs and takes no more, until somebody lets it take tasks again."),
            _("The request holds for a day at most."),
        ],
        button=_("Stop taking tasks"),
    )
    if meant := Inspector().workers.drain(name):
        history.note(request, TaskRecord, f"worker {name}", Did.ASKED_TO_STOP_TAKING)
        text = ngettext(
            "%(count)d worker takes no more tasks after its next beat.",
            "%(count)d workers take no more tasks after their next beat.",
            len(meant),
        )
        messages.success(request, text % {"count": len(meant)})
    else:
        messages.warning(request, _("No living worker is called %(name)s.") % {"name": name})
    return None


def undrain(model_admin: ModelAdmin[Any], request: HttpRequest) -> None:
    """Let a process, or all of a host, take tasks again."""
    name, workers = request.POST.get("name", ""), Inspector().workers
    was_drained, others = workers.resume(name), [each for each in workers.drained_by(name) if each != name]
    if was_drained:
        history.note(request, TaskRecord, f"worker {name}", Did.LET_TAKE_AGAIN)
    if others:
        text = _("%(name)s: a request to take no more tasks still holds for %(others)s.")
        messages.warning(request, text % {"name": name, "others": ", ".join(others)})
    elif was_drained:
        messages.success(request, _("%(name)s takes tasks again with its next beat.") % {"name": name})
    else:
        messages.warning(request, _("Nobody had asked %(name)s to stop taking tasks.") % {"name": name})
