"""Pushes of a dense stream are batched, and no task is lost or out of order."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.utils import timezone

from django_asyncq import gates, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import dispatching
from django_asyncq.lifecycle.dispatching import DENSE
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..redis_state import pending
from ..workers import environment, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parent.parent.parent
THREAD = "asyncq-push-batcher"
# Longer than a test may wait for anything.
LONG = 3600.0
# Longer than a test takes to enqueue its tasks, also on a machine that freezes at times.
SOON = 2.0


@pytest.fixture
def batching(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Switch the batcher on, empty; leave no thread behind."""
    own = dispatching.PushBatcher()
    monkeypatch.setattr(dispatching, "add", own.add)
    monkeypatch.setattr(dispatching, "flush_pushes", own.flush_pushes)

    def switch_on(seconds: float) -> None:
        settings.ASYNCQ = {**settings.ASYNCQ, "PUSH_BATCH_SECONDS": seconds}

    yield switch_on
    switch_on(0)
    # Wakes the thread, which then finishes.
    own.flush_pushes()
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(10)
            assert not thread.is_alive()


def has_thread() -> bool:
    """Whether the thread of the batcher runs."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def test_lone_task_is_pushed_by_its_caller(batching: Callable[[float], None]) -> None:
    """When `enqueue` returns, Redis has the task, and no thread was started."""
    batching(0.001)
    for _ in range(3):
        result = tasks.add.enqueue(1)
        assert pending()[-1] == result.id
        assert not has_thread()
        time.sleep(0.002)


def begin_stream() -> list[str]:
    """Enqueue enough tasks that the next ones are batched; return the ids of these, which are pushed."""
    ids = [tasks.add.enqueue(number).id for number in range(DENSE - 1)]
    wait_until(lambda: pending() == ids, "their pushes")
    return ids


def test_few_close_tasks_are_pushed_at_once_by_the_thread(batching: Callable[[float], None]) -> None:
    """The caller need not wait for Redis, and the thread does not wait for more tasks."""
    batching(LONG)
    assert not has_thread()
    assert len(begin_stream()) > 1
    assert has_thread()


class Clock:
    """The batcher's clock, which it reads while it holds its lock. interrupt: called at the next reading."""

    def __init__(self) -> None:
        self.interrupt: Callable[[], object] | None = None

    def monotonic(self) -> float:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt:
            interrupt()
        return time.monotonic()


def test_signal_handler_may_enqueue_while_the_batcher_is_locked(
    batching: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs in the thread that holds the lock, and must not wait for it."""
    batching(LONG)
    clock = Clock()
    monkeypatch.setattr(dispatching, "time", clock)
    clock.interrupt = lambda: tasks.add.enqueue(1)
    tasks.add.enqueue(2)
    dispatching.flush_pushes()
    assert len(pending()) == 2


def test_dense_stream_is_pushed_with_one_call(batching: Callable[[float], None], redis_client: Any) -> None:
    """The tasks wait for the rest of PUSH_BATCH_SECONDS, and are pushed together and in order."""
    batching(SOON)
    first = begin_stream()
    before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    results = [tasks.add.enqueue(number).id for number in range(10)]
    assert pending() == first
    wait_until(lambda: len(pending()) > len(first), "the others' push")
    assert pending() == first + results
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 1
    wait_until(lambda: not has_thread(), "the end of the thread")


def test_long_stream_is_pushed_in_batches(batching: Callable[[float], None], redis_client: Any) -> None:
    """One script call for each PUSH_BATCH_SECONDS."""
    batching(0.2)
    begin_stream()
    before, begun_at = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"], time.monotonic()
    while time.monotonic() < begun_at + 1:
        tasks.add.enqueue(0)
    wait_until(lambda: not has_thread(), "the end of the thread")
    calls = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
    assert calls < len(pending()) / 5


def test_task_enqueued_during_a_push_is_pushed_after_it(
    batching: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when so much time has passed that it would count as a lone task."""
    dispatch, is_pushing, may_go_on = dispatching.dispatch, threading.Event(), threading.Event()

    def wait_and_dispatch(records: Any) -> int:
        is_pushing.set()
        assert may_go_on.wait(30)
        return dispatch(records)

    monkeypatch.setattr(dispatching, "dispatch", wait_and_dispatch)
    batching(LONG)
    results = [tasks.add.enqueue(number).id for number in range(2)]
    assert is_pushing.wait(30)
    batching(0.001)
    time.sleep(0.002)
    results.append(tasks.add.enqueue(2).id)
    assert pending() == results[:1]
    may_go_on.set()
    wait_until(lambda: len(pending()) == 3, "their pushes")
    assert pending() == results


@pytest.mark.parametrize("count", [2, DENSE + 2])
def test_task_after_a_pause_is_a_lone_one_again(batching: Callable[[float], None], count: int) -> None:
    """After PUSH_BATCH_SECONDS without a task the thread finishes, and the next caller pushes at once."""
    batching(0.5)
    for number in range(count):
        tasks.add.enqueue(number)
    assert has_thread()
    wait_until(lambda: not has_thread(), "the end of the thread")
    result = tasks.add.enqueue(2)
    assert pending()[-1] == result.id
    assert not has_thread()


def test_steady_stream_keeps_its_order(batching: Callable[[float], None]) -> None:
    """The tasks of a caller are pending in the order of their `enqueue`, whether the caller or the thread pushes."""
    batching(0.005)
    results = []
    for number in range(300):
        results.append(tasks.add.enqueue(number).id)
        if number % 40 == 0:
            time.sleep(0.012)  # long enough for the thread to finish
    dispatching.flush_pushes()
    assert pending() == results


def test_batch_may_span_several_queues(batching: Callable[[float], None]) -> None:
    """A batch may hold tasks of several queues, delayed tasks, and whole transactions."""
    batching(LONG)
    begin_stream()
    one = tasks.add.using(queue_name="one").enqueue(1)
    with transaction.atomic():
        two = [tasks.add.using(queue_name="two").enqueue(number) for number in range(3)]
    late = tasks.add.using(queue_name="one", run_after=timedelta(hours=1)).enqueue(2)
    assert (pending("one"), pending("two")) == ([], [])
    dispatching.flush_pushes()
    assert (pending("one"), pending("two")) == ([one.id], [result.id for result in two])
    assert Broker().client.zrange(QueueKeys("one").scheduled, 0, -1) == [late.id.encode()]


def test_process_exit_waits_for_the_last_push() -> None:
    """Neither a script that enqueues and exits nor its exit handlers leave a push to the reconciler."""
    script = (
        "import atexit, django; django.setup()\n"
        "from django.conf import settings\n"
        f"settings.ASYNCQ['PUSH_BATCH_SECONDS'] = {SOON}\n"
        "from tests import tasks\n"
        "atexit.register(lambda: [tasks.add.enqueue(number) for number in range(5, 8)])\n"
        "[tasks.add.enqueue(number) for number in range(5)]\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    by_age = TaskRecord.objects.order_by("enqueued_at")
    assert [row.args for row in by_age] == [[number] for number in range(8)]
    assert pending() == [str(row.id) for row in by_age]


def test_stopped_worker_pushes_what_its_tasks_enqueued(tmp_path: Path) -> None:
    """Its process exits with `os._exit`, which waits for no thread."""
    count = DENSE + 2
    result = tasks.enqueues_closely.enqueue("elsewhere", count)
    with workers(tmp_path, "--queues", "default", ASYNCQ_TEST_PUSH_BATCH="1") as fleet:
        wait_until(lambda: TaskRecord.objects.get(id=result.id).state == TaskState.SUCCEEDED, "the success of the task")
        assert fleet.stop() == 0
    by_age = TaskRecord.objects.filter(queue_name="elsewhere").order_by("enqueued_at")
    assert pending("elsewhere") == [str(row.id) for row in by_age]
    assert len(by_age) == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_child_of_a_fork_starts_with_an_empty_batcher(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has neither the tasks that its parent will push, nor a lock that a thread of the parent holds."""
    settings.ASYNCQ = {**settings.ASYNCQ, "PUSH_BATCH_SECONDS": LONG}
    pushed: list[TaskRecord] = []
    clock, held, may_finish = Clock(), threading.Event(), threading.Event()
    monkeypatch.setattr(dispatching, "dispatch", pushed.extend)
    monkeypatch.setattr(dispatching, "time", clock)
    waiting = [TaskRecord(name="tests.tasks.add") for _ in range(DENSE)]
    for record in waiting:
        dispatching.add([record])
    clock.interrupt = lambda: held.set() or may_finish.wait(30)
    holder = threading.Thread(target=dispatching.add, args=[[TaskRecord(name="tests.tasks.add")]])
    try:
        holder.start()
        held.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # a child that waits for the lock is killed
            pushed.clear()
            dispatching.flush_pushes()
            is_lone = not dispatching.add([TaskRecord(name="tests.tasks.add")])
            os._exit(0 if is_lone and not pushed else 1)
        _, status = os.waitpid(child, 0)
    finally:
        may_finish.set()
        holder.join()
        settings.ASYNCQ = {**settings.ASYNCQ, "PUSH_BATCH_SECONDS": 0}
        dispatching.flush_pushes()
        wait_until(lambda: not has_thread(), "the end of the thread")
    assert status == 0
    assert waiting[-1] in pushed


def test_task_deleted_before_its_push_leaves_nothing(batching: Callable[[float], None]) -> None:
    """Neither an entry nor a gate slot."""
    batching(SOON)
    first = begin_stream()
    result = tasks.add.using(gate="batched", queue_limit=1).enqueue(1)
    TaskRecord.objects.get(id=result.id).delete()
    assert (pending(), gates.slots("batched")) == (first, [])
    wait_until(lambda: not has_thread(), "the end of the thread")
    assert (pending(), gates.slots("batched")) == (first, [])


def test_thread_parks_a_task_that_lost_its_slot(batching: Callable[[float], None]) -> None:
    """Afterwards the thread keeps no connection to the database."""
    batching(SOON)
    opened: list[Any] = []

    def note(*, connection: Any, **kwargs: Any) -> None:
        opened.append(connection)

    connection_created.connect(note)
    try:
        begin_stream()
        result = tasks.add.using(gate="stolen", queue_limit=1).enqueue(1)
        gates.release([TaskRecord.objects.get(id=result.id)])
        gates.acquire([TaskRecord(gate="stolen", queue_limit=1)])
        wait_until(lambda: TaskRecord.objects.get(id=result.id).state == TaskState.FAILED, "being parked")
        wait_until(lambda: not has_thread(), "the end of the thread")
    finally:
        connection_created.disconnect(note)
    assert TaskRecord.objects.get(id=result.id).retry_at
    mine = [each for each in opened if each is not connections["default"]]
    assert mine
    assert all(each.connection is None for each in mine)


def test_caller_pushes_when_too_many_tasks_wait(
    batching: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers cannot outrun Redis for long."""
    batching(LONG)
    first = begin_stream()
    monkeypatch.setattr(dispatching, "MOST_WAITING", 3)
    results = [tasks.add.enqueue(number).id for number in range(6)]
    assert pending() == first + results[3:]
    dispatching.flush_pushes()
    assert pending() == first + results[3:] + results[:3]


def test_unexpected_error_of_a_push_is_logged_and_the_next_push_works(
    batching: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reconciler pushes the task later; the thread goes on."""
    dispatch = dispatching.dispatch

    def fail_once(records: Any) -> int:
        monkeypatch.setattr(dispatching, "dispatch", dispatch)
        raise ZeroDivisionError

    monkeypatch.setattr(dispatching, "dispatch", fail_once)
    batching(LONG)
    results = [tasks.add.enqueue(number).id for number in range(2)]
    with caplog.at_level(logging.ERROR, "django_asyncq.lifecycle"):
        wait_until(lambda: "push of 1 task failed; the reconciler will retry" in caplog.text, "a line in the log")
    results.append(tasks.add.enqueue(2).id)
    wait_until(lambda: len(pending()) == 2, "the next push")
    assert pending() == [results[0], results[2]]


def test_slot_of_a_deleted_task_is_released_although_its_push_failed(
    batching: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the push does not stop the removal after it."""

    def fail(records: Any) -> int:
        raise ZeroDivisionError

    batching(LONG)
    begin_stream()
    monkeypatch.setattr(dispatching, "dispatch", fail)
    result = tasks.add.using(gate="unpushed", queue_limit=1).enqueue(1)
    assert len(gates.slots("unpushed")) == 1
    TaskRecord.objects.get(id=result.id).delete()
    assert gates.slots("unpushed") == []
    assert "push of 1 task failed; the reconciler will retry" in caplog.text


def test_unreachable_redis_delays_no_caller_and_loses_nothing(
    batching: Callable[[float], None],
    own_redis: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread waits for the timeout, one line is logged, and the reconciler pushes."""
    # The next push comes while pushes are still skipped.
    monkeypatch.setattr(dispatching, "BREAKER_SECONDS", 60.0)
    batching(SOON)
    results = begin_stream()
    own_redis.kill()
    with caplog.at_level(logging.WARNING, "django_asyncq.lifecycle"):
        results += [tasks.add.enqueue(number).id for number in range(1, 4)]
        wait_until(lambda: "push of 3 tasks failed" in caplog.text, "a line in the log")
        results.append(tasks.add.enqueue(4).id)
        wait_until(lambda: not has_thread(), "the end of the thread")
    assert len(caplog.records) == 1
    own_redis.restart()
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    Reconciler(Broker("worker")).tick(0)
    assert sorted(pending()) == sorted(results)


def test_nothing_is_batched_when_the_setting_is_0(batching: Callable[[float], None]) -> None:
    """PUSH_BATCH_SECONDS = 0: each `enqueue` has pushed when it returns."""
    batching(0)
    results = []
    for number in range(20):
        results.append(tasks.add.enqueue(number).id)
        assert pending() == results
    assert not has_thread()


def test_lifecycle_flushes_the_batcher_of_the_process() -> None:
    """`lifecycle.flush_pushes` and `enqueue` use the same batcher."""
    assert lifecycle.flush_pushes == dispatching.flush_pushes
