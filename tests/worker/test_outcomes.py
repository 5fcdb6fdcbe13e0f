"""Outcomes left in Redis are recorded when this project signed them; nothing that others write there reaches a row."""

from __future__ import annotations

import json
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from django.utils.crypto import salted_hmac

from django_asyncq import conf, lifecycle
from django_asyncq.broker import Broker, Entry, Lease
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.task_entries import SpilledOutcomes
from django_asyncq.core.payload import MAX_DEPTH
from django_asyncq.core.run_log import RunLog
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import spill
from django_asyncq.models import TaskLogLine, TaskRecord, TaskState
from django_asyncq.storage import identity

from .. import tasks
from ..redis_state import pending, stored, unknown
from ..workers import history, run_workers

pytestmark = pytest.mark.django_db(transaction=True)

WAITS = "is not signed with this host's SECRET_KEY or SECRET_KEY_FALLBACKS"


@pytest.fixture(autouse=True)
def _usual_lease(settings: Any) -> None:
    """The lease of the other tests is too short to tell a wait of one lease from none."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 30}


def taken_run(state: TaskState = TaskState.RUNNING, **values: Any) -> lifecycle.Run:
    """Return a run that worker `w` has claimed and begun. state: what the row says."""
    record = TaskRecord.objects.create(name="tests.tasks.add", **values)
    identity.own()  # as every claim does
    broker = Broker()
    broker.register_queue("default")
    broker.enqueue("default", [Entry(str(record.id), b"message")])
    (lease,) = broker.dequeue("default", "w", 1, 30).leases
    run = lifecycle.Run(record, lease)
    lifecycle.begin(run, "w", timezone.now())
    if state == TaskState.RUNNING:
        assert lifecycle.mark_running([run]) == []
    return run


def spilled_run(state: TaskState = TaskState.RUNNING, value: Any = "real") -> lifecycle.Run:
    """Return a run that has succeeded, whose outcome lies in Redis. state: what the row says."""
    run = taken_run(state)
    lifecycle.succeed(run, value, timezone.now())
    assert lifecycle.spill_outcomes(Broker(), "w", [run]) == 1
    return run


def recover(run: lifecycle.Run) -> int:
    """Do what a supervisor does for a lost process, of which none of the tasks was to blame."""
    return lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone", blame=lifecycle.Blame())


def put(redis_client: Any, id: str, outcome: bytes) -> None:
    """Write an outcome as anybody could who can write to Redis."""
    redis_client.hset(QueueKeys("default").task(id), "outcome", outcome)


def fields_of(run: lifecycle.Run) -> dict[str, Any]:
    """Return the fields of the outcome that the run has spilled."""
    fields: dict[str, Any] = json.loads(stored(run.lease.id)[run.lease.id][spill.SIGNATURE_BYTES :])
    return fields


def signed(id: str, fence: Any, body: bytes) -> bytes:
    """Return a body with the signature that the project itself would give it."""
    return spill.sign(spill.PURPOSE, f"{identity.own()} {id} {fence} ".encode() + body) + body


def let_wait_pass(redis_client: Any, id: str) -> None:
    """Do what the forwarder does when the time of a postponed task has come."""
    keys = QueueKeys("default")
    due_at = redis_client.zscore(keys.scheduled, id)
    assert abs(due_at - time.time() - conf.current().lease_seconds) <= 2, "one lease"
    redis_client.zadd(keys.scheduled, {id: time.time() - 1})
    assert Broker().forward("default", "scheduled").moved == 1


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    """Return the warnings that hold a text."""
    return [record for record in caplog.records if record.levelno == logging.WARNING and text in record.message]


# --- what the project spilled itself


@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.RUNNING])
def test_spilled_success_is_recorded(state: TaskState) -> None:
    """Whether the row says RUNNING or still QUEUED; the entry is removed, and nothing runs."""
    run = spilled_run(state, {"n": 1})
    assert Broker().held("default", "w") == []
    assert [expired.id for expired in Broker().expired("default")] == [run.lease.id]
    assert recover(run) == 1
    row = TaskRecord.objects.get()
    assert (row.state, row.return_value, row.attempt, row.worker_ids) == (TaskState.SUCCEEDED, {"n": 1}, 1, ["w"])
    assert row.finished_at == run.record.finished_at
    assert unknown([run.lease.id]) == [run.lease.id]


@pytest.mark.parametrize("again", [True, False])
def test_spilled_failure_is_recorded_with_its_retry(again: bool, redis_client: Any) -> None:
    """The error is added to those of the row; the entry goes to retry or archived, without the outcome."""
    run = taken_run(errors=[{"exception": "x", "message": "earlier", "traceback": ""}])
    retry_at = timezone.now() + timedelta(hours=1) if again else None
    lifecycle.fail(run, ValueError("no"), "traceback", timezone.now(), retry_at=retry_at)
    lifecycle.spill_outcomes(Broker(), "w", [run])
    recover(run)
    row = TaskRecord.objects.get()
    assert (row.state, row.retry_at) == (TaskState.FAILED, retry_at)
    assert [error["message"] for error in row.errors] == ["earlier", "no"]
    keys = QueueKeys("default")
    assert redis_client.zscore(keys.retry if again else keys.archived, run.lease.id) is not None
    assert not redis_client.hexists(keys.task(run.lease.id), "outcome")


def test_spilled_outcome_brings_the_lines_of_its_run(redis_client: Any) -> None:
    """Without secrets in Redis and in the rows; nothing of them stays in Redis."""
    run = taken_run()
    run.log = RunLog.of_lines(run.record.id, run.lease.fence, 1, [(4, 1_700_000_000.5, 30, "shop", "token=s3cret")])
    lifecycle.succeed(run, 1, timezone.now())
    lifecycle.spill_outcomes(Broker(), "w", [run])
    assert [text for *_, text in fields_of(run)["lines"]] == ["token=••••••"]
    recover(run)
    line = TaskLogLine.objects.get()
    assert (line.task_id, line.fence, line.attempt, line.number) == (run.record.id, run.lease.fence, 1, 4)
    assert (line.level, line.logger, line.text) == (30, "shop", "token=••••••")
    assert abs(line.logged_at.timestamp() - 1_700_000_000.5) < 60
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED


def test_lines_that_are_too_large_for_redis_are_left_out() -> None:
    """The outcome goes before them."""
    run = taken_run()
    lines = [(number, 1.5, 30, "shop", "x" * 2_000) for number in range(1, 1_001)]
    run.log = RunLog.of_lines(run.record.id, run.lease.fence, 1, lines)
    lifecycle.succeed(run, "value", timezone.now())
    lifecycle.spill_outcomes(Broker(), "w", [run])
    recover(run)
    assert TaskRecord.objects.get().return_value == "value"
    assert not TaskLogLine.objects.exists()


def test_spilled_retry_that_used_no_attempt_is_recorded() -> None:
    """It adds no error, and the attempt is not counted."""
    run = taken_run()
    retry_at = timezone.now() + timedelta(hours=1)
    lifecycle.fail(run, ValueError("later"), "", timezone.now(), retry_at=retry_at, counted=False)
    lifecycle.spill_outcomes(Broker(), "w", [run])
    recover(run)
    row = TaskRecord.objects.get()
    assert (row.state, row.retry_at, row.attempt, row.errors) == (TaskState.FAILED, retry_at, 0, [])


def test_next_worker_records_a_spilled_outcome_and_runs_nothing() -> None:
    """Also when asynq's own recoverer has made the entry pending again."""
    run = spilled_run()
    assert Broker().requeue("default", "w", [run.lease]) == ["requeued"]
    assert lifecycle.claim(Broker(), "default", "v", 1, "default").runs == []
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED
    assert Broker().held("default", "v") == []


def test_outcome_is_recorded_although_the_worker_that_claimed_it_next_died() -> None:
    """A claim raises the fence of the entry, but it begins no run: the row decides."""
    run = spilled_run()
    Broker().requeue("default", "w", [run.lease])
    (lease,) = Broker().dequeue("default", "v", 1, 30).leases
    assert lifecycle.recover(Broker(), "default", "v", [lease], reason="gone") == 1
    assert TaskRecord.objects.get().return_value == "real"


def test_spilled_outcome_is_void_when_another_run_has_begun() -> None:
    """The row has the fence of a later run: the outcome changes nothing, and Redis refuses a wrong fence too."""
    run = taken_run()
    lifecycle.succeed(run, 1, timezone.now())
    TaskRecord.objects.update(fence=run.lease.fence + 1)
    lifecycle.spill_outcomes(Broker(), "w", [run])
    rows = lifecycle.load_rows([run.lease.id])
    assert lifecycle.replay_outcomes(Broker(), "default", "w", [run.lease], rows) == set()
    assert TaskRecord.objects.get().state == TaskState.RUNNING
    assert lifecycle.spill_outcomes(Broker(), "w", [lifecycle.Run(run.record, Lease(run.lease.id, 99))]) == 0


def test_result_that_is_too_large_for_redis_is_not_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is recorded all the same, with a note about the result."""
    monkeypatch.setattr(spill, "LARGEST_OUTCOME_BYTES", 1000)
    run = spilled_run(value="x" * 1001)
    recover(run)
    row = TaskRecord.objects.get()
    assert row.state == TaskState.SUCCEEDED
    assert "too many to spill to Redis" in row.return_value["result_not_stored"]


def test_largest_texts_of_an_error_are_recorded() -> None:
    """What `storable_text` has cut is within the bounds of the reader; so is the deepest result."""
    run = taken_run()
    lifecycle.fail(run, ValueError("é" * 10_000), "é" * 100_000, timezone.now(), retry_at=None)
    lifecycle.spill_outcomes(Broker(), "w", [run])
    recover(run)
    assert "characters cut" in TaskRecord.objects.get().errors[0]["traceback"]


def test_deepest_result_is_recorded() -> None:
    """As many lists within each other as a return value may have."""
    value: Any = "bottom"
    for _ in range(MAX_DEPTH):
        value = [value]
    run = taken_run()
    lifecycle.succeed(run, value, timezone.now())
    assert lifecycle.spill_outcomes(Broker(), "w", [run]) == 1
    recover(run)
    assert TaskRecord.objects.get().return_value == value


# --- what others write


def test_forged_outcome_of_a_queued_task_is_not_recorded(
    redis_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function runs, and the row says what it returned; also if the entry pretends to have been claimed before."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history.jsonl"))
    results = [tasks.nap.enqueue(0) for _ in range(2)]
    for fence, result in zip((0, 5), results, strict=True):
        now = timezone.now().isoformat()
        forged = {"fence": fence + 1, "read_fence": 0, "counted": True, "state": 2, "reason": 0, "last_exception": ""}
        forged |= {"attempt": 1, "return_value": "forged", "worker_ids": ["w"], "error": None, "retry_at": None}
        forged |= {"started_at": now, "last_attempted_at": now, "finished_at": now, "lines": []}
        assert spill.decode(json.dumps(forged).encode()) is not None
        put(redis_client, result.id, b"0" * spill.SIGNATURE_BYTES + json.dumps(forged).encode())
        redis_client.hset(QueueKeys("default").task(result.id), "fence", fence)
    run_workers(ASYNCQ_TEST_LEASE="2")
    rows = TaskRecord.objects.all()
    assert {(row.state, row.return_value, row.attempt) for row in rows} == {(TaskState.SUCCEEDED, "rested", 1)}
    ran = [line["id"] for line in history(tmp_path / "history.jsonl") if line["event"] == "begin"]
    assert sorted(ran) == sorted(result.id for result in results)


FORGED = {
    "state and error": {
        "state": 3,
        "reason": 1,
        "error": {
            "exception": "E",
            "message": "forged",
            "traceback": "",
            "attempt": 1,
            "worker": "w",
            "started_at": None,
            "failed_at": None,
        },
        "return_value": None,
    },
    "no attempt, to retry": {
        "state": 3,
        "reason": 1,
        "counted": False,
        "return_value": None,
        "finished_at": None,
        "retry_at": "2030-01-01T00:00:00+00:00",
    },
    "last_exception": {"last_exception": "forged.Error"},
    "return_value": {"return_value": "forged"},
    "attempt": {"attempt": 99},
    "worker_ids": {"worker_ids": ["forged"]},
    "counted": {"counted": False},
    "started_at": {"started_at": "2001-01-01T00:00:00+00:00"},
    "last_attempted_at": {"last_attempted_at": "2001-01-01T00:00:00+00:00"},
    "finished_at": {"finished_at": "2001-01-01T00:00:00+00:00"},
}


FORGED["reason"] = {**FORGED["state and error"], "reason": 4}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.RUNNING])
def test_changed_field_of_a_signed_outcome_is_not_recorded(
    state: TaskState, change: dict[str, Any], redis_client: Any
) -> None:
    """The signature covers every byte. The task waits, then it runs as if there were no outcome."""
    run = spilled_run(state)
    id, original = run.lease.id, stored(run.lease.id)[run.lease.id]
    body = json.dumps({**fields_of(run), **change}).encode()
    assert spill.decode(body) is not None, "well-formed"
    put(redis_client, id, original[: spill.SIGNATURE_BYTES] + body)
    recover(run)
    let_wait_pass(redis_client, id)
    (again,) = lifecycle.claim(Broker(), "default", "v", 1, "default").runs
    row = TaskRecord.objects.get()
    assert (row.state, row.return_value, row.errors, row.attempt) == (TaskState.QUEUED, None, [], 0)
    assert (row.reason, row.last_exception, row.crash_count, row.worker_ids) == (0, "", 0, [])
    assert (row.finished_at, row.retry_at) == (None, None)
    assert again.lease.fence > run.lease.fence


def test_outcome_of_another_task_is_not_recorded(redis_client: Any) -> None:
    """Both have the same fence; the id is signed too."""
    first = spilled_run(value="of the first")
    second = spilled_run(value="of the second")
    assert first.lease.fence == second.lease.fence
    put(redis_client, second.lease.id, stored(first.lease.id)[first.lease.id])
    recover(second)
    assert TaskRecord.objects.get(id=second.record.id).state == TaskState.QUEUED
    recover(first)
    assert TaskRecord.objects.get(id=first.record.id).return_value == "of the first"


def test_outcome_of_another_database_is_not_recorded(redis_client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A copy has the same tasks and fences. The task waits for one lease, then it runs again."""
    run = spilled_run()
    identity.renew()
    recover(run)
    assert len(warnings(caplog, "or it is that of another database")) == 1
    let_wait_pass(redis_client, run.lease.id)
    (again,) = lifecycle.claim(Broker(), "default", "w2", 1, "default").runs
    assert (again.record.state, again.record.return_value) == (TaskState.QUEUED, None)


@pytest.mark.parametrize("is_begun", [True, False])
def test_outcome_of_an_earlier_run_is_not_recorded(is_begun: bool, redis_client: Any) -> None:
    """The first run failed and its outcome was recorded: put back during the second run, it changes nothing."""
    run = taken_run(max_attempts=5)
    lifecycle.fail(run, ValueError("first"), "", timezone.now(), retry_at=timezone.now())
    lifecycle.spill_outcomes(Broker(), "w", [run])
    old = stored(run.lease.id)[run.lease.id]
    recover(run)
    lifecycle.retry([run.record.id], by_person=False)
    (again,) = lifecycle.claim(Broker(), "default", "v", 1, "default").runs
    if is_begun:
        lifecycle.begin(again, "v", timezone.now())
        lifecycle.mark_running([again])
    put(redis_client, run.lease.id, old)
    recover(again)
    row = TaskRecord.objects.get()
    assert (row.state, row.retry_at, row.attempt) == (TaskState.QUEUED, None, 1)
    assert pending() == [run.lease.id]
    assert [error["message"] for error in row.errors][:1] == ["first"]
    assert "first" not in [error["message"] for error in row.errors][1:]


def test_outcome_of_a_run_that_never_was_is_not_recorded(redis_client: Any) -> None:
    """Its fence is above that of the entry; not even a signature helps."""
    run = spilled_run(TaskState.QUEUED)
    body = json.dumps({**fields_of(run), "fence": run.lease.fence + 1}).encode()
    put(redis_client, run.lease.id, signed(run.lease.id, run.lease.fence + 1, body))
    assert recover(run) == 1
    assert TaskRecord.objects.get().state == TaskState.QUEUED
    assert pending() == [run.lease.id]


ERROR = FORGED["state and error"]["error"]
FAILED = FORGED["state and error"]
MALFORMED: dict[str, dict[str, Any]] = {
    "state 0": {"state": 0},
    "state 1": {"state": 1},
    "state 7": {"state": 7},
    "state true": {"state": True},
    "state text": {"state": "2"},
    "state 2.0": {"state": 2.0},
    "state list": {"state": [2]},
    "lines null": {"lines": None},
    "line short": {"lines": [[1, 1.5, 20, "shop"]]},
    "line number 0": {"lines": [[0, 1.5, 20, "shop", "x"]]},
    "line time text": {"lines": [[1, "1.5", 20, "shop", "x"]]},
    "line time beyond": {"lines": [[1, 1e300, 20, "shop", "x"]]},
    "line level text": {"lines": [[1, 1.5, "INFO", "shop", "x"]]},
    "line huge": {"lines": [[1, 1.5, 20, "shop", "x" * 2_049]]},
    "fence 0": {"fence": 0},
    "fence negative": {"fence": -1},
    "fence beyond bigint": {"fence": 2**63},
    "fence text": {"fence": "1"},
    "fence true": {"fence": True},
    "counted 1": {"counted": 1},
    "reason 99": {"reason": 99},
    "reason text": {"reason": "1"},
    "last_exception number": {"last_exception": 1},
    "last_exception long": {"last_exception": "x" * 201},
    "attempt negative": {"attempt": -1},
    "attempt huge": {"attempt": 2**31},
    "attempt far too huge": {"attempt": 10**30},
    "attempt text": {"attempt": "1"},
    "attempt null": {"attempt": None},
    "worker_ids text": {"worker_ids": "w"},
    "worker_ids numbers": {"worker_ids": [1]},
    "worker_ids null": {"worker_ids": None},
    "worker_ids long": {"worker_ids": ["x" * 256]},
    "worker_ids NUL": {"worker_ids": ["\x00"]},
    "return_value NUL": {"return_value": ["\x00"]},
    "return_value key NUL": {"return_value": {"\x00": 1}},
    "return_value beyond 64 bits": {"return_value": 2**64},
    "return_value half a character": {"return_value": "\ud800"},
    "finished_at null": {"finished_at": None},
    "finished_at number": {"finished_at": 1_700_000_000},
    "finished_at text": {"finished_at": "yesterday"},
    "finished_at empty": {"finished_at": ""},
    "finished_at naive": {"finished_at": "2025-01-01T00:00:00"},
    "finished_at late": {"finished_at": "9999-12-31T23:00:00-08:00"},
    "finished_at early": {"finished_at": "0001-01-01T00:00:00+08:00"},
    "started_at dict": {"started_at": {}},
    "last_attempted_at true": {"last_attempted_at": True},
    "success with a retry": {"retry_at": "2030-01-01T00:00:00+00:00"},
    "success with an error": {"error": ERROR},
    "failure with a result": {**FAILED, "return_value": 1},
    "success with a reason": {"reason": 1},
    "failure without a reason": {**FAILED, "reason": 0},
    "failure without an error": {**FAILED, "error": None},
    "failure that is open": {**FAILED, "finished_at": None},
    "failure that is closed twice": {**FAILED, "retry_at": "2030-01-01T00:00:00+00:00"},
    "error uncounted": {**FAILED, "counted": False},
    "error text": {**FAILED, "error": "no"},
    "error list": {**FAILED, "error": [ERROR]},
    "error empty": {**FAILED, "error": {}},
    "error message number": {**FAILED, "error": {**ERROR, "message": 1}},
    "error message long": {**FAILED, "error": {**ERROR, "message": "x" * 5000}},
    "error traceback long": {**FAILED, "error": {**ERROR, "traceback": "x" * 70_000}},
    "error attempt text": {**FAILED, "error": {**ERROR, "attempt": "1"}},
    "error attempt negative": {**FAILED, "error": {**ERROR, "attempt": -1}},
    "error worker null": {**FAILED, "error": {**ERROR, "worker": None}},
    "error failed_at text": {**FAILED, "error": {**ERROR, "failed_at": "now"}},
    "error with a list": {**FAILED, "error": {**ERROR, "more": [1]}},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_malformed_field_counts_as_absent_even_when_signed(change: dict[str, Any], redis_client: Any) -> None:
    """The shape is checked apart from the signature: the task is recovered like any lost run, and runs again."""
    run = spilled_run()
    fields = {**fields_of(run), **change}
    put(redis_client, run.lease.id, signed(run.lease.id, fields["fence"], json.dumps(fields).encode()))
    assert recover(run) == 1
    row = TaskRecord.objects.get()
    assert (row.state, row.return_value, row.attempt) == (TaskState.QUEUED, None, 0)
    assert pending() == [run.lease.id]


def test_spilled_outcome_is_void_when_the_row_has_changed_since_the_run_read_it(redis_client: Any) -> None:
    """The fence of the change need not be higher than that of the run: its transaction may have begun long before."""
    result = tasks.nap.enqueue(0)
    broker = Broker()
    (run,) = lifecycle.claim(broker, "default", "w", 1, "default").runs
    run.lease = Lease(run.lease.id, run.lease.fence + 1000)
    redis_client.hset(QueueKeys("default").task(result.id), "fence", run.lease.fence)
    lifecycle.begin(run, "w", timezone.now())
    lifecycle.succeed(run, "of what it has read", timezone.now())
    assert lifecycle.spill_outcomes(broker, "w", [run]) == 1
    TaskRecord.objects.update(args=[1], fence=run.lease.fence - 10)
    recover(run)
    row = TaskRecord.objects.get()
    assert (row.state, row.return_value, row.args) == (TaskState.QUEUED, None, [1])


@pytest.mark.parametrize("name", [*spill.RULES])
def test_missing_field_counts_as_absent(name: str, redis_client: Any) -> None:
    """Every field is demanded."""
    run = spilled_run()
    fields = fields_of(run)
    del fields[name]
    put(redis_client, run.lease.id, signed(run.lease.id, run.lease.fence, json.dumps(fields).encode()))
    assert recover(run) == 1
    assert TaskRecord.objects.get().state == TaskState.QUEUED


def test_field_that_this_release_does_not_know_is_ignored(redis_client: Any) -> None:
    """A newer release may spill more; this one records what it knows."""
    run = spilled_run()
    body = json.dumps({**fields_of(run), "of a newer release": 1}).encode()
    put(redis_client, run.lease.id, signed(run.lease.id, run.lease.fence, body))
    recover(run)
    assert TaskRecord.objects.get().return_value == "real"


RAW = {
    "empty": b"",
    "a signature alone": b"0" * spill.SIGNATURE_BYTES,
    "short": b"{}",
    "a list": b"0" * 64 + b"[]",
    "null": b"0" * 64 + b"null",
    "a text": b"0" * 64 + b'"text"',
    "brackets": b"[" * 100_000,
    "brackets behind a signature": b"0" * 64 + b"[" * 100_000,
    "objects": b"0" * 64 + b'{"a":' * 100_000,
    "closed brackets": b"0" * 64 + b"[" * 50_000 + b"]" * 50_000,
    "huge": b"0" * 64 + b'"' + b"x" * 5_000_000 + b'"',
    "not UTF-8": b"\xff" * 1000,
    "not UTF-8 behind a signature": b"0" * 64 + b'{"fence": "\xff"}',
    "NaN": b"0" * 64 + b"NaN",
    "many digits": b"0" * 64 + b"9" * 10_000,
    "the format before": b'{"fence": 1, "counted": true, "state": 2}',
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_anything_else_counts_as_absent(raw: bytes, redis_client: Any) -> None:
    """For the reconciler and for a worker that claims the entry: nothing is raised, the task runs again."""
    run = taken_run()
    put(redis_client, run.lease.id, raw)
    assert recover(run) == 1
    (again,) = lifecycle.claim(Broker(), "default", "v", 1, "default").runs
    assert again.lease.id == run.lease.id
    assert TaskRecord.objects.get().state == TaskState.QUEUED


def test_unreadable_outcome_is_logged(caplog: pytest.LogCaptureFixture, redis_client: Any) -> None:
    """The log line names the task."""
    run = taken_run()
    put(redis_client, run.lease.id, b"[]")
    assert recover(run) == 1
    (line,) = warnings(caplog, "its outcome in Redis is unreadable")
    assert (line.task_id, line.task, line.queue, line.attempt) == (  # type: ignore[attr-defined]
        run.lease.id,
        "tests.tasks.add",
        "default",
        1,
    )


def test_forged_outcome_stops_no_other_task(redis_client: Any) -> None:
    """One batch: a genuine outcome, a forged one, an unreadable one."""
    genuine, forged, unreadable = spilled_run(), spilled_run(), spilled_run()
    put(redis_client, forged.lease.id, b"0" * 64 + stored(forged.lease.id)[forged.lease.id][64:])
    put(redis_client, unreadable.lease.id, b"[" * 100_000)
    leases = [run.lease for run in (unreadable, forged, genuine)]
    lifecycle.recover(Broker(), "default", "w", leases, reason="gone")
    states = dict(TaskRecord.objects.values_list("id", "state"))
    assert states[genuine.record.id] == TaskState.SUCCEEDED
    assert states[forged.record.id] == states[unreadable.record.id] == TaskState.QUEUED


def test_task_does_not_wait_for_an_outcome_that_its_row_refuses(
    redis_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An outcome of an earlier run than the row's is void whoever signed it."""
    run = spilled_run(TaskState.QUEUED)
    put(redis_client, run.lease.id, b"0" * 64 + stored(run.lease.id)[run.lease.id][64:])
    TaskRecord.objects.update(fence=run.lease.fence + 1)
    lease = Lease(run.lease.id, run.lease.fence + 2)
    rows = lifecycle.load_rows([lease.id])
    assert lifecycle.replay_outcomes(Broker(), "default", "w", [lease], rows) == set()
    assert not warnings(caplog, WAITS)


# --- two hosts, two keys


def test_outcome_signed_with_a_fallback_key_is_recorded(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A rotation: the worker had the old key, the next host has the new one and the old one as a fallback."""
    run = spilled_run()
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new", ["older", settings.SECRET_KEY]
    assert recover(run) == 1
    assert TaskRecord.objects.get().return_value == "real"
    assert not warnings(caplog, WAITS)


@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.RUNNING])
def test_task_waits_once_for_a_host_with_the_key_then_runs_again(
    state: TaskState, settings: Any, redis_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One lease, one WARNING that names both settings; no attempt and no crash is counted."""
    run = spilled_run(state)
    settings.SECRET_KEY = "of another host"
    recover(run)
    row = TaskRecord.objects.get()
    assert (row.state, row.attempt, row.crash_count, row.worker_ids) == (TaskState.QUEUED, 0, 0, [])
    assert lifecycle.claim(Broker(), "default", "v", 1, "default").runs == []
    let_wait_pass(redis_client, run.lease.id)
    (again,) = lifecycle.claim(Broker(), "default", "v", 1, "default").runs
    lifecycle.begin(again, "v", timezone.now())
    lifecycle.succeed(again, "again", timezone.now())
    assert lifecycle.record_runs([again]) == []
    row.refresh_from_db()
    assert (row.state, row.return_value, row.attempt) == (TaskState.SUCCEEDED, "again", 1)
    (line,) = warnings(caplog, WAITS)
    assert (line.task_id, line.queue) == (run.lease.id, "default")  # type: ignore[attr-defined]


@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.RUNNING])
@pytest.mark.parametrize("by_claim", [True, False])
def test_host_with_the_key_records_the_outcome_after_the_wait(
    state: TaskState, by_claim: bool, settings: Any, redis_client: Any
) -> None:
    """The host without the key has left the outcome in place, and the row open for that run."""
    run, key = spilled_run(state), settings.SECRET_KEY
    settings.SECRET_KEY = "of another host"
    if by_claim:
        Broker().requeue("default", "w", [run.lease])
        assert lifecycle.claim(Broker(), "default", "v", 1, "default").runs == []
    else:
        recover(run)
    let_wait_pass(redis_client, run.lease.id)
    settings.SECRET_KEY = key
    assert lifecycle.claim(Broker(), "default", "v", 1, "default").runs == []
    row = TaskRecord.objects.get()
    assert (row.state, row.return_value, row.attempt, row.worker_ids) == (TaskState.SUCCEEDED, "real", 1, ["w"])
    assert unknown([run.lease.id]) == [run.lease.id]


def test_run_of_the_waiting_task_is_not_undone_by_the_old_outcome(settings: Any, redis_client: Any) -> None:
    """Once the task has begun again, a host with the key leaves the earlier outcome alone."""
    run, key = spilled_run(), settings.SECRET_KEY
    settings.SECRET_KEY = "of another host"
    recover(run)
    let_wait_pass(redis_client, run.lease.id)
    (again,) = lifecycle.claim(Broker(), "default", "v", 1, "default").runs
    lifecycle.begin(again, "v", timezone.now())
    lifecycle.mark_running([again])
    settings.SECRET_KEY = key
    rows = lifecycle.load_rows([again.lease.id])
    assert lifecycle.replay_outcomes(Broker(), "default", "v", [again.lease], rows) == set()
    assert TaskRecord.objects.get().state == TaskState.RUNNING


def test_waiting_task_is_left_alone_by_the_reconciler(settings: Any, redis_client: Any) -> None:
    """Its row is QUEUED and its entry scheduled, like that of every postponed task."""
    run = spilled_run()
    settings.SECRET_KEY = "of another host"
    recover(run)
    before = TaskRecord.objects.values().get()
    TaskRecord.objects.update(last_attempted_at=timezone.now() - timedelta(hours=1))
    Broker().mark_alive()
    Reconciler(Broker()).sweep()
    assert TaskRecord.objects.get().fence == before["fence"]
    assert TaskRecord.objects.get().crash_count == 0
    let_wait_pass(redis_client, run.lease.id)


@pytest.mark.parametrize("fallbacks", [[""], [None], [b""]])
def test_empty_fallback_verifies_nothing(fallbacks: list[Any], settings: Any) -> None:
    """An empty key is one that everybody knows; None would stand for the SECRET_KEY itself."""
    signature = spill.sign("outcome", b"message")
    settings.SECRET_KEY_FALLBACKS = fallbacks
    assert spill.is_signed("outcome", b"message", signature)
    settings.SECRET_KEY = "of another host"
    assert not spill.is_signed("outcome", b"message", signature)
    of_nobody = salted_hmac("django_asyncq.outcome", b"message", secret="", algorithm="sha256").hexdigest()
    assert not spill.is_signed("outcome", b"message", of_nobody.encode())


def test_signature_is_worth_nothing_for_another_purpose() -> None:
    """Nor for another message, nor when it is cut or not ASCII."""
    signature = spill.sign("outcome", b"message")
    assert spill.is_signed("outcome", b"message", signature)
    assert not spill.is_signed("key-check", b"message", signature)
    assert not spill.is_signed("outcome", b"message ", signature)
    assert not spill.is_signed("outcome", b"message", signature[:-1])
    assert not spill.is_signed("outcome", b"message", b"\xff" * 64)


def test_without_a_key_nothing_is_spilled_and_nothing_verified(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why the tasks run again; an outcome that another host spilled waits for that host."""
    run, other = spilled_run(), taken_run()
    lifecycle.succeed(other, 1, timezone.now())
    settings.SECRET_KEY = ""
    assert lifecycle.spill_outcomes(Broker(), "w", [other]) == 0
    assert "SECRET_KEY is empty, so outcomes cannot be signed: 1; their tasks run again" in caplog.text
    recover(run)
    assert TaskRecord.objects.get(id=run.record.id).state == TaskState.QUEUED
    assert len(warnings(caplog, WAITS)) == 1


# --- the cost, and the scripts


def test_plain_task_signs_nothing_and_looks_for_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its claim to its acknowledgement."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a plain task came here")

    for where, name in ((spill, "sign"), (spill, "is_signed"), (spill, "encode")):
        monkeypatch.setattr(where, name, refuse)
    for name in ("read", "write", "mark_waited"):
        monkeypatch.setattr(SpilledOutcomes, name, refuse)
    tasks.add.enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.begin(run, "w", timezone.now())
    lifecycle.succeed(run, 2, timezone.now())
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED


def test_scripts_change_nothing_where_they_refuse(redis_client: Any, key_prefix: str) -> None:
    """For every word: another fence, a task that is not active, a task that Redis does not know."""
    run, broker, outcomes, keys = taken_run(), Broker(), SpilledOutcomes(), QueueKeys("default")

    def dump() -> dict[bytes, bytes]:
        return {key: redis_client.dump(key) for key in redis_client.scan_iter(f"{key_prefix}*")}

    before = dump()
    other = Lease(run.lease.id, run.lease.fence + 1)
    assert outcomes.write("default", "w", [(other, b"{}"), (Lease("none", 1), b"{}")]) == ["stale", "missing"]
    outcomes.mark_waited("default", {"none": 1, run.lease.id: 1})
    assert dump() == before
    assert outcomes.write("default", "w", [(run.lease, b"{}")]) == ["spilled"]
    assert outcomes.write("default", "w", [(run.lease, b"{}")]) == ["spilled"]
    assert stored("none", run.lease.id) == {run.lease.id: b"{}"}
    assert redis_client.zscore(keys.lease, run.lease.id) <= time.time() + 1
    broker.requeue("default", "w", [run.lease])
    before = dump()
    assert outcomes.write("default", "w", [(run.lease, b"{}")]) == ["stale"]
    assert dump() == before


def test_mark_of_the_wait_is_read_whatever_it_is(redis_client: Any) -> None:
    """A text that is no fence counts as none; an outcome that is too large is not read at all."""
    run, outcomes, keys = spilled_run(), SpilledOutcomes(), QueueKeys("default")
    id, size = run.lease.id, len(stored(run.lease.id)[run.lease.id])

    def waited() -> int:
        return outcomes.read("default", [id], largest_bytes=size)[id].waited_fence

    assert waited() == 0
    outcomes.mark_waited("default", {id: 7})
    assert waited() == 7
    for odd in (b"-1", b"text", b"", b"\xff", b"1.5", b"9" * 5000):
        redis_client.hset(keys.task(id), "outcome_waited", odd)
        assert waited() == 0
    assert outcomes.read("default", [id], largest_bytes=size - 1) == {}
