"""How long until a queue is empty, what holds it back, and how many slots would be enough: for autoscalers.

Everything is measured at the moment of the question: arrivals by the times in the newest ids, what is served by the
counters of Redis, and how long a run takes by how many run at once for that (Little's law). In the first ten seconds of
a minute the counter of the minute before is used too, so a change is seen up to ten seconds later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from django.db.models import Count
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseNotFound, JsonResponse

from ..broker import redis_clock
from ..exceptions import BrokerUnavailable, InvalidOption
from ..faults import one_line
from ..inspector import Inspector, MinuteInfo, WorkerInfo
from ..inspector.due import is_due
from ..inspector.known_names import check_queue
from ..models import FailureReason, TaskRecord, TaskState
from ..prefixes import DEFAULT_ALIAS
from ..storage import database_clock
from ..storage.routing import rows_of
from .access import may_read

ARRIVAL_SECONDS = 30
# Arrivals of a second are counted up to here; more than that is as much for any fleet.
MOST_ARRIVALS = 100_000
# The counter of this minute alone, once it says enough; before that with the minute before.
SETTLED_SECONDS = 10
TARGET_SECONDS = 60.0
LONGEST_TARGET = 86_400.0


@dataclass(frozen=True)
class Scale:
    """A queue, as an autoscaler sees it.

    waiting: tasks that are due, and those that wait for a gate. arrival_per_s, service_per_s: tasks per second.
    seconds_to_empty: 0 for an empty queue; None while it does not get shorter. slots, busy_slots: of the workers that
    serve it. wanted_slots: what would empty it within the target. limited_by: "paused", "gate:NAME", "slots", or
    "none".
    """

    backend: str
    queue: str
    waiting: int
    arrival_per_s: float
    service_per_s: float
    seconds_to_empty: float | None
    busy_slots: int
    slots: int
    wanted_slots: int
    limited_by: str


def read_scale(queue: str, backend: str = DEFAULT_ALIAS, *, target_seconds: float = TARGET_SECONDS) -> Scale:
    """Ask both stores. Raises: InvalidOption, BrokerUnavailable, django.db.Error."""
    inspector = Inspector(backend)
    info = inspector.queues.get(queue)
    now = database_clock.now()
    rows = rows_of(TaskRecord).order_by().filter(backend=backend, queue_name=queue)
    due = rows.filter(is_due(now), state=TaskState.QUEUED, after_id=None, batch_id=None)
    at_gates = rows.filter(state=TaskState.FAILED, retry_at__isnull=False, reason=FailureReason.GATE_FULL)
    by_gate = dict(at_gates.values_list("gate").annotate(count=Count("id")).order_by("-count"))
    queued, held = due.count(), sum(by_gate.values())
    serving = inspector.workers.serving(queue)
    running = sum(task.queue == queue for each in serving for task in each.running)
    arrival = _arrivals(queue, backend, now)
    minutes = inspector.queues.minutes(queue, minutes=2)
    # Redis counts by its own clock.
    service = served_per_second(minutes, redis_clock.seconds() - minutes[0].at.timestamp())
    waiting = queued + held
    slots, busy = sum(each.slots for each in serving), sum(each.busy for each in serving)
    return Scale(
        backend,
        queue,
        waiting,
        round(arrival, 3),
        round(service, 3),
        seconds_to_empty(waiting, arrival, service, is_paused=info.is_paused),
        busy,
        slots,
        wanted_slots(waiting, arrival, service, running, target_seconds),
        limited_by(queued, by_gate, serving, is_paused=info.is_paused),
    )


def served_per_second(minutes: Sequence[MinuteInfo], elapsed: float) -> float:
    """Return how many attempts finish in a second.

    minutes: this one and the one before, the newest first. elapsed: seconds of this one.
    """
    current, before = ([each.processed or 0 for each in minutes] + [0, 0])[:2]
    if elapsed >= SETTLED_SECONDS:
        return current / elapsed
    return (current + before) / (60 + max(elapsed, 0.0))


def seconds_to_empty(waiting: int, arrival: float, service: float, *, is_paused: bool) -> float | None:
    """Return how long until nothing waits; None while it does not get shorter."""
    if not waiting:
        return 0.0
    gain = service - arrival
    return None if is_paused or gain <= 0 else round(waiting / gain, 1)


def wanted_slots(waiting: int, arrival: float, service: float, running: int, target_seconds: float) -> int:
    """Return how many slots would take what arrives, and empty the queue within the target.

    How long a run takes is not known before the first ones have finished; until then one slot more than run is wanted.
    """
    if service <= 0:
        return running + 1 if waiting else running
    run_seconds = running / service
    return math.ceil((arrival + waiting / target_seconds) * run_seconds) or int(waiting > 0)


def limited_by(queued: int, by_gate: dict[str, int], serving: Sequence[WorkerInfo], *, is_paused: bool) -> str:
    """Return what holds the queue back. by_gate: tasks that wait for each gate, the most first."""
    if is_paused:
        return "paused"
    if by_gate and sum(by_gate.values()) >= queued:
        return f"gate:{next(iter(by_gate))}"
    if queued and sum(each.busy for each in serving) >= sum(each.slots for each in serving):
        return "slots"
    return "none"


def _arrivals(queue: str, backend: str, now: datetime) -> float:
    """Return how many tasks a second arrive, by the times in their ids: only those of some seconds are read."""
    since = now - timedelta(seconds=ARRIVAL_SECONDS)
    newest = rows_of(TaskRecord).enqueued_since(since).filter(backend=backend, queue_name=queue).order_by()
    return newest.values("pk")[:MOST_ARRIVALS].count() / ARRIVAL_SECONDS


def scale_view(request: HttpRequest) -> HttpResponse:
    """Answer with the `Scale` of a queue as JSON: `?queue=mail`, also `backend` and `target` in seconds.

    For those who may read the numbers; 404 to others. 400 for a queue that the alias does not have, 503 while Redis is
    unreachable.
    """
    if not may_read(request):
        return HttpResponseNotFound()
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD"])
    try:
        target = float(request.GET.get("target") or TARGET_SECONDS)
    except ValueError:
        target = 0.0
    if not 0 < target <= LONGEST_TARGET:
        text = f"target must be seconds, more than 0 and at most {LONGEST_TARGET:.0f}"
        return JsonResponse({"error": text}, status=400)
    queue, backend = request.GET.get("queue", ""), request.GET.get("backend") or DEFAULT_ALIAS
    try:
        check_queue(queue, backend)
        scale = read_scale(queue, backend, target_seconds=target)
    except InvalidOption as error:
        return JsonResponse({"error": str(error)}, status=400)
    except BrokerUnavailable as error:
        return JsonResponse({"error": one_line(error)}, status=503)
    answer = JsonResponse(asdict(scale))
    answer["Cache-Control"] = "no-store"
    return answer
