"""A span for each `enqueue` and one for each attempt, by the conventions for messaging systems.

The attempts of a task, and the tasks that it enqueues, are children of the span that enqueued it, in any process. So a
request, its tasks, their retries and their children are one trace. A span has no arguments and no result, and secrets
in the text of an error are masked. Which tracer provider is used, and where it exports to, the project decides.
Source: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, NamedTuple

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    raise ImportError(
        "django_asyncq.contrib.otel needs the opentelemetry-api package: pip install django-asyncq[otel]"
    ) from error

from ... import __version__
from ...definitions.exception_text import text_of, traceback_of
from ...guard import class_name
from ...header_sources import register_header_source
from ...masking import masker_of
from ...models import TaskRecord
from ...signals import run_ended, run_started

SYSTEM = "django_asyncq"
TRACEBACK_CHARACTERS = 8_000

tracer = trace.get_tracer(SYSTEM, __version__)


class _Open(NamedTuple):
    """The span of the attempt that runs in a context, and how to leave it."""

    span: Span
    token: Token[contexts.Context]


_open: ContextVar[_Open | None] = ContextVar("django_asyncq_otel_span", default=None)


def instrument() -> None:
    """Make spans from now on; a second call does nothing."""
    register_header_source(headers_of_enqueue)
    run_started.connect(begin_span, dispatch_uid=f"{__name__}.begin")
    run_ended.connect(end_span, dispatch_uid=f"{__name__}.end")


def headers_of_enqueue(task: Any) -> dict[str, str]:
    """Make the span of an `enqueue`, and return the headers that carry it to the worker."""
    attributes = {**_attributes("send", "enqueue", task.queue_name), "asyncq.task": task.module_path}
    with tracer.start_as_current_span(f"enqueue {task.queue_name}", kind=SpanKind.PRODUCER, attributes=attributes):
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier


def begin_span(sender: type[TaskRecord], *, record: TaskRecord, **kwargs: Any) -> None:
    """Begin the span of an attempt; what the body does is in it."""
    carrier = {str(name).lower(): value for name, value in (record.headers or {}).items()}
    parent = propagate.extract(carrier)
    attributes: dict[str, AttributeValue] = {
        **_attributes("process", "run", record.queue_name),
        "messaging.message.id": str(record.id),
        "asyncq.task": record.name,
        "asyncq.attempt": record.attempt,
    }
    span = tracer.start_span(f"run {record.queue_name}", parent, kind=SpanKind.CONSUMER, attributes=attributes)
    _open.set(_Open(span, contexts.attach(trace.set_span_in_context(span, parent))))


def end_span(sender: type[TaskRecord], *, record: TaskRecord, exception: BaseException | None, **kwargs: Any) -> None:
    """End the span of the attempt that runs in this context, if one does: a run may finish in another process."""
    found = _open.get()
    if found is None:
        return
    _open.set(None)
    if exception is not None:
        masker = masker_of(record)
        found.span.set_status(Status(StatusCode.ERROR, class_name(exception)))
        found.span.add_event(
            "exception",
            {
                "exception.type": class_name(exception),
                "exception.message": masker.text(text_of(exception)),
                "exception.stacktrace": masker.text(traceback_of(exception))[-TRACEBACK_CHARACTERS:],
            },
        )
    contexts.detach(found.token)
    found.span.end()


def _attributes(kind: str, operation: str, queue: str) -> dict[str, str]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.type": kind,
        "messaging.operation.name": operation,
        "messaging.destination.name": queue,
    }
