"""What goes when its time is over, what never goes, and that nobody is kept waiting meanwhile."""

from __future__ import annotations

import os
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
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import conf, gates, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.definitions.retention_policy import Retention, current_rules
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.maintenance import pruner as pruner_module
from django_asyncq.maintenance.pruner import Pruned, Pruner, lowest_id_at, over_condition
from django_asyncq.models import Occurrence, Schedule, StartupRun, TaskRecord, TaskState

from . import tasks
from .redis_state import unknown

pytestmark = pytest.mark.django_db(transaction=True)

SUCCEEDED, FAILED = TaskState.SUCCEEDED, TaskState.FAILED


@pytest.fixture
def pruner() -> Pruner:
    """A pruner over this test's keys."""
    return Pruner(Broker())


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not cut a pass in two."""
    monkeypatch.setattr(pruner_module, "BUDGET_SECONDS", 3600)


def row(state: TaskState = SUCCEEDED, *, days: float, **fields: Any) -> TaskRecord:
    """A task that was enqueued, and ended if its state is final, so many days ago; not saved."""
    then = timezone.now() - timedelta(days=days)
    made = {"id": uuid.UUID(int=lowest_id_at(then).int | int.from_bytes(os.urandom(7))), "name": "tests.tasks.add"}
    record = TaskRecord(**{**made, "state": state, "enqueued_at": then, **fields})
    record.finished_at = fields.get("finished_at", then) if record.is_final else None
    return record


def saved(*records: TaskRecord) -> list[TaskRecord]:
    return TaskRecord.objects.bulk_create(records)


def left() -> set[uuid.UUID]:
    return set(TaskRecord.objects.values_list("id", flat=True))


def over() -> Any:
    return over_condition(current_rules({}), timezone.now())


def keep(settings: Any, **changed: Any) -> None:
    settings.ASYNCQ = {**settings.ASYNCQ, **changed}


# --- which tasks go


def test_a_week_after_success_and_a_month_after_failure(pruner: Pruner) -> None:
    """The age is that since the end; a second pass finds nothing."""
    stay = saved(row(days=6.9), row(FAILED, days=8), row(FAILED, days=29.9), row(days=9, finished_at=timezone.now()))
    saved(row(days=7.1), row(FAILED, days=30.1), row(days=400))
    assert sum(pruner.prune_tasks()) == 3
    assert left() == {record.id for record in stay}
    assert sum(pruner.prune_tasks()) == 0


def test_what_has_not_ended_stays_whatever_its_age(pruner: Pruner, settings: Any) -> None:
    """Waiting, running, and waiting for a retry, although nothing ended is kept at all."""
    keep(settings, SUCCEEDED_RETENTION_SECONDS=0, FAILED_RETENTION_SECONDS=0)
    saved(
        row(TaskState.QUEUED, days=400),
        row(TaskState.QUEUED, days=400, run_after=timezone.now() + timedelta(days=400)),
        row(TaskState.RUNNING, days=400),
        row(FAILED, days=400, retry_at=timezone.now() - timedelta(days=399)),
    )
    assert sum(pruner.prune_tasks()) == 0
    assert len(left()) == 4
    # Nor when they are named outright.
    assert lifecycle.prune(Broker(), list(left()), over()) == 0
    assert len(left()) == 4


def test_settings_of_a_task_then_its_code_then_its_queue_then_the_default(
    pruner: Pruner, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each outcome by itself: what one does not say, the next does."""
    day = 86_400
    keep(
        settings,
        RETENTION={
            "tasks": {"a.set": {"succeeded": 1 * day}, "a.kept": {"succeeded": None}},
            "queues": {"mail": {"succeeded": 3 * day, "failed": None}},
        },
    )
    declared = {"a.set": Retention(succeeded=9 * day, failed=timedelta(days=2)), "a.code": Retention(succeeded=2 * day)}
    monkeypatch.setattr(pruner_module, "declared_retentions", lambda: declared)
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
    assert left() == {record.id for record in stay}


def test_what_a_task_declares_holds_for_its_rows(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read from the registered tasks; one that declares nothing is left out."""
    declared = {"a.b": SimpleNamespace(retention=Retention(5)), "a.c": SimpleNamespace(retention=None)}
    monkeypatch.setattr(pruner_module.registry, "registered_names", lambda: sorted(declared))
    monkeypatch.setattr(pruner_module.registry, "registered", declared.__getitem__)
    assert pruner_module.declared_retentions() == {"a.b": Retention(5)}
    (stays, _) = saved(row(days=1, name="a.c"), row(days=1, name="a.b"))
    assert sum(pruner.prune_tasks()) == 1
    assert left() == {stays.id}


def test_for_ever_is_for_ever(pruner: Pruner, settings: Any) -> None:
    """None keeps everything, and no row is even looked at."""
    keep(settings, SUCCEEDED_RETENTION_SECONDS=None, FAILED_RETENTION_SECONDS=None)
    saved(row(days=4000), row(FAILED, days=4000))
    with CaptureQueriesContext(connection) as queries:
        assert sum(pruner.prune_tasks()) == 0
    assert len(queries) == 0


def test_what_has_just_ended_waits_for_two_leases(pruner: Pruner, settings: Any) -> None:
    """With a retention of 0 the row stays while its acknowledgement may be on its way."""
    keep(settings, SUCCEEDED_RETENTION_SECONDS=0, LEASE_SECONDS=30)
    now = timezone.now()
    young, old = (row(days=1, finished_at=now - timedelta(seconds=seconds)) for seconds in (50, 70))
    saved(young, old)
    assert sum(pruner.prune_tasks()) == 1
    assert left() == {young.id}


def test_ids_that_are_not_ours_are_pruned_too(pruner: Pruner) -> None:
    """A foreign producer's id is random; it says nothing of the age."""
    ids = [uuid.UUID("f47ac10b-58cc-4372-a567-0e02b2c3d479"), uuid.UUID("00000000-0000-4000-8000-000000000001")]
    saved(*(row(days=8, id=id) for id in ids), row(days=1, id=uuid.UUID("e47ac10b-58cc-4372-a567-0e02b2c3d479")))
    assert sum(pruner.prune_tasks()) == 2
    assert len(left()) == 1


def test_rows_that_the_project_refers_to_stay(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign key with a constraint keeps its task, whatever its on_delete; one without (that of occurrences) does not."""
    kept, loose = saved(row(days=8), row(days=8))
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    for number, record in enumerate((kept, loose)):
        Occurrence.objects.create(schedule=schedule, occurs_at=timezone.now() + timedelta(number), task=record)
    Occurrence.objects.filter(task=loose).delete()
    with monkeypatch.context() as patched:
        patched.setattr(Occurrence._meta.get_field("task"), "db_constraint", True)
        assert sum(pruner.prune_tasks()) == 1
        assert left() == {kept.id}
    assert sum(pruner.prune_tasks()) == 1


# --- retries at the same moment


def test_task_retried_between_reading_and_deleting_survives() -> None:
    """Its row is 0 by then, and its entry stays in pending; the others go."""
    records = saved(row(FAILED, days=31), row(FAILED, days=31))
    ids, condition = [record.id for record in records], over()
    assert [record.id for record in lifecycle.retry(ids[:1], by_person=True).retried] == ids[:1]
    assert lifecycle.prune(Broker(), ids, condition) == 1
    assert left() == {ids[0]}
    assert TaskRecord.objects.get().state == TaskState.QUEUED
    assert Broker().client.lrange(QueueKeys("default").pending, 0, -1) == [str(ids[0]).encode()]
    # It may even have ended again: that end is young.
    TaskRecord.objects.update(state=SUCCEEDED, finished_at=timezone.now())
    assert lifecycle.prune(Broker(), ids, condition) == 0
    assert left() == {ids[0]}


def test_retry_of_a_pruned_task_is_told(pruner: Pruner) -> None:
    """The page that still shows it learns that it is gone."""
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


def test_what_failed_leaves_asynqs_archive_with_its_row(pruner: Pruner, settings: Any) -> None:
    """Hash and member go; the entry of a younger failure stays."""
    keep(settings, RETENTION={"tasks": {"x": {"failed": 0}}})  # so that today's ids are looked at
    over_, young = fail_for_good(), fail_for_good()
    TaskRecord.objects.filter(id=young.id).update(finished_at=timezone.now())
    assert sum(pruner.prune_tasks()) == 1
    assert left() == {young.id}
    keys = QueueKeys("default")
    assert Broker().client.zrange(keys.archived, 0, -1) == [str(young.id).encode()]
    assert unknown([str(over_.id), str(young.id)]) == [str(over_.id)]


def test_redis_away_loses_nothing(own_redis: Any, pruner: Pruner) -> None:
    """What is over has gone, what lives is there, and the pass is due again when Redis is back."""
    saved(row(days=8), row(FAILED, days=31))
    tasks.add.enqueue(1)
    own_redis.kill()
    with pytest.raises(BrokerUnavailable):
        pruner.tick(1000.0)
    assert [record.state for record in TaskRecord.objects.all()] == [TaskState.QUEUED]
    own_redis.restart()
    saved(row(days=8))
    assert pruner.tick(1001.0) == Pruned(tasks=1)


def test_gate_slots_are_left_alone(pruner: Pruner) -> None:
    """An ended task holds none, and the slot of one that waits is its own."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    slots = gates.slots("g")
    assert len(slots) == 1
    saved(row(days=8, gate="g"), row(FAILED, days=31, gate="g"))
    assert sum(pruner.prune_tasks()) == 2
    assert gates.slots("g") == slots


# --- batches, locks, and others who work at the same time


def test_batches_are_bounded_and_load_no_row(pruner: Pruner) -> None:
    """At most 500 rows in a transaction of two statements; nobody reads arguments or results of what goes."""
    saved(*(row(days=8) for _ in range(1200)))
    with CaptureQueriesContext(connection) as queries:
        assert list(pruner.prune_tasks()) == [500, 500, 200, 0]
    statements = [query["sql"] for query in queries]
    deletes = [sql for sql in statements if sql.startswith("DELETE")]
    assert [sql.count(",") + 1 for sql in deletes] == [500, 500, 200]
    assert not [sql for sql in statements if "return_value" in sql or "kwargs" in sql]
    own = [sql for sql in statements if sql.split()[0] in ("SELECT", "DELETE")]
    # Two pages are two statements each: the page's end, and what in it is over; then two for each batch.
    assert len(own) == 2 * 2 + 2 * 3


def test_pages_are_bounded_by_rows_looked_at(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows that stay make many short statements, not one long one; each row is looked at once."""
    monkeypatch.setattr(pruner_module, "ROWS_PER_PAGE", 10)
    records = sorted((row(FAILED, days=8 + number / 100) for number in range(34)), key=lambda record: record.id)
    saved(*records, row(days=1))
    now = timezone.now()
    seen = [
        list(page.values_list("id", flat=True))
        for page in pruner_module.pages(pruner_module.LOWEST_ID, lowest_id_at(now - timedelta(days=7)))
    ]
    assert [len(page) for page in seen] == [10, 10, 10, 4]
    assert [id for page in seen for id in page] == [record.id for record in records]
    assert list(pruner.prune_tasks()) == [0] * 5  # four pages, and one of foreign ids


@pytest.mark.skipif("__import__('django.db').db.connection.vendor != 'sqlite'", reason="plans are read as SQLite's")
def test_every_statement_goes_by_the_primary_key(pruner: Pruner) -> None:
    """Not by the index on states, which would read all rows of a state for each batch."""
    saved(*(row(days=8) for _ in range(20)))
    with CaptureQueriesContext(connection) as queries:
        assert sum(pruner.prune_tasks()) == 20
    statements = [query["sql"] for query in queries if query["sql"].split()[0] in ("SELECT", "DELETE")]
    assert len(statements) == 6
    for statement in statements:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}")
            plan = " ".join(str(step) for step in cursor.fetchall())
        assert "INDEX sqlite_autoindex_django_asyncq_taskrecord_1" in plan, (statement, plan)


def test_two_pruners_at_once_share_the_work() -> None:
    """Every row is counted by one of them, and none of them fails."""
    saved(*(row(days=8) for _ in range(2000)), row(days=1))
    counts, errors = [], []

    def prune() -> None:
        try:
            counts.append(sum(Pruner(Broker()).prune_tasks()))
        except Exception as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=prune) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (errors, sum(counts), len(left())) == ([], 2000, 1)


def in_another_connection(act: Callable[[], None]) -> threading.Thread:
    """Start `act` in a thread, which has a database connection of its own."""

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
def test_row_that_somebody_holds_is_left_out_at_once(pruner: Pruner) -> None:
    """The pruner does not wait for it, and takes it the next time."""
    held, other = saved(row(FAILED, days=31), row(FAILED, days=31))
    locked, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            TaskRecord.objects.select_for_update().get(id=held.id)
            locked.set()
            enough.wait(30)

    thread = in_another_connection(hold)
    try:
        assert locked.wait(30)
        begun_at = time.monotonic()
        assert sum(pruner.prune_tasks()) == 1
        assert time.monotonic() - begun_at < 2
        assert left() == {held.id}
    finally:
        enough.set()
        thread.join(30)
    assert sum(pruner.prune_tasks()) == 1
    assert other.id not in left()


@needs_row_locks
def test_writers_are_not_locked_out_by_an_open_batch() -> None:
    """While a batch has deleted and not yet committed, others enqueue, and change rows of the same age."""
    saved(row(days=8), row(days=8))
    (waiting,) = saved(row(TaskState.QUEUED, days=8))
    written = threading.Event()

    def write() -> None:
        tasks.add.enqueue(1)
        TaskRecord.objects.filter(id=waiting.id).update(attempt=1)
        written.set()

    @contextmanager
    def slow_commit() -> Iterator[None]:
        with transaction.atomic():
            yield
            thread = in_another_connection(write)
            assert written.wait(10), "a writer waits for the pruner"
        thread.join(10)

    assert sum(Pruner(Broker(), fenced=slow_commit).prune_tasks()) == 2
    assert len(left()) == 2


# --- occurrences and start-up runs


def tick(schedule: Schedule, days: float, **fields: Any) -> Occurrence:
    then = timezone.now() - timedelta(days=days)
    return Occurrence.objects.create(schedule=schedule, occurs_at=then, created_at=then, **fields)


def test_old_ticks_go_but_each_schedules_latest(pruner: Pruner) -> None:
    """The latest decides what comes next, and one whose task has not ended whether the next may overlap."""
    often, seldom = (
        Schedule.objects.create(name=name, task="tests.tasks.add", interval_seconds=60) for name in ("often", "seldom")
    )
    live, ended = saved(row(TaskState.QUEUED, days=60), row(days=3))
    goes = [tick(often, 90), tick(often, 80, task=ended), tick(often, 70)]
    stay = [tick(seldom, 65), tick(often, 60, task=live), tick(often, 29), tick(often, 1)]
    assert sum(pruner.prune_occurrences()) == len(goes)
    assert set(Occurrence.objects.values_list("id", flat=True)) == {each.id for each in stay}
    assert sum(pruner.prune_occurrences()) == 0


def test_old_startup_runs_go_but_each_names_latest(pruner: Pruner) -> None:
    """The latest decides whether it must run again."""

    def run(name: str, days: float) -> StartupRun:
        then = timezone.now() - timedelta(days=days)
        return StartupRun.objects.create(name=name, holder="h", term=1, begun_at=then)

    run("a", 90), run("b", 80), run("a", 70)
    stay = [run("c", 65), run("a", 60), run("b", 1)]
    assert sum(pruner.prune_startup_runs()) == 3
    assert set(StartupRun.objects.values_list("id", flat=True)) == {each.id for each in stay}


def test_history_is_walked_in_pages_and_no_further_than_it_is_old(
    pruner: Pruner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A young page is the last."""
    monkeypatch.setattr(pruner_module, "ROWS_PER_BATCH", 10)
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    for number in range(45):
        tick(schedule, 60.5 - number * 2)
    assert list(pruner.prune_occurrences()) == [10, 6]
    assert Occurrence.objects.count() == 29


def test_history_is_kept_as_long_as_failures(pruner: Pruner, settings: Any) -> None:
    """For ever, when they are."""
    keep(settings, FAILED_RETENTION_SECONDS=None)
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    tick(schedule, 4000), tick(schedule, 3999)
    assert list(pruner.prune_occurrences()) == []


# --- the pass


def test_pass_is_bounded_resumed_and_followed_by_a_rest(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """An occurrence without budget does one batch; the next goes on; then nothing until PRUNE_SECONDS have passed."""
    saved(*(row(days=8) for _ in range(700)))
    with monkeypatch.context() as patched:
        patched.setattr(pruner_module, "BUDGET_SECONDS", 0)
        patched.setattr(pruner_module, "REST_FACTOR", 0)
        assert [pruner.tick(1000.0).tasks for _ in range(3)] == [500, 200, 0]
        for _ in range(20):
            pruner.tick(1001.0)
    saved(row(days=8))
    assert pruner.tick(1050.0) == Pruned()
    assert pruner.tick(1001.0 + conf.current().prune_seconds) == Pruned(tasks=1)


def test_long_pass_is_followed_by_a_long_rest(pruner: Pruner, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a table of any size costs a fixed share of one connection."""
    monkeypatch.setattr(pruner_module, "REST_FACTOR", 1e9)
    pruner.tick(1000.0)
    saved(row(days=8))
    assert pruner.tick(1000.0 + 10 * conf.current().prune_seconds) == Pruned()


def test_a_pass_prunes_every_kind(pruner: Pruner, redis_client: redis.Redis) -> None:
    """And says how many of each."""
    saved(row(days=8))
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    tick(schedule, 60), tick(schedule, 50)
    for _ in range(2):
        StartupRun.objects.create(name="n", holder="h", term=1, begun_at=timezone.now() - timedelta(days=60))
    Broker().register_queue("go")
    complete("a", -1, queue="go")
    assert pruner.tick(1000.0) == Pruned(1, 1, 1, 1)


def test_each_batch_of_rows_is_fenced() -> None:
    """A fence that is over ends the pass: nothing more is deleted, and the pass is due again."""
    saved(*(row(days=8) for _ in range(700)))
    entered: list[int] = []

    @contextmanager
    def fenced() -> Iterator[None]:
        entered.append(1)
        if len(entered) == 2:
            raise RuntimeError("another holds the lock")
        with transaction.atomic():
            yield

    pruner = Pruner(Broker(), fenced=fenced)
    with pytest.raises(RuntimeError):
        pruner.tick(1000.0)
    assert len(left()) == 200
    assert pruner.tick(1000.0).tasks == 200
    assert len(entered) == 3


def test_history_is_fenced_too() -> None:
    """Ticks and start-up runs stay when another holds the lock."""
    schedule = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60)
    tick(schedule, 60), tick(schedule, 50)
    for _ in range(2):
        StartupRun.objects.create(name="n", holder="h", term=1, begun_at=timezone.now() - timedelta(days=60))

    @contextmanager
    def fenced() -> Iterator[None]:
        raise RuntimeError("another holds the lock")
        yield

    pruner = Pruner(Broker(), fenced=fenced)
    for prune in (pruner.prune_occurrences, pruner.prune_startup_runs):
        with pytest.raises(RuntimeError):
            list(prune())
    assert (Occurrence.objects.count(), StartupRun.objects.count()) == (2, 2)


# --- asynq's completed set


def complete(id: str, seconds: int, *, queue: str = "default", **fields: str) -> None:
    """What a Go worker leaves of a task whose retention ends in so many seconds."""
    keys = QueueKeys(queue)
    Broker().client.hset(keys.task(id), mapping={"msg": "m", "state": "completed", "result": "r", **fields})
    Broker().client.zadd(keys.completed, {id: int(time.time()) + seconds})


@pytest.fixture
def dump(redis_client: redis.Redis, key_prefix: str) -> Callable[[], dict[bytes, bytes]]:
    """A function that returns all of this test's keys with their contents."""
    return lambda: {key: redis_client.dump(key) for key in redis_client.scan_iter(f"{key_prefix}*")}


def test_completed_tasks_go_when_their_retention_is_over(redis_client: redis.Redis) -> None:
    """Hash and member; the one with time left stays."""
    complete("over", -1), complete("now", 0), complete("later", 60)
    assert Broker().prune_completed("default") == 2
    keys = QueueKeys("default")
    assert redis_client.zrange(keys.completed, 0, -1) == [b"later"]
    assert unknown(["over", "now", "later"]) == ["over", "now"]


def test_nothing_completed_is_over_and_nothing_changes(dump: Any) -> None:
    """0, also when it is said again and for a queue that is not there."""
    complete("later", 60)
    before = dump()
    assert [Broker().prune_completed(queue) for queue in ("default", "default", "nowhere")] == [0, 0, 0]
    assert Broker().prune_completed("default", 0) == 0
    assert dump() == before


def test_a_call_prunes_so_many_and_the_pass_calls_again(pruner: Pruner, redis_client: redis.Redis) -> None:
    """The longest over first; a limit above 200 is 200."""
    for number in range(250):
        complete(f"{number:03}", number - 300)
    assert Broker().prune_completed("default", 20) == 20
    assert redis_client.zrange(QueueKeys("default").completed, 0, 0) == [b"020"]
    Broker().register_queue("default")
    assert list(pruner.prune_completed()) == [100, 100, 30]
    for number in range(250):
        complete(f"{number:03}", number - 300)
    assert Broker().prune_completed("default", 1000) == 200


def test_a_lock_the_completed_task_still_owns_is_given_back(redis_client: redis.Redis) -> None:
    """And no lock of another."""
    keys = QueueKeys("default")
    mine, other = keys.unique("t", "1"), keys.unique("t", "2")
    redis_client.mset({mine: "a", other: "x"})
    complete("a", -1, unique_key=mine), complete("b", -1, unique_key=other)
    assert Broker().prune_completed("default") == 2
    assert redis_client.mget(mine, other) == [None, b"x"]


def test_a_task_that_stands_elsewhere_loses_its_place_in_the_set_only(redis_client: redis.Redis) -> None:
    """asynq's janitor would delete the message of a task that waits to run again; a stray hash is no task."""
    complete("a", -1, state="pending")
    keys = QueueKeys("default")
    redis_client.hset(keys.task("stray"), "result", "r")
    redis_client.zadd(keys.completed, {"stray": 1, "hashless": 1})
    assert Broker().prune_completed("default") == 3
    assert redis_client.zcard(keys.completed) == 0
    assert redis_client.hget(keys.task("a"), "state") == b"pending"
    assert redis_client.exists(keys.task("stray")) == 0
