"""What the pruner deletes, what it never deletes, and that it does not block other processes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import gates, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core.names import lowest_uuid7_at
from django_asyncq.core.policies import Retention, current_rules
from django_asyncq.exceptions import BrokerUnavailable, LockLost
from django_asyncq.fleet import pruner as pruning
from django_asyncq.fleet.pruner import PRUNE_SECONDS, Pruned, Pruner, retention_is_over
from django_asyncq.models import FailureReason, Occurrence, Schedule, StartupRun, TaskRecord, TaskState
from django_asyncq.storage import database_clock
from django_asyncq.storage.errors import ErrorKind, kind_of
from django_asyncq.storage.routing import transaction_of, writing_database

from .. import tasks
from ..clock import uuid7_at
from ..redis_state import unknown

pytestmark = pytest.mark.django_db(transaction=True)

SUCCEEDED, FAILED = TaskState.SUCCEEDED, TaskState.FAILED


@pytest.fixture
def pruner() -> Pruner:
    """A pruner over this test's keys."""
    return Pruner(Broker())


@pytest.fixture(autouse=True)
def large_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not split a pass."""
    monkeypatch.setattr(pruning, "BUDGET_SECONDS", 3600)


def row(state: TaskState = SUCCEEDED, *, days: float, **fields: Any) -> TaskRecord:
    """A task that was enqueued `days` ago, and finished then if its state is final; not saved."""
    then = timezone.now() - timedelta(days=days)
    made = {"id": uuid7_at(then), "name": "tests.tasks.add"}
    record = TaskRecord(**{**made, "state": state, "enqueued_at": then, **fields})
    record.reason = FailureReason.EXCEPTION if state == FAILED else FailureReason.NONE
    record.finished_at = fields.get("finished_at", then) if record.is_final else None
    return record


def saved(*records: TaskRecord) -> list[TaskRecord]:
    return TaskRecord.objects.bulk_create(records)


def remaining_ids() -> set[uuid.UUID]:
    return set(TaskRecord.objects.values_list("id", flat=True))


def default_condition() -> Any:
    return retention_is_over(current_rules({}), timezone.now())


def configure(settings: Any, **changed: Any) -> None:
    settings.ASYNCQ = {**settings.ASYNCQ, **changed}


# --- which tasks are deleted


def test_tasks_are_deleted_a_week_after_success_and_a_month_after_failure(pruner: Pruner) -> None:
    """The time counts from when the task finished. A second pass finds nothing."""
    stay = saved(row(days=6.9), row(FAILED, days=8), row(FAILED, days=29.9), row(days=9, finished_at=timezone.now()))
    saved(row(days=7.1), row(FAILED, days=30.1), row(days=400))
    assert sum(pruner.prune_tasks()) == 3
    assert remaining_ids() == {record.id for record in stay}
    assert sum(pruner.prune_tasks()) == 0


def test_unfinished_tasks_stay_whatever_their_age(pruner: Pruner, settings: Any) -> None:
    """QUEUED, RUNNING and RETRYING rows, even if finished rows are not kept at all."""
    configure(settings, SUCCEEDED_RETENTION_SECONDS=0, FAILED_RETENTION_SECONDS=0)
    saved(
        row(TaskState.QUEUED, days=400),
        row(TaskState.QUEUED, days=400, run_after=timezone.now() + timedelta(days=400)),
        row(TaskState.RUNNING, days=400),
        row(FAILED, days=400, retry_at=timezone.now() - timedelta(days=399)),
    )
    assert sum(pruner.prune_tasks()) == 0
    assert len(remaining_ids()) == 4
    # Nor are they deleted when their ids are given.
    assert lifecycle.prune(Broker(), list(remaining_ids()), default_condition()) == 0
    assert len(remaining_ids()) == 4


def test_the_setting_of_a_task_precedes_its_code_its_queue_and_the_default(
    pruner: Pruner, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each outcome by itself, the next rule applies where one sets nothing."""
    day = 86_400
    configure(
        settings,
        RETENTION={
            "tasks": {"a.set": {"succeeded": 1 * day}, "a.kept": {"succeeded": None}},
            "queues": {"mail": {"succeeded": 3 * day, "failed": None}},
        },
    )
    declared = {"a.set": Retention(succeeded=9 * day, failed=timedelta(days=2)), "a.code": Retention(succeeded=2 * day)}
    monkeypatch.setattr(pruning, "declared_retentions", lambda: declared)
    mail = {"queue_name": "mail"}
    goes = saved(
        row(days=1.5, name="a.set"),
        row(FAILED, days=2.5, name="a.set", **mail),
        row(days=2.5, name="a.code", **mail),
        row(days=3.5, **mail),
        row(days=7.5),
        row(FAILED, days=31),
        row(FAILED, days=31, name="a.kept"),
    )
    stay = saved(
        row(days=0.5, name="a.set"),
        row(FAILED, days=1.5, name="a.set"),
        row(days=1.5, name="a.code"),
        row(FAILED, days=31, name="a.code", **mail),
        row(days=400, name="a.kept", **mail),
        row(days=2.5, **mail),
        row(FAILED, days=400, **mail),
        row(days=6.5),
    )
    assert sum(pruner.prune_tasks()) == len(goes)
    assert remaining_ids() == {record.id for record in stay}


def test_the_retention_that_a_task_declares_applies_to_its_rows(
    pruner: Pruner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pruner reads it from the registered tasks, and skips tasks that declare nothing."""
    declared = {"a.b": SimpleNamespace(retention=Retention(5)), "a.c": SimpleNamespace(retention=None)}
    monkeypatch.setattr(pruning.registry, "known_versions", lambda: dict.fromkeys(declared, 1))
    monkeypatch.setattr(pruning.registry, "registered", declared.__getitem__)
    assert pruning.declared_retentions() == {"a.b": Retention(5)}
    (stays, _) = saved(row(days=1, name="a.c"), row(days=1, name="a.b"))
    assert sum(pruner.prune_tasks()) == 1
    assert remaining_ids() == {stays.id}


def test_none_keeps_tasks_for_ever(pruner: Pruner, settings: Any) -> None:
    """No row is even read."""
    configure(settings, SUCCEEDED_RETENTION_SECONDS=None, FAILED_RETENTION_SECONDS=None)
    saved(row(days=4000), row(FAILED, days=4000))
    # As in a process that has run for a while: whoever needs the time asks the database for it.
    database_clock._clocks.clear()
    with CaptureQueriesContext(connections[writing_database(TaskRecord)]) as queries:
        assert sum(pruner.prune_tasks()) == 0
    assert len(queries) == 0


def test_a_task_that_has_just_finished_stays_for_two_leases(pruner: Pruner, settings: Any) -> None:
    """With a retention of 0 the row stays while its outcome may still have to be acknowledged."""
    configure(settings, SUCCEEDED_RETENTION_SECONDS=0, LEASE_SECONDS=30)
    now = timezone.now()
    young, old = (row(days=1, finished_at=now - timedelta(seconds=seconds)) for seconds in (50, 70))
    saved(young, old)
    assert sum(pruner.prune_tasks()) == 1
    assert remaining_ids() == {young.id}


def test_tasks_with_random_ids_are_pruned_too(pruner: Pruner) -> None:
    """The ids of foreign producers are random and do not tell the age."""
    ids = [uuid.UUID("f47ac10b-58cc-4372-a567-0e02b2c3d479"), uuid.UUID("00000000-0000-4000-8000-000000000001")]
    saved(*(row(days=8, id=id) for id in ids), row(days=1, id=uuid.UUID("e47ac10b-58cc-4372-a567-0e02b2c3d479")))
    assert sum(pruner.prune_tasks()) == 2
    assert len(remaining_ids()) == 1


def test_rows_that_the_project_refers_to_stay(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign key with a constraint keeps its task, whatever its on_delete; one without (of occurrences) does not."""
    kept, loose = saved(row(days=8), row(days=8))
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    for number, record in enumerate((kept, loose)):
        Occurrence.objects.create(schedule=schedule, occurs_at=timezone.now() + timedelta(number), task=record)
    Occurrence.objects.filter(task=loose).delete()
    with monkeypatch.context() as patched:
        patched.setattr(Occurrence._meta.get_field("task"), "db_constraint", True)
        assert sum(pruner.prune_tasks()) == 1
        assert remaining_ids() == {kept.id}
    assert sum(pruner.prune_tasks()) == 1


# --- retries at the same moment


def test_task_retried_between_reading_and_deleting_survives() -> None:
    """Its row is QUEUED by then, and its entry stays in pending. The others are deleted."""
    records = saved(row(FAILED, days=31), row(FAILED, days=31))
    ids, condition = [record.id for record in records], default_condition()
    assert [record.id for record in lifecycle.retry(ids[:1], by_person=True).retried] == ids[:1]
    assert lifecycle.prune(Broker(), ids, condition) == 1
    assert remaining_ids() == {ids[0]}
    assert TaskRecord.objects.get().state == TaskState.QUEUED
    assert Broker().client.lrange(QueueKeys("default").pending, 0, -1) == [str(ids[0]).encode()]
    # It may even have finished again: then its retention has only begun.
    TaskRecord.objects.update(state=SUCCEEDED, finished_at=timezone.now())
    assert lifecycle.prune(Broker(), ids, condition) == 0
    assert remaining_ids() == {ids[0]}


def test_the_retry_of_a_pruned_task_reports_that_it_is_deleted(pruner: Pruner) -> None:
    """A page may still show it."""
    (record,) = saved(row(FAILED, days=31))
    assert sum(pruner.prune_tasks()) == 1
    assert lifecycle.retry([record.id], by_person=True).not_failed == [record.id]


# --- Redis


def fail_for_good() -> TaskRecord:
    """A task that a worker ran and whose entry is in asynq's archive."""
    tasks.add.enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.begin(run, "w", timezone.now())
    lifecycle.fail(run, ValueError("no"), "", timezone.now() - timedelta(days=31), retry_at=None)
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    return run.record


def test_a_failed_task_is_removed_from_asynqs_archive_with_its_row(pruner: Pruner, settings: Any) -> None:
    """Its hash and its member are removed; the entry of a younger failure stays."""
    configure(settings, RETENTION={"tasks": {"x": {"failed": 0}}})  # so that today's ids are checked
    old, young = fail_for_good(), fail_for_good()
    TaskRecord.objects.filter(id=young.id).update(finished_at=timezone.now())
    assert sum(pruner.prune_tasks()) == 1
    assert remaining_ids() == {young.id}
    keys = QueueKeys("default")
    assert Broker().client.zrange(keys.archived, 0, -1) == [str(young.id).encode()]
    assert unknown([str(old.id), str(young.id)]) == [str(old.id)]


def test_an_outage_of_redis_ends_the_pass_and_loses_nothing(own_redis: Any, pruner: Pruner) -> None:
    """Old rows are deleted, unfinished rows stay, and the pass is due again when Redis is back."""
    saved(row(days=8), row(FAILED, days=31))
    tasks.add.enqueue(1)
    own_redis.kill()
    with pytest.raises(BrokerUnavailable):
        pruner.tick(1000.0)
    assert [record.state for record in TaskRecord.objects.all()] == [TaskState.QUEUED]
    own_redis.restart()
    saved(row(days=8))
    assert pruner.tick(1001.0) == Pruned(tasks=1)


def test_gate_slots_do_not_change(pruner: Pruner) -> None:
    """A finished task holds no slot, and a waiting task keeps its own."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    slots = gates.slots("g")
    assert len(slots) == 1
    saved(row(days=8, gate="g"), row(FAILED, days=31, gate="g"))
    assert sum(pruner.prune_tasks()) == 2
    assert gates.slots("g") == slots


# --- batches, locks, and other processes at work


def test_batches_are_bounded_and_load_no_rows(pruner: Pruner) -> None:
    """A transaction has at most 500 rows and two statements, and reads neither arguments nor results."""
    saved(*(row(days=8) for _ in range(1200)))
    with CaptureQueriesContext(connections[writing_database(TaskRecord)]) as queries:
        assert list(pruner.prune_tasks()) == [500, 500, 200, 0]
    statements = [query["sql"] for query in queries]
    deletes = [sql for sql in statements if sql.startswith("DELETE")]
    assert [sql.count(",") + 1 for sql in deletes] == [500, 500, 200]
    assert not [sql for sql in statements if "return_value" in sql or "kwargs" in sql]
    own = [sql for sql in statements if sql.split()[0] in ("SELECT", "DELETE", "WITH")]
    # Two statements for each of two pages: its last id, and its old rows; then two for each batch.
    assert len(own) == 2 * 2 + 2 * 3


def test_pages_are_bounded_by_the_rows_they_read(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows that stay make many short statements, not one long one. Each row is read once."""
    monkeypatch.setattr(pruning, "ROWS_PER_PAGE", 10)
    records = sorted((row(FAILED, days=8 + number / 100) for number in range(34)), key=lambda record: record.id)
    saved(*records, row(days=1))
    now = timezone.now()
    seen = [
        list(page.values_list("id", flat=True))
        for page in pruning.pages_between(pruning.LOWEST_ID, lowest_uuid7_at(now - timedelta(days=7)), 10)
    ]
    assert [len(page) for page in seen] == [10, 10, 10, 4]
    assert [id for page in seen for id in page] == [record.id for record in records]
    assert list(pruner.prune_tasks()) == [0] * 5  # four pages, and one of foreign ids


@pytest.mark.skipif("__import__('django.db').db.connection.vendor != 'sqlite'", reason="plans are read as SQLite's")
def test_every_statement_uses_the_primary_key(pruner: Pruner) -> None:
    """Not the index on states, which would read all rows of a state for each batch."""
    saved(*(row(days=8) for _ in range(20)))
    with CaptureQueriesContext(connections[writing_database(TaskRecord)]) as queries:
        assert sum(pruner.prune_tasks()) == 20
    statements = [query["sql"] for query in queries if query["sql"].split()[0] in ("SELECT", "DELETE")]
    assert len(statements) == 6
    for statement in statements:
        with connections[writing_database(TaskRecord)].cursor() as cursor:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}")
            plan = " ".join(str(step) for step in cursor.fetchall())
        assert "INDEX sqlite_autoindex_django_asyncq_taskrecord_1" in plan, (statement, plan)


def test_two_pruners_at_once_share_the_work() -> None:
    """One of them counts each row. One that MariaDB ends for a deadlock begins anew, as the loop of the leader does."""
    saved(*(row(days=8) for _ in range(2000)), row(days=1))
    counts, errors = [], []

    def prune() -> None:
        pages = Pruner(Broker()).prune_tasks()
        try:
            while True:
                try:
                    for count in pages:
                        counts.append(count)
                    return
                except OperationalError as error:
                    if kind_of(error) is not ErrorKind.AGAIN:
                        raise
                    pages = Pruner(Broker()).prune_tasks()
        except Exception as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=prune) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (errors, sum(counts), len(remaining_ids())) == ([], 2000, 1)


def in_another_connection(act: Callable[[], None]) -> threading.Thread:
    """Run `act` in a thread, with a database connection of its own."""

    def run() -> None:
        try:
            act()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


needs_row_locks = pytest.mark.skipif(
    "not __import__('django.db').db.connection.features.has_select_for_update_skip_locked",
    reason="the database locks no single rows",
)


@needs_row_locks
def test_a_locked_row_is_skipped_at_once(pruner: Pruner) -> None:
    """The pruner does not wait for the lock, and deletes the row in the next pass."""
    held, other = saved(row(FAILED, days=31), row(FAILED, days=31))
    locked, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction_of(TaskRecord):
            TaskRecord.objects.select_for_update().get(id=held.id)
            locked.set()
            enough.wait(30)

    thread = in_another_connection(hold)
    try:
        assert locked.wait(30)
        begun_at = time.monotonic()
        assert sum(pruner.prune_tasks()) == 1
        assert time.monotonic() - begun_at < 20
        assert remaining_ids() == {held.id}
    finally:
        enough.set()
        thread.join(30)
    assert sum(pruner.prune_tasks()) == 1
    assert other.id not in remaining_ids()


@needs_row_locks
def test_an_open_batch_does_not_block_writers() -> None:
    """Before the batch commits, others can enqueue, and change rows of the same age."""
    saved(row(days=8), row(days=8))
    (waiting,) = saved(row(TaskState.QUEUED, days=8))
    written = threading.Event()

    def write() -> None:
        tasks.add.enqueue(1)
        TaskRecord.objects.filter(id=waiting.id).update(attempt=1)
        written.set()

    @contextmanager
    def slow_commit() -> Iterator[None]:
        with transaction_of(TaskRecord):
            yield
            thread = in_another_connection(write)
            assert written.wait(10), "a writer waits for the pruner"
        thread.join(10)

    assert sum(Pruner(Broker(), fenced=slow_commit).prune_tasks()) == 2
    assert len(remaining_ids()) == 2


# --- occurrences and start-up runs


def occurrence(schedule: Schedule, days: float, **fields: Any) -> Occurrence:
    then = timezone.now() - timedelta(days=days)
    return Occurrence.objects.create(schedule=schedule, occurs_at=then, created_at=then, **fields)


def test_old_occurrences_are_deleted_except_the_latest_of_each_schedule(pruner: Pruner) -> None:
    """The latest decides what fires next. One whose task has not finished decides whether the next may overlap."""
    often, seldom = (
        Schedule.objects.create(name=name, task="tests.tasks.add", interval_seconds=60) for name in ("often", "seldom")
    )
    live, ended = saved(row(TaskState.QUEUED, days=60), row(days=3))
    goes = [occurrence(often, 90), occurrence(often, 80, task=ended), occurrence(often, 70)]
    stay = [occurrence(seldom, 65), occurrence(often, 60, task=live), occurrence(often, 29), occurrence(often, 1)]
    assert sum(pruner.prune_occurrences()) == len(goes)
    assert set(Occurrence.objects.values_list("id", flat=True)) == {each.id for each in stay}
    assert sum(pruner.prune_occurrences()) == 0


def test_old_startup_runs_are_deleted_except_the_latest_of_each_name(pruner: Pruner) -> None:
    """The latest decides whether it must run again."""

    def run(name: str, days: float) -> StartupRun:
        then = timezone.now() - timedelta(days=days)
        return StartupRun.objects.create(name=name, holder="h", term=1, begun_at=then)

    run("a", 90), run("b", 80), run("a", 70)
    stay = [run("c", 65), run("a", 60), run("b", 1)]
    assert sum(pruner.prune_startup_runs()) == 3
    assert set(StartupRun.objects.values_list("id", flat=True)) == {each.id for each in stay}


def test_history_is_read_in_pages_up_to_the_first_young_row(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that ends with a young row is the last."""
    monkeypatch.setattr(pruning, "ROWS_PER_BATCH", 10)
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    for number in range(45):
        occurrence(schedule, 60.5 - number * 2)
    assert list(pruner.prune_occurrences()) == [10, 6]
    assert Occurrence.objects.count() == 29


def test_history_is_kept_as_long_as_failed_tasks(pruner: Pruner, settings: Any) -> None:
    """For ever, if they are."""
    configure(settings, FAILED_RETENTION_SECONDS=None)
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    occurrence(schedule, 4000), occurrence(schedule, 3999)
    assert list(pruner.prune_occurrences()) == []


# --- the pass


def test_a_pass_is_bounded_resumed_and_followed_by_a_pause(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round without budget does one batch, the next continues, then nothing until PRUNE_SECONDS have passed."""
    saved(*(row(days=8) for _ in range(700)))
    with monkeypatch.context() as patched:
        patched.setattr(pruning, "BUDGET_SECONDS", 0)
        patched.setattr(pruning, "PAUSE_FACTOR", 0)
        assert [pruner.tick(1000.0).tasks for _ in range(3)] == [500, 200, 0]
        for _ in range(20):
            pruner.tick(1001.0)
    saved(row(days=8))
    assert pruner.tick(1050.0) == Pruned()
    assert pruner.tick(1001.0 + PRUNE_SECONDS) == Pruned(tasks=1)


def test_a_long_pass_is_followed_by_a_long_pause(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a table of any size takes a fixed share of one connection."""
    monkeypatch.setattr(pruning, "PAUSE_FACTOR", 1e9)
    pruner.tick(1000.0)
    saved(row(days=8))
    assert pruner.tick(1000.0 + 10 * PRUNE_SECONDS) == Pruned()


def test_a_pass_prunes_every_kind(pruner: Pruner, redis_client: redis.Redis) -> None:
    """And returns how many of each."""
    saved(row(days=8))
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    occurrence(schedule, 60), occurrence(schedule, 50)
    for _ in range(2):
        StartupRun.objects.create(name="n", holder="h", term=1, begun_at=timezone.now() - timedelta(days=60))
    Broker().register_queue("go")
    complete("a", -1, queue="go")
    assert pruner.tick(1000.0) == Pruned(1, 1, 1, 1)


def test_each_batch_of_rows_is_fenced() -> None:
    """A lost lock ends the pass: nothing more is deleted, and the pass is due again."""
    saved(*(row(days=8) for _ in range(700)))
    entered: list[int] = []

    @contextmanager
    def fenced() -> Iterator[None]:
        entered.append(1)
        if len(entered) == 2:
            raise LockLost("maintenance", 1)
        with transaction_of(TaskRecord):
            yield

    pruner = Pruner(Broker(), fenced=fenced)
    with pytest.raises(LockLost):
        pruner.tick(1000.0)
    assert len(remaining_ids()) == 200
    assert pruner.tick(1000.0).tasks == 200
    assert len(entered) == 3


def test_history_is_fenced_too() -> None:
    """Occurrences and start-up runs stay when another process holds the lock."""
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    occurrence(schedule, 60), occurrence(schedule, 50)
    for _ in range(2):
        StartupRun.objects.create(name="n", holder="h", term=1, begun_at=timezone.now() - timedelta(days=60))

    @contextmanager
    def fenced() -> Iterator[None]:
        raise LockLost("maintenance", 1)
        yield

    pruner = Pruner(Broker(), fenced=fenced)
    for prune in (pruner.prune_occurrences, pruner.prune_startup_runs):
        with pytest.raises(LockLost):
            list(prune())
    assert (Occurrence.objects.count(), StartupRun.objects.count()) == (2, 2)


# --- asynq's completed set


def complete(id: str, seconds: int, *, queue: str = "default", **fields: str) -> None:
    """What a Go worker leaves of a task whose retention is over in so many seconds."""
    keys = QueueKeys(queue)
    Broker().client.hset(keys.task(id), mapping={"msg": "m", "state": "completed", "result": "r", **fields})
    Broker().client.zadd(keys.completed, {id: int(time.time()) + seconds})


@pytest.fixture
def dump(redis_client: redis.Redis, key_prefix: str) -> Callable[[], dict[bytes, bytes]]:
    """A function that returns all of this test's keys with their contents."""
    return lambda: {key: redis_client.dump(key) for key in redis_client.scan_iter(f"{key_prefix}*")}


def test_completed_tasks_are_deleted_when_their_retention_is_over(redis_client: redis.Redis) -> None:
    """Hash and member. One with time left stays."""
    complete("over", -1), complete("now", 0), complete("later", 60)
    assert Broker().prune_completed("default") == 2
    keys = QueueKeys("default")
    assert redis_client.zrange(keys.completed, 0, -1) == [b"later"]
    assert unknown(["over", "now", "later"]) == ["over", "now"]


def test_completed_tasks_with_time_left_do_not_change(dump: Any) -> None:
    """The answer is 0, also the second time and for an unknown queue."""
    complete("later", 60)
    before = dump()
    assert [Broker().prune_completed(queue) for queue in ("default", "default", "nowhere")] == [0, 0, 0]
    assert Broker().prune_completed("default", 0) == 0
    assert dump() == before


def test_a_call_prunes_up_to_its_limit_and_the_pass_calls_again(pruner: Pruner, redis_client: redis.Redis) -> None:
    """The oldest first. A limit above 200 counts as 200."""
    for number in range(250):
        complete(f"{number:03}", number - 300)
    assert Broker().prune_completed("default", 20) == 20
    assert redis_client.zrange(QueueKeys("default").completed, 0, 0) == [b"020"]
    Broker().register_queue("default")
    assert list(pruner.prune_completed()) == [100, 100, 30]
    for number in range(250):
        complete(f"{number:03}", number - 300)
    assert Broker().prune_completed("default", 1000) == 200


def test_the_unique_lock_of_a_completed_task_is_released(redis_client: redis.Redis) -> None:
    """A lock that another task owns stays."""
    keys = QueueKeys("default")
    mine, other = keys.unique("t", "1"), keys.unique("t", "2")
    redis_client.mset({mine: "a", other: "x"})
    complete("a", -1, unique_key=mine), complete("b", -1, unique_key=other)
    assert Broker().prune_completed("default") == 2
    assert redis_client.mget(mine, other) == [None, b"x"]


def test_a_task_in_another_state_only_leaves_the_completed_set(redis_client: redis.Redis) -> None:
    """asynq's janitor would delete the message of a task that is to run again. A stray hash is no task."""
    complete("a", -1, state="pending")
    keys = QueueKeys("default")
    redis_client.hset(keys.task("stray"), "result", "r")
    redis_client.zadd(keys.completed, {"stray": 1, "hashless": 1})
    assert Broker().prune_completed("default") == 3
    assert redis_client.zcard(keys.completed) == 0
    assert redis_client.hget(keys.task("a"), "state") == b"pending"
    assert redis_client.exists(keys.task("stray")) == 0
