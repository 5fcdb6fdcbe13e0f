"""`run_tasks` and `TestBackend`: the worker's own code on the test's thread, without Redis."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, connections, transaction
from django.test import TestCase, TransactionTestCase, override_settings
from django.utils import timezone, translation

from django_asyncq import lifecycle
from django_asyncq.control import pause, resume
from django_asyncq.core import compat
from django_asyncq.exceptions import (
    InvalidOption,
    QueueFull,
    RunAborted,
    TaskCancelled,
    TaskNotRegistered,
    TaskNotRunnable,
    TaskTimeout,
    TooManyRuns,
    UnknownGate,
)
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.signals import task_state_changed
from django_asyncq.storage.routing import writing_database
from django_asyncq.testing import TestBackend, run_tasks, travel

from .. import kit_tasks as tasks

BACKEND = "django_asyncq.testing.TestBackend"
STORE = {"default": {"BACKEND": BACKEND, "QUEUES": []}}
IMMEDIATE = {"default": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"mode": "immediate"}}}
WORKERS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}}


class Kit:
    """The kit's settings, with a Redis that notices whoever connects to it."""

    server: ClassVar[socket.socket]

    @pytest.fixture(autouse=True)
    def _kit(self, settings: Any) -> Iterator[None]:
        tasks.BODIES.clear()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            location = f"redis://127.0.0.1:{server.getsockname()[1]}"
            settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location}}
            settings.TASKS = STORE
            yield
            with pytest.raises(BlockingIOError):
                server.accept()

    @contextmanager
    def committed(self) -> Iterator[None]:
        """Call the commit hooks of the block; a TestCase never commits."""
        database = writing_database(TaskRecord)
        if connections[database].in_atomic_block:
            with TestCase.captureOnCommitCallbacks(execute=True, using=database):
                yield
        else:
            yield


def body(function: Any) -> str:
    """Have a function be the body of a task; return its name."""
    tasks.BODIES[function.__name__] = function
    return str(function.__name__)


def row(result: Any) -> TaskRecord:
    """The row of a result."""
    return TaskRecord.objects.get(pk=result.id)


def atomic(**options: Any) -> transaction.Atomic:
    """Open a transaction of the database that has the tasks."""
    return transaction.atomic(using=writing_database(TaskRecord), **options)


def on_commit(hook: Any) -> None:
    """Register a hook of that database."""
    transaction.on_commit(hook, using=writing_database(TaskRecord))


class Behaviour(Kit):
    """What holds in a TestCase, within its transaction, as in a TransactionTestCase, in autocommit."""

    def test_runs_what_is_due_and_returns_the_results(self) -> None:
        """In the order of priority, then of enqueueing; rows are as after a worker."""
        first = tasks.add.enqueue(1, b=2)
        urgent = tasks.add.using(priority=5).enqueue(2)
        later = tasks.add.using(run_after=timedelta(hours=1)).enqueue(3)
        results = run_tasks()
        assert [(each.id, each.return_value) for each in results] == [(urgent.id, 2), (first.id, 3)]
        record = row(first)
        assert (record.state, record.attempt, record.fence) == (TaskState.SUCCEEDED, 1, 1)
        assert record.worker_ids == ["run_tasks"]
        assert record.finished_at is not None
        assert row(later).state == TaskState.QUEUED
        assert run_tasks() == []

    def test_runs_nested_tasks_and_queues_by_name(self) -> None:
        """What a body enqueues runs too; `queues` selects."""

        def enqueues(context: Any) -> None:
            tasks.add.enqueue(1)
            tasks.add.using(queue_name="mail").enqueue(2)

        tasks.run.enqueue(body(enqueues))
        assert len(run_tasks(queues=["default"])) == 2
        assert [each.return_value for each in run_tasks(queues=["mail"])] == [2]

    def test_a_body_that_raises_keeps_what_it_wrote(self) -> None:
        """As in autocommit; the attempt is recorded, and the retry waits for its time."""

        def writes_and_raises(context: Any) -> None:
            Group.objects.create(name="kept")
            raise ValueError("no")

        result = tasks.run.enqueue(body(writes_and_raises))
        assert run_tasks() == []
        record = row(result)
        assert Group.objects.filter(name="kept").exists()
        assert (record.state, record.reason, record.attempt) == (TaskState.FAILED, FailureReason.EXCEPTION, 1)
        assert record.retry_at is not None
        assert record.errors[0]["exception"] == "builtins.ValueError"
        assert "writes_and_raises" in record.errors[0]["traceback"]

    def test_until_moves_the_clock_to_each_due_time(self) -> None:
        """Retries run with their backoff; what is due later stays, and the clock is put back."""

        def fails_twice(context: Any) -> int:
            if context.attempt < 3:
                raise ValueError
            return int(context.attempt)

        Group.objects.all().delete()
        result = tasks.run.enqueue(body(fails_twice))
        assert run_tasks(until=timedelta(seconds=61)) == []
        assert row(result).attempt == 2
        (found,) = run_tasks(until=timezone.now() + timedelta(seconds=200))
        assert found.return_value == 3
        record = row(result)
        assert record.started_at and record.last_attempted_at
        assert (record.last_attempted_at - record.started_at).total_seconds() >= 120
        fresh = tasks.add.enqueue(1)
        assert abs((row(fresh).enqueued_at - timezone.now()).total_seconds()) < 30

    def test_failures_can_be_raised(self) -> None:
        """The error itself, with the frame that raised it; the row is written."""

        def gives_up(context: Any) -> None:
            raise tasks.Fatal("this one")

        result = tasks.run.enqueue(body(gives_up))
        with pytest.raises(tasks.Fatal, match="this one") as caught:
            run_tasks(raise_failures=True)
        assert "gives_up" in [each.name for each in caught.traceback]
        assert row(result).state == TaskState.FAILED

    def test_most_runs_end_an_endless_chain(self) -> None:
        """The error names the tasks and how often each ran."""

        def again(context: Any) -> None:
            tasks.run.enqueue("again")

        tasks.run.enqueue(body(again))
        with pytest.raises(TooManyRuns, match=r"after 5 runs: tests\.kit_tasks\.run \(5\)"):
            run_tasks(most=5)

    def test_context_retry(self) -> None:
        """An uncounted retry uses no attempt."""

        def asks(context: Any) -> int:
            if not Group.objects.filter(name="asked").exists():
                Group.objects.create(name="asked")
                context.retry(in_=0, counted=False)
            return int(context.attempt)

        tasks.run.enqueue(body(asks))
        (found,) = run_tasks()
        assert found.return_value == 1

    def test_async_body_uses_the_connection_of_the_test(self) -> None:
        """Its synchronous code runs in the calling thread."""

        def writes(context: Any) -> bool:
            Group.objects.create(name="async")
            return threading.current_thread() is threading.main_thread()

        tasks.arun.enqueue(body(writes))
        (found,) = run_tasks()
        assert found.return_value is True
        assert Group.objects.filter(name="async").exists()

    def test_outcomes_that_cannot_be_stored(self) -> None:
        """As in a worker: notes, or an error in the row."""
        generator = tasks.generator.enqueue()
        returned = [tasks.returns.enqueue(kind) for kind in ("set", "nul", "huge")]
        run_tasks()
        assert row(generator).errors[0]["exception"].endswith(TaskNotRunnable.__name__)
        assert [row(each).is_final for each in returned] == [True, True, True]

    def test_an_exit_is_a_failure_and_a_key_press_is_not(self) -> None:
        """SystemExit fails the task; Ctrl-C, and pytest's own outcomes, reach the test."""

        def exits(context: Any) -> None:
            raise SystemExit(3)

        def is_interrupted(context: Any) -> None:
            raise KeyboardInterrupt

        def fails_the_test(context: Any) -> None:
            pytest.fail("from the body")

        result = tasks.run.enqueue(body(exits))
        run_tasks()
        assert row(result).errors[0]["exception"] == "builtins.SystemExit"
        tasks.run.enqueue(body(is_interrupted))
        with pytest.raises(KeyboardInterrupt):
            run_tasks()
        TaskRecord.objects.all().delete()
        tasks.run.enqueue(body(fails_the_test))
        with pytest.raises(pytest.fail.Exception):
            run_tasks()

    def test_unregistered_task_fails_at_once(self) -> None:
        """A worker waits for newer code; a test has none."""
        result = tasks.add.enqueue(1)
        TaskRecord.objects.update(name="tests.gone.task")
        (found,) = run_tasks()
        record = row(result)
        assert found.id == result.id
        assert (record.reason, record.attempt, record.worker_ids) == (FailureReason.NOT_REGISTERED, 0, [])
        tasks.add.enqueue(1)
        TaskRecord.objects.update(name="tests.gone.task")
        with pytest.raises(TaskNotRegistered):
            run_tasks(raise_failures=True)

    def test_odd_rows_fail(self) -> None:
        """Arguments that are not a list and an object."""
        result = tasks.add.enqueue(1)
        TaskRecord.objects.update(args={"a": 1})
        run_tasks()
        assert row(result).errors[0]["exception"].endswith("TaskNotRunnable")

    # --- transactions

    def test_commit_hooks_of_a_body_run_once_and_before_the_outcome(self) -> None:
        """One that fails fails the task, as the commit in a worker would."""
        called: list[str] = []

        def registers(context: Any) -> None:
            with atomic():
                on_commit(lambda: called.append(context.task_result.id))
                tasks.add.enqueue(1)

        def registers_a_bad_one(context: Any) -> None:
            def fails() -> None:
                raise tasks.Fatal("in the hook")

            with atomic():
                on_commit(fails)

        result = tasks.run.enqueue(body(registers))
        with self.committed():
            assert len(run_tasks()) == 2
        assert called == [result.id]
        bad = tasks.run.enqueue(body(registers_a_bad_one))
        run_tasks()
        assert row(bad).errors[0]["message"] == "in the hook"

    def test_hooks_of_a_rolled_back_block_are_not_called(self) -> None:
        """Its rows are gone too."""
        called: list[str] = []

        def rolls_back(context: Any) -> None:
            with atomic():
                on_commit(lambda: called.append("hook"))
                Gate.objects.create(name="gone", limit=1)
                raise tasks.Fatal

        tasks.run.enqueue(body(rolls_back))
        run_tasks()
        assert called == []
        assert not Gate.objects.filter(name="gone").exists()

    def test_durable_block_in_a_body(self) -> None:
        """The body is not within a transaction, so Django allows it."""

        def writes(context: Any) -> str:
            with atomic(durable=True):
                Group.objects.create(name="durable")
            return "ok"

        tasks.run.enqueue(body(writes))
        assert [each.return_value for each in run_tasks()] == ["ok"]

    def test_database_error_leaves_the_test_usable(self) -> None:
        """On PostgreSQL it breaks the transaction of a TestCase; the attempt is recorded all the same."""

        def violates(context: Any) -> None:
            Group.objects.create(name="twice")
            Group.objects.create(name="twice")

        result = tasks.run.enqueue(body(violates))
        run_tasks()
        assert row(result).errors[0]["exception"] == "django.db.utils.IntegrityError"
        assert Group.objects.filter(name="other").count() == 0

    def test_database_error_in_a_commit_hook_leaves_the_test_usable(self) -> None:
        """A hook fails alone; the task fails if the hook is not robust, and what the body wrote is kept."""

        def violates() -> None:
            Group.objects.create(name="body")

        def registers(context: Any, is_robust: bool) -> str:
            Group.objects.get_or_create(name="body")
            transaction.on_commit(violates, robust=is_robust)
            transaction.on_commit(lambda: Group.objects.create(name="next hook"))
            return "done"

        robust = tasks.run.enqueue(body(registers), True)
        run_tasks()
        assert row(robust).return_value == "done"
        assert set(Group.objects.values_list("name", flat=True)) == {"body", "next hook"}
        bad = tasks.run.using(max_attempts=1).enqueue(body(registers), False)
        run_tasks()
        assert row(bad).errors[0]["exception"] == "django.db.utils.IntegrityError"

    def test_atomic_task(self) -> None:
        """Effects and success together, or neither; its hooks run once."""
        called: list[str] = []

        def succeeds(context: Any) -> int:
            on_commit(lambda: called.append("hook"))
            Gate.objects.create(name="atomic", limit=1)
            return 7

        def fails(context: Any) -> None:
            on_commit(lambda: called.append("bad hook"))
            Gate.objects.create(name="undone", limit=1)
            raise tasks.Fatal

        good, bad = tasks.run_atomic.enqueue(body(succeeds)), tasks.run_atomic.enqueue(body(fails))
        with self.committed():
            run_tasks()
        assert (row(good).return_value, row(good).state) == (7, TaskState.SUCCEEDED)
        assert row(bad).state == TaskState.FAILED
        assert list(Gate.objects.values_list("name", flat=True)) == ["atomic"]
        assert called == ["hook"]

    def test_complete_on_commit(self) -> None:
        """The block decides; what the body does after it, even a database error, takes nothing back."""
        called: list[str] = []

        def completes(context: Any) -> str:
            with context.complete_on_commit("done"):
                Gate.objects.create(name="once", limit=1)
                on_commit(lambda: called.append("hook"))
            assert called == ["hook"]
            Gate.objects.create(name="once", limit=1)
            return "ignored"

        def within(context: Any) -> None:
            with atomic(), context.complete_on_commit():
                pass

        good, bad = tasks.run.enqueue(body(completes)), tasks.run.enqueue(body(within))
        run_tasks()
        assert (row(good).return_value, row(good).state) == ("done", TaskState.SUCCEEDED)
        assert Gate.objects.filter(name="once").count() == 1
        assert "within a transaction" in row(bad).errors[0]["message"]
        assert called == ["hook"]

    def test_rolled_back_completion_can_be_repeated(self) -> None:
        """An error within the block leaves nothing of it."""

        def retries(context: Any) -> None:
            try:
                with context.complete_on_commit():
                    Gate.objects.create(name="no", limit=1)
                    raise ValueError
            except ValueError:
                pass
            with context.complete_on_commit("yes"):
                Gate.objects.create(name="yes", limit=1)

        result = tasks.run.enqueue(body(retries))
        run_tasks()
        assert row(result).return_value == "yes"
        assert list(Gate.objects.values_list("name", flat=True)) == ["yes"]

    # --- time

    def test_timeout_by_the_kits_clock(self) -> None:
        """The flag of the context is set after it, and the run fails when the body returns."""
        seen: list[bool] = []

        with travel() as clock:

            def overruns(context: Any) -> None:
                seen.append(context.should_stop)
                clock.move(seconds=31)
                seen.append(context.should_stop)

            result = tasks.run.using(timeout=30, max_attempts=1).enqueue(body(overruns))
            with pytest.raises(TaskTimeout):
                run_tasks(raise_failures=True)
        assert seen == [False, True]
        assert row(result).reason == FailureReason.TIMEOUT

    def test_stops_by_the_kits_clock(self) -> None:
        """`check` and `deadline` follow the moved clock: the soft timeout, then the deadline, before the timeout."""
        seen: list[Any] = []

        def stopped_by(context: Any) -> str:
            try:
                context.check()
            except RunAborted as error:
                return type(error).__name__
            return ""

        with travel() as clock:
            deadline = clock.now() + timedelta(seconds=20)

            def checks(context: Any) -> str:
                seen.append(context.deadline == deadline)
                for seconds in (0, 11, 0, 10):
                    clock.move(seconds=seconds)
                    seen.append(stopped_by(context))
                return "late"

            options: Any = {"timeout": 30, "soft_timeout": 10, "max_attempts": 1}
            result = tasks.run.using(deadline=deadline, **options).enqueue(body(checks))
            run_tasks()
        assert seen == [True, "", "SoftTimeout", "", "TaskTimeout"]
        assert row(result).reason == FailureReason.TIMEOUT
        assert "ran on after its deadline" in row(result).errors[0]["message"]

    def test_task_cancelled_by_its_own_body(self) -> None:
        """It learns of it at once; the outcome of that run does not count, and nothing is retried."""
        seen: list[Any] = []

        def cancels(context: Any) -> str:
            seen.extend([context.should_stop, context.task_result.cancel("enough"), context.should_stop])
            try:
                context.check()
            except TaskCancelled:
                seen.append("raised")
            return "all the same"

        result = tasks.run.using(max_attempts=3).enqueue(body(cancels))
        run_tasks()
        assert seen == [False, "cancelled", True, "raised"]
        assert (row(result).reason, row(result).return_value) == (FailureReason.CANCELLED, None)
        assert run_tasks() == []

    def test_cancel_that_is_rolled_back_stops_nothing(self) -> None:
        """It never happened."""

        def rolls_back(context: Any) -> Any:
            with suppress(ZeroDivisionError), atomic():
                said = context.task_result.cancel()
                raise ZeroDivisionError
            context.check()
            return said

        result = tasks.run.enqueue(body(rolls_back))
        run_tasks()
        assert row(result).return_value == "cancelled"

    def test_travel(self) -> None:
        """What is due follows the moved clock, and so do the times in rows; nested blocks add up."""
        later = tasks.add.using(run_after=timedelta(hours=2)).enqueue(1)
        with travel(hours=1) as clock:
            assert run_tasks() == []
            assert clock.move(minutes=61) >= timezone.now() + timedelta(hours=2)
            (found,) = run_tasks()
            assert found.id == later.id
            with travel(days=1):
                new = tasks.add.enqueue(1)
                assert row(new).enqueued_at > timezone.now() + timedelta(hours=25)
                assert abs((row(new).enqueued_at - new.enqueued_at).total_seconds()) < 30
            assert clock.now() < timezone.now() + timedelta(hours=3)

    def test_what_a_body_activates_vanishes(self) -> None:
        """As in a worker's slot."""

        def activates(context: Any) -> None:
            translation.activate("de")

        tasks.run.enqueue(body(activates))
        before = translation.get_language()
        run_tasks()
        assert translation.get_language() == before

    # --- gates

    def test_gate_is_counted_from_the_rows(self) -> None:
        """The same error and fields as from Redis; a finished task frees its slot."""
        tasks.gated.enqueue()
        tasks.gated.enqueue()
        with pytest.raises(QueueFull) as caught:
            tasks.gated.enqueue()
        error = caught.value
        assert (error.gate, error.limit, error.occupancy, error.waiting) == ("kit", 2, 2, 0)
        assert error.retry_after > 0
        assert len(run_tasks()) == 2
        accepted = tasks.gated.enqueue_many([(), (), ()], partial=True)
        assert [each is not None for each in accepted] == [True, True, False]
        with pytest.raises(QueueFull):
            tasks.gated.enqueue_many([()])

    def test_task_of_several_gates_has_all_slots_or_none(self) -> None:
        """Refused, waiting or let in as by Redis, and at the same gate."""
        both = tasks.gated.using(gate=("kit", "narrow"), queue_limit=(2, 1))
        first = both.enqueue()
        with pytest.raises(QueueFull) as caught:
            both.enqueue()
        assert (caught.value.gate, caught.value.limit, caught.value.occupancy) == ("narrow", 1, 1)
        second, third = both.using(on_full="wait").enqueue(), both.using(on_full="wait", priority=5).enqueue()
        assert {row(each).gate for each in (second, third)} == {"narrow"}
        other = tasks.gated.enqueue()
        with pytest.raises(QueueFull) as caught:
            tasks.gated.enqueue()
        assert caught.value.gate == "kit"
        ran = [result.id for result in run_tasks()]
        assert set(ran) == {first.id, second.id, third.id, other.id}
        accepted = both.enqueue_many([(), (), ()], partial=True)
        assert [each is not None for each in accepted] == [True, False, False]

    def test_gate_row_and_missing_limit(self) -> None:
        """The row wins over the task's own limit; without either there is none."""
        with self.committed():
            Gate.objects.create(name="kit", limit=1)
        tasks.gated.enqueue()
        with pytest.raises(QueueFull):
            tasks.gated.enqueue()
        Gate.objects.update(limit=0)
        assert len(tasks.gated.enqueue_many([()] * 3)) == 3
        with pytest.raises(UnknownGate):
            tasks.add.using(gate="unheard_of").enqueue(1)

    def test_rollback_frees_the_slots(self) -> None:
        """There is nothing to give back but the rows."""
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), atomic():
                tasks.gated.enqueue_many([(), ()])
                raise ZeroDivisionError
        tasks.gated.enqueue_many([(), ()])

    def test_retry_waits_at_a_full_gate_and_runs_when_a_slot_is_free(self) -> None:
        """The retry asks the gate again after each run that may have freed a slot."""

        def fails_once(context: Any) -> None:
            if context.attempt == 1:
                raise ValueError

        failing = tasks.gated.using(max_attempts=2).enqueue(body(fails_once))
        run_tasks()
        assert row(failing).state == TaskState.FAILED
        tasks.gated.enqueue_many([(), ()])
        with travel(hours=1):
            found = run_tasks(most=3)
        assert [each.id for each in found][1] == failing.id
        assert row(failing).attempt == 2

    # --- a person

    def test_person_retries_and_deletes(self) -> None:
        """Rows of this backend never reach Redis."""

        def fails(context: Any) -> None:
            raise tasks.Fatal

        result = tasks.run.enqueue(body(fails))
        run_tasks()
        with self.committed():
            assert len(lifecycle.retry([row(result).id], by_person=True).retried) == 1
        assert row(result).state == TaskState.QUEUED
        with self.committed():
            TaskRecord.objects.all().delete()
        assert run_tasks() == []

    # --- signals

    def test_signals_are_those_of_a_worker(self) -> None:
        """Enqueued after the commit, then started and finished, by the class of the backend."""
        seen: list[tuple[str, type]] = []

        def hear(name: str) -> Any:
            def receive(sender: type, **kwargs: Any) -> None:
                seen.append((name, sender))

            return receive

        signals = {"enqueued": compat.task_enqueued, "started": compat.task_started, "finished": compat.task_finished}
        receivers = {name: hear(name) for name in signals}
        changes: list[Any] = []

        def change(old: Any, new: Any, **kwargs: Any) -> None:
            changes.append((old, new))

        for name, signal in signals.items():
            signal.connect(receivers[name])
        task_state_changed.connect(change)
        try:
            with self.committed():
                tasks.add.enqueue(1)
            run_tasks()
        finally:
            for name, signal in signals.items():
                signal.disconnect(receivers[name])
            task_state_changed.disconnect(change)
        assert seen == [("enqueued", TestBackend), ("started", TestBackend), ("finished", TestBackend)]
        assert changes == [(None, TaskState.QUEUED), (TaskState.RUNNING, TaskState.SUCCEEDED)]

    def test_receivers_may_wait_for_the_commit(self) -> None:
        """After a worker's change of a row, what a receiver gives to `on_commit` is called at once."""
        called: list[tuple[Any, Any]] = []

        def receive(old: Any, new: Any, **kwargs: Any) -> None:
            transaction.on_commit(lambda: called.append((old, new)))

        def fails_once(context: Any) -> None:
            if context.attempt == 1:
                raise ValueError

        tasks.run.enqueue(body(fails_once))
        task_state_changed.connect(receive)
        try:
            run_tasks(until=timedelta(minutes=2))
        finally:
            task_state_changed.disconnect(receive)
        assert called == [
            (TaskState.RUNNING, TaskState.FAILED),
            (TaskState.FAILED, TaskState.QUEUED),
            (TaskState.RUNNING, TaskState.SUCCEEDED),
        ]

    def test_a_row_that_goes_away_is_nobodys_outcome(self) -> None:
        """The body has deleted it; the others run on."""

        def deletes(context: Any) -> None:
            TaskRecord.objects.filter(pk=context.record.pk).delete()

        tasks.run.enqueue(body(deletes))
        other = tasks.add.enqueue(1)
        assert [each.id for each in run_tasks()] == [other.id]
        with override_settings(TASKS=IMMEDIATE):
            tasks.run.enqueue("deletes")

    # --- immediate

    @override_settings(TASKS=IMMEDIATE)
    def test_immediate_runs_at_enqueue(self) -> None:
        """The result shows the outcome; what is not due stays, and no option is dropped."""
        result = tasks.add.enqueue(1, b=2)
        assert (result.status, result.return_value) == (compat.TaskResultStatus.SUCCESSFUL, 3)
        later = tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)
        assert row(later).state == TaskState.QUEUED
        many = tasks.gated.enqueue_many([(), ()], partial=True)
        assert [each.status for each in many if each] == [compat.TaskResultStatus.SUCCESSFUL] * 2

        def fails(context: Any) -> None:
            raise ValueError

        failed = tasks.run.enqueue(body(fails))
        assert row(failed).retry_at is not None

    @override_settings(TASKS=IMMEDIATE)
    def test_immediate_waits_for_the_commit(self) -> None:
        """In a transaction of the tested code; after a rollback nothing runs."""
        with self.committed():
            with atomic():
                result = tasks.add.enqueue(1)
                assert row(result).state == TaskState.QUEUED
            with pytest.raises(ZeroDivisionError), atomic():
                tasks.add.enqueue(2)
                raise ZeroDivisionError
        assert row(result).state == TaskState.SUCCEEDED
        assert TaskRecord.objects.count() == 1

    @override_settings(TASKS=IMMEDIATE)
    def test_immediate_nested(self) -> None:
        """A body's own tasks run within it, and its hooks once."""
        called: list[str] = []

        def enqueues(context: Any) -> Any:
            with atomic():
                on_commit(lambda: called.append("hook"))
            return tasks.add.enqueue(1).return_value

        with self.committed():
            assert tasks.run.enqueue(body(enqueues)).return_value == 1
        assert called == ["hook"]

    @override_settings(TASKS=IMMEDIATE)
    def test_immediate_loop(self) -> None:
        """A task that enqueues itself fails the test, by name, before Python's limit of recursion breaks something."""

        def goes_on(context: Any) -> None:
            tasks.run.enqueue("goes_on")

        def counts_down(context: Any) -> None:
            if TaskRecord.objects.filter(name=tasks.run.module_path).count() < 20:
                tasks.run.enqueue("counts_down")

        body(counts_down)
        with self.committed():
            tasks.run.enqueue("counts_down")
        assert set(TaskRecord.objects.values_list("state", flat=True)) == {TaskState.SUCCEEDED}
        body(goes_on)
        with pytest.raises(TooManyRuns, match=r"tests\.kit_tasks\.run \(30\); each has enqueued the next"):
            tasks.run.enqueue("goes_on")

    def test_paused_queues_tasks_and_gates_are_obeyed(self) -> None:
        """What is paused stays queued, other tasks run, and time goes on; it runs after the resume."""
        held = tasks.add.enqueue(1)
        late = tasks.add.using(run_after=timedelta(minutes=1)).enqueue(2)
        other = tasks.run.using(queue_name="other").enqueue(body(lambda context: 3))
        for kind, name in (("task", tasks.add.module_path), ("queue", "other"), ("gate", "kit")):
            pause(kind, name)
        free = tasks.arun.enqueue(body(lambda context: 4))
        with pytest.raises(QueueFull):
            tasks.gated.enqueue()
        assert [result.id for result in run_tasks(until=timedelta(hours=1))] == [free.id]
        assert {row(result).state for result in (held, late, other)} == {TaskState.QUEUED}
        resume("task", tasks.add.module_path)
        assert [result.id for result in run_tasks(until=timedelta(hours=1))] == [held.id, late.id]
        resume("queue", "other")
        resume("gate", "kit")
        inside = tasks.gated.enqueue()
        assert [result.id for result in run_tasks()] == [other.id, inside.id]


class InTestCase(Behaviour, TestCase):
    """Within the transaction of the test."""

    databases = "__all__"

    def test_capture_holds_no_hook_of_an_enqueue(self) -> None:
        """Each task is announced once, although no capture calls a hook."""
        announced: list[str] = []

        def receive(task_result: Any, **kwargs: Any) -> None:
            announced.append(task_result.id)

        compat.task_enqueued.connect(receive)
        try:
            with self.captureOnCommitCallbacks(using=writing_database(TaskRecord), execute=True) as first:
                one = tasks.add.enqueue(1)
            with self.captureOnCommitCallbacks(using=writing_database(TaskRecord), execute=True) as second:
                other = tasks.add.enqueue(2)
        finally:
            compat.task_enqueued.disconnect(receive)
        assert (first, second) == ([], [])
        assert announced == [one.id, other.id]

    @contextmanager
    def announcing(self) -> Iterator[list[str]]:
        """Collect the ids that `task_enqueued` announces."""
        announced: list[str] = []

        def receive(task_result: Any, **kwargs: Any) -> None:
            announced.append(task_result.id)

        compat.task_enqueued.connect(receive)
        try:
            yield announced
        finally:
            compat.task_enqueued.disconnect(receive)

    def test_capture_holds_the_own_callbacks_only(self) -> None:
        """Whether it calls them or not; what follows a commit of ours is done when the outermost block ends."""

        def own() -> None:
            results.append(tasks.add.enqueue(3))

        for execute in (False, True):
            results: list[Any] = []
            with self.announcing() as announced:
                database = writing_database(TaskRecord)
                with self.captureOnCommitCallbacks(using=database, execute=execute) as callbacks, atomic():
                    results.append(tasks.add.enqueue(1))
                    on_commit(own)
                    with atomic():
                        results.append(tasks.add.enqueue(2))
                    assert announced == []
            assert callbacks == [own]
            assert announced == [each.id for each in results]
            assert len(results) == 2 + execute

    def test_end_of_the_outermost_block_is_the_commit(self) -> None:
        """Also without a capture; an `execute_wrapper` of the test that ends first is no matter."""

        def plain(execute: Any, *arguments: Any) -> Any:
            return execute(*arguments)

        connection = connections[writing_database(TaskRecord)]
        with self.announcing() as announced:
            with atomic():
                with connection.execute_wrapper(plain):
                    result = tasks.add.enqueue(1)
                assert announced == []
            assert announced == [result.id]
        assert connection.execute_wrappers == []

    def test_rolled_back_block_has_nothing_followed_up(self) -> None:
        """A nested one takes its own tasks along; a savepoint by hand keeps the hooks, as in production."""
        database = writing_database(TaskRecord)
        with self.announcing() as announced, self.captureOnCommitCallbacks(using=database, execute=True) as callbacks:
            with atomic():
                kept = tasks.add.enqueue(1)
                with pytest.raises(ZeroDivisionError), atomic():
                    tasks.add.enqueue(2)
                    with atomic():
                        tasks.add.enqueue(3)
                    raise ZeroDivisionError
                savepoint = connections[database].savepoint()
                connections[database].savepoint_rollback(savepoint)
                also_kept = tasks.add.enqueue(4)
            with pytest.raises(ZeroDivisionError), atomic():
                tasks.add.enqueue(5)
                with atomic():
                    tasks.add.enqueue(6)
                raise ZeroDivisionError
            with atomic():
                tasks.add.enqueue(7)
                transaction.set_rollback(True, using=database)
        assert callbacks == []
        assert announced == [kept.id, also_kept.id]
        assert connections[database].execute_wrappers == []

    def test_cancel_retry_pause_and_replace_leave_no_callback(self) -> None:
        """Every verb goes through the same door."""
        database = writing_database(TaskRecord)
        with self.captureOnCommitCallbacks(using=database) as callbacks:
            tasks.add.enqueue(1).cancel()
            pause("queue", "other")
            resume("queue", "other")
            for number in range(2):
                tasks.add.using(unique="one", on_duplicate="replace", run_after=timedelta(hours=1)).enqueue(number)
        assert callbacks == []

    def test_immediate_mode_runs_at_the_end_of_the_block(self) -> None:
        """As after a commit; the capture lists nothing."""
        options = {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": [], "OPTIONS": {"mode": "immediate"}}
        database = writing_database(TaskRecord)
        with override_settings(TASKS={"default": options}):
            with self.captureOnCommitCallbacks(using=database) as callbacks, atomic():
                with atomic():
                    result = tasks.add.enqueue(1)
                assert row(result).state == TaskState.QUEUED
            assert callbacks == []
            assert result.return_value == 1

    def test_block_without_a_savepoint_leaves_the_hook_to_the_capture(self) -> None:
        """Nothing shows its end, so Django's way is kept."""
        database = writing_database(TaskRecord)
        with self.announcing() as announced:
            with self.captureOnCommitCallbacks(using=database, execute=True) as callbacks, atomic(savepoint=False):
                result = tasks.add.enqueue(1)
            assert len(callbacks) == 1
            assert announced == [result.id]

    def test_wait_in_the_block_that_enqueued_is_refused(self) -> None:
        """Its hook waits, although Django does not know it."""
        with atomic():
            result = tasks.add.enqueue(1)
            with pytest.raises(InvalidOption, match="in the transaction that enqueued it"):
                result.wait(1)
        assert result.wait(1) == 1

    def test_transaction_left_open_does_not_reach_the_next_body(self) -> None:
        """What was written in it is gone, as when a worker closes the connection."""

        def enters(context: Any) -> None:
            transaction.atomic().__enter__()
            Group.objects.create(name="never committed")

        tasks.run.enqueue(body(enters))
        run_tasks()
        assert not Group.objects.exists()
        assert len(connection.savepoint_ids) == 1  # the savepoint of the test, within that of its class


class InTransactionTestCase(Behaviour, TransactionTestCase):
    """In autocommit, as a worker."""

    databases = "__all__"

    def test_running_task_is_cancelled_by_a_query(self) -> None:
        """As by a person in the admin."""
        seen: list[bool] = []

        def cancels_all(context: Any) -> None:
            TaskRecord.objects.all().cancel(by="a person")
            seen.append(context.should_stop)

        result = tasks.run.enqueue(body(cancels_all))
        run_tasks()
        assert seen == [True]
        assert (row(result).reason, row(result).cancelled_by) == (FailureReason.CANCELLED, "a person")


class Refusals(Kit, TestCase):
    """What is wrong is said before anything runs."""

    databases = "__all__"

    def test_alias_of_workers(self) -> None:
        """The error has the line to write."""
        with override_settings(TASKS=WORKERS), pytest.raises(InvalidOption, match=r"'django_asyncq\.testing\.TestB"):
            run_tasks()

    def test_wrong_arguments(self) -> None:
        """A text for a list, a naive moment."""
        with pytest.raises(InvalidOption, match=r"such as \['mail'\]"):
            run_tasks(queues="mail")
        with pytest.raises(InvalidOption, match=r"timezone\.now"):
            run_tasks(until=datetime(2030, 1, 1))

    def test_workers_do_not_run_it(self) -> None:
        """`runworkers` names the remedy."""
        with pytest.raises(CommandError, match="run_tasks"):
            call_command("runworkers")

    def test_options_are_checked(self) -> None:
        """Others than those of AsyncqBackend and `mode` are refused; nothing is said about Redis."""
        with override_settings(CACHES={"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}):
            assert not [each for each in run_checks() if each.level >= 30]
            tasks.add.enqueue(1)
        bad = {"default": {"BACKEND": BACKEND, "OPTIONS": {"mode": "later", "max_attempts": 2, "speed": 1}}}
        with override_settings(TASKS=bad):
            assert {each.id for each in run_checks() if each.level >= 30} == {"asyncq.E021", "asyncq.E022"}

    def test_naive_host_clock_is_another_matter(self) -> None:
        """A moment in the past, whatever the zone, is due."""
        tasks.add.using(run_after=datetime(2020, 1, 1, tzinfo=UTC)).enqueue(1)
        assert len(run_tasks()) == 1

    def test_database_error_outside_a_body_is_the_tests_own(self) -> None:
        """The kit repairs a transaction only around a body."""
        with pytest.raises(IntegrityError), atomic():
            Group.objects.create(name="a")
            Group.objects.create(name="a")


class AdminWithoutRedis(Kit, TestCase):
    """The pages of rows that no Redis knows."""

    databases = "__all__"

    def test_pages_are_shown_and_a_retry_works(self) -> None:
        """Filters, the occupancy of gates, and the action; nothing connects."""

        def fails(context: Any) -> None:
            raise tasks.Fatal

        user = get_user_model().objects.create_superuser("admin", "", "password")
        self.client.force_login(user)
        Gate.objects.create(name="kit", limit=2)
        tasks.gated.enqueue()
        result = tasks.run.enqueue(body(fails))
        run_tasks(queues=["default"], most=5)
        tasks.gated.enqueue()
        for page in ("taskrecord/", f"taskrecord/{result.id}/change/", "gate/"):
            response = self.client.get(f"/admin/django_asyncq/{page}", follow=True)
            assert response.status_code == 200
        with self.captureOnCommitCallbacks(execute=True):
            data = {"action": "retry_selected", "_selected_action": [result.id], "confirmed": "yes"}
            self.client.post("/admin/django_asyncq/taskrecord/", data, follow=True)
        assert row(result).state == TaskState.QUEUED
