"""What a rolled-back transaction took outside the database is given back at once, and only then."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, TestCase
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

from django_asyncq import QueueFull, gates, lifecycle
from django_asyncq.lifecycle.enqueueing import Dispatch
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.storage import rollbacks
from django_asyncq.storage.routing import transaction_of, writing_database

from .. import tasks
from ..proxy import Proxy
from ..workers import ROOT, environment, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

THREAD = "asyncq-rollbacks"


class Rollback(Exception):
    """Rolls a transaction back."""


def view(request: HttpRequest) -> HttpResponse:
    """Enqueue two tasks at a gate of two; fail if asked to."""
    fill(2)
    if "fail" in request.GET:
        raise Rollback
    return HttpResponse("queued")


urlpatterns = [path("enqueue", view)]


def fill(count: int, gate: str = "g") -> list[Any]:
    """Enqueue tasks at a gate of two."""
    return [tasks.gated.using(queue_limit=2).enqueue(gate) for _ in range(count)]


def holders(gate: str = "g") -> set[str]:
    """Return the ids that hold a slot."""
    return {slot.id for slot in gates.slots(gate)}


def roll_back(count: int) -> None:
    """Enqueue tasks in a transaction that is rolled back."""
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        fill(count)
        raise Rollback


@pytest.fixture
def without_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is given back but by the next call."""
    own = rollbacks.RolledBack()
    monkeypatch.setattr(own, "expect", lambda until: None)
    monkeypatch.setattr(rollbacks, "_rolled_back", own)
    monkeypatch.setattr(gates.admission, "release_rolled_back", own.release)
    yield


def test_thread_gives_back_after_a_rollback() -> None:
    """Other processes have the slots without another call of this one."""
    roll_back(2)
    wait_until(lambda: not holders(), "an empty gate", 5)


def test_next_call_gives_back_before_it_asks(without_thread: None) -> None:
    """So a process never finds a gate full of what it rolled back itself."""
    for _ in range(3):
        roll_back(2)
        assert len(holders()) == 2
    fill(2)
    assert len(holders()) == 2


def test_two_tests_of_one_class_share_a_gate() -> None:
    """Each test of a `TestCase` is rolled back, within the transaction of its class."""

    class TwoTests(TestCase):
        databases = {writing_database(TaskRecord), "default"}

        def test_one(self) -> None:
            fill(2)

        def test_two(self) -> None:
            fill(2)
            with pytest.raises(QueueFull):
                fill(1)

    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(TwoTests).run(outcome)
    assert outcome.testsRun == 2
    assert not [text for _, text in outcome.errors + outcome.failures]
    wait_until(lambda: not holders(), "an empty gate", 5)


def test_only_the_savepoint_that_is_rolled_back_gives_back(without_thread: None) -> None:
    """A savepoint within a savepoint gives back alone; the tasks around it keep their slots."""
    with transaction_of(TaskRecord):
        (kept,) = fill(1)
        for _ in range(2):
            with pytest.raises(Rollback), transaction_of(TaskRecord):
                with pytest.raises(Rollback), transaction_of(TaskRecord):
                    fill(1)
                    raise Rollback
                fill(1)
                raise Rollback
        with transaction_of(TaskRecord), transaction_of(TaskRecord):
            (inner,) = fill(1)
    assert holders() == {kept.id, inner.id}
    assert TaskRecord.objects.count() == 2


def test_savepoint_released_into_a_rollback_gives_back() -> None:
    """The tasks of an inner block that was left without an error go with the outer one."""
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        with transaction_of(TaskRecord):
            fill(2)
        raise Rollback
    fill(2)


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_view_leaves_room_for_the_next_request(
    settings: Any, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """With ATOMIC_REQUESTS."""
    settings.ROOT_URLCONF = __name__
    monkeypatch.setitem(connections[writing_database(TaskRecord)].settings_dict, "ATOMIC_REQUESTS", True)

    async def statuses() -> list[int]:
        client = AsyncClient(raise_request_exception=False)
        return [(await client.get(url)).status_code for url in ("/enqueue?fail=1", "/enqueue?fail=1", "/enqueue")]

    if is_async:
        found = asyncio.run(statuses())
    else:
        client = Client(raise_request_exception=False)
        found = [client.get(url).status_code for url in ("/enqueue?fail=1", "/enqueue?fail=1", "/enqueue")]
    assert found == [500, 500, 200]
    assert TaskRecord.objects.count() == 2


def test_async_code_gives_back() -> None:
    """`sync_to_async` runs the transaction in a thread."""

    async def twice() -> None:
        for _ in range(2):
            await sync_to_async(roll_back)(2)
        await sync_to_async(connections.close_all)()

    asyncio.run(twice())
    wait_until(lambda: not holders(), "an empty gate", 5)


def test_kept_traceback_keeps_no_slot(without_thread: None) -> None:
    """The frames of a traceback hold the results, not the hook."""
    with pytest.raises(QueueFull) as kept, transaction_of(TaskRecord):
        results = fill(2)
        fill(1)
    assert kept.value.occupancy == len(results) == 2
    fill(2)
    assert kept.tb is not None


def test_enqueue_many_gives_back_what_it_was_granted(without_thread: None) -> None:
    """With `partial`, only tasks that were admitted hold something."""
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        results = tasks.gated.using(queue_limit=2).enqueue_many([("g",)] * 4, partial=True)
        assert [result is not None for result in results] == [True, True, False, False]
        raise Rollback
    fill(2)


def test_commit_keeps_the_slots(without_thread: None) -> None:
    """A hook that has been called gives nothing back when it is dropped."""
    with transaction_of(TaskRecord):
        results = fill(2)
    gc.collect()
    rollbacks.release_rolled_back()
    assert holders() == {result.id for result in results}


def test_hooks_run_by_a_test_keep_the_slots_until_its_end(without_thread: None) -> None:
    """`captureOnCommitCallbacks` runs the hooks, and Django drops them later."""
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        with TestCase.captureOnCommitCallbacks(using=writing_database(TaskRecord), execute=True) as hooks:
            fill(2)
        assert len(hooks) == 1
        del hooks
        with pytest.raises(QueueFull):
            fill(1)
        raise Rollback
    gc.collect()
    gates.admission.release_rolled_back()
    # They are confirmed, and last until the audit finds no rows.
    assert len(holders()) == 2


def test_existing_row_keeps_its_slot(without_thread: None) -> None:
    """Whatever made Django drop a hook: the row decides."""
    alias = writing_database(TaskRecord)
    with transaction_of(TaskRecord):
        results = fill(2)
        connections[alias].run_on_commit = []
    gates.admission.release_rolled_back()
    assert holders() == {result.id for result in results}


def test_garbage_collector_of_another_thread_may_drop_the_hook(without_thread: None) -> None:
    """The finalizer asks nothing of the thread that it runs in."""
    alias = writing_database(TaskRecord)
    gc.disable()
    try:
        with transaction_of(TaskRecord):
            fill(2)
            # A cycle, so that only the collector drops it.
            hook: Any = connections[alias].run_on_commit.pop()[1]
            assert type(hook) is Dispatch
            hook.itself = hook
            del hook
            transaction.set_rollback(True, using=alias)
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join()
    finally:
        gc.enable()
    fill(2)


def test_forked_child_gives_nothing_back(without_thread: None) -> None:
    """It drops its copy of the hook; the slots are the parent's, which commits."""
    alias = writing_database(TaskRecord)
    with transaction_of(TaskRecord):
        results = fill(2)
        child = os.fork()
        if not child:
            connections[alias].run_on_commit = []
            gc.collect()
            is_empty = rollbacks._rolled_back._noted.empty()
            os._exit(0 if is_empty else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert holders() == {result.id for result in results}


def test_child_starts_with_nothing_to_give_back(without_thread: None) -> None:
    """What the parent noted before the fork is the parent's to give back."""
    own = rollbacks._rolled_back
    roll_back(1)
    assert not own._noted.empty()
    own.reset()
    assert own._noted.empty()
    own.release()
    assert len(holders()) == 1


def test_command_that_fails_gives_back_before_it_exits() -> None:
    """The process does not live long enough for its thread."""
    script = """
import django
django.setup()
from django_asyncq.storage import rollbacks
from django_asyncq.storage.routing import transaction_of
from django_asyncq.models import TaskRecord
from tests import tasks
rollbacks.RolledBack.expect = lambda self, until: None
with transaction_of(TaskRecord):
    tasks.gated.using(queue_limit=2).enqueue("g")
    raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", script], env=environment(), cwd=ROOT).returncode == 3
    assert gates.slots("g") == []
    assert TaskRecord.objects.count() == 0


def failed_at_gate(**more: Any) -> TaskRecord:
    """Make the row of a failed task."""
    values = {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "finished_at": timezone.now(), **more}
    return TaskRecord.objects.create(name="tests.tasks.gated", args=["g"], gate="g", queue_limit=2, **values)


def test_rolled_back_retry_gives_back() -> None:
    """The row exists and is FAILED, so it holds no slot."""
    failed = failed_at_gate()
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        assert lifecycle.retry([failed.id], by_person=True).retried
        raise Rollback
    wait_until(lambda: not holders(), "an empty gate", 5)
    assert len(lifecycle.retry([failed.id], by_person=True).retried) == 1
    assert holders() == {str(failed.id)}


def test_rolled_back_retry_of_a_waiter_keeps_its_place() -> None:
    """It waited at its gate, and is next again."""
    waiter, other = (
        failed_at_gate(reason=FailureReason.GATE_FULL, retry_at=timezone.now(), finished_at=None) for _ in range(2)
    )
    Gate.objects.create(name="g", limit=1)
    gates.build("g")
    assert gates.waiters("g") == [str(waiter.id), str(other.id)]
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        assert lifecycle.retry([waiter.id], by_person=False).retried
        raise Rollback
    wait_until(lambda: not holders(), "an empty gate", 5)
    assert gates.waiters("g") == [str(waiter.id), str(other.id)]


@pytest.mark.skipif(
    not connections[writing_database(TaskRecord)].features.has_select_for_update_skip_locked,
    reason="needs locks of rows",
)
def test_retry_by_another_transaction_keeps_the_slot(without_thread: None) -> None:
    """The row is locked by a retry that needs the slot."""
    failed = failed_at_gate()
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        assert lifecycle.retry([failed.id], by_person=True).retried
        raise Rollback
    retried, may_commit = threading.Event(), threading.Event()

    def retry_slowly() -> None:
        with transaction_of(TaskRecord):
            TaskRecord.objects.select_for_update().get(id=failed.id)
            retried.set()
            may_commit.wait(10)
            lifecycle.retry([failed.id], by_person=True)
        connections.close_all()

    other = threading.Thread(target=retry_slowly)
    other.start()
    assert retried.wait(10)
    rollbacks._rolled_back.release()
    assert holders() == {str(failed.id)}
    may_commit.set()
    other.join()
    assert holders() == {str(failed.id)}
    assert TaskRecord.objects.get().state == TaskState.QUEUED


def test_lost_reply_to_a_commit_gives_nothing_back(without_thread: None) -> None:
    """The task may be committed, and here it is; without its slot the gate would admit too many."""
    alias = writing_database(TaskRecord)
    if connections[alias].vendor == "sqlite":
        pytest.skip("SQLite has no server")
    address = urlsplit(environment()["DATABASE_URL"])
    wrapper = connections[alias]
    wrapper.close()
    with Proxy((address.hostname or "127.0.0.1", address.port or 5432)) as proxy:
        own = wrapper.copy()
        own.settings_dict.update(HOST=proxy.host, PORT=proxy.port)
        connections[alias] = own
        try:
            fill(1, "warm")
            with pytest.raises(DatabaseError), transaction_of(TaskRecord):
                fill(2)
                proxy.drop = 1
        finally:
            own.close()
            connections[alias] = wrapper
    gc.collect()
    assert rollbacks._rolled_back._noted.empty()
    wait_until(lambda: TaskRecord.objects.filter(gate="g").count() == 2, "the commit", 5)
    with pytest.raises(QueueFull):
        fill(1)
    assert len(holders()) == 2


def test_unreadable_database_is_tried_again(without_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As within a transaction that can only be rolled back."""
    alias = writing_database(TaskRecord)
    roll_back(2)
    with transaction_of(TaskRecord):
        transaction.set_rollback(True, using=alias)
        rollbacks._rolled_back.release()
        assert len(holders()) == 2
    fill(2)


def test_database_of_tests_that_are_over_is_not_looked_for(
    without_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the alias is that of development again; the next test run has the slots."""
    wrapper = connections[writing_database(TaskRecord)]
    roll_back(2)
    monkeypatch.setitem(wrapper.settings_dict, "NAME", "development")
    with CaptureQueriesContext(wrapper) as queries:
        rollbacks._rolled_back.release()
    assert not queries.captured_queries and not holders()


def test_thread_starts_only_for_a_task_at_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """And finishes when nothing that was taken can still be held provisionally."""
    own = rollbacks.RolledBack()
    monkeypatch.setattr(rollbacks, "_rolled_back", own)
    with pytest.raises(Rollback), transaction_of(TaskRecord):
        tasks.add.enqueue(1)
        raise Rollback
    fill(1)  # without a transaction nothing can be rolled back
    assert own._thread is None
    own.expect(time.monotonic() + 0.1)
    thread = own._thread
    assert thread is not None and thread.name == THREAD
    thread.join(10)
    assert not thread.is_alive() and own._thread is None


def test_thread_that_dies_has_a_successor(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The next task at a gate starts another one."""
    own = rollbacks.RolledBack()
    monkeypatch.setattr(rollbacks, "_rolled_back", own)
    with monkeypatch.context() as patch:
        patch.setattr(own, "release", lambda: sys.exit(1))
        roll_back(1)
        wait_until(lambda: own._thread is None, "the death of the thread", 5)
    # It lets go of its place first, and its guard says so afterwards.
    wait_until(lambda: f"thread {THREAD} has died" in caplog.text, "a line in the log", 5)
    roll_back(1)
    wait_until(lambda: not holders(), "an empty gate", 5)


def test_task_without_a_gate_waits_for_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be releasing slots, slowly."""
    calls: list[None] = []
    monkeypatch.setattr(gates.admission, "release_rolled_back", lambda: calls.append(None))
    tasks.add.enqueue(1)
    assert not calls
    fill(1)
    assert len(calls) == 1
