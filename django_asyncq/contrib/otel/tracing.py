"""A span for each `enqueue` and one for each attempt, by the conventions for messaging systems; and their times.

The attempts of a task, and the tasks that it enqueues, are children of the span that enqueued it, in any process. So a
request, its tasks, their retries and their children are one trace, and so is a workflow: its steps are children of the
one span that enqueued them all. The span of an `enqueue` lasts as long as the call
and fails with it. That of a run whose process has died is made by the process that notices. A span has no arguments and
no result, and secrets in the text of an error are masked. Which providers of tracers and meters are used, and where
they export to, the project decides.
Source: https://opentelemetry.io/docs/specs/semconv/messaging/
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from datetime import datetime
from typing import Any, NamedTuple

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    raise ImportError(
        "django_asyncq.contrib.otel needs the opentelemetry-api package: pip install django-asyncq[otel]"
    ) from error

from ... import __version__
from ...broker.run_counts import BOUNDS
from ...core.guard import is_a
from ...core.header_sources import Finish, register_header_source, tracers
from ...core.masking import masker_of, masker_of_call
from ...core.payload import class_path, text_of, traceback_of
from ...core.redaction import MASK
from ...exceptions import Discard
from ...models import TaskRecord
from ...signals import run_ended, run_lost, run_started

SYSTEM = "django_asyncq"
TRACEBACK_CHARACTERS = 8_000
DESCRIPTION_CHARACTERS = 500

tracer = trace.get_tracer(SYSTEM, __version__)
_meter = metrics.get_meter(SYSTEM, __version__)
_run_times = _meter.create_histogram(
    "messaging.process.duration",
    unit="s",
    description="How long attempts of tasks took.",
    explicit_bucket_boundaries_advisory=BOUNDS,
)
_waits = _meter.create_histogram(
    "asyncq.task.wait",
    unit="s",
    description="How long tasks had been due when an attempt began.",
    explicit_bucket_boundaries_advisory=BOUNDS,
)


class _Open(NamedTuple):
    """The span of the attempt that runs in a context, how to leave it, and when it began (monotonic seconds)."""

    span: Span
    token: Token[contexts.Context]
    began: float


_open: ContextVar[_Open | None] = ContextVar("django_asyncq_otel_span", default=None)
# In a context: the span of the `enqueue` that is under way.
_ENQUEUE = contexts.create_key("django_asyncq_enqueue")


def instrument() -> None:
    """Make spans from now on; a second call does nothing."""
    register_header_source(headers_of_enqueue)
    if trace_enqueue not in tracers:
        tracers.append(trace_enqueue)
    run_started.connect_directly(begin_span)
    run_ended.connect_directly(end_span)
    run_lost.connect_directly(make_span_of_lost)


def trace_enqueue(task: Any, calls: Sequence[Any]) -> Finish:
    """Begin the span of an `enqueue` or `enqueue_many`; return what ends it."""
    attributes: dict[str, AttributeValue] = _attributes("send", "enqueue", task)
    if len(calls) != 1:
        attributes["messaging.batch.message_count"] = len(calls)
    span = tracer.start_span(f"enqueue {task.queue_name}", kind=SpanKind.PRODUCER, attributes=attributes)
    token = contexts.attach(contexts.set_value(_ENQUEUE, span, trace.set_span_in_context(span)))

    def finish(results: Sequence[Any] | None, error: BaseException | None) -> None:
        contexts.detach(token)
        try:
            if error is not None:
                _fail(span, error, _mask_of(task, calls))
                return
            ids = [result.id for result in results or () if result is not None]
            if len(calls) != 1:
                # With `partial` the gates may have refused some.
                span.set_attribute("messaging.batch.message_count", len(ids))
            elif ids:
                span.set_attribute("messaging.message.id", ids[0])
        finally:
            span.end()

    return finish


def headers_of_enqueue(task: Any) -> dict[str, str]:
    """Return the headers that carry the span of an `enqueue` to the worker.

    What is enqueued together with tasks of other kinds, by a schedule or from an inbox, gets a span of its own here.
    """
    carrier: dict[str, str] = {}
    if trace.get_current_span() is contexts.get_value(_ENQUEUE):
        propagate.inject(carrier)
        return carrier
    attributes = _attributes("create", "create", task)
    with tracer.start_as_current_span(f"create {task.queue_name}", kind=SpanKind.PRODUCER, attributes=attributes):
        propagate.inject(carrier)
        return carrier


def begin_span(*, record: TaskRecord, **kwargs: Any) -> None:
    """Begin the span of an attempt; what the body does is in it."""
    parent = _parent_of(record)
    span = _start(record, record.attempt, parent)
    _open.set(_Open(span, contexts.attach(trace.set_span_in_context(span, parent)), time.monotonic()))
    if (waited := record.waited_seconds) is not None:
        _waits.record(max(waited, 0.0), _attributes("process", "run", record))


def end_span(*, record: TaskRecord, exception: BaseException | None, **kwargs: Any) -> None:
    """End the span of the attempt that runs in this context, if one does: a run may finish in another process."""
    found = _open.get()
    if found is None:
        return
    _open.set(None)
    contexts.detach(found.token)
    error = None if exception is None or is_a(exception, Discard) else exception
    try:
        if error is not None:
            _fail(found.span, error, masker_of(record).text)
    finally:
        found.span.end()
        _measure(record, time.monotonic() - found.began, error)


def make_span_of_lost(
    *,
    record: TaskRecord,
    exception: BaseException,
    attempt: int,
    began_at: datetime,
    lost_at: datetime,
    **kwargs: Any,
) -> None:
    """Make the span of an attempt whose process has died, and could not send its own."""
    ended_at = _nanoseconds(lost_at)
    span = _start(record, attempt, _parent_of(record), _nanoseconds(began_at))
    try:
        _fail(span, exception, masker_of(record).text, ended_at)
    finally:
        span.end(ended_at)
        _measure(record, (lost_at - began_at).total_seconds(), exception)


def _measure(record: TaskRecord, seconds: float, error: BaseException | None) -> None:
    attributes = _attributes("process", "run", record)
    if error is not None:
        attributes["error.type"] = _name_of(error)
    _run_times.record(max(seconds, 0.0), attributes)


def _name_of(error: BaseException) -> str:
    return class_path(error).removeprefix("builtins.")


def _parent_of(record: TaskRecord) -> contexts.Context:
    return propagate.extract({str(name).lower(): value for name, value in (record.headers or {}).items()})


def _start(record: TaskRecord, attempt: int, parent: contexts.Context, began_at: int | None = None) -> Span:
    attributes: dict[str, AttributeValue] = {
        **_attributes("process", "run", record),
        "messaging.message.id": str(record.id),
        "asyncq.attempt": attempt,
    }
    if record.workflow_id is not None:
        attributes["asyncq.workflow"] = str(record.workflow_id)
    name = f"run {record.queue_name}"
    return tracer.start_span(name, parent, kind=SpanKind.CONSUMER, attributes=attributes, start_time=began_at)


def _fail(span: Span, exception: BaseException, mask: Callable[[str], str], at: int | None = None) -> None:
    """Note in a span with what it has failed. at: nanoseconds since 1970; None for now."""
    name = _name_of(exception)
    text = mask(text_of(exception))
    span.set_attribute("error.type", name)
    description = f"{name.rpartition('.')[2]}: {text}"
    span.set_status(Status(StatusCode.ERROR, description[:DESCRIPTION_CHARACTERS]))
    stack = mask(traceback_of(exception))[-TRACEBACK_CHARACTERS:]
    event = {"exception.type": name, "exception.message": text, "exception.stacktrace": stack}
    span.add_event("exception", event, at)


def _mask_of(task: Any, calls: Sequence[Any]) -> Callable[[str], str]:
    """Return what masks the secrets of calls, which are not rows yet; those of many are too many to look for."""
    if task.sensitive and len(calls) != 1:
        return lambda text: MASK
    args, kwargs = [], {}
    if task.sensitive and calls:
        # As a row would have them.
        args, kwargs = json.loads(json.dumps([*calls[0]], default=str, skipkeys=True))
    return masker_of_call(task.module_path, args, kwargs, task.backend).text


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1_000


def _attributes(kind: str, operation: str, task: Any) -> dict[str, AttributeValue]:
    """Return the attributes of any span. task: declared, or a row."""
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.type": kind,
        "messaging.operation.name": operation,
        "messaging.destination.name": task.queue_name,
        "asyncq.task": task.name if isinstance(task, TaskRecord) else task.module_path,
    }
