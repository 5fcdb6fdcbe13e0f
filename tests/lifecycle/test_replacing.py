"""`on_duplicate="replace"` and `"follow"`: the newest arguments of a key run, and run last."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from django_asyncq import gates, lifecycle
from django_asyncq.broker import Broker, task_entries
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import cancel_channel
from django_asyncq.exceptions import QueueFull
from django_asyncq.lifecycle import replacing
from django_asyncq.lifecycle.following import follower_slot
from django_asyncq.lifecycle.messages import later_fence
from django_asyncq.lifecycle.running import Run
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.testing import failpoints, run_tasks

from .. import kit_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
# One key for all calls.
debounced = tasks.add.using(unique="add", on_duplicate="replace")
following = tasks.add.using(unique="add", on_duplicate="follow")


def claim(worker_id: str = "w") -> Run | None:
    """The next task, claimed and not written as RUNNING."""
    runs = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
    return runs[0] if runs else None


def begun(worker_id: str = "w") -> Run:
    run = claim(worker_id)
    assert run is not None
    lifecycle.begin(run, worker_id, timezone.now())
    return run


def running(worker_id: str = "w") -> Run:
    run = begun(worker_id)
    assert lifecycle.mark_running([run]) == []
    return run


def finish(run: Run, worker_id: str = "w") -> list[Run]:
    """Report a success as a worker does; return the run if its outcome was refused."""
    lifecycle.succeed(run, run.record.args, timezone.now())
    lost = lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), worker_id, [run], lost)
    lifecycle.settle_lost(Broker(), lost)
    return lost


def arguments_run() -> list[Any]:
    """Run all that is due, one after the other; return the arguments."""
    found = []
    while (run := claim()) is not None:
        lifecycle.begin(run, "w", timezone.now())
        found.append(run.record.args[0])
        assert finish(run) == []
    return found


def row() -> TaskRecord:
    return TaskRecord.objects.get()


def entry_state(id: str) -> str:
    (found,) = Inspection("worker", "default").entry_states("default", [id])
    return found.state


class TestReplace:
    """A task that has not begun gets the arguments of the newest call."""

    def test_a_waiting_task_gets_the_newest_arguments(self) -> None:
        """The same row; one run."""
        first, second = debounced.enqueue(1), debounced.enqueue(2)
        assert first.id == second.id
        assert second.args == [2]
        assert arguments_run() == [2]
        assert row().state == TaskState.SUCCEEDED

    @pytest.mark.parametrize("is_emptied", [False, True], ids=["claimed", "Redis emptied"])
    def test_the_request_to_stop_names_the_fence_of_the_replaced_row(self, redis_client: Any, is_emptied: bool) -> None:
        """It may reach the worker when the task has begun anew there, with the newest arguments."""
        debounced.enqueue(1)
        run = begun()
        if is_emptied:
            Broker().remove("default", [run.lease.id])
        with redis_client.pubsub(ignore_subscribe_messages=True) as listener:
            listener.subscribe(cancel_channel())
            listener.get_message(timeout=5)
            debounced.enqueue(2)
            message = listener.get_message(timeout=5)
            assert message["data"].decode() == f"{run.lease.id} {row().fence}"
            assert listener.get_message(timeout=0.1) is None

    def test_other_keys_and_tasks_stay(self) -> None:
        """Only the holder of the key is replaced."""
        tasks.add.enqueue(7)
        tasks.add.using(unique="other", on_duplicate="replace").enqueue(8)
        debounced.enqueue(1)
        debounced.enqueue(2)
        assert sorted(arguments_run()) == [2, 7, 8]

    def test_each_call_moves_the_time(self) -> None:
        """Debounce: it runs after the last call's delay, and a call without one runs at once."""
        later = timezone.now() + HOUR
        result = debounced.using(run_after=later).enqueue(1)
        assert entry_state(result.id) == "scheduled"
        debounced.using(run_after=later + HOUR).enqueue(2)
        record = row()
        assert (record.args, record.run_after) == ([2], later + HOUR)
        assert entry_state(result.id) == "scheduled"
        assert arguments_run() == []
        debounced.enqueue(3)
        assert row().run_after is None
        assert arguments_run() == [3]

    def test_a_pending_task_can_be_delayed(self) -> None:
        """Its entry goes back to those that wait for their time."""
        result = debounced.enqueue(1)
        debounced.using(run_after=HOUR).enqueue(2)
        assert entry_state(result.id) == "scheduled"
        assert arguments_run() == []

    def test_a_rolled_back_call_replaces_nothing(self) -> None:
        """Neither in the row nor in Redis."""
        debounced.enqueue(1)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            debounced.using(run_after=HOUR).enqueue(2)
            raise ZeroDivisionError
        assert arguments_run() == [1]

    def test_a_rolled_back_savepoint_replaces_nothing(self) -> None:
        """What the transaction replaced before it stays."""
        debounced.enqueue(1)
        with transaction.atomic():
            debounced.enqueue(2)
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                debounced.enqueue(3)
                raise ZeroDivisionError
        assert arguments_run() == [2]

    def test_a_run_with_the_newest_arguments_is_not_asked_to_stop(self) -> None:
        """Another process has brought them to Redis; this one is late, and the row does not say RUNNING yet."""
        debounced.enqueue(1)
        runs: list[lifecycle.Run] = []

        def another(name: str) -> None:
            if name == "replace.committed":
                failpoints.disarm()
                replacing._bring_to_redis([row()])
                runs.append(begun())

        failpoints.arm(another)
        debounced.enqueue(2)
        (run,) = runs
        assert run.record.args == [2]
        assert Broker().client.hget(Broker().keys("default").task_prefix + run.lease.id, "cancel") is None
        assert finish(run) == []
        assert claim("v") is None

    def test_a_run_that_was_claimed_before_is_void(self) -> None:
        """The row said QUEUED. The old run's outcome is refused; its report brings the task back."""
        debounced.enqueue(1)
        run = begun()
        assert run.record.args == [1]
        debounced.enqueue(2)
        # The body may still run: no second one begins.
        assert claim("v") is None
        assert task_entries.take_out(Broker(), "default", [(str(run.record.id), run.lease.fence)]) == ["active"]
        assert finish(run) == [run]
        assert arguments_run() == [2]
        assert row().args == [2]

    def test_a_claimed_run_cannot_be_written_as_running_after_it(self) -> None:
        """Unique tasks are written as RUNNING before their body is called, so the old body is never called."""
        debounced.enqueue(1)
        run = begun()
        debounced.enqueue(2)
        assert lifecycle.mark_running([run]) == [run]

    def test_a_running_task_is_followed(self) -> None:
        """The newest arguments run after it, once."""
        first = debounced.enqueue(1)
        run = running()
        second, third = debounced.enqueue(2), debounced.enqueue(3)
        assert first.id != second.id == third.id
        assert claim("v") is None
        assert finish(run) == []
        assert arguments_run() == [3]
        assert TaskRecord.objects.count() == 2

    def test_a_requeued_holder_with_a_follower_runs_first(self) -> None:
        """The newest arguments go to the follower, because it runs last."""
        debounced.enqueue(1)
        run = running()
        debounced.enqueue(2)
        lifecycle.requeue(Broker(), "w", [run])
        debounced.enqueue(3)
        assert arguments_run() == [1, 3]

    def test_a_retrying_task_is_retried_at_once_with_all_its_attempts(self) -> None:
        """The old arguments' delay and attempts are not those of the new call."""
        result = debounced.using(max_attempts=2).enqueue(1)
        run = running()
        lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=timezone.now() + HOUR)
        assert lifecycle.record_runs([run]) == []
        lifecycle.acknowledge(Broker(), "w", [run])
        assert debounced.using(max_attempts=2).enqueue(2).id == result.id
        record = row()
        assert record.retry_at is not None
        assert record.retry_at <= timezone.now()
        assert (record.attempt, record.max_attempts) == (1, 3)
        assert lifecycle.retry_due(Broker(), "default", [result.id]) == 1
        assert arguments_run() == [2]

    def test_a_retrying_task_waits_for_the_time_of_the_newest_call(self) -> None:
        """In the row, and in Redis."""
        result = debounced.enqueue(1)
        run = running()
        lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=timezone.now())
        lifecycle.record_runs([run])
        lifecycle.acknowledge(Broker(), "w", [run])
        later = timezone.now() + HOUR
        debounced.using(run_after=later).enqueue(2)
        assert row().retry_at == later
        assert entry_state(result.id) == "retry"
        score = Broker().client.zscore(Broker().keys("default").retry, result.id)
        assert score == int(score) >= later.timestamp()

    def test_a_finished_task_is_not_replaced(self) -> None:
        """A new one is enqueued."""
        debounced.enqueue(1)
        assert arguments_run() == [1]
        debounced.enqueue(2)
        assert TaskRecord.objects.count() == 2
        assert arguments_run() == [2]

    def test_a_replacement_takes_no_second_gate_slot(self) -> None:
        """The row keeps its own; a follower needs one."""
        gated = debounced.using(gate="g", queue_limit=2)
        for number in range(5):
            gated.enqueue(number)
        assert len(gates.slots("g")) == 1
        run = running()
        gated.enqueue(5)
        gated.enqueue(6)
        assert len(gates.slots("g")) == 2
        with pytest.raises(QueueFull):
            tasks.add.using(gate="g", queue_limit=2).enqueue(9)
        finish(run)
        lifecycle.announce([run.record], TaskState.RUNNING, TaskState.SUCCEEDED)
        assert len(gates.slots("g")) == 1

    def test_a_gated_follower_that_is_refused_writes_nothing(self) -> None:
        """The gate is full of the holder; the caller is told."""
        gated = debounced.using(gate="g", queue_limit=1)
        gated.enqueue(1)
        run = running()
        with pytest.raises(QueueFull):
            gated.enqueue(2)
        assert row().args == [1]
        assert finish(run) == []

    def test_the_last_replacement_of_a_transaction_counts(self) -> None:
        """One commit hook for all of them."""
        result = debounced.enqueue(0)
        with transaction.atomic():
            for number in range(1, 5):
                debounced.using(run_after=HOUR).enqueue(number)
            assert entry_state(result.id) == "pending"
        assert entry_state(result.id) == "scheduled"
        assert row().args == [4]

    def test_a_list_with_repeated_keys_keeps_the_last(self) -> None:
        """All their results are of the same row."""
        results = debounced.enqueue_many([(1,), (2,), (3,)])
        assert len({result.id for result in results}) == 1
        assert arguments_run() == [3]

    def test_a_list_is_brought_to_redis_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not task by task: a list of a thousand would be thousands of commands."""
        task = debounced.using(unique="{0}")
        task.enqueue_many([(number,) for number in range(20)])
        calls: list[int] = []
        real = replacing.take_out
        monkeypatch.setattr(replacing, "take_out", lambda rows, **how: calls.append(len(rows)) or real(rows, **how))
        task.enqueue_many([(number,) for number in range(20)])
        assert calls == [20]
        assert sorted(arguments_run()) == list(range(20))

    def test_a_task_that_was_cancelled_while_it_ran_is_followed(self) -> None:
        """Its worker may have put it back before it noticed: it is closed, and the new call with it if it replaced."""
        debounced.enqueue(1)
        run = running()
        lifecycle.cancel([run.record.id])
        lifecycle.requeue(Broker(), "w", [run])
        assert row().state == TaskState.QUEUED
        debounced.enqueue(2)
        assert arguments_run() == []
        assert arguments_run() == [2]
        reasons = TaskRecord.objects.order_by("id").values_list("reason", flat=True)
        assert list(reasons) == [FailureReason.CANCELLED, FailureReason.NONE]

    def test_an_old_entry_brings_no_old_time(self) -> None:
        """A producer died after its commit: the entry comes when the old call was due, and is dispatched anew."""
        result = debounced.enqueue(1)
        TaskRecord.objects.update(args=[2], run_after=timezone.now() + HOUR, fence=later_fence(row()))
        assert claim() is None
        assert entry_state(result.id) == "scheduled"

    def test_limits_and_priority_come_with_the_newest_call(self) -> None:
        """All that `using` may set for a call, except its queue and its gate."""
        debounced.enqueue(1)
        debounced.using(priority=5, timeout=9, expires=HOUR).enqueue(2)
        record = row()
        assert (record.priority, record.timeout_seconds) == (5, 9)


class TestCancel:
    """A cancel of a holder or of a follower."""

    def test_a_cancelled_holder_lets_its_follower_run(self) -> None:
        """In the transaction of the cancel."""
        holder = following.enqueue(1)
        following.enqueue(2)
        assert holder.cancel() == "cancelled"
        assert arguments_run() == [2]

    def test_a_cancelled_follower_leaves_its_place(self) -> None:
        """The next call follows; the cancelled one never runs."""
        following.enqueue(1)
        follower = following.enqueue(2)
        assert follower.cancel() == "cancelled"
        record = TaskRecord.objects.get(id=follower.id)
        assert (record.unique_slot, record.after_id) == (None, None)
        following.enqueue(3)
        assert arguments_run() == [1, 3]

    def test_a_replaced_run_that_was_claimed_can_be_cancelled(self) -> None:
        """Its worker is asked to stop; neither the old nor the new arguments have a run that counts."""
        result = debounced.enqueue(1)
        run = begun()
        debounced.enqueue(2)
        assert result.cancel() == "asked"
        assert finish(run) == [run]
        assert arguments_run() == []
        assert row().state == TaskState.FAILED

    def test_a_cancelled_follower_that_a_person_retries_waits_for_nobody(self) -> None:
        """It takes the key again when it is free, and is pushed."""
        following.enqueue(1)
        follower = following.enqueue(2)
        follower.cancel()
        ids = [TaskRecord.objects.get(id=follower.id).id]
        assert lifecycle.retry(ids, by_person=True).retried == []
        assert arguments_run() == [1]
        assert len(lifecycle.retry(ids, by_person=True).retried) == 1
        assert arguments_run() == [2]


class TestFollow:
    """At most one task waits behind the one that holds the key."""

    def test_a_second_call_follows_and_a_third_replaces_the_second(self) -> None:
        """Also while the first has not begun."""
        first, second, third = (following.enqueue(number) for number in (1, 2, 3))
        assert first.id != second.id == third.id
        assert TaskRecord.objects.get(id=second.id).after_id is not None
        assert arguments_run() == [1, 3]

    def test_a_follower_has_a_slot_of_its_own(self) -> None:
        """So a key has one at most, on every database."""
        following.enqueue(1)
        record = TaskRecord.objects.get(id=following.enqueue(2).id)
        assert record.unique_slot == follower_slot(record.unique_key)

    def test_a_list_makes_a_holder_and_a_follower(self) -> None:
        """The first and the last of its calls."""
        results = following.enqueue_many([(1,), (2,), (3,)])
        assert [result.id == results[0].id for result in results] == [True, False, False]
        assert results[1].id == results[2].id
        assert arguments_run() == [1, 3]

    def test_a_follower_can_be_followed_when_it_has_moved_up(self) -> None:
        """Then it holds the key."""
        following.enqueue(1)
        following.enqueue(2)
        run = running()
        assert finish(run) == []
        following.enqueue(3)
        assert arguments_run() == [2, 3]

    def test_a_follower_that_commits_after_its_holder_finished_is_pushed(self) -> None:
        """Its own commit looks: the end of the holder could not see the row."""
        following.enqueue(1)
        run = running()
        with transaction.atomic():
            following.enqueue(2)
            in_thread(lambda: finish(run)) if connection.vendor != "sqlite" else None
        if connection.vendor == "sqlite":
            finish(run)
        assert arguments_run() == [2]

    def test_a_follower_waits_for_its_own_time_after_it_has_moved_up(self) -> None:
        """run_after is the earliest time."""
        following.enqueue(1)
        result = following.using(run_after=HOUR).enqueue(2)
        assert arguments_run() == [1]
        assert entry_state(result.id) == "scheduled"

    def test_a_rolled_back_follower_leaves_nothing(self) -> None:
        """Neither row nor place."""
        following.enqueue(1)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            following.enqueue(2)
            raise ZeroDivisionError
        following.enqueue(3)
        assert arguments_run() == [1, 3]

    def test_a_throttled_key_is_followed_by_its_last_call(self) -> None:
        """At the end of the time, not before."""
        throttled = following.using(unique_until=HOUR)
        throttled.enqueue(1)
        throttled.enqueue(2)
        throttled.enqueue(3)
        assert arguments_run() == [1]
        TaskRecord.objects.filter(after_id=None).update(unique_until=timezone.now())
        assert lifecycle.move_up_waiting() == 1
        assert arguments_run() == [3]

    def test_the_time_of_a_throttled_follower_begins_when_it_moves_up(self) -> None:
        """A call that comes later than that, while it still follows, replaces it; its place is not freed before."""
        following.enqueue(1)
        run = running()
        follower = following.using(unique_until=timedelta(minutes=10)).enqueue(2)
        TaskRecord.objects.filter(id=follower.id).update(unique_until=timezone.now() - timedelta(seconds=1))
        assert following.enqueue(3).id == follower.id
        assert finish(run) == []
        assert arguments_run() == [3]
        assert TaskRecord.objects.count() == 2


KIT = "django_asyncq.testing.TestBackend"


class TestKit:
    """The same under `run_tasks`, without Redis."""

    @pytest.fixture(autouse=True)
    def _kit(self, settings: Any) -> None:
        kit_tasks.BODIES.clear()
        settings.TASKS = {"default": {"BACKEND": KIT, "QUEUES": []}}

    def task(self, on_duplicate: str, **options: Any) -> Any:
        return kit_tasks.run.using(unique=lambda name, *args: "kit", on_duplicate=on_duplicate, **options)

    @pytest.mark.parametrize("on_duplicate", ["replace", "follow"])
    def test_a_body_that_enqueues_its_own_key_is_followed(self, on_duplicate: str) -> None:
        """It runs, so the new arguments wait until it has finished."""
        seen: list[int] = []

        def body(context: Any, number: int) -> int:
            seen.append(number)
            if number == 1:
                for later in (2, 3):
                    self.task(on_duplicate).enqueue("body", later)
            return number

        kit_tasks.BODIES["body"] = body
        self.task(on_duplicate).enqueue("body", 1)
        assert [result.return_value for result in run_tasks()] == [1, 3]
        assert seen == [1, 3]

    def test_a_follower_of_a_task_that_ran_at_once_runs_after_it(self, settings: Any) -> None:
        """In the mode "immediate", where the body runs within `enqueue`."""
        settings.TASKS = {"default": {"BACKEND": KIT, "QUEUES": [], "OPTIONS": {"mode": "immediate"}}}
        seen: list[str] = []

        def body(context: Any, number: int) -> None:
            seen.append(f"begin {number}")
            if number == 1:
                self.task("follow").enqueue("body", 2)
            seen.append(f"end {number}")

        kit_tasks.BODIES["body"] = body
        self.task("follow").enqueue("body", 1)
        assert seen == ["begin 1", "end 1", "begin 2", "end 2"]

    def test_the_clock_of_the_test_ends_a_throttle(self) -> None:
        """`until` goes on to the moment at which the follower may run."""
        kit_tasks.BODIES["body"] = lambda context, number: number
        for number in (1, 2, 3):
            self.task("follow", unique_until=HOUR).enqueue("body", number)
        assert [result.return_value for result in run_tasks()] == [1]
        assert [result.return_value for result in run_tasks(until=timedelta(hours=2))] == [3]

    def test_the_newest_call_moves_the_time(self) -> None:
        """Debounce by the clock of the test."""
        kit_tasks.BODIES["body"] = lambda context, number: number
        for number in (1, 2, 3):
            self.task("replace", run_after=number * HOUR).enqueue("body", number)
        assert run_tasks(until=timedelta(hours=2)) == []
        assert [result.return_value for result in run_tasks(until=timedelta(hours=4))] == [3]


def in_thread(act: Callable[[], Any]) -> None:
    """Do something on another connection, and wait for it."""

    def run() -> Any:
        try:
            return act()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result(20)


def in_another_transaction(act: Callable[[], object]) -> None:
    """Do it as another process would while this one's transaction is open, on a connection of its own."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (act(), connection.close())).result()


class TestOpenTransaction:
    """What others do while the transaction that replaces the task is open, of which they see nothing."""

    def test_a_run_that_is_claimed_before_the_commit_is_void(self, redis_client: Any) -> None:
        """Redis is emptied, the leader pushes the row as it was, with a later fence, and a worker runs it."""
        debounced.using(run_after=HOUR).enqueue(1)
        runs: list[Run] = []

        def lost_memory() -> None:
            redis_client.flushdb()
            (old,) = TaskRecord.objects.all()
            old.run_after = None  # its time comes
            lifecycle.push(Broker(), [old], again=True)
            runs.append(begun())

        with transaction.atomic():
            debounced.enqueue(2)
            in_another_transaction(lost_memory)
        (run,) = runs
        assert run.record.args == [1]
        assert run.lease.fence > row().fence
        assert finish(run) == [run]
        assert (row().args, row().state) == ([2], TaskState.QUEUED)
        assert arguments_run() == [2]
        assert (row().args, row().state, row().return_value) == ([2], TaskState.SUCCEEDED, [2])

    def test_what_was_pushed_before_the_commit_waits_for_the_new_time(self, redis_client: Any) -> None:
        """The leader has pushed it, with a later fence, as it was."""
        result = debounced.enqueue(1)

        def lost_memory() -> None:
            redis_client.flushdb()
            lifecycle.push(Broker(), [row()], again=True)

        with transaction.atomic():
            debounced.using(run_after=HOUR).enqueue(2)
            in_another_transaction(lost_memory)
        assert entry_state(result.id) == "scheduled"
        assert arguments_run() == []

    def test_a_gated_task_that_is_claimed_before_its_cancel_is_committed_gives_its_slot_back(
        self, redis_client: Any
    ) -> None:
        """Its worker reports a run that the row refuses; nothing was announced before."""
        result = tasks.add.using(gate="g", queue_limit=1).enqueue(1)
        runs: list[Run] = []

        def lost_memory() -> None:
            lifecycle.push(Broker(), [row()], again=True)
            redis_client.delete(Broker().keys("default").task_prefix + result.id)
            redis_client.delete(Broker().keys("default").pending)
            lifecycle.push(Broker(), [row()], again=True)
            runs.append(begun())

        with transaction.atomic():
            lifecycle.cancel([row().id])
            in_another_transaction(lost_memory)
        assert len(gates.slots("g")) == 1
        assert finish(runs[0]) == runs
        assert row().state == TaskState.FAILED
        assert gates.slots("g") == []


class TestSpilled:
    """An outcome that waits in Redis for the database."""

    def test_it_is_refused_when_the_task_was_replaced(self) -> None:
        """Whatever the order of the fences is."""
        debounced.enqueue(1)
        run = begun()
        lifecycle.succeed(run, "old", timezone.now())
        assert lifecycle.spill_outcomes(Broker(), "w", [run]) == 1
        # As a replacement whose transaction was open while the run was claimed.
        TaskRecord.objects.update(args=[2], fence=F("fence") + 1)
        assert row().fence <= run.lease.fence
        lifecycle.recover(Broker(), "default", "w", [run.lease], reason="gone")
        assert row().state == TaskState.QUEUED
        lifecycle.push(Broker(), [row()], again=True)
        assert arguments_run() == [2]


def test_a_void_run_whose_fence_is_later_than_the_row_s_brings_the_task_back() -> None:
    """Its report removes the entry; nothing else would push the row."""
    debounced.enqueue(1)
    run = begun()
    TaskRecord.objects.update(args=[2], fence=F("fence") + 1)
    assert finish(run) == [run]
    assert arguments_run() == [2]
