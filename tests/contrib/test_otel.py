"""Traces through tasks: one from a request to the children of its tasks; headers that a project adds to each task."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from django_asyncq import chain, checks, group, lifecycle, previous
from django_asyncq.broker import Broker
from django_asyncq.contrib.otel import tracing
from django_asyncq.core import compat, header_sources
from django_asyncq.core.headers import with_inherited
from django_asyncq.exceptions import QueueFull, TaskTimeout
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import run_ended, run_lost, run_started
from django_asyncq.testing import run_tasks

from .. import tasks, traced_tasks, workflow_tasks
from ..runs import claimed
from ..workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans that this process has made; tasks are instrumented for one test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("tests"))
    tracing.instrument()
    yield exporter
    forget_tracing()


def forget_tracing() -> None:
    """Make no more spans."""
    header_sources.forget_header_source(tracing.headers_of_enqueue)
    header_sources.tracers.remove(tracing.trace_enqueue)
    run_started.direct.remove(tracing.begin_span)
    run_ended.direct.remove(tracing.end_span)
    run_lost.direct.remove(tracing.make_span_of_lost)


@pytest.fixture
def kit(settings: Any) -> None:
    """Tasks run in this process, by `run_tasks`."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}


class Collector:
    """An OTLP receiver; keeps the spans that arrive."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A receiver for the spans of worker processes."""
    found = Collector()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


@pytest.mark.parametrize("is_burst", [True, False], ids=["burst", "SIGTERM"])
def test_no_span_is_lost_at_the_end_of_a_process(collector: Collector, tmp_path: Path, is_burst: bool) -> None:
    """An exporter of batches, as the guide has it, sends the last ones at exit."""
    for _ in range(60):
        tasks.add.enqueue(1)
    options = ["--burst"] if is_burst else []
    with workers(
        tmp_path, "--processes", "2", *options, ASYNCQ_TEST_OTLP=collector.url, ASYNCQ_TEST_OTLP_LATE="yes"
    ) as fleet:
        if is_burst:
            assert fleet.process.wait(60) == 0, fleet.output()
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == 60, "all tasks")
        assert fleet.stop() == 0
    assert len([span for span in collector.spans if span.name == "run default"]) == 60


def test_a_request_its_task_the_retry_and_the_child_are_one_trace(
    spans: InMemorySpanExporter, collector: Collector, tmp_path: Path
) -> None:
    """Across processes: the worker exports to a collector."""
    with tracing.tracer.start_as_current_span("request") as request:
        traced_tasks.parent.enqueue()
    (enqueued,) = named(spans, "enqueue default")
    assert enqueued.kind is SpanKind.PRODUCER and enqueued.parent is not None
    assert enqueued.parent.span_id == request.get_span_context().span_id
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_OTLP=collector.url):
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == 2, "both tasks")
        wait_until(lambda: len(collector.spans) == 4, "the spans")
    trace_id = request.get_span_context().trace_id.to_bytes(16, "big")
    assert {span.trace_id for span in collector.spans} == {trace_id}
    first, second = (span for span in collector.spans if span.name == "run default")
    (sent,) = (span for span in collector.spans if span.name == "enqueue mail")
    (child,) = (span for span in collector.spans if span.name == "run mail")
    producer = enqueued.get_span_context()
    assert producer is not None
    assert first.parent_span_id == second.parent_span_id == producer.span_id.to_bytes(8, "big")
    assert sent.parent_span_id == second.span_id and child.parent_span_id == sent.span_id
    attributes = {each.key: each.value for each in first.attributes}
    assert attributes["messaging.destination.name"].string_value == "default"
    assert attributes["asyncq.task"].string_value == "tests.traced_tasks.parent"
    assert attributes["asyncq.attempt"].int_value == 1
    assert first.status.code == 2 and first.status.message == "LookupError: not yet" and second.status.code == 0
    # An `async def` body runs in its span too.
    assert TaskRecord.objects.get(name="tests.traced_tasks.child").return_value == child.span_id.hex()


def test_a_span_has_no_arguments_and_no_secret(spans: InMemorySpanExporter, kit: None) -> None:
    """The text of the error is masked; what was called is not there."""
    traced_tasks.pays.enqueue("DE02120300000000202051", amount=77_123)
    run_tasks()
    (span,) = named(spans, "run default")
    text = span.to_json()
    assert span.status.status_code is StatusCode.ERROR and "ValueError" in text and "no account" in text
    assert "DE02120300000000202051" not in text and "hunter22" not in text and "77123" not in text


# --- the span of an enqueue


def test_the_span_of_an_enqueue_lasts_as_long_as_the_call(spans: InMemorySpanExporter) -> None:
    """The INSERT and what follows the push are in it; it has the id of the task."""
    found: list[tuple[str, Any]] = []

    def note_insert(execute: Any, sql: Any, *rest: Any) -> Any:
        if str(sql).startswith("INSERT"):
            found.append(("INSERT", trace.get_current_span()))
        return execute(sql, *rest)

    def note_pushed(**kwargs: Any) -> None:
        found.append(("pushed", trace.get_current_span()))

    compat.task_enqueued.connect(note_pushed)
    try:
        with connection.execute_wrapper(note_insert):
            result = tasks.add.enqueue(1)
    finally:
        compat.task_enqueued.disconnect(note_pushed)
    (span,) = named(spans, "enqueue default")
    assert [(what, each.get_span_context()) for what, each in found] == [
        ("INSERT", span.get_span_context()),
        ("pushed", span.get_span_context()),
    ]
    assert span.attributes is not None and span.attributes["messaging.message.id"] == result.id
    assert "messaging.batch.message_count" not in span.attributes and span.status.status_code is StatusCode.UNSET
    assert not trace.get_current_span().is_recording()


def test_many_tasks_have_one_span(spans: InMemorySpanExporter, kit: None) -> None:
    """It counts those that were enqueued, and is the parent of their runs."""
    calls = [(f"DE{number}",) for number in (1, 2, 1)]
    assert traced_tasks.books.enqueue_many(calls, partial=True)[2] is None
    run_tasks()
    (sent,) = named(spans, "enqueue default")
    attributes = dict(sent.attributes or {})
    assert attributes["messaging.batch.message_count"] == 2 and "messaging.message.id" not in attributes
    parents = [span.parent.span_id for span in named(spans, "run default") if span.parent]
    context = sent.get_span_context()
    assert context is not None and parents == [context.span_id] * 2


READ_ONLY = {
    "sqlite": ("PRAGMA query_only = ON", "PRAGMA query_only = OFF"),
    "postgresql": ("SET default_transaction_read_only = on", "SET default_transaction_read_only = off"),
    "mysql": ("SET SESSION TRANSACTION READ ONLY", "SET SESSION TRANSACTION READ WRITE"),
}


def full_gate() -> None:
    traced_tasks.books.enqueue("DE02120300000000202051")
    traced_tasks.books.enqueue("DE02120300000000202051")


def duplicate() -> None:
    traced_tasks.only_once.enqueue()
    traced_tasks.only_once.enqueue()


def read_only_database() -> None:
    begin, end = READ_ONLY[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(begin)
        try:
            tasks.add.enqueue(1)
        finally:
            cursor.execute(end)


def bad_arguments() -> None:
    tasks.add.enqueue_many([(1,), (object(),)])


@pytest.mark.parametrize(
    ("enqueue", "error"),
    [
        (full_gate, "django_asyncq.exceptions.QueueFull"),
        (duplicate, "django_asyncq.exceptions.DuplicateTask"),
        (read_only_database, "django.db.utils."),
        (bad_arguments, "django_asyncq.exceptions.InvalidArguments"),
    ],
)
def test_the_span_of_an_enqueue_fails_with_it(enqueue: Any, error: str, spans: InMemorySpanExporter) -> None:
    """It says why, without secrets, and names no task."""
    with pytest.raises(Exception) as raised:
        enqueue()
    span = named(spans, "enqueue default")[-1]
    attributes = dict(span.attributes or {})
    kind = type(raised.value)
    assert attributes["error.type"] == f"{kind.__module__}.{kind.__qualname__}" and error in attributes["error.type"]
    assert span.status.status_code is StatusCode.ERROR
    assert str(span.status.description).startswith(f"{kind.__name__}: ")
    assert "messaging.message.id" not in attributes and "DE0212" not in span.to_json()
    (event,) = span.events
    assert event.attributes is not None and event.attributes["exception.type"] == attributes["error.type"]
    assert not trace.get_current_span().is_recording()


def test_the_error_of_many_calls_has_no_text_if_their_task_has_secrets(spans: InMemorySpanExporter) -> None:
    """There may be thousands of values to look for."""
    with pytest.raises(QueueFull):
        traced_tasks.books.enqueue_many([("DE02120300000000202051",)] * 2)
    (span,) = named(spans, "enqueue default")
    assert span.status.description == "QueueFull: ••••••" and "DE0212" not in span.to_json()


class Failing(SpanProcessor):
    """Fails when a span begins, or when it ends."""

    def __init__(self, when: str) -> None:
        self.when = when

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Fail."""
        if self.when == "start":
            raise OSError("the tracer is broken")

    def on_end(self, span: Any) -> None:
        """Fail."""
        if self.when == "end":
            raise OSError("the tracer is broken")


@pytest.mark.parametrize("when", ["start", "end"])
def test_a_tracer_that_fails_costs_no_task(
    when: str, spans: Any, kit: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its enqueueing nor its run; the log says so."""
    provider = TracerProvider()
    provider.add_span_processor(Failing(when))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("tests"))
    monkeypatch.setattr(header_sources, "_logged", {})
    result = tasks.add.enqueue(1)
    tasks.add.enqueue(2)
    run_tasks()
    result.refresh()
    assert result.return_value == 1 and TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == 2
    assert len([line for line in caplog.records if line.message.startswith("tracer ")]) == 1
    assert not trace.get_current_span().is_recording()


# --- the span of a run whose process has died


def test_a_killed_run_has_a_span(spans: InMemorySpanExporter, collector: Collector, tmp_path: Path) -> None:
    """Its supervisor sends it; the run that follows has its own, with the same parent."""
    result = traced_tasks.dies_once.enqueue()
    (sent,) = named(spans, "enqueue default")
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_OTLP=collector.url):
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).exists(), "the second run")
        wait_until(lambda: len(collector.spans) == 2, "the spans")
    lost, ran = sorted(collector.spans, key=lambda span: int(span.start_time_unix_nano))
    context = sent.get_span_context()
    assert context is not None
    assert lost.parent_span_id == ran.parent_span_id == context.span_id.to_bytes(8, "big")
    attributes = {each.key: each.value for each in lost.attributes}
    assert attributes["error.type"].string_value == "django_asyncq.exceptions.WorkerLost"
    assert attributes["messaging.message.id"].string_value == result.id
    assert attributes["asyncq.attempt"].int_value == 1
    assert (lost.status.code, ran.status.code) == (2, 0) and "SIGKILL" in lost.status.message
    # The row says when it began, soon after it did.
    assert lost.end_time_unix_nano - lost.start_time_unix_nano > 10_000_000
    assert lost.end_time_unix_nano <= ran.start_time_unix_nano + 1_000_000_000


def recover(run: lifecycle.Run, blame: lifecycle.Blame | None = None, **more: Any) -> None:
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone, password=hunter22", blame=blame, **more)


def claimed_only() -> lifecycle.Run:
    tasks.add.enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    return run


def of(run: lifecycle.Run) -> frozenset[str]:
    return frozenset({str(run.record.id)})


def expires() -> None:
    recover(claimed())


def is_innocent() -> None:
    recover(claimed(), lifecycle.Blame())


def is_blamed_at_once() -> None:
    run = claimed_only()
    recover(run, lifecycle.Blame(named=of(run)))


def overruns() -> None:
    run = claimed()
    recover(run, lifecycle.Blame(), timed_out={str(run.record.id): (TaskTimeout("too long"), None)})


def is_abandoned() -> None:
    assert lifecycle.abandon(claimed().record, "no lease")


@pytest.mark.parametrize(
    ("lose", "error", "text"),
    [
        (expires, "WorkerLost", "gone, password=••••••"),
        (is_innocent, "WorkerLost", "gone, password=••••••"),
        (is_blamed_at_once, "WorkerLost", "gone, password=••••••"),
        (overruns, "TaskTimeout", "too long"),
        (is_abandoned, "WorkerLost", "no lease"),
    ],
)
def test_a_run_that_is_given_up_has_a_span(lose: Any, error: str, text: str, spans: InMemorySpanExporter) -> None:
    """It began when the row says, and ended now."""
    lose()
    (span,) = named(spans, "run default")
    (sent,) = named(spans, "enqueue default")
    record = TaskRecord.objects.get()
    context = sent.get_span_context()
    assert context is not None and span.parent is not None and span.parent.span_id == context.span_id
    assert span.kind is SpanKind.CONSUMER
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == f"django_asyncq.exceptions.{error}" and attributes["asyncq.attempt"] == 1
    assert attributes["messaging.message.id"] == str(record.id)
    assert span.status.description == f"{error}: {text}" and record.last_attempted_at is not None
    assert span.start_time is not None and span.end_time is not None
    assert abs(span.start_time / 1e9 - record.last_attempted_at.timestamp()) < 0.001
    assert (span.start_time == span.end_time) == (lose is is_blamed_at_once)


def waits_in_a_lost_host() -> None:
    recover(claimed_only())


def waits_in_a_dead_process() -> None:
    recover(claimed_only(), lifecycle.Blame())


def has_spilled() -> None:
    run = claimed()
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.spill_outcomes(Broker(), "w", [run]) == 1
    recover(run)


@pytest.mark.parametrize("lose", [waits_in_a_lost_host, waits_in_a_dead_process, has_spilled])
def test_what_had_not_begun_or_had_finished_has_none(lose: Any, spans: InMemorySpanExporter) -> None:
    """Nobody knows of a run that was cut."""
    lose()
    assert named(spans, "run default") == []


# --- what must not happen


def test_without_a_provider_nothing_is_added(kit: None) -> None:
    """The span of a process without a tracer is no parent."""
    tracing.instrument()
    try:
        traced_tasks.child.enqueue()
        run_tasks()
    finally:
        forget_tracing()
    record = TaskRecord.objects.get()
    assert record.headers is None and record.state == TaskState.SUCCEEDED


def test_a_hostile_header_is_no_parent(spans: InMemorySpanExporter, kit: None) -> None:
    """A span of its own begins then."""
    traced_tasks.child.using(headers={"traceparent": "00-zz", "x": "\x1b[31m"}).enqueue()
    run_tasks()
    (span,) = named(spans, "run mail")
    assert span.parent is None


def test_the_span_of_a_run_ends_with_it(spans: InMemorySpanExporter, kit: None) -> None:
    """Afterwards the caller's own span is the current one again."""
    with tracing.tracer.start_as_current_span("request") as request:
        tasks.add.enqueue(1)
        run_tasks()
        assert trace.get_current_span() is request


def test_a_receiver_that_fails_costs_no_task(caplog: pytest.LogCaptureFixture, kit: None) -> None:
    """Neither before the body nor after it; the log says so."""

    def fails(**kwargs: Any) -> None:
        raise OSError("the exporter is away")

    run_started.connect(fails)
    run_ended.connect(fails)
    try:
        tasks.add.enqueue(1)
        run_tasks()
    finally:
        run_started.disconnect(fails)
        run_ended.disconnect(fails)
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED
    assert "the exporter is away" in caplog.text


def test_the_signals_of_a_run_carry_its_row_and_its_error(kit: None) -> None:
    """Both for each attempt."""
    heard: list[Any] = []

    def hear_start(record: TaskRecord, **kwargs: Any) -> None:
        heard.append(("start", record.attempt))

    def hear_end(record: TaskRecord, exception: BaseException | None, **kwargs: Any) -> None:
        heard.append(("end", record.attempt, type(exception).__name__))

    run_started.connect(hear_start)
    run_ended.connect(hear_end)
    try:
        traced_tasks.parent.enqueue()
        run_tasks()
    finally:
        run_started.disconnect(hear_start)
        run_ended.disconnect(hear_end)
    assert heard[:4] == [("start", 1), ("end", 1, "LookupError"), ("start", 2), ("end", 2, "NoneType")]


# --- headers of a project


def with_sources(settings: Any, *paths: str) -> None:
    settings.ASYNCQ = {**settings.ASYNCQ, "HEADER_SOURCES": list(paths)}


def test_a_source_adds_headers_to_each_task(settings: Any) -> None:
    """Those of the call win."""
    with_sources(settings, "tests.traced_tasks.source")
    tasks.add.enqueue(1)
    assert TaskRecord.objects.get().headers == {"x-task": "tests.tasks.add"}
    TaskRecord.objects.all().delete()
    tasks.add.using(headers={"x-task": "own"}).enqueue(1)
    assert TaskRecord.objects.get().headers == {"x-task": "own"}


@pytest.mark.parametrize(
    ("own", "inherited", "sourced", "headers"),
    [
        (None, {}, {}, None),
        (None, {"trace-id": "a"}, {}, {"trace-id": "a"}),
        (None, {"trace-id": "a"}, {"x": "1"}, {"trace-id": "a", "x": "1"}),
        (None, {"trace-id": "a"}, {"traceparent": "b"}, {"traceparent": "b"}),
        ({"traceparent": "c"}, {"trace-id": "a"}, {"traceparent": "b", "x": "1"}, {"traceparent": "c", "x": "1"}),
        ({"y": "2"}, {"trace-id": "a"}, {"x": "1"}, {"trace-id": "a", "x": "1", "y": "2"}),
        ({"y": "2"}, {}, {"x": "1" * 9_000}, {"y": "2"}),
    ],
)
def test_a_task_belongs_to_one_trace(own: Any, inherited: Any, sourced: Any, headers: Any) -> None:
    """The one that the call names, else that of a source, else that of the task that makes the call."""
    assert with_inherited(own, inherited, sourced) == headers


@pytest.mark.parametrize("bad", ["failing_source", "no_source"])
def test_a_source_that_fails_costs_no_task(
    bad: str, settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are asked; the log says it once a minute."""
    monkeypatch.setattr(header_sources, "_logged", {})
    with_sources(settings, f"tests.traced_tasks.{bad}", "tests.traced_tasks.source")
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            tasks.add.enqueue(number)
    assert {tuple(record.headers or {}) for record in TaskRecord.objects.all()} == {("x-task",)}
    assert len([line for line in caplog.records if "header source" in line.message]) == 1


@pytest.mark.parametrize("bad", ["tests.traced_tasks.source", ["tests.nothing.at_all"], [5], ["tests.tasks"], {"a": 1}])
def test_a_source_that_is_none_is_refused(bad: Any, settings: Any) -> None:
    """By the check, before the first task."""
    settings.ASYNCQ = {**settings.ASYNCQ, "HEADER_SOURCES": bad}
    (found,) = [each for each in checks.check_settings(None) if each.id == "asyncq.E172"]
    assert "functions" in (found.hint or "")


def test_times_are_metrics_by_task_and_error(spans: InMemorySpanExporter, kit: None, monkeypatch: Any) -> None:
    """How long attempts took, by the name that the conventions give it, and how long their tasks had waited."""
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("tests")
    monkeypatch.setattr(tracing, "_run_times", meter.create_histogram("messaging.process.duration", unit="s"))
    monkeypatch.setattr(tracing, "_waits", meter.create_histogram("asyncq.task.wait", unit="s"))
    for _ in range(3):
        tasks.add.enqueue(1)
    tasks.fail_until.enqueue(2)
    run_tasks()
    data = reader.get_metrics_data()
    assert data is not None
    found = {each.name: each.data.data_points for each in data.resource_metrics[0].scope_metrics[0].metrics}
    counted = {
        (name, point.attributes["asyncq.task"].rpartition(".")[2], point.attributes.get("error.type")): point.count
        for name, points in found.items()
        for point in points
    }
    duration, wait = "messaging.process.duration", "asyncq.task.wait"
    assert counted == {
        (duration, "add", None): 3,
        (duration, "fail_until", "tests.tasks.Glitch"): 1,
        (duration, "fail_until", None): 1,
        (wait, "add", None): 3,
        (wait, "fail_until", None): 2,
    }
    assert all(0 <= point.sum < 60 for points in found.values() for point in points)


@pytest.mark.parametrize(
    ("task", "arguments", "error"),
    [
        (tasks.overruns, [True], "django_asyncq.exceptions.TaskTimeout"),
        (tasks.returns_set, [], "django_asyncq.exceptions.InvalidResult"),
    ],
)
def test_a_run_that_returned_and_failed_all_the_same_has_a_failed_span(
    task: Any, arguments: list[Any], error: str, spans: InMemorySpanExporter, kit: None
) -> None:
    """It came after its timeout, or its result cannot be stored."""
    task.using(max_attempts=1).enqueue(*arguments)
    run_tasks()
    assert TaskRecord.objects.get().state == TaskState.FAILED
    (run,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CONSUMER]
    assert run.status.status_code is StatusCode.ERROR
    assert run.attributes is not None and run.attributes["error.type"] == error


# --- workflows


def test_a_workflow_is_one_trace(spans: InMemorySpanExporter, kit: None) -> None:
    """Also where nothing was traced before it: the one span of its enqueue is the parent of each run."""
    sums = workflow_tasks.total.using(after={"rows": previous}).step()
    result: Any = chain(group([workflow_tasks.load.step(number) for number in (1, 2)]), sums).enqueue()
    run_tasks()
    (sent,) = named(spans, "enqueue default")
    context, attributes = sent.get_span_context(), dict(sent.attributes or {})
    assert sent.parent is None and context is not None and named(spans, "create default") == []
    assert attributes["messaging.batch.message_count"] == 3 and "messaging.message.id" not in attributes
    runs = named(spans, "run default")
    assert len(runs) == 3 and {run.parent.span_id for run in runs if run.parent} == {context.span_id}
    workflow_id = str(TaskRecord.objects.get(id=result.id).workflow_id)
    assert {dict(run.attributes or {})["asyncq.workflow"] for run in runs} == {workflow_id}


def test_a_node_that_a_run_enqueues_is_in_the_trace_of_the_run(spans: InMemorySpanExporter, kit: None) -> None:
    """A workflow that grows while it runs stays one trace; a plain task names no workflow."""
    with tracing.tracer.start_as_current_span("request") as request:
        workflow_tasks.grows.enqueue(2)
    run_tasks()
    found = [span for span in spans.get_finished_spans() if span.name == "run default"]
    trace_id = request.get_span_context().trace_id
    assert len(found) == 4 and {span.get_span_context().trace_id for span in found} == {trace_id}
    by_task = {dict(span.attributes or {})["asyncq.task"]: dict(span.attributes or {}) for span in found}
    assert "asyncq.workflow" not in by_task["tests.workflow_tasks.grows"]
    assert "asyncq.workflow" in by_task["tests.workflow_tasks.total"]


def test_an_error_of_a_workflow_shows_no_secret(spans: InMemorySpanExporter) -> None:
    """Of none of its steps, whichever is first."""
    iban = "DE02120300000000202051"

    def refuse(execute: Any, sql: Any, *rest: Any) -> Any:
        if str(sql).startswith("INSERT"):
            raise ValueError(f"no account {iban}")
        return execute(sql, *rest)

    with connection.execute_wrapper(refuse), pytest.raises(ValueError, match=iban):
        chain(workflow_tasks.note.step("a"), traced_tasks.pays.step(iban, 1)).enqueue()
    (span,) = named(spans, "enqueue default")
    assert span.status.status_code is StatusCode.ERROR and iban not in span.to_json()
