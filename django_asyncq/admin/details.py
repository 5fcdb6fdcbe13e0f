"""The pages of one queue, of one worker process, and of one task of the code: what it does, and what it has done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..broker.reading import Reader, side_by_side
from ..broker.run_counts import RunCounts
from ..core.aliases import DEFAULT_ALIAS, is_redis_used, uses_redis
from ..core.names import check_queue_name
from ..models import TaskRecord, TaskState
from ..observe.backlog import live_rows, reading_known, reading_queues
from ..observe.counts import reading_processed, reading_runs_by_task
from ..observe.fleet import Fleet
from ..observe.of_queues import queue_infos
from ..observe.values import QueueInfo, WorkerInfo
from ..storage import database_clock
from ..storage.routing import rows_of
from . import base
from .base import Text, has_right, url_about
from .code import known_task
from .filters import LastError, as_listed, with_why
from .fleet import fleet_and, fleet_of
from .navigation import as_count
from .queues import MINUTES_OF_RATE, links_of, rate_of
from .task_page import Fact
from .workers import state_of, url_of_worker

# Newest rows among which those of a worker are looked for: no index is on what ran a task.
ROWS_SEARCHED = 2_000
ROWS_SHOWN = 20
SPANS: tuple[tuple[Text, int], ...] = (
    (gettext_lazy("This hour and the one before"), 1),
    (gettext_lazy("24 hours"), 24),
    (gettext_lazy("7 days"), 7 * 24),
)
RUN_COLUMNS: tuple[Text, ...] = (
    gettext_lazy("Runs"),
    gettext_lazy("Failed for good"),
    gettext_lazy("Failure rate"),
    gettext_lazy("Retried"),
    gettext_lazy("Run time, median"),
    gettext_lazy("Run time, p95"),
    gettext_lazy("Wait, median"),
    gettext_lazy("Wait, p95"),
)
TASK_COLUMNS: tuple[Text, ...] = (
    gettext_lazy("Task"),
    gettext_lazy("State"),
    gettext_lazy("Enqueued"),
    gettext_lazy("Ran"),
)


class Table(NamedTuple):
    """A table of a page. id: of its heading. columns: the first is that of the row's name. none: said without rows.

    are_numbers: whether all cells but the first are.
    """

    id: str
    title: Text
    columns: Sequence[Text]
    rows: Sequence[Sequence[SafeString | str]]
    none: Text
    are_numbers: bool = False

    @property
    def labelled(self) -> list[list[tuple[Text, SafeString | str]]]:
        """The cells, each with the heading of its column, which it has where a row is a card."""
        return [list(zip(self.columns, row, strict=True)) for row in self.rows]


def cells_of_runs(counts: RunCounts) -> list[str]:
    """Return the numbers of RUN_COLUMNS; a dash for what nothing is known of."""
    found = [times.quantile(share) for times in (counts.took, counts.waited) for share in (0.5, 0.95)]
    rate = f"{100 * counts.failed / counts.total:.1f} %" if counts.total else "–"
    times = ["–" if each is None else base.duration(each) for each in found]
    return [as_count(counts.total), as_count(counts.failed), rate, as_count(counts.outcomes["retried"]), *times]


def _tasks(model_admin: Any, fleet: Fleet, id: str, title: Text, rows: list[TaskRecord], none: Text) -> Table:
    """Return a table of tasks, as the list shows them."""
    cells = [
        [
            format_html(
                '<a href="{}">{}</a>', base.url_of(model_admin, "change", quote(row.pk)), model_admin.task(row)
            ),
            model_admin.state_and_error(row),
            model_admin.enqueued(row),
            model_admin.run(row),
        ]
        for row in with_why(rows, fleet)
    ]
    return Table(id, title, TASK_COLUMNS, cells, none)


def _newest(rows: QuerySet[TaskRecord]) -> list[TaskRecord]:
    return list(as_listed(rows)[:ROWS_SHOWN])


def _link(url: str, text: str) -> SafeString:
    return format_html('<a href="{}"><bdi>{}</bdi></a>', url, text)


# --- one task of the code


def task(model_admin: Any, request: HttpRequest) -> dict[str, Any]:
    """Show how often a task ran and failed, how long it took and waited, and its latest tasks."""
    name = request.GET.get("name", "")
    fleet, (read,) = fleet_and(request, _reading_runs()) if is_redis_used() else (fleet_of(request), [None])
    declared = known_task(name)
    rows = rows_of(TaskRecord).filter(name=name)
    counts = zip(SPANS, read or (), strict=False)
    runs = [[str(label), *cells_of_runs(of_span[name])] for (label, _), of_span in counts if name in of_span]
    facts = [Fact(_("Tasks of this name"), _link(url_about(model_admin, "changelist", name=name), _("Show the list")))]
    if declared is None:
        facts.append(Fact(_("Code"), _("The code has no task of this name.")))
    else:
        url = url_about(model_admin, "queue", backend=declared.backend, queue=declared.queue_name)
        facts += [
            Fact(_("Queue"), _link(url, declared.queue_name)),
            Fact(_("Attempts"), str(declared.max_attempts)),
            Fact(_("Priority"), str(declared.priority)),
        ]
    if pause := fleet.task_pause(name):
        facts.append(Fact(_("Paused"), base.pause_note(pause, fleet.now)))
    failed = rows.filter(state=TaskState.FAILED).order_by("-id")
    return {
        "title": _("Task %(name)s") % {"name": name},
        "error": fleet.error,
        "facts": facts,
        "tables": [
            Table("runs", _("Runs"), (_("Time"), *RUN_COLUMNS), runs, _("No run was counted."), are_numbers=True),
            _tasks(model_admin, fleet, "latest", _("Latest tasks"), _newest(rows.order_by("-id")), _("There is none.")),
            _tasks(model_admin, fleet, "failed", _("Latest failures"), _newest(failed), _("None has failed.")),
        ],
    }


def _reading_runs() -> Reader[list[dict[str, RunCounts]]]:
    """Read how all runs ended, by task, for each of SPANS."""
    names = yield from reading_known(live_rows(database_clock.now()))
    return (yield from side_by_side(*(reading_runs_by_task(names, hours) for _, hours in SPANS)))


# --- one queue


def queue(model_admin: Any, request: HttpRequest) -> dict[str, Any]:
    """Show what waits in a queue, who takes it, and how its tasks run."""
    backend, name = request.GET.get("backend") or DEFAULT_ALIAS, request.GET.get("queue", "")
    check_queue_name(name)
    readers = [_reading_queue(backend, name)] if uses_redis(backend) else []
    fleet, found = fleet_and(request, *readers) if readers else (fleet_of(request), [])
    facts, runs = [], []
    for info, rate, counted in filter(None, found):
        facts = _facts_of_queue(model_admin, fleet, info, rate)
        runs = [
            [_link(url_about(model_admin, "task", name=each), each), *cells_of_runs(of_task)]
            for each, of_task in counted.items()
        ]
    if pause := fleet.queue_pause(backend, name):
        facts.insert(0, Fact(_("Paused"), base.pause_note(pause, fleet.now)))
    rows = rows_of(TaskRecord).filter(backend=backend, queue_name=name)
    waiting = list(as_listed(rows.filter(state=TaskState.QUEUED).order_by("state", "id"))[:ROWS_SHOWN])
    failed = rows.filter(state__gte=TaskState.FAILED).order_by("-state", "-id")
    servers = [
        [_link(url_of_worker(model_admin, each), each.id), state_of(each)[0], f"{each.busy} / {each.slots}"]
        for each in fleet.serving(backend, name)
    ]
    return {
        "title": _("Queue %(name)s") % {"name": name},
        "error": fleet.error,
        "facts": facts,
        "switch": {"kind": "queue", "backend": backend, "name": name} if has_right(request, "pause_queue") else None,
        "is_paused": pause is not None,
        "tables": [
            Table(
                "servers", _("Workers"), (_("Worker"), _("State"), _("Slots in use")), servers, _("No worker serves it")
            ),
            Table(
                "runs",
                _("Runs in 24 hours"),
                (_("Task"), *RUN_COLUMNS),
                runs,
                _("No run was counted."),
                are_numbers=True,
            ),
            _tasks(model_admin, fleet, "waiting", _("Queued first"), waiting, _("No task is queued.")),
            _tasks(model_admin, fleet, "failed", _("Latest failures"), _newest(failed), _("None has failed.")),
        ],
    }


def _reading_queue(backend: str, name: str) -> Reader[tuple[QueueInfo, float | None, dict[str, RunCounts]]]:
    """Read a queue, its tasks per minute, and how its runs of a day ended, by task."""
    at, queue = database_clock.now(), (backend, name)
    end = base.aware(at).replace(second=0, microsecond=0)
    live = live_rows(at, backend=backend)
    contents, (minutes,), runs = yield from side_by_side(
        reading_queues([queue]),
        reading_processed([queue], end - timedelta(minutes=MINUTES_OF_RATE), end - timedelta(minutes=1), 1),
        reading_runs_by_task([queue], 24),
    )
    return queue_infos(live, contents, at)[0], rate_of(minutes), runs


def _facts_of_queue(model_admin: Any, fleet: Fleet, info: QueueInfo, rate: float | None) -> list[Fact]:
    waited, links = info.oldest_waiting_seconds, links_of(model_admin, info)
    return [
        Fact(_("Waiting"), as_count(info.waiting)),
        Fact(_("Queued"), _link(links["queued"], as_count(info.queued))),
        Fact(_("Running"), _link(links["running"], as_count(info.running))),
        Fact(_("Delayed"), as_count(info.scheduled)),
        Fact(_("Retrying"), as_count(info.retry)),
        Fact(
            _("Oldest was due"),
            "–" if waited is None else base.time_element(fleet.now - timedelta(seconds=waited), fleet.now),
        ),
        Fact(_("Per minute"), "–" if rate is None else f"{rate:.1f}"),
        Fact(_("Rejected messages"), _link(links["rejected"], as_count(info.rejected))),
    ]


# --- one worker process


def worker(model_admin: Any, request: HttpRequest) -> dict[str, Any] | None:
    """Show what a process runs, what it ran, and what failed there. One that has ended is known by what it ran."""
    id, fleet = request.GET.get("id", ""), fleet_of(request)
    info = next((each for each in fleet.workers if each.id == id), None)
    rows = rows_of(TaskRecord)
    finished = rows.order_by("-id").values_list("pk", "worker_ids")[:ROWS_SEARCHED]
    ran = [pk for pk, ids in finished if isinstance(ids, list) and ids[-1:] == [id]][:ROWS_SHOWN]
    latest = (
        rows.filter(state__gte=TaskState.FAILED).order_by("-state", "-id").annotate(last_worker=LastError("worker"))
    )
    failed = [pk for pk, last in latest.values_list("pk", "last_worker")[:ROWS_SEARCHED] if last == id][:ROWS_SHOWN]
    if fleet.is_known and info is None and not ran and not failed:
        messages.warning(request, _("No worker is called %(name)s.") % {"name": id})
        return None
    running = [] if info is None else [each.id for each in info.running]
    note = _("Among the newest %(count)s tasks.") % {"count": as_count(ROWS_SEARCHED)}
    return {
        "title": _("Worker %(name)s") % {"name": id},
        "error": fleet.error,
        "facts": _facts_of_worker(info, fleet) if info else _not_alive(fleet),
        "note": note,
        "tables": [
            _tasks(model_admin, fleet, "running", _("Runs"), _by_ids(running), _("Nothing.")),
            _tasks(model_admin, fleet, "ran", _("Ran"), _by_ids(ran), _("Nothing.")),
            _tasks(model_admin, fleet, "failed", _("Failed"), _by_ids(failed), _("Nothing.")),
        ],
    }


def _not_alive(fleet: Fleet) -> list[Fact]:
    return [Fact(_("State"), _("It is not alive."))] if fleet.is_known else []


def _by_ids(ids: Iterable[Any]) -> list[TaskRecord]:
    known = [id for each in ids if (id := base.uuid_of(str(each)))]
    return _newest(rows_of(TaskRecord).filter(pk__in=known).order_by("-id")) if known else []


def _facts_of_worker(info: WorkerInfo, fleet: Fleet) -> list[Fact]:
    return [
        Fact(_("State"), state_of(info)[0]),
        Fact(_("Host"), info.host, True),
        Fact(_("Process"), str(info.pid), True),
        Fact(_("Backend"), info.backend, True),
        Fact(_("Queues"), info.queues_text.replace(",", ", "), True),
        Fact(_("Slots in use"), f"{info.busy} / {info.slots}"),
        Fact(_("Memory"), filesizeformat(info.rss_bytes) if info.rss_bytes else "–"),
        Fact(_("Started"), base.time_element(info.started_at, fleet.now)),
        Fact(_("Last heartbeat"), base.time_element(info.beat_at, fleet.now) or "–"),
        Fact(_("Version"), info.version, True),
    ]
