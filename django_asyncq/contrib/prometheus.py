"""Metrics for Prometheus, with `prometheus_client` (`pip install django-asyncq[prometheus]`).

`path("metrics", metrics_view)` answers scrapes. A project that has a registry of its own registers `AsyncqCollector`
with it. All values are read from the stores at a scrape, so every web process gives the same, and no worker counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseNotFound

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ImportError(
        "django_asyncq.contrib.prometheus needs the prometheus_client package: pip install django-asyncq[prometheus]"
    ) from error

from ..broker.run_counts import BOUNDS, Times
from ..core.guard import get_logger
from ..observe.access import may_read
from ..observe.inspector import QueueInfo, WorkerInfo
from ..observe.numbers import Numbers, read_numbers
from ..storage.errors import STORE_ERRORS, one_line

__all__ = ["AsyncqCollector", "metrics_view"]

logger = get_logger("django_asyncq.monitoring")

ROWS = ("queued", "running")
ENTRIES = ("pending", "active", "scheduled", "retry", "archived", "completed", "inbox", "rejected")


class AsyncqCollector(Collector):
    """Reads the numbers of both stores at each scrape. While one is unreachable, `asyncq_up` alone is there, as 0."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Raises nothing for a store that is unreachable."""
        began = time.perf_counter()
        try:
            numbers = read_numbers()
        except STORE_ERRORS as error:
            logger.warning("a scrape of metrics found a store unreachable: %s", one_line(error))
            yield _gauge("up", "Whether both stores could be read.", 0)
            return
        yield _gauge("up", "Whether both stores could be read.", 1)
        yield from _of_queues(numbers.queues)
        yield from _of_tasks(numbers)
        yield from _of_workers(numbers.workers)
        yield from _of_gates(numbers)
        yield from _of_rates(numbers)
        yield from _of_fleet(numbers)
        yield _gauge("scrape_seconds", "How long it took to read both stores.", time.perf_counter() - began)


def metrics_view(request: HttpRequest) -> HttpResponse:
    """Answer a scrape, to those who may read the numbers; 404 to others.

    With ASYNCQ["MONITOR_TOKEN"] the scraper sends it as `Authorization: Bearer …`; a member of staff may look too.
    """
    if not may_read(request):
        return HttpResponseNotFound()
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD"])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AsyncqCollector())
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    answer = HttpResponse(encode(registry), content_type=content_type)
    answer["Cache-Control"] = "no-store"
    return answer


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"asyncq_{name}", text, value=value)


def _family(
    name: str, text: str, labels: Iterable[str], samples: Iterable[tuple[list[str], float]], *, counts: bool = False
) -> Metric:
    kind = CounterMetricFamily if counts else GaugeMetricFamily
    family = kind(f"asyncq_{name}", text, labels=list(labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, labels: Iterable[str], samples: Iterable[tuple[list[str], Times]]) -> Metric:
    family = HistogramMetricFamily(f"asyncq_{name}", text, labels=list(labels))
    bounds = [*(str(float(each)) for each in BOUNDS), "+Inf"]
    for values, times in samples:
        family.add_metric(values, list(zip(bounds, accumulate(times.buckets), strict=True)), times.seconds)
    return family


def _of_queues(queues: list[QueueInfo]) -> Iterator[Metric]:
    labels = ("backend", "queue")
    yield _family(
        "queue_rows",
        "Tasks of the database that are not final, by state.",
        (*labels, "state"),
        (([each.backend, each.queue, state], getattr(each, state)) for each in queues for state in ROWS),
    )
    yield _family(
        "queue_entries",
        "What Redis holds of a queue, by asynq's state; pending with priority.",
        (*labels, "state"),
        (([each.backend, each.queue, state], getattr(each, state)) for each in queues for state in ENTRIES),
    )
    yield _family(
        "queue_waiting",
        "What a worker could take now: due tasks, messages of other programs, documents of the inbox.",
        labels,
        (([each.backend, each.queue], each.waiting) for each in queues),
    )
    yield _family(
        "queue_oldest_waiting_seconds",
        "How long the oldest task has been due; 0 when none is.",
        labels,
        (([each.backend, each.queue], each.oldest_waiting_seconds or 0.0) for each in queues),
    )
    yield _family(
        "queue_paused",
        "1 while workers take nothing from the queue.",
        labels,
        (([each.backend, each.queue], float(each.is_paused)) for each in queues),
    )
    yield _family(
        "queue_processed",
        "Attempts that have finished, failed ones included. It begins at 0 again when Redis has lost its memory.",
        labels,
        (([each.backend, each.queue], each.processed) for each in queues),
        counts=True,
    )
    yield _family(
        "queue_failed",
        "Attempts that have failed. It begins at 0 again each day of UTC.",
        labels,
        (([each.backend, each.queue], each.failed_today) for each in queues),
        counts=True,
    )


def _of_tasks(numbers: Numbers) -> Iterator[Metric]:
    unknown = [([each.backend, each.queue, each.name], each.total) for each in numbers.unknown]
    text = "Tasks that wait for a worker whose code has them, and the version of their arguments."
    yield _family("unknown_tasks", text, ("backend", "queue", "task"), _added(unknown))
    yield _family(
        "task_rows",
        "Tasks of the database that are not final, by name and state.",
        ("task", "state"),
        (([name, state], count) for (name, state), count in sorted(numbers.tasks.items())),
    )
    labels = ("backend", "queue", "task")
    runs = [([*of, name], counts) for of, by_name in sorted(numbers.runs.items()) for name, counts in by_name.items()]
    yield _family(
        "task_runs",
        "How attempts ended, and tasks that did not begin. It begins at 0 again when Redis has lost its memory.",
        (*labels, "outcome"),
        (([*of, how], count) for of, counts in runs for how, count in counts.outcomes.items()),
        counts=True,
    )
    yield _histogram("task_duration_seconds", "How long attempts took.", labels, ((of, each.took) for of, each in runs))
    text = "How long tasks had been due when an attempt began."
    yield _histogram("task_wait_seconds", text, labels, ((of, each.waited) for of, each in runs))


def _added(samples: Iterable[tuple[list[str], int]]) -> list[tuple[list[str], int]]:
    """Return one sample for the same labels: versions of a task have none of their own."""
    totals: Counter[tuple[str, ...]] = Counter()
    for labels, count in samples:
        totals[tuple(labels)] += count
    return [(list(labels), count) for labels, count in totals.items()]


def _of_workers(workers: list[WorkerInfo]) -> Iterator[Metric]:
    counts: dict[tuple[str, str], int] = {}
    slots: dict[str, list[float]] = {}
    for each in workers:
        state = "other" if not each.is_ours else "draining" if each.is_draining else "active"
        counts[each.backend, state] = counts.get((each.backend, state), 0) + 1
        if each.is_ours:
            found = slots.setdefault(each.backend, [0, 0, 0])
            for index, value in enumerate((each.slots, each.busy, each.rss_bytes)):
                found[index] += value
    yield _family(
        "workers",
        "Living worker processes; other: those of other programs.",
        ("backend", "state"),
        (([backend, state], count) for (backend, state), count in sorted(counts.items())),
    )
    texts = (
        ("worker_slots", "Tasks that the workers can run at once."),
        (
            "worker_slots_in_use",
            "Tasks that the workers run.",
        ),
        ("worker_memory_bytes", "Memory of the worker processes."),
    )
    for index, (name, text) in enumerate(texts):
        samples = (([backend], values[index]) for backend, values in sorted(slots.items()))
        yield _family(name, text, ("backend",), samples)


def _of_gates(numbers: Numbers) -> Iterator[Metric]:
    for name, text in (
        ("limit", "The most tasks of a gate that may be queued or running."),
        ("slots", "Tasks that hold a slot of a gate."),
        ("waiting", "Tasks that wait for a slot of a gate."),
    ):
        samples = (([each.name], getattr(each, name)) for each in numbers.gates)
        yield _family(f"gate_{name}", text, ("gate",), samples)


def _of_rates(numbers: Numbers) -> Iterator[Metric]:
    waiting = (([each.name], each.waiting) for each in numbers.rates)
    yield _family("rate_waiting", "Tasks that wait for a rate.", ("rate",), waiting)
    text = "How often a task had to wait for a rate. It begins at 0 again when nobody has asked the rate for an hour."
    refused = (([each.name], each.refused) for each in numbers.rates)
    yield _family("rate_refused", text, ("rate",), refused, counts=True)


def _of_fleet(numbers: Numbers) -> Iterator[Metric]:
    yield _gauge("supervisors", "Living supervisors: one for each runworkers.", numbers.supervisors)
    yield _gauge(
        "supervisors_vanished",
        "Those that died in the last hour without being stopped, and were not replaced on their hosts.",
        numbers.vanished_supervisors,
    )
    if numbers.silence_seconds is not None:
        yield _gauge("last_report_age_seconds", "Since a supervisor last reported.", numbers.silence_seconds)
    yield _gauge("schedules", "Schedules that are switched on.", numbers.schedules)
    yield _gauge("schedules_overdue", "Those whose occurrence is due.", numbers.overdue_schedules)
    yield _gauge("schedules_overdue_seconds", "How late the latest of them is.", numbers.overdue_seconds)
    yield _family(
        "schedule_last_failed",
        "1 for a schedule whose latest run has failed finally, or could not be queued; others are not there.",
        ("schedule",),
        (([name], 1.0) for name in numbers.failed_schedules),
    )
    yield _gauge("clock_difference_seconds", "Redis's clock less the database's.", numbers.clock_difference_seconds)
