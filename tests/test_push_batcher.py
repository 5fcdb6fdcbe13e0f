"""Pushes that follow each other closely are made together, and nothing is lost or out of order by that."""

from __future__ import annotations

import logging
import os
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
from django_asyncq.lifecycle import dispatching, push_batcher
from django_asyncq.lifecycle.push_batcher import DENSE
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from . import tasks
from .redis_state import pending
from .workers import environment, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parent.parent
THREAD = "asyncq-gathering"
# Longer than a test may wait for anything.
LONG = 3600.0
# Longer than a test takes to enqueue what it looks at, also on a machine that stands still at times.
SOON = 2.0


@pytest.fixture
def gather(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Switch gathering on, with nothing waiting and no push made yet; leave no thread behind."""
    own = push_batcher.PushBatcher()
    monkeypatch.setattr(push_batcher, "add", own.add)
    monkeypatch.setattr(push_batcher, "flush_pushes", own.flush_pushes)

    def switch_on(seconds: float) -> None:
        settings.ASYNCQ = {**settings.ASYNCQ, "PUSH_BATCH_SECONDS": seconds}

    yield switch_on
    switch_on(0)
    with own._changed:
        own._changed.notify_all()
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(10)
            assert not thread.is_alive()


def has_thread() -> bool:
    """Whether somebody gathers."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def test_a_lone_push_is_made_by_the_caller(gather: Callable[[float], None]) -> None:
    """When `enqueue` returns, Redis has it, and no thread was started."""
    gather(0.001)
    for _ in range(3):
        result = tasks.add.enqueue(1)
        assert pending()[-1] == result.id
        assert not has_thread()
        time.sleep(0.002)


def begin_stream() -> list[str]:
    """Enqueue so many that what follows closely is gathered; return the ids of these, which are pushed."""
    ids = [tasks.add.enqueue(number).id for number in range(DENSE - 1)]
    wait_until(lambda: pending() == ids, "their pushes")
    return ids


def test_what_follows_closely_is_pushed_at_once_by_the_thread(gather: Callable[[float], None]) -> None:
    """As long as they are few: the caller goes on, and nobody waits for more."""
    gather(LONG)
    assert not has_thread()
    assert len(begin_stream()) > 1
    assert has_thread()


def test_a_signals_handler_may_enqueue_in_the_middle_of_it(gather: Callable[[float], None]) -> None:
    """It runs in the same thread, which would wait for itself."""
    gather(LONG)
    gatherer = push_batcher.add.__self__  # type: ignore[attr-defined]
    with gatherer._lock:
        tasks.add.enqueue(1)
        tasks.add.enqueue(2)
    push_batcher.flush_pushes()
    assert len(pending()) == 2


def test_a_stream_is_pushed_with_one_call(gather: Callable[[float], None], redis_client: Any) -> None:
    """What comes as the last of so many waits for the rest of the time, and is pushed together and in order."""
    gather(SOON)
    first = begin_stream()
    before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    results = [tasks.add.enqueue(number).id for number in range(10)]
    assert pending() == first
    wait_until(lambda: len(pending()) > len(first), "the others' push")
    assert pending() == first + results
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 1
    wait_until(lambda: not has_thread(), "the thread's end")


def test_a_stream_that_lasts_is_pushed_in_groups(gather: Callable[[float], None], redis_client: Any) -> None:
    """One call for each PUSH_BATCH_SECONDS."""
    gather(0.2)
    begin_stream()
    before, begun_at = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"], time.monotonic()
    while time.monotonic() < begun_at + 1:
        tasks.add.enqueue(0)
    wait_until(lambda: not has_thread(), "the thread's end")
    calls = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
    assert calls < len(pending()) / 5


def test_what_comes_during_a_push_is_pushed_behind_it(
    gather: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing came for so long that it is a lone one."""
    dispatch, is_pushing, may_go_on = push_batcher.dispatch, threading.Event(), threading.Event()

    def wait_and_dispatch(records: Any) -> int:
        is_pushing.set()
        assert may_go_on.wait(30)
        return dispatch(records)

    monkeypatch.setattr(push_batcher, "dispatch", wait_and_dispatch)
    gather(LONG)
    results = [tasks.add.enqueue(number).id for number in range(2)]
    assert is_pushing.wait(30)
    gather(0.001)
    time.sleep(0.002)
    results.append(tasks.add.enqueue(2).id)
    assert pending() == results[:1]
    may_go_on.set()
    wait_until(lambda: len(pending()) == 3, "their pushes")
    assert pending() == results


@pytest.mark.parametrize("count", [2, DENSE + 2])
def test_when_nothing_has_come_the_next_push_is_a_lone_one_again(gather: Callable[[float], None], count: int) -> None:
    """A time in which nothing came ends the gathering: what comes soon after that is pushed by its caller, at once."""
    gather(0.5)
    for number in range(count):
        tasks.add.enqueue(number)
    assert has_thread()
    wait_until(lambda: not has_thread(), "the thread's end")
    result = tasks.add.enqueue(2)
    assert pending()[-1] == result.id
    assert not has_thread()


def test_a_steady_stream_keeps_its_order(gather: Callable[[float], None]) -> None:
    """Whoever pushes, caller or thread: a caller's tasks are pending in the order in which he enqueued them."""
    gather(0.005)
    results = []
    for number in range(300):
        results.append(tasks.add.enqueue(number).id)
        if number % 40 == 0:
            time.sleep(0.012)  # long enough for the thread to end
    push_batcher.flush_pushes()
    assert pending() == results


def test_each_queue_gets_its_own(gather: Callable[[float], None]) -> None:
    """What is gathered may be of several queues, delayed, or a whole transaction."""
    gather(LONG)
    begin_stream()
    one = tasks.add.using(queue_name="one").enqueue(1)
    with transaction.atomic():
        two = [tasks.add.using(queue_name="two").enqueue(number) for number in range(3)]
    late = tasks.add.using(queue_name="one", run_after=timedelta(hours=1)).enqueue(2)
    assert (pending("one"), pending("two")) == ([], [])
    push_batcher.flush_pushes()
    assert (pending("one"), pending("two")) == ([one.id], [result.id for result in two])
    assert Broker().client.zrange(QueueKeys("one").scheduled, 0, -1) == [late.id.encode()]


def test_an_end_of_the_process_waits_for_its_last_push() -> None:
    """A script that enqueues and ends leaves nothing to the reconciler; nor do its exit handlers."""
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


def test_a_worker_that_is_stopped_pushes_what_its_tasks_enqueued(tmp_path: Path) -> None:
    """Its process ends by `os._exit`, which waits for no thread."""
    count = DENSE + 2
    result = tasks.enqueues_closely.enqueue("elsewhere", count)
    with workers(tmp_path, "--queues", "default", ASYNCQ_TEST_PUSH_BATCH="1") as fleet:
        wait_until(lambda: TaskRecord.objects.get(id=result.id).state == TaskState.SUCCEEDED, "the end of the task")
        assert fleet.stop() == 0
    by_age = TaskRecord.objects.filter(queue_name="elsewhere").order_by("enqueued_at")
    assert pending("elsewhere") == [str(row.id) for row in by_age]
    assert len(by_age) == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_begins_anew() -> None:
    """The child has neither what its parent is to push nor the lock that the parent's thread may hold."""
    own = push_batcher._gathering
    held = threading.Event()
    may_end = threading.Event()

    def hold() -> None:
        with own._changed:
            held.set()
            may_end.wait(30)

    holder = threading.Thread(target=hold)
    own._waiting.append(TaskRecord(name="tests.tasks.add"))
    try:
        holder.start()
        held.wait(30)
        child = os.fork()
        if child == 0:
            is_new = own._changed.acquire(timeout=5) and own._waiting == [] and own._thread is None
            os._exit(0 if is_new else 1)
        _, status = os.waitpid(child, 0)
    finally:
        may_end.set()
        holder.join()
        own._waiting.clear()
    assert status == 0


def test_what_is_deleted_before_its_push_leaves_nothing(gather: Callable[[float], None]) -> None:
    """Neither an entry nor a slot."""
    gather(SOON)
    first = begin_stream()
    result = tasks.add.using(gate="gathered", queue_limit=1).enqueue(1)
    TaskRecord.objects.get(id=result.id).delete()
    assert (pending(), gates.slots("gathered")) == (first, [])
    wait_until(lambda: not has_thread(), "the thread's end")
    assert (pending(), gates.slots("gathered")) == (first, [])


def test_a_lost_slot_is_noticed_by_the_push(gather: Callable[[float], None]) -> None:
    """The thread parks the task, and keeps no connection to the database."""
    gather(SOON)
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
        wait_until(lambda: not has_thread(), "the thread's end")
    finally:
        connection_created.disconnect(note)
    assert TaskRecord.objects.get(id=result.id).retry_at
    mine = [each for each in opened if each is not connections["default"]]
    assert mine
    assert all(each.connection is None for each in mine)


def test_when_too_much_waits_the_caller_pushes(
    gather: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gets ahead of Redis for long."""
    gather(LONG)
    first = begin_stream()
    monkeypatch.setattr(push_batcher, "MOST_WAITING", 3)
    results = [tasks.add.enqueue(number).id for number in range(6)]
    assert pending() == first + results[3:]
    push_batcher.flush_pushes()
    assert pending() == first + results[3:] + results[:3]


def test_a_push_that_fails_in_an_unknown_way_is_logged_and_the_next_goes_on(
    gather: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect costs the reconciler's delay, not the thread."""
    dispatch = push_batcher.dispatch

    def fail_once(records: Any) -> int:
        monkeypatch.setattr(push_batcher, "dispatch", dispatch)
        raise ZeroDivisionError

    monkeypatch.setattr(push_batcher, "dispatch", fail_once)
    gather(LONG)
    results = [tasks.add.enqueue(number).id for number in range(2)]
    with caplog.at_level(logging.ERROR, "django_asyncq.lifecycle"):
        wait_until(lambda: "1 tasks not pushed now, the reconciler will" in caplog.text, "a line in the log")
    results.append(tasks.add.enqueue(2).id)
    wait_until(lambda: len(pending()) == 2, "the next push")
    assert pending() == [results[0], results[2]]


def test_a_push_that_fails_does_not_keep_a_deleted_task_its_slot(
    gather: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was to be done after the push is done all the same."""

    def fail(records: Any) -> int:
        raise ZeroDivisionError

    gather(LONG)
    begin_stream()
    monkeypatch.setattr(push_batcher, "dispatch", fail)
    result = tasks.add.using(gate="unpushed", queue_limit=1).enqueue(1)
    assert len(gates.slots("unpushed")) == 1
    TaskRecord.objects.get(id=result.id).delete()
    assert gates.slots("unpushed") == []
    assert "1 tasks not pushed now, the reconciler will" in caplog.text


def test_redis_away_costs_a_caller_nothing_and_loses_nothing(
    gather: Callable[[float], None],
    own_redis: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread pays for the time-out; one line is logged; the reconciler pushes."""
    # The next push, too, comes while pushes are skipped.
    monkeypatch.setattr(dispatching, "BREAKER_SECONDS", 60.0)
    gather(SOON)
    results = begin_stream()
    own_redis.kill()
    with caplog.at_level(logging.WARNING, "django_asyncq.lifecycle"):
        results += [tasks.add.enqueue(number).id for number in range(1, 4)]
        wait_until(lambda: "3 tasks not pushed now" in caplog.text, "a line in the log")
        results.append(tasks.add.enqueue(4).id)
        wait_until(lambda: not has_thread(), "the thread's end")
    assert len(caplog.records) == 1
    own_redis.restart()
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    Reconciler(Broker("worker")).tick(0)
    assert sorted(pending()) == sorted(results)


def test_nothing_is_gathered_where_it_is_switched_off(gather: Callable[[float], None]) -> None:
    """PUSH_BATCH_SECONDS = 0: each `enqueue` has pushed when it returns."""
    gather(0)
    results = []
    for number in range(20):
        results.append(tasks.add.enqueue(number).id)
        assert pending() == results
    assert not has_thread()


def test_verbs_outside_use_the_same_gathering() -> None:
    """`flush_pushes` of the one door is the process's own."""
    assert lifecycle.flush_pushes.__self__ is push_batcher._gathering  # type: ignore[attr-defined]
