"""A row that cannot be read stops nothing: each repair, and each part of a worker, goes on with the others."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from django_asyncq import gates, interop, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.pruner import Pruner
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.interop.asynq_display import SchedulerEntries
from django_asyncq.models import FailureReason, Occurrence, Schedule, TaskRecord, TaskState
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.storage import isolation
from django_asyncq.storage.errors import ErrorKind, kind_of
from django_asyncq.storage.isolation import set_aside

from ..redis_state import pending, unknown
from ..runs import taken_by

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = "django_asyncq_taskrecord"
IS_POSTGRESQL = connection.vendor == "postgresql"
IS_MARIADB = connection.vendor == "mysql"
# What makes a database take values that the model's constraints refuse, for one connection.
WITHOUT_CHECKS = {
    "sqlite": ("PRAGMA ignore_check_constraints = ON", "PRAGMA ignore_check_constraints = OFF"),
    "mysql": ("SET check_constraint_checks = 0", "SET check_constraint_checks = 1"),
}


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    """Each test begins without rows that are set aside, and the database is emptied of what the ORM cannot delete."""
    set_aside.clear()
    yield
    set_aside.clear()
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE}")


def write(id: Any, column: str, value: Any) -> None:
    """Write a value that Django would refuse, past its checks."""
    write_to(TABLE, id, column, value)


def write_to(table: str, id: Any, column: str, value: Any) -> None:
    """Do the same in any table whose key is a UUID."""
    begin, end = WITHOUT_CHECKS.get(connection.vendor, ("", ""))
    with connection.cursor() as cursor:
        if begin:
            cursor.execute(begin)
        cursor.execute(f"UPDATE {table} SET {column} = %s WHERE id = %s", [value, id if IS_POSTGRESQL else id.hex])
        if end:
            cursor.execute(end)


FAR = "20000-01-01 00:00:00+00"
# Column and value of each way in which a row cannot be used; RETRYING rows need their `retry_at`.
SPOILED = (
    [("run_after", FAR), ("started_at", FAR), ("expires_at", FAR), ("errors", "5"), ("worker_ids", '{"a": 1}')]
    if IS_POSTGRESQL
    # Its types refuse all but JSON of another shape, or none. A date that is none arrives as None.
    else [("errors", "5"), ("errors", '["text"]'), ("errors", "{"), ("worker_ids", "7")]
    if IS_MARIADB
    else [
        ("run_after", "9999-99-99 00:00:00"),
        ("started_at", "9999-99-99 00:00:00"),
        ("errors", "5"),
        ("errors", '["text"]'),
        ("worker_ids", "7"),
        ("attempt", "many"),
        ("parent_id", "no uuid"),
        ("id", "no uuid"),
    ]
)
each_spoiled = pytest.mark.parametrize(("column", "value"), SPOILED)


def old(**fields: Any) -> TaskRecord:
    """A row that was enqueued a minute ago and never pushed."""
    return TaskRecord.objects.create(
        name="tests.tasks.add", args=[1], enqueued_at=timezone.now() - timedelta(minutes=1), **fields
    )


def three(**fields: Any) -> tuple[TaskRecord, TaskRecord, TaskRecord]:
    """Three such rows; a test spoils the one in the middle."""
    return old(**fields), old(**fields), old(**fields)


def ids_of(*rows: TaskRecord) -> list[str]:
    """The ids of rows as text."""
    return [str(row.id) for row in rows]


@each_spoiled
@pytest.mark.parametrize("young", [True, False])
def test_rows_that_were_never_pushed_are_pushed(column: str, value: Any, young: bool) -> None:
    """The quick repair and the sweep; the odd row stays where it is."""
    first, odd, last = three()
    write(odd.id, column, value)
    assert Reconciler(Broker()).push_missing(young=young) == 2
    assert unknown(ids_of(first, odd, last)) == ids_of(odd)


@each_spoiled
def test_every_repair_of_a_round_goes_on(column: str, value: Any) -> None:
    """A sweep meets odd rows in each state, and everything else is repaired in the same pass."""
    queued = three()
    running = three(state=TaskState.RUNNING, fence=1, last_attempted_at=timezone.now() - timedelta(minutes=1))
    retrying = three(
        state=TaskState.FAILED, reason=FailureReason.EXCEPTION, retry_at=timezone.now() + timedelta(hours=1)
    )
    for _, odd, _ in (queued, running, retrying):
        if column != "id" or odd is queued[1]:
            write(odd.id, column, value)
    reconciler = Reconciler(Broker())
    reconciler.broker.mark_alive()
    long_ago = str(int(time.time()) - 3600)
    reconciler.broker.client.set(alive_key_name(reconciler.broker), long_ago)
    reconciler.sweep()
    reconciler.sweep()
    good = [row for rows in (queued, running, retrying) for row in (rows[0], rows[2])]
    assert unknown(ids_of(*good)) == []


def alive_key_name(broker: Broker) -> str:
    """The key that says since when Redis remembers."""
    from django_asyncq.broker.keys import alive_key

    return alive_key()


@each_spoiled
def test_a_worker_claims_the_others(column: str, value: Any) -> None:
    """The odd task leaves Redis; a sweep finds it when it is corrected. An id without a row goes back to the queue."""
    rows = three()
    lifecycle.dispatch(rows)
    write(rows[1].id, column, value)
    broker = Broker()
    runs = interop.claim(broker, "default", "w", 10, "default").runs
    assert [run.record.id for run in runs] == [rows[0].id, rows[2].id]
    keys = QueueKeys("default")
    assert broker.client.zcard(keys.archived) == 0
    if column == "id":
        assert broker.client.zcard(keys.scheduled) == 1
    else:
        assert unknown(ids_of(rows[1])) == ids_of(rows[1])


@each_spoiled
def test_retries_are_due(column: str, value: Any) -> None:
    """Those of the other tasks, however often the round is repeated."""
    now = timezone.now()
    rows = three(
        state=TaskState.FAILED,
        reason=FailureReason.EXCEPTION,
        retry_at=now - timedelta(seconds=1),
        max_attempts=3,
        attempt=1,
    )
    reconciler = Reconciler(Broker())
    assert sum(reconciler.park_missing()) == 3
    write(rows[1].id, column, value)
    for _ in range(3):
        forward_due(reconciler.broker, ["default"])
    states = dict(TaskRecord.objects.filter(id__in=[rows[0].id, rows[2].id]).values_list("id", "state"))
    assert set(states.values()) == {TaskState.QUEUED}
    # What no row has moves like any other program's.
    left = rows if column == "id" else [rows[0], rows[2]]
    assert sorted(pending()) == sorted(ids_of(*left))


@each_spoiled
def test_tasks_of_a_lost_host_come_back(column: str, value: Any) -> None:
    """By its supervisor, by the reconciler: `recover` is the same."""
    rows = three()
    lifecycle.dispatch(rows)
    runs = [taken_by("w") for _ in rows]
    write(runs[1].record.id, column, value)
    broker = Broker()
    leases = broker.held("default", "w")
    blame = lifecycle.Blame(named=frozenset(lease.id for lease in leases))
    lifecycle.recover(broker, "default", "w", leases, reason="its host is down", blame=blame)
    for run in (runs[0], runs[2]):
        row = TaskRecord.objects.get(id=run.record.id)
        assert (row.state, row.crash_count) == (TaskState.QUEUED, 1)
        assert unknown(ids_of(row)) == []


@each_spoiled
def test_old_rows_are_pruned(column: str, value: Any) -> None:
    """Whatever stands in the rows beside them."""
    long_ago = timezone.now() - timedelta(days=400)
    rows = [
        TaskRecord.objects.create(
            name="tests.tasks.add", state=TaskState.SUCCEEDED, finished_at=long_ago, enqueued_at=long_ago
        )
        for _ in range(3)
    ]
    for row in rows:
        # Ids hold the time at which they were made.
        older = row.id.__class__(int=row.id.int - (400 * 86_400_000 << 80))
        TaskRecord.objects.filter(id=row.id).update(id=older)
        row.id = older
    write(rows[1].id, column, value)
    for _ in Pruner(Broker()).prune_in_batches():
        pass
    assert not TaskRecord.objects.filter(id__in=[rows[0].id, rows[2].id]).exists()


def test_a_row_that_may_not_be_deleted_keeps_no_other() -> None:
    """A trigger of the project refuses one."""
    long_ago = timezone.now() - timedelta(days=400)
    kept, *_ = [
        TaskRecord.objects.create(
            id=isolation.TaskRecord._meta.pk.to_python(f"00000000-0000-7000-8000-00000000000{number}"),
            name="tests.tasks.add",
            state=TaskState.SUCCEEDED,
            finished_at=long_ago,
        )
        for number in range(1, 5)
    ]
    with refusing("DELETE", kept):
        for _ in Pruner(Broker()).prune_in_batches():
            pass
        assert list(TaskRecord.objects.all()) == [kept]


class refusing:
    """A trigger that refuses to change one row."""

    def __init__(self, action: str, row: TaskRecord) -> None:
        condition = f"OLD.id = '{row.id if IS_POSTGRESQL else row.id.hex}'"
        if IS_POSTGRESQL:
            self._begin = [
                "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger AS "
                "$$ BEGIN RAISE EXCEPTION 'refused by a trigger'; END $$ LANGUAGE plpgsql",
                f"CREATE TRIGGER refuse BEFORE {action} ON {TABLE} FOR EACH ROW WHEN ({condition}) "
                f"EXECUTE FUNCTION refuse()",
            ]
            self._end = f"DROP TRIGGER refuse ON {TABLE}"
        elif IS_MARIADB:
            self._begin = [
                f"CREATE TRIGGER refuse BEFORE {action} ON {TABLE} FOR EACH ROW IF {condition} "
                f"THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused by a trigger'; END IF"
            ]
            self._end = "DROP TRIGGER refuse"
        else:
            self._begin = [
                f"CREATE TRIGGER refuse BEFORE {action} ON {TABLE} WHEN {condition} "
                f"BEGIN SELECT RAISE(ABORT, 'refused by a trigger'); END"
            ]
            self._end = "DROP TRIGGER refuse"

    def __enter__(self) -> None:
        """Make it."""
        with connection.cursor() as cursor:
            for statement in self._begin:
                cursor.execute(statement)

    def __exit__(self, *error: object) -> None:
        """Drop it."""
        with connection.cursor() as cursor:
            cursor.execute(self._end)


def test_a_row_that_refuses_a_write_keeps_no_other() -> None:
    """Retries, recovery and lost runs: the rows beside it change."""
    now = timezone.now()
    retrying = three(
        state=TaskState.FAILED,
        reason=FailureReason.EXCEPTION,
        retry_at=now - timedelta(seconds=1),
        max_attempts=3,
        attempt=1,
    )
    reconciler = Reconciler(Broker())
    assert sum(reconciler.park_missing()) == 3
    with refusing("UPDATE", retrying[1]):
        for _ in range(3):
            forward_due(reconciler.broker, ["default"])
    assert sorted(pending()) == sorted(ids_of(retrying[0], retrying[2]))
    runs = [taken_by("w") for _ in range(2)]
    with refusing("UPDATE", runs[0].record):
        leases = reconciler.broker.held("default", "w")
        lifecycle.recover(reconciler.broker, "default", "w", leases, reason="its host is down")
    assert TaskRecord.objects.get(id=runs[1].record.id).state == TaskState.QUEUED


@each_spoiled
def test_gates_are_audited(column: str, value: Any) -> None:
    """Slots of the other tasks are added, and the gate can be built anew."""
    rows = three(gate="g", queue_limit=5)
    write(rows[1].id, column, value)
    gates.audit("g")
    assert {str(rows[0].id), str(rows[2].id)} <= {slot.id for slot in gates.slots("g")}


@pytest.mark.skipif(IS_MARIADB, reason="the types of a gate's columns refuse every value that cannot be read")
def test_an_odd_gate_concerns_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Its audit fails alone, and is logged once."""
    from django_asyncq.models import Gate

    for name in "abc":
        Gate.objects.create(name=name, limit=5)
        old(gate=name)
    with connection.cursor() as cursor:
        value = "'NaN'" if IS_POSTGRESQL else "'soon'"
        cursor.execute(f"UPDATE django_asyncq_gate SET expected_seconds = {value} WHERE name = 'b'")
    reconciler = Reconciler(Broker())
    for _ in range(3):
        reconciler.audit_gates("abc")
    assert len(gates.slots("a")) == len(gates.slots("c")) == 1
    assert sum("audit of the gate b" in line for line in caplog.messages) <= 1


SCHEDULE_SPOILED = (
    [("starts_at", FAR), ("ends_at", FAR), ("created_at", FAR)]
    if IS_POSTGRESQL
    else [("args", "{"), ("kwargs", "{")]
    if IS_MARIADB
    else [
        ("starts_at", "2026-99-99 00:00:00"),
        ("args", "{"),
        ("jitter_seconds", "soon"),
        ("created_at", 7),
        ("id", "no uuid"),
        ("next_occurrence_at", "0junk"),
        ("next_occurrence_at", "2026-99-99 00:00:00"),
    ]
)


@pytest.mark.parametrize(("column", "value"), SCHEDULE_SPOILED)
def test_the_other_schedules_fire(column: str, value: Any) -> None:
    """And are shown to asynq's tools; those of the code are updated."""
    due = timezone.now().replace(second=0, microsecond=0)
    rows = [
        Schedule.objects.create(
            name=name, task="tests.tasks.tally", args=["x"], cron="* * * * *", next_occurrence_at=due, is_declared=True
        )
        for name in "abc"
    ]
    write_to("django_asyncq_schedule", rows[1].id, column, value)
    try:
        # Twice at one moment: by the real clock, another minute may begin between the rounds.
        scheduler = Scheduler(clock=lambda: due + timedelta(seconds=1))
        for _ in range(2):
            scheduler.fire_due()
            SchedulerEntries().beat()
        assert Occurrence.objects.filter(schedule__in=[rows[0].pk, rows[2].pk]).count() == 2
        scheduler.sync()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM django_asyncq_occurrence")
            cursor.execute("DELETE FROM django_asyncq_schedule")


def test_an_odd_row_is_logged_once_and_used_again_when_it_is_corrected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the row and the remedy. Nothing needs a restart."""
    row = old()
    write(row.id, "errors", "5")
    reconciler = Reconciler(Broker())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert reconciler.push_missing(young=True) == 0
    (line,) = [message for message in caplog.messages if TABLE in message]
    assert str(row.id) in line
    assert "correct or delete" in line
    assert [(found.table, found.id) for found in set_aside.rows()] == [(TABLE, str(row.id))]
    write(row.id, "errors", "[]")
    assert reconciler.push_missing(young=True) == 0
    monkeypatch.setattr(isolation.time, "monotonic", lambda: time.perf_counter() + 1e9)
    assert reconciler.push_missing(young=True) == 1
    assert set_aside.rows() == []


def test_more_than_a_hundred_odd_rows_are_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else is wrong then, and no row is to blame."""
    rows = [old() for _ in range(101)]
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET errors = '5'")
    with pytest.raises(OperationalError, match="more than 100") as caught:
        Reconciler(Broker()).push_missing(young=False)
    assert kind_of(caught.value) is ErrorKind.UNAVAILABLE
    assert set_aside.rows() == []
    rows[0].delete()
    assert Reconciler(Broker()).push_missing(young=False) == 0
    assert len(set_aside.rows()) == 100


def test_other_errors_set_no_row_aside() -> None:
    """A lock, an outage or a missing table says nothing of the rows."""
    for error in (OperationalError("server closed the connection unexpectedly"), KeyboardInterrupt()):
        calls: list[list[int]] = []

        def fail(part: Any, error: BaseException = error, calls: list[list[int]] = calls) -> list[int]:
            calls.append(list(part))
            raise error

        with pytest.raises(type(error)):
            isolation.each_alone("numbers", [1, 2, 3], fail, database="default")
        assert calls == [[1, 2, 3]]
    assert set_aside.rows() == []


@pytest.mark.parametrize("odd", [set(), {0}, {7}, {3, 4}, set(range(0, 100, 7)), set(range(100))])
def test_each_alone_finds_the_odd_ones(odd: set[int]) -> None:
    """The others come back in their order; each odd one is tried alone, once, and not again."""
    tried: list[int] = []

    def double(part: Any) -> list[int]:
        tried.append(len(part))
        if odd & set(part):
            raise ValueError("odd")
        return [2 * number for number in part]

    expected = [2 * number for number in range(100) if number not in odd]
    assert isolation.each_alone("numbers", range(100), double, database="default") == expected
    assert {row.id for row in set_aside.rows()} == {str(number) for number in odd}
    tried.clear()
    assert isolation.each_alone("numbers", range(100), double, database="default") == expected
    assert len(tried) == (1 if expected else 0)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten."""
    monkeypatch.setattr(isolation, "MOST_REMEMBERED", 3)
    for number in range(5):
        set_aside.add("numbers", [(str(number), ValueError())])
    assert [row.id for row in set_aside.rows()] == ["2", "3", "4"]


def test_json_of_the_row_is_what_the_check_expects() -> None:
    """Every row that the project writes is usable, with and without errors."""
    rows = three()
    lifecycle.dispatch(rows)
    run = taken_by("w")
    lifecycle.fail(run, ValueError("wrong"), "", timezone.now(), retry_at=None)
    lifecycle.record_runs([run])
    found = lifecycle.load_rows([str(row.id) for row in rows])
    assert len(found) == 3
    assert json.dumps(found[str(run.record.id)].errors)
