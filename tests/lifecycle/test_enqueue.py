"""Enqueueing: the row in the caller's transaction, the entry in Redis after its commit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import GateUnavailable, InvalidArguments, QueueFull
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.message import decode_message
from django_asyncq.core import compat
from django_asyncq.core.compat import InvalidTask, TaskResultDoesNotExist, TaskResultStatus
from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import Gate, TaskRecord, TaskState
from django_asyncq.storage.routing import writing_database
from django_asyncq.tasks import task

from .. import acl, tasks
from ..redis_state import pending, unknown

pytestmark = pytest.mark.django_db(transaction=True)


def test_enqueue_writes_a_row_and_a_message() -> None:
    """One QUEUED row, and one message that asynq can read."""
    result = tasks.fail_until.using(priority=0).enqueue(2)
    record = TaskRecord.objects.get()
    assert str(record.id) == result.id
    assert (record.state, record.name, record.args, record.max_attempts) == (
        TaskState.QUEUED,
        "tests.tasks.fail_until",
        [2],
        3,
    )
    assert result.status == TaskResultStatus.READY
    raw = acl.unrestricted(Broker().client).hgetall(QueueKeys("default").task_prefix + result.id)
    assert set(raw) == {b"msg", b"state", b"pending_since"}
    message = decode_message(raw[b"msg"])
    assert (message.type, message.id, message.queue, message.retry) == (record.name, result.id, "default", 2)
    assert message.payload == b'{"args":[2],"kwargs":{}}'


def test_tasks_enqueued_inside_atomic_are_pushed_after_the_commit() -> None:
    """Redis has nothing before the outermost commit, and all tasks in order after it."""
    with transaction.atomic():
        first = tasks.add.enqueue(1)
        with transaction.atomic():
            second = tasks.add.enqueue(2)
        third = tasks.add.enqueue(3)
        assert pending() == []
    assert pending() == [first.id, second.id, third.id]


def test_rollback_leaves_nothing() -> None:
    """Neither a row nor an entry, for a whole transaction and for a savepoint."""
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        tasks.add.enqueue(1)
        raise ZeroDivisionError
    with transaction.atomic():
        kept = tasks.add.enqueue(2)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            tasks.add.enqueue(3)
            raise ZeroDivisionError
        also_kept = tasks.add.enqueue(4)
    assert pending() == [kept.id, also_kept.id]
    assert TaskRecord.objects.count() == 2


@pytest.mark.django_db
def test_each_capture_of_a_test_case_has_its_own_tasks() -> None:
    """Also after tasks that were enqueued before it: a test case's transaction merges nothing."""
    alias = writing_database(TaskRecord)
    tasks.add.enqueue(1)
    for _ in range(2):
        with TestCase.captureOnCommitCallbacks(using=alias, execute=True) as hooks:
            second = tasks.add.enqueue(2)
        assert len(hooks) == 1 and pending()[-1] == second.id
    with TestCase.captureOnCommitCallbacks(using=alias) as hooks, transaction.atomic(using=alias):
        tasks.add.enqueue(3)
        tasks.add.enqueue(4)
    assert len(hooks) == 1


def test_all_tasks_of_a_transaction_are_pushed_with_one_script_call(redis_client: Any) -> None:
    """A hundred calls of `enqueue` in one transaction cost one script call."""
    tasks.add.enqueue(0)
    before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    with transaction.atomic():
        for number in range(100):
            tasks.add.enqueue(number)
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 1


def test_enqueue_many_inserts_with_one_statement() -> None:
    """One INSERT for a chunk; results in order."""
    with CaptureQueriesContext(connection) as queries:
        results = tasks.add.enqueue_many([(1,), {"a": 2}, tasks.add.arguments(3, b=4)])
    assert [query["sql"].startswith("INSERT") for query in queries.captured_queries].count(True) == 1
    assert [result.id for result in results] == pending()
    assert [(result.args, result.kwargs) for result in results] == [
        ([1], {}),
        ([], {"a": 2}),
        ([3], {"b": 4}),
    ]
    assert tasks.add.enqueue_many([]) == []
    with pytest.raises(InvalidOption, match="enqueue_many"):
        tasks.add.enqueue_many([3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("change", "call", "error"),
    [
        ({}, (float("nan"),), InvalidArguments),
        ({}, ({1, 2},), InvalidArguments),
        ({}, ("\ud800",), InvalidArguments),
        ({}, ({1: 1},), InvalidArguments),
        ({}, ("x" * 300_000,), InvalidArguments),
        ({"run_after": datetime(2030, 1, 1)}, (1,), InvalidTask),
        ({"priority": 101}, (1,), InvalidTask),
        ({"priority": -101}, (1,), InvalidTask),
        ({"priority": 1.5}, (1,), InvalidTask),
        ({"priority": True}, (1,), InvalidTask),
        ({"priority": "high"}, (1,), InvalidTask),
        ({"queue_name": "bad queue"}, (1,), InvalidOption),
        ({"queue_name": "{}"}, (1,), InvalidOption),
        ({"queue_name": ""}, (1,), InvalidOption),
        ({"gate": "bad gate", "queue_limit": 1}, (1,), InvalidOption),
        ({"gate": "{nobody}", "queue_limit": 1}, (1,), InvalidOption),
        ({"gate": "no-limit-anywhere"}, (1,), InvalidOption),
        ({"max_attempts": 0}, (1,), InvalidOption),
        ({"max_attempts": 1_000_001}, (1,), InvalidOption),
        ({"gate": "big", "queue_limit": 2**31}, (1,), InvalidOption),
        ({"timeout": -1}, (1,), InvalidOption),
        ({"timeout": float("nan")}, (1,), InvalidOption),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    change: dict[str, Any], call: tuple[Any, ...], error: type[Exception], redis_client: Any, key_prefix: str
) -> None:
    """A clear error, no row, and no key except the meta of a gate."""
    with pytest.raises(error):
        tasks.add.using(**change).enqueue(*call)
    assert TaskRecord.objects.count() == 0
    assert [key for key in redis_client.scan_iter(f"{key_prefix}*") if not key.endswith(b":meta")] == []


def test_unknown_queue_is_refused(settings: Any) -> None:
    """QUEUES lists the allowed names; an empty list allows every valid name."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": ["default"]}}
    with pytest.raises(InvalidTask, match="other"):
        tasks.add.using(queue_name="other").enqueue(1)
    assert TaskRecord.objects.count() == 0


def test_options_follow_changed_settings(settings: Any) -> None:
    """The common values of a task's rows are cached between calls, and a change of the settings clears the cache."""
    first = tasks.add.enqueue(1)
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_ATTEMPTS": 7}
    second = tasks.add.enqueue(1)
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"max_attempts": 9}}}
    third = tasks.add.enqueue(1)
    attempts = dict(TaskRecord.objects.values_list("id", "max_attempts"))
    assert [attempts[UUID(result.id)] for result in (first, second, third)] == [1, 7, 9]
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["other"]}}
    with pytest.raises(InvalidTask):
        tasks.add.enqueue(1)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="a lock timeout is PostgreSQL's")
def test_failed_insert_raises_from_enqueue_itself() -> None:
    """The call raises, not a later statement, where a handler of another error would swallow it."""
    with locked_task_table(), pytest.raises(OperationalError, match="lock timeout"), transaction.atomic():
        set_lock_timeout()
        with pytest.raises(OperationalError, match="lock timeout") as refused:
            tasks.add.enqueue(1)
        raise refused.value
    assert not TaskRecord.objects.exists() and pending() == []


@pytest.mark.skipif(connection.vendor != "postgresql", reason="a lock timeout is PostgreSQL's")
def test_handler_around_a_savepoint_catches_a_failed_insert() -> None:
    """The savepoint is rolled back, the outer transaction commits its own row, and nothing is queued."""
    caught: list[DatabaseError] = []
    with locked_task_table(), transaction.atomic():
        set_lock_timeout()
        Gate.objects.create(name="of-the-caller", limit=1)
        try:
            with transaction.atomic():
                Gate.objects.create(name="of-the-savepoint", limit=1)
                tasks.add.enqueue(1)
                pytest.fail("enqueue raised nothing")
        except DatabaseError as error:
            caught.append(error)
    assert [type(error) for error in caught] == [OperationalError]
    assert list(Gate.objects.values_list("name", flat=True)) == ["of-the-caller"]
    assert not TaskRecord.objects.exists() and pending() == []


@contextmanager
def locked_task_table() -> Iterator[None]:
    """Lock the table of tasks from another connection, so that an INSERT waits."""
    blocker = connection.copy()
    try:
        blocker.set_autocommit(False)
        with blocker.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {TaskRecord._meta.db_table} IN ACCESS EXCLUSIVE MODE")
        yield
    finally:
        blocker.close()


def set_lock_timeout() -> None:
    """Let statements of this transaction wait for a lock for 50 ms only."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '50ms'")


def test_run_after_takes_datetimes_and_timedeltas() -> None:
    """A delayed task waits in asynq's scheduled set, and a time in the past makes it pending at once."""
    at = timezone.now() + timedelta(hours=1)
    by_time, by_delay = (
        tasks.add.using(run_after=at).enqueue(1),
        tasks.add.using(run_after=timedelta(hours=1)).enqueue(2),
    )
    scheduled = dict(acl.unrestricted(Broker().client).zrange(QueueKeys("default").scheduled, 0, -1, withscores=True))
    assert set(scheduled) == {by_time.id.encode(), by_delay.id.encode()}
    assert 0 <= scheduled[by_time.id.encode()] - at.timestamp() < 1
    past = tasks.add.using(run_after=timezone.now() - timedelta(hours=1)).enqueue(3)
    assert pending() == [past.id]


def test_aenqueue_and_aget_result() -> None:
    """The async methods do the same as the plain ones."""

    async def both() -> Any:
        result = await tasks.add_async.aenqueue(1, 2)
        again = await tasks.add_async.aget_result(result.id)
        await result.arefresh()
        return result, again

    result, again = async_to_sync(both)()
    assert result.id == again.id == pending()[0]


def test_aenqueue_many_does_what_enqueue_many_does() -> None:
    """In the thread of the caller's connection: an INSERT for all, refused calls, nothing written in an error."""

    async def many(calls: Any, **options: Any) -> list[Any]:
        return await task_of_gate.aenqueue_many(calls, **options)

    task_of_gate = tasks.add.using(gate="small", queue_limit=2)
    with pytest.raises(QueueFull):
        async_to_sync(many)([(1,), (2,), (3,)])
    with pytest.raises(InvalidArguments):
        async_to_sync(many)([(1,), (2, 3, 4)])
    assert not TaskRecord.objects.exists()
    with CaptureQueriesContext(connection) as queries:
        results = async_to_sync(many)((call for call in [(1,), {"a": 2}, (3,)]), partial=True)
    assert [query["sql"].startswith("INSERT") for query in queries.captured_queries].count(True) == 1
    assert [result.id if result else None for result in results] == [*pending(), None]
    with pytest.raises(InvalidOption, match="enqueue_many"):
        async_to_sync(many)([3])


def test_get_result_with_a_wrong_id() -> None:
    """The id of another task raises a mismatch; text that is no id raises TaskResultDoesNotExist."""
    result = tasks.add.enqueue(1)
    assert tasks.add.get_result(result.id).args == [1]
    with pytest.raises(Exception, match="does not match"):
        tasks.nap.get_result(result.id)
    for rubbish in ("", "../x", "x" * 5000, "\x00", str(timezone.now())):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(rubbish)


def test_result_of_another_alias_is_found_there(settings: Any) -> None:
    """A backend that is called directly uses its own alias, whatever alias the task names."""
    settings.TASKS = dict.fromkeys(("default", "other"), settings.TASKS["default"])
    result = compat.task_backends["other"].enqueue(tasks.add, [1], {})
    assert (result.backend, result.task.backend, result.task.func) == ("other", "other", tasks.add.func)
    result.refresh()
    assert result.status == TaskResultStatus.READY


def test_later_changes_of_arguments_have_no_effect() -> None:
    """Neither the caller nor the holder of the result can change the arguments after `enqueue`."""
    listed = [1, {"a": [1]}]
    with transaction.atomic():
        result = tasks.add.enqueue(listed)
        listed.append(2)
        result.args.append(3)
        result.args[0][1]["a"].append(4)
        result.kwargs["b"] = 5
    assert TaskRecord.objects.get().args == [[1, {"a": [1]}]]
    raw = Broker().client.hget(QueueKeys("default").task_prefix + result.id, "msg")
    assert decode_message(raw).payload == b'{"args":[[1,{"a":[1]}]],"kwargs":{}}'


def test_result_of_a_task_that_was_removed_from_the_code() -> None:
    """The row can still be read, and it keeps the name."""
    record = TaskRecord.objects.create(name="gone.tasks.away", args=[1])
    result = compat.task_backends["default"].get_result(str(record.id))
    assert (result.task.module_path, result.task.name, result.args) == ("gone.tasks.away", "away", [1])


def test_enqueue_without_redis_succeeds(own_redis: Any, caplog: Any) -> None:
    """The row is written, the call is quick, later calls skip the dead server, and one line is logged."""
    own_redis.kill()
    began = time.monotonic()
    tasks.add.enqueue(1)
    assert time.monotonic() - began < 10
    began = time.monotonic()
    for number in range(20):
        tasks.add.enqueue(number)
    assert time.monotonic() - began < 10
    assert TaskRecord.objects.queued().count() == 21
    assert sum("push of 1 task failed" in record.message for record in caplog.records) == 1


def test_framework_signals_are_sent_only_after_the_commit() -> None:
    """`task_enqueued` is sent once with the result after the commit, and never after a rollback."""
    seen: list[Any] = []

    def receiver(sender: Any, task_result: Any, **kwargs: Any) -> None:
        seen.append((sender.__name__, task_result.id))

    compat.task_enqueued.connect(receiver)
    try:
        with transaction.atomic():
            result = tasks.add.enqueue(1)
            assert seen == []
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            tasks.add.enqueue(2)
            raise ZeroDivisionError
    finally:
        compat.task_enqueued.disconnect(receiver)
    assert seen == [("AsyncqBackend", result.id)]


def test_stock_decorator_takes_our_options() -> None:
    """The framework's own `task` passes them on, on Django 6.1 and with the backport; Django 6.0 cannot."""
    import django

    if (6, 0) <= django.VERSION < (6, 1):
        pytest.skip("Django 6.0's decorator takes no extra options")
    if compat.HAS_DJANGO_TASKS:
        from django.tasks import task as stock
    else:
        from django_tasks import task as stock
    declared = stock(max_attempts=4, gate="{a}", queue_limit=2, timeout=3)(tasks.add.func)
    assert (declared.max_attempts, declared.gate, declared.queue_limit, declared.timeout) == (4, "{a}", 2, 3)


def test_options_are_dropped_for_another_backend(settings: Any) -> None:
    """A test suite that uses Django's immediate backend can still import the tasks."""
    module = "django.tasks" if compat.HAS_DJANGO_TASKS else "django_tasks"
    settings.TASKS = {"default": {"BACKEND": f"{module}.backends.immediate.ImmediateBackend"}}
    declared = task(max_attempts=3, gate="x")(tasks.add.func)
    assert declared.enqueue(1, 2).return_value == 3


def test_deleting_a_row_removes_its_entry_from_redis() -> None:
    """A deleted row leaves nothing in Redis."""
    kept, deleted = tasks.add.enqueue(1), tasks.add.enqueue(2)
    TaskRecord.objects.filter(id=deleted.id).delete()
    assert pending() == [kept.id]
    assert unknown([deleted.id]) == [deleted.id]


def test_status_of_a_failed_task_in_django() -> None:
    """RETRYING (FAILED with `retry_at`) is READY for Django, FAILED is FAILED."""
    record = TaskRecord(name="tests.tasks.add", state=TaskState.FAILED, retry_at=timezone.now())
    from django_asyncq.results import result_of

    assert result_of(record).status == TaskResultStatus.READY
    record.retry_at = None
    assert result_of(record).status == TaskResultStatus.FAILED


def test_enqueue_with_a_silent_redis_succeeds(own_redis: Any) -> None:
    """A server that accepts connections and never answers costs one timeout, then nothing."""
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        tasks.add.enqueue(1)
        assert time.monotonic() - began < 10
        with pytest.raises(GateUnavailable):
            tasks.gated.enqueue("g")
        began = time.monotonic()
        tasks.add.enqueue(2)
        assert time.monotonic() - began < 10
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    assert TaskRecord.objects.queued().count() == 2
