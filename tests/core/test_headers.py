"""Headers travel with a task everywhere, and the trace they name is on each of its log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import DuplicateTask, lifecycle, task
from django_asyncq.broker import Broker
from django_asyncq.broker.message import decode_message
from django_asyncq.context import TaskContext, current_task
from django_asyncq.core.headers import LARGEST_BYTES, MOST_HEADERS, checked_headers, trace_id_of, with_inherited
from django_asyncq.core.logs import TaskLogFilter, enter_run, leave_run, log_extra
from django_asyncq.exceptions import InvalidOption
from django_asyncq.lifecycle.messages import message_of
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.testing import run_tasks

from .. import tasks
from ..runs import claimed

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
KIT = {"default": {"BACKEND": "django_asyncq.testing.TestBackend"}}


@task(takes_context=True)
def shows_headers(context: TaskContext) -> dict[str, str]:
    """Return the headers of the run; changing them changes nothing."""
    found = context.headers
    context.headers.clear()
    return found


@task
def enqueues(name: str = "") -> list[Any]:
    """Enqueue two tasks, and return the current trace."""
    shows_headers.enqueue()
    shows_headers.using(headers={"tenant": "b", **({name: "own"} if name else {})}).enqueue()
    current = current_task()
    assert current is not None
    return [current.trace_id]


@pytest.fixture
def running() -> Iterator[TaskRecord]:
    """The row of a task whose body this test is."""
    row = TaskRecord(name="app.work", queue_name="mail", attempt=1, headers={"traceparent": TRACEPARENT, "tenant": "a"})
    enter_run(row)
    yield row
    leave_run()


# --- the trace id


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        (None, None),
        ([], None),
        ({"tenant": "a"}, None),
        ({"traceparent": TRACEPARENT}, TRACE),
        ({"Traceparent": TRACEPARENT.upper()}, TRACE),
        ({"traceparent": TRACEPARENT + "-later"}, TRACE),
        ({"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, None),
        ({"traceparent": f"ff-{TRACE}-00f067aa0ba902b7-01"}, None),
        ({"traceparent": "odd", "trace-id": "t", "x-request-id": "r"}, "t"),
        ({"traceparent": "odd", "X-Request-Id": "r"}, "r"),
        ({"trace-id": "", "x-request-id": "r"}, "r"),
        ({"trace-id": "a\n2026 ERROR b"}, None),
        ({"trace-id": "x" * 201}, None),
        ({"trace-id": 7}, None),
    ],
)
def test_the_trace_of_headers(headers: Any, found: str | None) -> None:
    """The first that names a trace; what a log line cannot show is none."""
    assert trace_id_of(headers) == found


def test_the_lines_of_a_task_have_its_trace(running: TaskRecord) -> None:
    """In `extra`, in `current_task()` and through the filter; without such a header it is the id of the task."""
    assert log_extra(running)["trace_id"] == TRACE
    current = current_task()
    assert current is not None
    assert current.trace_id == TRACE
    line = logging.makeLogRecord({})
    assert TaskLogFilter().filter(line)
    assert line.trace_id == TRACE  # type: ignore[attr-defined]
    running.headers = {"tenant": "a"}
    assert log_extra(running)["trace_id"] == str(running.id)


# --- inheriting


@pytest.mark.django_db
def test_a_task_enqueued_by_another_belongs_to_its_trace(settings: Any) -> None:
    """It gets the headers of the trace, and no others; `enqueue_many` too. After the run nothing is inherited."""
    settings.TASKS = KIT
    enqueues.using(headers={"traceparent": TRACEPARENT, "X-Request-Id": "r", "tenant": "a"}).enqueue()
    run_tasks()
    first, *others = TaskRecord.objects.order_by("id")
    trace = {"traceparent": TRACEPARENT, "X-Request-Id": "r"}
    assert first.return_value == [TRACE]
    assert [row.headers for row in others] == [trace, {**trace, "tenant": "b"}]
    assert [row.return_value for row in others] == [row.headers for row in others]
    shows_headers.enqueue()
    assert TaskRecord.objects.order_by("id").last().headers is None  # type: ignore[union-attr]


@pytest.mark.django_db
def test_a_task_that_names_its_trace_inherits_none(settings: Any) -> None:
    """Parts of two traces would join what does not belong together."""
    settings.TASKS = KIT
    enqueues.using(headers={"traceparent": TRACEPARENT}).enqueue("Trace-Id")
    run_tasks()
    assert [row.headers for row in TaskRecord.objects.order_by("id")][1:] == [
        {"traceparent": TRACEPARENT},
        {"tenant": "b", "Trace-Id": "own"},
    ]


def test_inherited_headers_make_no_call_invalid() -> None:
    """Where both together are too many or too large, the call's own are kept."""
    inherited = {"traceparent": TRACEPARENT}
    most = {str(number): "" for number in range(MOST_HEADERS)}
    assert with_inherited(most, inherited) == most
    large = checked_headers({"a": "x" * (LARGEST_BYTES - 1)})
    assert with_inherited(large, inherited) == large
    assert with_inherited(None, inherited) == inherited
    assert with_inherited(None, {}) is None


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ("a", "give a mapping"),
        ({str(number): "" for number in range(MOST_HEADERS + 1)}, "there are 33, more than 32"),
        ({"a": "x" * LARGEST_BYTES}, "they take 8,193 bytes, more than 8,192"),
        ({"a": 1}, "is not a name with a text"),
        ({"": "a"}, "is not a name with a text"),
        ({"a": "\x00"}, "cannot store"),
        ({"a": "\ud800"}, "cannot store"),
    ],
)
def test_headers_that_cannot_travel_are_refused(headers: Any, text: str) -> None:
    """Before anything is written, with what is wrong."""
    with pytest.raises(InvalidOption, match=text):
        shows_headers.using(headers=headers)


# --- everywhere


@pytest.mark.django_db(transaction=True)
def test_headers_are_in_the_message_in_every_attempt() -> None:
    """`enqueue_many` gives them to each call; a retry and a person's retry keep them, in the row and on the wire."""
    given = {"trace-id": "t", "tenant": "a"}
    shows_headers.using(headers=given, max_attempts=2).enqueue_many([(), ()])
    assert [row.headers for row in TaskRecord.objects.all()] == [given, given]
    run = claimed()
    broker = Broker()
    assert decode_message(broker.client.hget(broker.keys("default").task(run.lease.id), "msg")).headers == given
    row = TaskRecord.objects.get(id=run.record.id)
    row.attempt, row.errors = 1, [{"message": "m", "exception": "e", "traceback": ""}]
    assert decode_message(message_of(row)).headers == given
    final = {"reason": FailureReason.EXCEPTION, "finished_at": timezone.now()}
    TaskRecord.objects.filter(id=row.id).update(state=TaskState.FAILED, **final)
    assert lifecycle.retry([row.id], by_person=True).retried
    assert TaskRecord.objects.get(id=row.id).headers == given


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("on_duplicate", ["replace", "follow"])
def test_the_newest_call_of_a_key_gives_the_headers(on_duplicate: Any) -> None:
    """Of a replaced task and of a follower, in the row and in the message; a call without headers removes them."""
    call = tasks.nap.using(unique="one", on_duplicate=on_duplicate)
    call.using(headers={"trace-id": "first"}).enqueue(0)
    call.using(headers={"trace-id": "second"}).enqueue(0)
    newest = call.using(headers={"trace-id": "third"}).enqueue(0)
    row = TaskRecord.objects.get(id=newest.id)
    assert row.headers == {"trace-id": "third"}
    if on_duplicate == "replace":
        broker = Broker()
        message = broker.client.hget(broker.keys("default").task(newest.id), "msg")
        assert decode_message(message).headers == {"trace-id": "third"}
    call.enqueue(0)
    assert TaskRecord.objects.filter(id=newest.id, headers__isnull=True).exists()
    with pytest.raises(DuplicateTask):
        tasks.nap.using(unique="one", on_duplicate="reject").enqueue(0)
