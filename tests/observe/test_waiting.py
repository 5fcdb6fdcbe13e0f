"""`result.wait()` and its kin, on real servers: woken by announcements, and by looks where announcements are lost."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, connection, connections, transaction
from django.test import TestCase, override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import TaskFailed, WaitTimeout, await_all, lifecycle, wait_all
from django_asyncq.broker import Broker, ownership
from django_asyncq.broker.waits import OverListener
from django_asyncq.context import TaskContext
from django_asyncq.core import compat
from django_asyncq.core.logs import enter_run, leave_run
from django_asyncq.exceptions import InvalidOption, WorkerLost
from django_asyncq.lifecycle.base import append_error
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.observe import waiters, waits
from django_asyncq.observe import waits as outcomes
from django_asyncq.observe.waits import Waiting
from django_asyncq.storage import database_clock, identity
from django_asyncq.testing import EmbeddedRedis

from .. import kit_tasks, tasks
from ..workers import wait_until
from ..workers import workers as run_workers

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_SECONDS = 20.0
# So long that only an announcement can wake within a test.
NEVER = 3600.0


@pytest.fixture(autouse=True)
def _listener(own_keys: None) -> Iterator[None]:
    yield
    waiters.of_process().stop()


@pytest.fixture
def only_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at no row without an announcement, once the tasks are marked."""
    monkeypatch.setattr(waiters, "LOOK_SECONDS", NEVER)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def in_thread(pool: ThreadPoolExecutor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call a function in another thread, with connections of its own."""

    def call() -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            connections.close_all()

    return pool.submit(call)


def marked(*results: Any) -> bool:
    """Whether Redis has the tasks as waited for."""
    broker = Broker()
    return all(broker.client.hget(broker.keys("default").task(result.id), "waited") for result in results)


def until_marked(*results: Any) -> None:
    wait_until(lambda: marked(*results), "mark")


def finish(value: Any = None, *, error: Exception | None = None, retries: bool = False, count: int = 1) -> None:
    """Run the next tasks as a worker does: claim, record, acknowledge."""
    broker, now = Broker(), timezone.now()
    runs = lifecycle.claim(broker, "default", "w", count, "default").runs
    assert len(runs) == count
    for run in runs:
        lifecycle.begin(run, "w", now)
        if error is None:
            lifecycle.succeed(run, value if value is not None else run.record.args[0], now)
        else:
            retry_at = now + timedelta(hours=1) if retries else None
            lifecycle.fail(run, error, f"Traceback\nValueError: {error}", now, retry_at=retry_at)
    assert not lifecycle.record_runs(runs)
    lifecycle.acknowledge(broker, "w", runs)


def test_an_announcement_wakes_the_wait(only_announcements: None, pool: ThreadPoolExecutor) -> None:
    """It returns the value, and the result shows the row."""
    result = tasks.add.enqueue(1)
    waited = in_thread(pool, result.wait, PATIENCE_SECONDS)
    until_marked(result)
    assert not waited.done()
    finish(value=7)
    assert waited.result(PATIENCE_SECONDS) == 7
    assert result.status == compat.TaskResultStatus.SUCCESSFUL and result.return_value == 7
    assert result.finished_at is not None


def test_a_finished_task_needs_no_sleep(only_announcements: None) -> None:
    """Nor the time to look again; a timeout of 0 looks once."""
    result = tasks.add.enqueue(1)
    finish()
    assert result.wait(0) == 1
    assert result.wait(timedelta(0)) == 1


def test_a_failure_is_raised(only_announcements: None, pool: ThreadPoolExecutor) -> None:
    """With its reason, and the last error in words; an attempt that is retried is no failure yet."""
    result = tasks.add.using(max_attempts=2).enqueue(1)
    waited = in_thread(pool, result.wait, PATIENCE_SECONDS)
    until_marked(result)
    finish(error=ValueError("soon better"), retries=True)
    assert marked(result) and not waited.done()
    lifecycle.retry([TaskRecord.objects.get().id], by_person=True)
    finish(error=ValueError("no"))
    with pytest.raises(TaskFailed, match=rf"{result.id} has failed: .*ValueError: no") as caught:
        waited.result(PATIENCE_SECONDS)
    assert caught.value.task_id == result.id
    assert (caught.value.reason, caught.value.exception) == (FailureReason.EXCEPTION, "builtins.ValueError")
    assert result.status == compat.TaskResultStatus.FAILED and len(result.errors) == 2


def test_a_failure_without_a_traceback_says_why() -> None:
    """A cancel names the person and the reason; an expiry says that it was one."""
    cancelled, expired = [tasks.add.using(run_after=timedelta(hours=1)).enqueue(1, 2) for _ in range(2)]
    TaskRecord.objects.filter(pk=cancelled.id).cancel(by="anna", reason="wrong codec")
    with pytest.raises(TaskFailed, match=r"has failed: It was cancelled: anna: wrong codec$"):
        cancelled.wait(0)
    TaskRecord.objects.filter(pk=expired.id).update(expires_at=timezone.now() - timedelta(hours=2))
    assert lifecycle.expire() == 1
    with pytest.raises(TaskFailed, match=r"TaskExpired: it had not begun by the time at which it expires$"):
        expired.wait(0)


def test_a_task_whose_process_died_says_how() -> None:
    """Not the last line of its stacks, which stay in the traceback; of other errors the message, and no note."""
    crashed, noted, silent = [tasks.add.enqueue(1) for _ in range(3)]
    errors: list[tuple[Any, Exception, str]] = [
        (crashed, WorkerLost("its process was killed by signal 11 (SIGSEGV)"), 'Fatal\n  File "<string>", line 1'),
        (noted, ValueError("two\nlines"), "Traceback\nValueError: two\nlines\na note"),
        (silent, ValueError(), "Traceback\nValueError"),
    ]
    for result, error, stack in errors:
        row = TaskRecord.objects.get(pk=result.id)
        row.state, row.finished_at = TaskState.FAILED, timezone.now()
        append_error(row, error, stack, row.finished_at)
        row.save()
    with pytest.raises(TaskFailed, match=r"lost: .*WorkerLost: its process was killed by signal 11 \(SIGSEGV\)$"):
        crashed.wait(0)
    with pytest.raises(TaskFailed, match=r"error: ValueError: two lines$"):
        noted.wait(0)
    with pytest.raises(TaskFailed, match=r"error: ValueError$"):
        silent.wait(0)
    assert crashed.errors[0].traceback.endswith("line 1")


def test_a_deleted_task_is_announced(only_announcements: None, pool: ThreadPoolExecutor) -> None:
    """The framework's error for a result that is not there."""
    result = tasks.add.enqueue(1)
    waited = in_thread(pool, result.wait, PATIENCE_SECONDS)
    until_marked(result)
    TaskRecord.objects.get().delete()
    with pytest.raises(compat.TaskResultDoesNotExist, match=result.id):
        waited.result(PATIENCE_SECONDS)


def test_time_that_is_over_says_whether_a_worker_is_alive() -> None:
    """Without one, the remedy is another."""
    result = tasks.add.enqueue(1)
    with pytest.raises(WaitTimeout, match=r"after 0\.05 s; it goes on.*no worker is alive") as caught:
        result.wait(0.05)
    assert caught.value.task_id == result.id and not caught.value.has_worker
    ownership.note_supervisor(identity.ensure(), "token", alive_ms=60_000, may_take=True)
    with pytest.raises(WaitTimeout, match="to wait longer, give timeout=") as caught:
        result.wait(timedelta(milliseconds=50))
    # A task in a queue that nobody serves is not helped by a longer wait.
    assert f"`manage.py asyncq tasks show {result.id}` says what it waits for" in str(caught.value)


def test_a_blocking_call_in_a_coroutine_says_what_to_await() -> None:
    """Django's error, and its class, with the method that does the same."""
    result = tasks.add.enqueue(1)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("result.await_", lambda: result.wait(0)),
        ("await_all", lambda: wait_all([result], 0)),
        ("task.aenqueue", lambda: tasks.add.enqueue(1)),
        ("task.aenqueue_many", lambda: tasks.add.enqueue_many([(1,)])),
    ]

    async def call(function: Callable[[], object]) -> None:
        function()

    for instead, function in calls:
        with pytest.raises(SynchronousOnlyOperation, match=rf"use `await {instead}\(…\)`\. Django says: You cannot"):
            asyncio.run(call(function))
    assert TaskRecord.objects.count() == 1


def test_a_wait_without_a_timeout_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After WAIT_SECONDS."""
    monkeypatch.setattr("django_asyncq.observe.waits.WAIT_SECONDS", 0.05)
    result = tasks.add.enqueue(1)
    with pytest.raises(WaitTimeout, match=r"0\.05 s"):
        result.wait()


@pytest.mark.parametrize("timeout", [-1, "3", True, float("nan")])
def test_a_timeout_that_is_no_duration_is_refused(timeout: Any) -> None:
    """Before anything else."""
    with pytest.raises(InvalidOption, match=r"wait\(timeout="):
        tasks.add.enqueue(1).wait(timeout)


def test_coroutines_wait_without_a_thread(only_announcements: None) -> None:
    """Many in one loop, for one task each and for all; one that is cancelled waits no more."""
    results = [tasks.add.enqueue(number) for number in range(5)]

    async def main() -> None:
        waits = [asyncio.ensure_future(result.await_(PATIENCE_SECONDS)) for result in results]
        everything = asyncio.ensure_future(await_all(results, PATIENCE_SECONDS))
        given_up = asyncio.ensure_future(results[0].await_(PATIENCE_SECONDS))
        while not await asyncio.to_thread(marked, *results):
            await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.to_thread(in_own_connection, finish, count=5)
        assert await asyncio.gather(*waits) == [0, 1, 2, 3, 4]
        assert await everything == [0, 1, 2, 3, 4]
        with pytest.raises(asyncio.CancelledError):
            await given_up

    in_loop(main)
    assert not waiters.of_process()._by_id


def in_loop(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine, and close the connections of the thread that has run its database calls."""

    async def run() -> Any:
        try:
            return await main()
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(run())


def in_own_connection(function: Callable[..., Any], **kwargs: Any) -> None:
    try:
        function(**kwargs)
    finally:
        connections.close_all()


def test_a_closed_loop_is_woken_in_vain() -> None:
    """The listener outlives a loop that did not wait to the end."""

    async def main() -> Callable[[], None]:
        return waits.waker_of(asyncio.Event())

    in_loop(main)()


def test_all_of_many_and_the_first_failure(pool: ThreadPoolExecutor, only_announcements: None) -> None:
    """Values in the order of the results, one result twice; the first failure is raised while others go on."""
    results = [tasks.add.enqueue(number) for number in range(3)]
    waited = in_thread(pool, wait_all, [*reversed(results), results[0]], PATIENCE_SECONDS)
    until_marked(*results)
    finish(count=3)
    assert waited.result(PATIENCE_SECONDS) == [2, 1, 0, 0]
    results = [tasks.add.enqueue(number) for number in range(2)]
    waited = in_thread(pool, wait_all, results, PATIENCE_SECONDS)
    until_marked(*results)
    finish(error=ValueError("no"))
    with pytest.raises(TaskFailed, match="no"):
        waited.result(PATIENCE_SECONDS)
    assert wait_all([]) == []


def test_results_of_several_aliases(settings: Any) -> None:
    """One after the other, within one time for all."""
    settings.TASKS = {**settings.TASKS, "mail": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}}
    results = [tasks.add.enqueue(1), tasks.add.using(backend="mail").enqueue(2)]
    finish()
    with pytest.raises(WaitTimeout, match=results[1].id):
        wait_all(results, 0.05)
    TaskRecord.objects.filter(id=results[1].id).update(
        state=TaskState.SUCCEEDED, finished_at=timezone.now(), return_value=5
    )
    assert wait_all(results, 0.05) == [1, 5]


def test_a_result_of_another_backend_is_refused(settings: Any) -> None:
    """Django's own results cannot wait."""
    settings.TASKS = {
        "default": {"BACKEND": f"{compat.BaseTaskBackend.__module__.rpartition('.')[0]}.immediate.ImmediateBackend"}
    }
    with pytest.raises(InvalidOption, match="not of django_asyncq"):
        wait_all([compat.task_backends["default"].enqueue(tasks.tidy, [], {})])


def test_many_waiters_share_one_connection(only_announcements: None, own_redis: EmbeddedRedis) -> None:
    """200 coroutines wait: one thread and one connection listen for all."""
    results = [tasks.add.enqueue(number) for number in range(200)]

    async def main() -> None:
        waits = [asyncio.ensure_future(result.await_(3 * PATIENCE_SECONDS)) for result in results]
        while not await asyncio.to_thread(marked, *results):
            await asyncio.sleep(0.01)
        assert Broker().client.info("clients")["pubsub_clients"] == 1
        await asyncio.to_thread(in_own_connection, finish, count=200)
        assert await asyncio.gather(*waits) == list(range(200))

    in_loop(main)


def test_a_task_that_is_pushed_later_is_marked_soon(settings: Any, only_announcements: None) -> None:
    """Its hash is not there when the wait begins; here the batcher would push it in a second."""
    settings.ASYNCQ = {**settings.ASYNCQ, "PUSH_BATCH_SECONDS": 1}
    results = [tasks.add.enqueue(number) for number in range(9)]
    with pytest.raises(WaitTimeout):
        results[-1].wait(0.2)
    assert marked(results[-1])


def test_redis_forgets_the_mark(monkeypatch: pytest.MonkeyPatch, own_redis: EmbeddedRedis, pool: Any) -> None:
    """FLUSHALL: the row is read all the same, every five seconds at the latest."""
    monkeypatch.setattr(waiters, "LOOK_SECONDS", 0.3)
    result = tasks.add.enqueue(1)
    waited = in_thread(pool, result.wait, PATIENCE_SECONDS)
    until_marked(result)
    Broker().client.flushall()
    lifecycle.dispatch(list(TaskRecord.objects.all()))
    until_marked(result)
    Broker().client.flushall()
    TaskRecord.objects.update(state=TaskState.SUCCEEDED, finished_at=timezone.now(), return_value=3)
    assert waited.result(PATIENCE_SECONDS) == 3


def test_redis_is_unreachable(own_redis: EmbeddedRedis, pool: ThreadPoolExecutor, only_announcements: None) -> None:
    """The row is polled; once Redis is back, announcements wake again."""
    result, later = tasks.add.enqueue(1), tasks.add.enqueue(2)
    waited = in_thread(pool, later.wait, PATIENCE_SECONDS)
    until_marked(later)
    own_redis.kill()
    wait_until(lambda: not waiters.of_process().is_listening, "loss of the connection")
    TaskRecord.objects.filter(id=result.id).update(
        state=TaskState.SUCCEEDED, finished_at=timezone.now(), return_value=3
    )
    assert result.wait(PATIENCE_SECONDS) == 3
    own_redis.start()
    lifecycle.dispatch(list(TaskRecord.objects.filter(id=later.id)))
    until_marked(later)
    finish()
    assert waited.result(PATIENCE_SECONDS) == 2


def test_a_listener_that_dies_is_replaced(
    only_announcements: None, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so in the log, and the tasks are marked again before anything sleeps on."""
    result = tasks.add.enqueue(1)
    with monkeypatch.context() as patch:
        patch.setattr(OverListener, "_received", lambda self, channel, data: 1 / 0)
        waited = in_thread(pool, result.wait, PATIENCE_SECONDS)
        until_marked(result)
        first = waiters.of_process()._listener
        finish()
        wait_until(lambda: first is not None and first.has_died, "death of the listener")
    assert waited.result(PATIENCE_SECONDS) == 1


def test_the_listener_goes_when_nothing_waits(only_announcements: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes again with the next wait."""
    monkeypatch.setattr(waiters, "IDLE_SECONDS", 0.0)
    for number in range(2):
        result = tasks.add.enqueue(number)
        with pytest.raises(WaitTimeout):
            result.wait(0.05)
        wait_until(lambda: not threading_names() & {"listener"}, "end of the listener")
        assert not waiters.of_process().is_listening


def threading_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_forked_child_has_a_listener_of_its_own(only_announcements: None, pool: ThreadPoolExecutor) -> None:
    """It closes its copy of the connection, sends nothing, and the parent is woken as before."""
    result, of_child = tasks.add.enqueue(1), tasks.add.enqueue(2)
    waited = in_thread(pool, result.wait, PATIENCE_SECONDS)
    until_marked(result)
    listener = waiters.of_process()._listener
    assert listener is not None
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert listener._connection._sock.fileno() == -1
            assert waiters.of_process()._listener is None
            assert of_child.wait(PATIENCE_SECONDS) == 2
            code = 0
        finally:
            os._exit(code)
    until_marked(of_child)
    finish(count=2)
    assert waited.result(PATIENCE_SECONDS) == 1
    assert os.waitpid(pid, 0)[1] == 0
    assert waiters.of_process()._listener is listener and listener.is_listening


def test_a_wait_in_the_transaction_that_enqueued_is_refused() -> None:
    """At once, in released savepoints too; after the commit it is not."""
    with transaction.atomic():
        with transaction.atomic():
            result = tasks.add.enqueue(1)
        with pytest.raises(InvalidOption, match="in the transaction that enqueued it"):
            result.wait(PATIENCE_SECONDS)
        with pytest.raises(InvalidOption, match="in the transaction that enqueued it"):
            wait_all([result], PATIENCE_SECONDS)
    finish()
    assert result.wait(PATIENCE_SECONDS) == 1


def test_a_wait_in_the_transaction_that_retried_is_refused() -> None:
    """A retry is dispatched after the commit too."""
    result = tasks.add.enqueue(1)
    finish(error=ValueError("no"))
    with transaction.atomic():
        lifecycle.retry([TaskRecord.objects.get().id], by_person=True)
        with pytest.raises(InvalidOption, match="in the transaction that enqueued it"):
            result.wait(PATIENCE_SECONDS)


def test_a_wait_in_a_transaction_that_sees_no_commits_is_refused(pool: ThreadPoolExecutor) -> None:
    """Above READ COMMITTED, and always on SQLite; at READ COMMITTED it is woken as anywhere."""
    result = tasks.add.enqueue(1)
    if connection.vendor != "sqlite":
        with transaction.atomic():
            waited = TaskRecord.objects.get().state
            assert waited == TaskState.QUEUED
            in_thread(pool, finish).result(PATIENCE_SECONDS)
            assert result.wait(PATIENCE_SECONDS) == 1
    with transaction.atomic():
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        elif connection.vendor == "mysql":
            with connection.cursor() as cursor:
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(InvalidOption, match="never sees what workers commit"):
            result.wait(PATIENCE_SECONDS)
    connection.close()


def test_a_wait_in_a_task_is_refused() -> None:
    """Unless the caller allows it."""
    result = tasks.add.enqueue(1)
    record = TaskRecord.objects.get()
    finish()
    enter_run(record)
    try:
        with pytest.raises(InvalidOption, match=r"within the task tests\.tasks\.add.*allow_in_task=True"):
            result.wait(1)
        assert result.wait(1, allow_in_task=True) == 1
    finally:
        leave_run()


class InTestCase(TestCase):
    """A plain TestCase never commits, so workers never get the task."""

    databases = "__all__"

    def test_a_wait_is_refused_at_once(self) -> None:
        """Until the hooks are called."""
        with self.captureOnCommitCallbacks(execute=True):
            committed = tasks.add.enqueue(1)
        with pytest.raises(InvalidOption, match="in a TestCase use"):
            tasks.add.enqueue(2).wait(1)
        TaskRecord.objects.filter(id=committed.id).update(
            state=TaskState.SUCCEEDED, finished_at=timezone.now(), return_value=3
        )
        assert committed.wait(1) == 3


def test_with_real_workers(tmp_path: Path) -> None:
    """A web process and a fleet: values, failures and many at once, each woken long before the next look."""
    with run_workers(tmp_path):
        assert tasks.add.enqueue(1, 2).wait(5 * PATIENCE_SECONDS) == 3
        began = time.monotonic()
        for number in range(20):
            assert tasks.add.enqueue(number).wait(PATIENCE_SECONDS) == number
        assert time.monotonic() - began < waiters.LOOK_SECONDS, "each was announced"
        results = tasks.add.enqueue_many([(number,) for number in range(100)])
        assert wait_all(results, PATIENCE_SECONDS) == list(range(100))
        with pytest.raises(TaskFailed, match="TypeError"):
            tasks.returns_set.enqueue().wait(PATIENCE_SECONDS)


class InTestKit(TestCase):
    """`TestBackend`: the wait runs what is due, and refuses what production refuses."""

    databases = "__all__"

    def setUp(self) -> None:
        kit = override_settings(TASKS={"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}})
        kit.enable()
        self.addCleanup(kit.disable)
        kit_tasks.BODIES.clear()

    def test_it_runs_the_task(self) -> None:
        """And what is due before it; the result shows the row."""
        results = [tasks.add.enqueue(number) for number in range(3)]
        assert results[2].wait() == 2 and results[2].return_value == 2
        assert TaskRecord.objects.succeeded().count() == 3
        assert wait_all(results) == [0, 1, 2]
        assert async_to_sync(await_all)([tasks.add_async.enqueue(4)]) == [4]

    def test_it_runs_retries_that_are_due_in_time(self) -> None:
        """The clock moves on to them, and is restored; later ones are out of time."""
        kit_tasks.BODIES["third"] = lambda context: context.attempt if context.attempt == 3 else 1 / 0
        began = time.monotonic()
        assert kit_tasks.run.enqueue("third").wait(125) == 3
        assert time.monotonic() - began < PATIENCE_SECONDS and database_clock.offset() == timedelta(0)
        result = kit_tasks.run.enqueue("third")
        with pytest.raises(WaitTimeout, match=result.id):
            result.wait(110)
        assert result.wait(125) == 3

    def test_it_raises_what_production_raises(self) -> None:
        """A failure, a task that is not due, a deleted row."""
        with pytest.raises(TaskFailed, match="TypeError"):
            tasks.returns_set.enqueue().wait()
        later = tasks.add.using(run_after=timezone.now() + timedelta(minutes=1)).enqueue(1)
        with pytest.raises(WaitTimeout):
            later.wait(30)
        TaskRecord.objects.filter(id=later.id).delete()
        with pytest.raises(compat.TaskResultDoesNotExist):
            later.wait()

    def test_it_refuses_the_transaction_that_enqueued(self) -> None:
        """The test's own transaction does not count, nor one that began later."""
        outside = tasks.add.enqueue(1)
        with transaction.atomic():
            inside = tasks.add.enqueue(2)
            with transaction.atomic(), pytest.raises(InvalidOption, match="in the transaction that enqueued it"):
                inside.wait()
            assert outside.wait() == 1
        assert inside.wait() == 2

    def test_it_refuses_a_wait_in_a_task(self) -> None:
        """Where it is allowed, the tasks that are waited for run, and no others."""

        def waits(context: TaskContext, allowed: bool) -> Any:
            tasks.add.enqueue(1)
            value = tasks.add.enqueue(2).wait(allow_in_task=allowed)
            assert TaskRecord.objects.queued().filter(args=[1]).exists()
            return value

        kit_tasks.BODIES["waits"] = waits
        with pytest.raises(TaskFailed, match=r"within the task tests\.kit_tasks"):
            kit_tasks.arun.enqueue("waits", False).wait()
        TaskRecord.objects.all().delete()
        assert kit_tasks.arun.enqueue("waits", True).wait() == 2


def test_each_result_of_many_is_refreshed_once(monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    """However often the wait for all is woken: else it costs the square of their number."""
    refreshed: list[Any] = []
    original = outcomes.result_of
    monkeypatch.setattr(outcomes, "result_of", lambda *args: refreshed.append(args) or original(*args))
    results = [tasks.add.enqueue(number) for number in range(9)]
    waited = in_thread(pool, wait_all, results, PATIENCE_SECONDS)
    until_marked(*results)
    for count in range(1, 10):
        finish()
        wait_until(lambda count=count: len(refreshed) >= count, "wake")
    assert waited.result(PATIENCE_SECONDS) == list(range(9))
    assert len(refreshed) == 9


def test_rows_of_very_many_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Databases bound the parameters of a query: SQLite to 250,000 at most, PostgreSQL's protocol to 65,535."""
    monkeypatch.setattr(waiters, "ROWS_PER_QUERY", 2)
    results = [tasks.add.enqueue(number) for number in range(5)]
    finish(count=5)
    with CaptureQueriesContext(connection) as queries:
        assert wait_all(results, 0) == list(range(5))
    found = [str(query["sql"]) for query in queries if " IN (" in str(query["sql"])]
    assert len(found) == 6 and max(sql.count(",") for sql in (sql.split(" IN (")[1] for sql in found)) <= 1


def test_a_listener_that_cannot_start_is_tried_again(
    only_announcements: None, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be had for a moment: the wait looks at its rows, and later ones are announced again."""
    waiters.of_process().stop()
    refused: list[Any] = []

    def start(self: Any) -> None:
        refused.append(self)
        raise RuntimeError("can't start new thread")

    result = tasks.add.enqueue(1)
    with monkeypatch.context() as patch:
        patch.setattr(OverListener, "start", start)
        with pytest.raises(WaitTimeout):
            result.wait(0.2)
    assert refused
    waited = in_thread(pool, result.wait, PATIENCE_SECONDS)
    until_marked(result)
    finish()
    assert waited.result(PATIENCE_SECONDS) == 1


def test_a_wait_that_is_over_leaves_nothing_to_look_at() -> None:
    """Even where a read of a cancelled `await_` ends after it; else all others would look often, for ever."""
    results = [tasks.add.enqueue(number) for number in range(2)]
    with Waiting(results, lambda: None) as waiting:
        waiting.begin()
    waiting._waiter.note(results[0].id)
    waiting.look()
    waiters.of_process().look_soon([results[1].id])
    assert not waiters.of_process()._unmarked


@pytest.mark.parametrize("end", ["error", "cancelled"])
def test_a_look_that_is_not_done_is_due_again(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waiter looks for all: when it fails or goes before, another one looks soon."""
    results = [tasks.add.enqueue(number) for number in range(2)]
    now = [time.monotonic()]
    with Waiting(results[1:], lambda: None) as other:
        other.begin()
        with suppress(DatabaseError), Waiting(results[:1], lambda: None) as first:
            first.begin()
            waiters.of_process()._unmarked.clear()
            monkeypatch.setattr(waiters.time, "monotonic", lambda: now[0])
            now[0] += waiters.LOOK_SECONDS + 1
            assert first.must_look() and not other.must_look()
            if end == "error":
                with monkeypatch.context() as patch:
                    patch.setattr(waiters, "over_among", failing)
                    first.look()
        now[0] += 2 * waiters.SHORTEST_LOOK_SECONDS
        assert other.must_look()


def failing(ids: Any) -> Any:
    raise DatabaseError("connection lost")
