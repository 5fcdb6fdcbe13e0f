"""Traces through tasks: one from a request to the children of its tasks; headers that a project adds to each task."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from django_asyncq import checks, header_sources
from django_asyncq.contrib.otel import tracing
from django_asyncq.definitions.headers import with_inherited
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import run_ended, run_started
from django_asyncq.testing import run_tasks

from . import tasks, traced_tasks
from .workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans that this process has made; tasks are instrumented for one test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("tests"))
    tracing.instrument()
    yield exporter
    header_sources.forget_header_source(tracing.headers_of_enqueue)
    run_started.disconnect(dispatch_uid=f"{tracing.__name__}.begin")
    run_ended.disconnect(dispatch_uid=f"{tracing.__name__}.end")


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
    assert first.status.code == 2 and first.status.message == "LookupError" and second.status.code == 0
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


def test_without_a_provider_nothing_is_added(kit: None) -> None:
    """The span of a process without a tracer is no parent."""
    tracing.instrument()
    try:
        traced_tasks.child.enqueue()
        run_tasks()
    finally:
        header_sources.forget_header_source(tracing.headers_of_enqueue)
        run_started.disconnect(dispatch_uid=f"{tracing.__name__}.begin")
        run_ended.disconnect(dispatch_uid=f"{tracing.__name__}.end")
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
