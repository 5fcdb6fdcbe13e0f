"""For autoscalers: how long until a queue is empty, what holds it back, and how many slots would be enough.

What came and what was served is the difference to an earlier question to the same process, 5 s to 5 minutes ago; how
long a run takes follows from how many run at once for that (Little's law). The first question of a process is answered
by the times in the newest ids and by the counters of this minute and the one before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from threading import Lock
from typing import NamedTuple

from django.db.models import Count
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseNotFound, JsonResponse

from ..broker import redis_clock
from ..core.aliases import DEFAULT_ALIAS, prefix_of
from ..exceptions import BrokerUnavailable, InvalidOption
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.errors import one_line
from ..storage.routing import rows_of
from .access import may_read
from .inspector import Inspector, MinuteInfo
from .known_names import check_queue

ARRIVAL_SECONDS = 30
# Arrivals of a second are counted up to here; more than that is as much for any fleet.
MOST_ARRIVALS = 100_000
# Between the two questions that are compared.
SHORTEST_SPAN_SECONDS = 5.0
LONGEST_SPAN_SECONDS = 300.0
SAMPLE_SECONDS = 1.0
MOST_SAMPLES = 64
MOST_QUEUES = 1_000
# The counter of this minute alone, once it says enough; before that with the minute before.
SETTLED_SECONDS = 10
TARGET_SECONDS = 60.0
LONGEST_TARGET = 86_400.0


@dataclass(frozen=True)
class Scale:
    """A queue, as an autoscaler sees it.

    waiting: as of `QueueInfo`, and the tasks that wait for a gate. arrival_per_s, service_per_s: tasks per second.
    seconds_to_empty: 0 for an empty queue; None while it does not get shorter. slots, busy_slots: of the workers that
    serve it, as far as they may run its tasks. wanted_slots: what would empty it within the target. limited_by:
    "paused", "gate:NAME", "slots", or "none".
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
    at_gates = rows.filter(state=TaskState.FAILED, retry_at__isnull=False, reason=FailureReason.GATE_FULL)
    by_gate = dict(at_gates.values_list("gate").annotate(count=Count("id")).order_by("-count"))
    queued, held = info.waiting, sum(by_gate.values())
    serving = inspector.workers.serving(queue)
    running = sum(task.queue == queue for each in serving for task in each.running)
    waiting = queued + held
    flow = _since_last_question((prefix_of(backend), queue), waiting, info.processed)
    if flow is None:
        minutes = inspector.queues.minutes(queue, minutes=2)
        # Redis counts by its own clock.
        service = served_per_second(minutes, redis_clock.seconds() - minutes[0].at.timestamp())
        flow = Flow(_arrivals(queue, backend, now), service)
    arrival, service = flow
    slots, busy = sum(each.slots_for(queue) for each in serving), sum(each.busy_for(queue) for each in serving)
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
        limited_by(queued, by_gate, slots - busy, is_paused=info.is_paused),
    )


class Flow(NamedTuple):
    """Tasks a second that came, and that finished."""

    arrival: float
    service: float


class _Sample(NamedTuple):
    at: float
    waiting: int
    processed: int


# What this process has last answered of each queue, by its prefix and name; the oldest first.
_samples: dict[tuple[str, str], list[_Sample]] = {}
_samples_lock = Lock()


def _since_last_question(queue: tuple[str, str], waiting: int, processed: int) -> Flow | None:
    """Return what came and went since an earlier question to this process; None when there is none to compare with.

    What came is what was processed and what the queue has grown by: also what has no row, and what is tried again.
    """
    now = time.monotonic()
    with _samples_lock:
        kept = [each for each in _samples.pop(queue, []) if now - each.at <= LONGEST_SPAN_SECONDS]
        before = next((each for each in reversed(kept) if now - each.at >= SHORTEST_SPAN_SECONDS), None)
        # Some ask many times a second.
        is_new = not kept or now - kept[-1].at >= SAMPLE_SECONDS
        _samples[queue] = [*kept, *([_Sample(now, waiting, processed)] if is_new else [])][-MOST_SAMPLES:]
        while len(_samples) > MOST_QUEUES:
            del _samples[next(iter(_samples))]
    # A counter that fell is that of another memory of Redis.
    if before is None or processed < before.processed:
        return None
    seconds, finished = now - before.at, processed - before.processed
    return Flow(max((finished + waiting - before.waiting) / seconds, 0.0), finished / seconds)


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


def limited_by(queued: int, by_gate: dict[str, int], free: int, *, is_paused: bool) -> str:
    """Return what holds the queue back. by_gate: tasks that wait for each gate, the most first. free: its slots."""
    if is_paused:
        return "paused"
    if by_gate and sum(by_gate.values()) >= queued:
        return f"gate:{next(iter(by_gate))}"
    if queued and free <= 0:
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
