"""Failures of tasks in Sentry: its real SDK, with a transport and a receiver of the suite's own."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from django.utils import timezone
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport
from sentry_sdk.utils import strip_string

from django_asyncq.contrib.sentry import AsyncqIntegration, crons, integration
from django_asyncq.contrib.sentry.events import masked_event
from django_asyncq.core import header_sources
from django_asyncq.core.headers import MOST_HEADERS, SCHEDULE_HEADER, with_schedule
from django_asyncq.core.redaction import Masker
from django_asyncq.lifecycle.base import OWN_RECEIVERS, announce_runs
from django_asyncq.models import FailureReason, Schedule, TaskRecord, TaskState
from django_asyncq.signals import run_ended, run_started, task_failed, task_state_changed
from django_asyncq.testing import run_tasks

from .. import reported_tasks, tasks
from ..workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

# The newer name of the option, and the older one.
HAS_DATA_COLLECTION = tuple(map(int, sentry_sdk.VERSION.split(".")[:2])) >= (2, 70)
WITH_ARGUMENTS = {"data_collection": {"queues": True}} if HAS_DATA_COLLECTION else {"send_default_pii": True}
IBAN, PIN = "DE02120300000000202051", 77_123


class Kept(Transport):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.envelopes: list[Envelope] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope)


class Refusing(Transport):
    """Fails at each event."""

    def capture_envelope(self, envelope: Envelope) -> None:
        raise OSError("Sentry is away")


def items(envelopes: list[Envelope], kind: str) -> list[dict[str, Any]]:
    """What envelopes hold of one kind: "event", "transaction", "check_in"."""
    return [json.loads(item.get_bytes()) for each in envelopes for item in each.items if item.type == kind]


def errors(envelopes: list[Envelope]) -> list[dict[str, Any]]:
    return [event for event in items(envelopes, "event") if "exception" in event]


@pytest.fixture
def client() -> Iterator[Callable[..., list[Envelope]]]:
    """Begins a client with the integration, for one test; what it sends is kept."""

    def begin(transport: Transport | None = None, **options: Any) -> list[Envelope]:
        kept = transport or Kept()
        chosen = {"integrations": [AsyncqIntegration()], "traces_sample_rate": 1.0, **options}
        sentry_sdk.init("http://key@127.0.0.1:1/1", transport=kept, **chosen)
        # Sentry connects an integration once in a process, and each of these tests disconnects it.
        AsyncqIntegration.setup_once()
        return getattr(kept, "envelopes", [])

    yield begin
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)
    header_sources.forget_header_source(integration.headers_of_enqueue)
    run_started.direct.remove(integration.begin_scopes)
    run_ended.direct.remove(integration.end_scopes)
    task_failed.direct.remove(integration.send_failure)


@pytest.fixture
def kit(settings: Any) -> None:
    """Tasks run in this process, by `run_tasks`."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}


class Receiver:
    """A Sentry of the suite's own, over HTTP."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.envelopes.append(Envelope.deserialize(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.dsn = f"http://key@127.0.0.1:{self.server.server_port}/1"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """What worker processes send to."""
    found = Receiver()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def task_of(event: dict[str, Any]) -> str:
    return str(event["transaction"]).rpartition(".")[2]


# --- in worker processes


def test_one_event_for_each_final_failure(client: Any, receiver: Receiver, tmp_path: Path) -> None:
    """In threads, in the loop, in a process of its own, and of a process that died; in the trace of the request."""
    client()
    with sentry_sdk.start_transaction(name="request") as request:
        in_thread = [reported_tasks.fails_twice.enqueue(f"thread-{number}") for number in range(4)]
        in_loop = [reported_tasks.fails_in_the_loop.enqueue(f"loop-{number}") for number in range(4)]
        alone = reported_tasks.fails_alone.enqueue("alone")
        died = reported_tasks.dies.enqueue("died")
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_SENTRY=receiver.dsn):
        wait_until(
            lambda: TaskRecord.objects.filter(state=TaskState.FAILED, retry_at=None).count() == 10, "the ends", 90
        )
        wait_until(lambda: len(errors(receiver.envelopes)) >= 10, "the events")
    found = {event["tags"]["task_id"]: event for event in errors(receiver.envelopes)}
    assert len(errors(receiver.envelopes)) == len(found) == 10 and len(items(receiver.envelopes, "event")) == 10
    traces = {task_of(event): event["contexts"]["trace"]["trace_id"] for event in found.values()}
    assert set(traces.values()) == {request.trace_id}, traces
    for number, result in enumerate(in_thread):
        event = found[result.id]
        assert (task_of(event), event["transaction_info"]) == ("fails_twice", {"source": "task"})
        tags = event["tags"]
        assert (tags["mark"], tags["attempt"], tags["queue"], tags["reason"]) == (
            f"thread-{number}",
            "2",
            "default",
            "The function raised an error",
        )
        crumbs = [each["message"] for each in event["breadcrumbs"]["values"] if "crumb" in (each.get("message") or "")]
        assert crumbs == [f"crumb of thread-{number}, attempt 2"]
        (raised,) = event["exception"]["values"]
        assert (raised["type"], raised["value"]) == ("LookupError", f"no thread-{number}")
        assert raised["stacktrace"]["frames"][-1]["function"] == "fails_twice"
        assert raised["mechanism"] == {"type": "django_asyncq", "handled": False}
    for number, result in enumerate(in_loop):
        event = found[result.id]
        crumbs = [each["message"] for each in event["breadcrumbs"]["values"] if "crumb" in (each.get("message") or "")]
        assert (task_of(event), event["tags"]["mark"], crumbs) == (
            "fails_in_the_loop",
            f"loop-{number}",
            [f"crumb of loop-{number}"],
        )
    event = found[alone.id]
    assert event["tags"]["mark"] == "alone" and event["exception"]["values"][0]["type"] == "LookupError"
    event = found[died.id]
    (raised,) = event["exception"]["values"]
    assert raised["type"] == "WorkerLost" and "exit" in raised["value"] and task_of(event) == "dies"
    assert event["fingerprint"] == ["django_asyncq", "tests.reported_tasks.dies", "WorkerLost"]
    # The transaction of a run is what its event belongs to.
    runs = {each["contexts"]["trace"]["span_id"]: each for each in items(receiver.envelopes, "transaction")}
    run = runs[found[in_loop[0].id]["contexts"]["trace"]["span_id"]]
    assert run["transaction"] == "tests.reported_tasks.fails_in_the_loop"
    assert 0 <= run["contexts"]["trace"]["data"]["messaging.message.receive.latency"] < 60_000
    assert run["contexts"]["trace"]["op"] == "queue.process" and run["contexts"]["trace"]["status"] == "internal_error"


def test_an_occurrence_checks_in(receiver: Receiver, tmp_path: Path) -> None:
    """When it is queued, by the leader, and when its task has ended, by the worker; with what the monitor must know."""
    due = timezone.now().replace(microsecond=0) + timedelta(seconds=1)
    for name, task in (("nightly", "tests.tasks.tally"), ("often.reported", "tests.reported_tasks.fails_alone")):
        Schedule.objects.create(
            name=name, task=task, args=["x"], interval_seconds=300, zone="UTC", starts_at=due, next_occurrence_at=due
        )
    with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_SENTRY=receiver.dsn):
        wait_until(lambda: len(items(receiver.envelopes, "check_in")) >= 4, "the check-ins")
    found = items(receiver.envelopes, "check_in")
    by_status = {(each["monitor_slug"], each["status"]): each for each in found}
    often = crons.slug_of("often.reported")
    assert set(by_status) == {
        ("nightly", "in_progress"),
        ("nightly", "ok"),
        (often, "in_progress"),
        (often, "error"),
    }
    begun, ended = by_status["nightly", "in_progress"], by_status["nightly", "ok"]
    record = TaskRecord.objects.get(name="tests.tasks.tally")
    assert begun["check_in_id"] == ended["check_in_id"] == record.id.hex
    assert begun["monitor_config"]["schedule"] == {"type": "interval", "unit": "minute", "value": 5}
    assert record.headers is not None and record.headers[SCHEDULE_HEADER] == "nightly"
    assert ended["duration"] >= 0 and "monitor_config" not in ended


# --- what an event says


def test_secrets_are_masked_everywhere(client: Any, kit: None) -> None:
    """Also in what the body sends by itself, and in the variables of all frames."""
    sent = client(**WITH_ARGUMENTS)
    reported_tasks.pays.enqueue(IBAN, 1234, amount=PIN, key={"api_key": "hunter22"})
    reported_tasks.dials.enqueue(PIN)
    run_tasks()
    paid, dialled = errors(sent)
    (message,) = (event for event in items(sent, "event") if "exception" not in event)
    assert message["message"] == "asked the bank for ••••••" and task_of(message) == "pays"
    assert message["tags"]["task_id"] == paid["tags"]["task_id"]
    assert paid["contexts"]["asyncq"]["args"] == ["••••••", 1234]
    assert paid["contexts"]["asyncq"]["kwargs"] == {"amount": PIN, "key": {"api_key": "••••••"}}
    assert "no account ••••••" in paid["exception"]["values"][0]["value"]
    frame = paid["exception"]["values"][0]["stacktrace"]["frames"][-1]
    assert frame["function"] == "pays" and frame["vars"]["copy"][0] == "'••••••'"
    for envelope in sent:
        text = envelope.serialize().decode()
        assert IBAN not in text and "hunter22" not in text
    # A number that is a secret; in the first task it was none.
    frame = dialled["exception"]["values"][0]["stacktrace"]["frames"][-1]
    assert frame["vars"]["digits"] == frame["vars"]["pin"] == "••••••" or frame["vars"]["digits"] == ["••••••"]
    assert str(PIN) not in str(dialled) and dialled["contexts"]["asyncq"]["args"] == ["••••••"]


def test_what_sentry_has_shortened_is_masked_too() -> None:
    """It is no plain text then."""
    shortened = strip_string(f"{IBAN} {'x' * 100}", max_length=50)
    event: Any = {"message": shortened, "spans": [{"span_id": IBAN, "description": f"asks for {IBAN}"}]}
    masked: Any = masked_event(event, Masker({"iban"}, ["iban"], [IBAN]))
    assert masked["message"].value == f"•••••• {'x' * 24}..."
    assert masked["spans"] == [{"span_id": IBAN, "description": "asks for ••••••"}]


def test_arguments_are_sent_only_where_sentry_may_have_personal_data(client: Any, kit: None) -> None:
    """As Sentry's own integrations do."""
    sent = client()
    reported_tasks.pays.enqueue("some account", 5, amount=6)
    run_tasks()
    (event,) = errors(sent)
    assert event["contexts"]["asyncq"] == {"max_attempts": 1, "backend": "default"}


def test_a_failure_that_is_retried_sends_nothing(client: Any, kit: None) -> None:
    """Nor does one that was cancelled, and nothing is kept of the run."""
    sent = client()
    reported_tasks.fails_for_now.enqueue("later")
    reported_tasks.fails_in_the_loop.enqueue("now").cancel()
    run_tasks()
    assert TaskRecord.objects.get(name__endswith="fails_for_now").retry_at is not None
    assert items(sent, "event") == []
    gc.collect()
    assert len(integration._raised) == 0


def test_a_failure_without_an_exception_is_told_by_its_row(client: Any, kit: None) -> None:
    """As in a supervisor, in the trace of its headers, and masked."""
    sent = client()
    with sentry_sdk.start_transaction(name="request") as request:
        result = reported_tasks.pays.enqueue(IBAN, 5, amount=6)
    record = TaskRecord.objects.get()
    record.reason = FailureReason.WORKER_LOST
    record.errors = [
        {"exception": "django_asyncq.exceptions.WorkerLost", "message": f"at {IBAN}", "traceback": "in pays"}
    ]
    announce_runs(task_failed, record, exception=None)
    (event,) = errors(sent)
    (value,) = event["exception"]["values"]
    assert (value["type"], value["value"]) == ("WorkerLost", "at ••••••")
    assert event["contexts"]["trace"]["trace_id"] == request.trace_id
    assert event["tags"]["task_id"] == result.id and event["tags"]["reason"] == "Its worker was lost"
    assert event["extra"]["traceback"] == "in pays" and event["level"] == "error"


def test_a_run_without_tracing_has_its_event_too(client: Any, kit: None) -> None:
    """And belongs to the trace of the request."""
    sent = client(traces_sample_rate=None)
    header = sentry_sdk.get_traceparent()
    assert header is not None
    reported_tasks.fails_in_the_loop.enqueue("now")
    run_tasks()
    (event,) = errors(sent)
    assert event["contexts"]["trace"]["trace_id"] == header.partition("-")[0]
    assert items(sent, "transaction") == []


# --- what must not happen


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_sentry_that_fails_costs_no_task(rate: float, client: Any, kit: None) -> None:
    """Neither a run nor its outcome."""
    client(Refusing(), traces_sample_rate=rate)
    tasks.add.enqueue(1)
    reported_tasks.fails_in_the_loop.enqueue("now")
    run_tasks()
    states = dict(TaskRecord.objects.values_list("name", "state"))
    assert states == {
        "tests.tasks.add": TaskState.SUCCEEDED,
        "tests.reported_tasks.fails_in_the_loop": TaskState.FAILED,
    }


def test_without_the_integration_nothing_is_added(client: Any, kit: None) -> None:
    """A client that does not have it gets no headers, no scopes and no events of tasks."""
    client()
    kept = Kept()
    sentry_sdk.init("http://key@127.0.0.1:1/1", transport=kept, traces_sample_rate=1.0)
    reported_tasks.fails_in_the_loop.enqueue("now")
    run_tasks()
    assert TaskRecord.objects.get().headers is None
    assert errors(kept.envelopes) == [] and items(kept.envelopes, "transaction") == []


def test_sentry_traces_no_function_of_the_integration(client: Any, kit: None) -> None:
    """It traces each receiver of a signal, which would cost more than what these do; without monitors none is one."""
    sent = client()
    count = len(task_state_changed.receivers)
    with sentry_sdk.start_transaction(name="request"):
        tasks.add.enqueue(1)
        reported_tasks.fails_in_the_loop.enqueue("now")
        run_tasks()
    spans = [span for each in items(sent, "transaction") for span in each["spans"]]
    assert [span for span in spans if span["op"] == "db"]
    assert not [span for span in spans if "contrib.sentry" in str(span["description"])]
    assert count == OWN_RECEIVERS


def test_the_scope_of_the_caller_is_back_after_a_run(client: Any, kit: None) -> None:
    """Tags of the run are gone."""
    client()
    sentry_sdk.set_tag("mark", "own")
    before = sentry_sdk.get_isolation_scope(), sentry_sdk.get_current_scope()
    reported_tasks.fails_twice.enqueue("other")
    run_tasks()
    assert (sentry_sdk.get_isolation_scope(), sentry_sdk.get_current_scope()) == before


def test_the_signal_of_a_failure_is_sent_with_its_line(kit: None, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each task that has failed finally, whatever its attempts."""
    # The test kit keeps its failures out of the output, at this level.
    caplog.set_level(logging.DEBUG, "django_asyncq.runs")
    heard: list[tuple[str, str]] = []

    def hear(record: TaskRecord, exception: BaseException | None, **kwargs: Any) -> None:
        heard.append((record.name.rpartition(".")[2], repr(exception)))
        raise OSError("the receiver is away")

    task_failed.connect(hear)
    try:
        reported_tasks.fails_twice.enqueue("a")
        reported_tasks.fails_in_the_loop.enqueue("b").cancel()
        run_tasks()
    finally:
        task_failed.disconnect(hear)
    assert heard == [("fails_twice", "LookupError('no a')")]
    failed = [line for line in caplog.records if line.name == "django_asyncq.runs" and line.exc_info]
    lines = [line for line in failed if "next attempt" not in line.getMessage()]
    assert len(lines) == 1 and TaskRecord.objects.filter(state=TaskState.FAILED, retry_at=None).count() == 2


# --- monitors


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("nightly-report", "nightly-report"),
        ("shop.tasks.report", "shop-tasks-report"),
        ("Nightly report", "nightly-report-"),
        ("x" * 60, "x" * 41 + "-"),
        ("夜", ""),
    ],
)
def test_a_monitor_has_a_name_of_its_own(name: str, slug: str) -> None:
    """Legal in Sentry, and never that of another schedule."""
    found = crons.slug_of(name)
    assert found.startswith(slug) and 1 <= len(found) <= 50 and found == found.strip("-")
    assert found == slug or len(found) == len(slug) + 8
    assert crons.slug_of(name + "!") != found


@pytest.mark.parametrize(
    ("cron", "seconds", "expected"),
    [
        ("*/5 8-17 * * MON-FRI", None, {"type": "crontab", "value": "*/5 8-17 * * MON-FRI"}),
        ("0 0 1 * *", None, {"type": "crontab", "value": "0 0 1 * *"}),
        ("0 0 L * *", None, None),
        ("0 0 * * MON#2", None, None),
        ("0 0 13 * 5", None, None),
        ("0 0 * * * 30", None, None),
        ("", 300, {"type": "interval", "unit": "minute", "value": 5}),
        ("", 7_200, {"type": "interval", "unit": "hour", "value": 2}),
        ("", 172_800, {"type": "interval", "unit": "day", "value": 2}),
        ("", 90, None),
        ("", None, None),
    ],
)
def test_a_monitor_knows_the_times_that_sentry_has_words_for(cron: str, seconds: int | None, expected: Any) -> None:
    """Others are monitors that a person makes."""
    schedule = Schedule(name="x", cron=cron, interval_seconds=seconds, zone="Europe/Berlin")
    record = TaskRecord(timeout_seconds=3_000, max_attempts=2)
    config = crons.config_of(schedule, record)
    if expected is None:
        assert config is None
    else:
        assert config == {"schedule": expected, "timezone": "Europe/Berlin", "max_runtime": 100}


def test_a_schedule_names_itself_in_a_header(settings: Any) -> None:
    """Beside the headers of the task; one without space for it gets none."""
    full = {f"h{number}": "x" for number in range(MOST_HEADERS)}
    assert with_schedule({"a": "b"}, "nightly") == {"a": "b", SCHEDULE_HEADER: "nightly"}
    assert with_schedule(None, "nightly") == {SCHEDULE_HEADER: "nightly"}
    assert with_schedule(full, "nightly") == full
