"""What `runworkers` does with tasks, seen from outside: real processes, real stores."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone, translation

from django_asyncq import conf, lifecycle
from django_asyncq.broker import Broker, Entry, Lease
from django_asyncq.broker.foreign import read_rejected
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core import compat, guard
from django_asyncq.core.guard import EX_SOFTWARE
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import TaskCancelled
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.results import result_of
from django_asyncq.worker.capacity import MOST_PREFETCHED, Capacity
from django_asyncq.worker.executors import Executor, ThreadExecutor
from django_asyncq.worker.job import Job, JobPhase, Jobs, Outcome, StopReason
from django_asyncq.worker.marks import settle_marks
from django_asyncq.worker.run import JobRunner
from django_asyncq.worker.slot_table import SlotTable
from django_asyncq.worker.wakeup import Reason, Wakeup

from .. import isolated_tasks, tasks
from ..clock import Clock
from ..redis_state import unknown
from ..runs import worker_process
from ..workers import ROOT, child_pids, history, run_workers, start_workers, wait_until, worker_pids, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


def record_of(result: Any) -> TaskRecord:
    """The row of a result."""
    return TaskRecord.objects.get(id=result.id)


def is_running(result: Any) -> bool:
    """Whether the row says RUNNING."""
    return record_of(result).state == TaskState.RUNNING


def test_runs_sync_and_async_tasks_and_stores_results() -> None:
    """A burst runs what waits and leaves the results on the rows."""
    first, second = tasks.add.enqueue(1, b=2), tasks.add_async.enqueue(3, 4)
    run_workers()
    first.refresh()
    second.refresh()
    assert (first.return_value, second.return_value) == (3, 7)
    assert set(TaskRecord.objects.values_list("state", flat=True)) == {TaskState.SUCCEEDED}


def test_leaves_nothing_in_redis_but_counters(redis_client: Any, key_prefix: str) -> None:
    """A task that has succeeded leaves no hash, no lease, nothing held."""
    tasks.add.enqueue_many([(n,) for n in range(50)])
    run_workers("--processes", "2")
    left = {key.decode().split("}:")[-1].split(":")[0] for key in redis_client.scan_iter(f"{key_prefix}:{{*")}
    assert left == {"processed", "minutes", "runs"}
    assert redis_client.get(QueueKeys("default").processed) == b"50"


def test_retries_until_it_succeeds(history_path: Path) -> None:
    """A failure with attempts left is retried; each attempt leaves its error and its worker."""
    result = tasks.fail_until.enqueue(3)
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.return_value) == (TaskState.SUCCEEDED, 3, 3)
    assert [error["message"] for error in record.errors] == ["attempt 1", "attempt 2"]
    assert all("tests.tasks.Glitch" in error["traceback"] for error in record.errors)
    assert len(record.worker_ids) == 3


def test_gives_up_after_the_last_attempt_and_at_once_on_give_up_on(history_path: Path) -> None:
    """`max_attempts` bounds the attempts; after an exception of `give_up_on` there is no other."""
    exhausted, fatal = tasks.fail_until.enqueue(9), tasks.fail_until.enqueue(9, fatal=True)
    log = run_workers().stderr
    assert log.count("attempt 1 of 3 failed; next attempt at") == 1
    assert log.count("attempt 3 of 3 failed; it is not retried: tests.tasks.Glitch: attempt 3") == 1
    assert log.count("attempt 1 of 3 failed; it is not retried: tests.tasks.Fatal: ") == 1
    assert [record_of(exhausted).attempt, record_of(fatal).attempt] == [3, 1]
    for result in (exhausted, fatal):
        record = record_of(result)
        assert record.state == TaskState.FAILED
        assert record.retry_at is None
        assert record.finished_at is not None


def test_retry_asked_for_without_counting_uses_no_attempt(history_path: Path) -> None:
    """`context.retry(counted=False)` goes on past max_attempts and leaves no error."""
    result = tasks.asks_again.enqueue(2)
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.errors) == (TaskState.SUCCEEDED, 1, [])


def test_result_that_json_cannot_carry_fails_the_task_for_good() -> None:
    """With the framework's own error, which says that the function had finished. It is not retried."""
    result = tasks.returns_set.using(max_attempts=3).enqueue()
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.retry_at) == (TaskState.FAILED, 1, None)
    assert (record.reason, record.last_exception) == (FailureReason.EXCEPTION, "builtins.TypeError")
    assert "the function had finished, but return value is a builtins.set" in record.errors[0]["message"]
    result.refresh()
    assert result.errors[0].exception_class is TypeError


def test_async_task_over_its_timeout_is_cancelled() -> None:
    """An `async def` task fails at its timeout with TaskTimeout."""
    result = tasks.overruns_async.enqueue()
    run_workers()
    (error,) = record_of(result).errors
    assert error["exception"] == "django_asyncq.exceptions.TaskTimeout"


def test_sync_task_that_stops_when_asked_fails_with_timeout_and_keeps_its_process(history_path: Path) -> None:
    """The cooperative flag is set; a run that took too long has failed even when it returns."""
    result, other = tasks.overruns.enqueue(listens=True), tasks.add.enqueue(1)
    run_workers("--concurrency", "1")
    assert record_of(result).errors[0]["exception"] == "django_asyncq.exceptions.TaskTimeout"
    assert record_of(other).worker_ids == record_of(result).worker_ids


def test_sync_task_that_ignores_its_timeout_has_its_process_replaced(history_path: Path) -> None:
    """The process is killed; the overdue task has failed, its neighbour runs again without an attempt used."""
    late, neighbour = tasks.overruns.enqueue(listens=False), tasks.nap.enqueue(1.5)
    run_workers("--concurrency", "2", ASYNCQ_TEST_TIMEOUT_GRACE="0.5")
    assert record_of(late).state == TaskState.FAILED
    assert record_of(late).errors[0]["exception"] == "django_asyncq.exceptions.TaskTimeout"
    record = record_of(neighbour)
    assert (record.state, record.attempt, record.crash_count, record.errors) == (TaskState.SUCCEEDED, 1, 0, [])
    begun = [line for line in history(history_path) if line["event"] == "begin" and line["id"] == neighbour.id]
    assert len(begun) == 2


def test_task_running_for_three_leases_runs_once(history_path: Path) -> None:
    """Leases (2 s here) are renewed by the supervisor, so a long task is not taken for lost."""
    result = tasks.nap.enqueue(6.5)
    run_workers("--processes", "2")
    assert record_of(result).state == TaskState.SUCCEEDED
    assert [line["event"] for line in history(history_path)] == ["begin", "end"]


def test_task_that_holds_the_interpreter_past_its_lease_runs_once(history_path: Path) -> None:
    """A C call that keeps the GIL stops the worker's own threads, but not the renewal of its lease."""
    result = tasks.holds_gil.enqueue(5)
    run_workers("--processes", "2")
    assert record_of(result).state == TaskState.SUCCEEDED
    assert len(history(history_path)) == 1


def test_killed_process_has_exactly_its_task_run_again_soon(history_path: Path, tmp_path: Path) -> None:
    """kill -9 of one of three processes: its task begins again, and no other does."""
    results = [tasks.nap.enqueue(4) for _ in range(2)]
    with workers(tmp_path, "--processes", "3", "--concurrency", "1", ASYNCQ_TEST_LEASE="60"):
        wait_until(lambda: all(is_running(result) for result in results), "two running tasks")
        theirs, victim = next((line["id"], line["pid"]) for line in history(history_path))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        again = wait_until(
            lambda: [line for line in history(history_path)[2:] if line["event"] == "begin"], "the lost task again"
        )
        # The start of a process, beside that of the one which replaces the victim, and not the end of a lease.
        assert again[0]["at"] - killed < 30
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 2, "two succeeded tasks")
    assert [line["id"] for line in history(history_path)[2:] if line["event"] == "begin"] == [theirs]
    for record in TaskRecord.objects.all():
        assert (record.crash_count, record.attempt) == (0, 1)


def test_task_that_kills_each_of_its_workers_is_failed(history_path: Path) -> None:
    """A poison pill fails with WorkerLost and the signal that killed its process; its first loss is not counted."""
    result = tasks.kills_its_process.enqueue()
    run_workers()
    record = record_of(result)
    assert (record.state, record.crash_count) == (TaskState.FAILED, 3)
    assert record.errors[-1]["exception"] == "django_asyncq.exceptions.WorkerLost"
    assert "SIGKILL" in record.errors[-1]["message"]
    assert len(history(history_path)) == 4


def test_sigterm_drains_tasks_that_finish_in_time(history_path: Path, tmp_path: Path) -> None:
    """Running tasks finish; waiting ones are not begun and lose nothing."""
    running = [tasks.nap.enqueue(1.0) for _ in range(2)]
    with workers(tmp_path, "--concurrency", "2") as fleet:
        wait_until(lambda: all(is_running(result) for result in running), "running tasks")
        waiting = tasks.nap.enqueue(0.1)
        assert fleet.stop() == 0
    assert [record_of(result).state for result in running] == [TaskState.SUCCEEDED] * 2
    assert (record_of(waiting).state, record_of(waiting).attempt) == (TaskState.QUEUED, 0)


def test_shutdown_past_the_grace_requeues_without_an_attempt(history_path: Path, tmp_path: Path) -> None:
    """A task that does not finish in time is queued again, its attempt not counted, sync and async alike."""
    slow, slow_async = tasks.nap.enqueue(30), tasks.nap_async.enqueue(30)
    with workers(tmp_path, ASYNCQ_TEST_SHUTDOWN_GRACE="1") as fleet:
        wait_until(lambda: is_running(slow) and is_running(slow_async), "running tasks")
        began = time.monotonic()
        assert fleet.stop() == 0
        assert time.monotonic() - began < 20
    for result in (slow, slow_async):
        record = record_of(result)
        assert (record.state, record.attempt, record.crash_count) == (TaskState.QUEUED, 0, 0)
        assert record.worker_ids == []
    keys = QueueKeys("default")
    assert unknown([slow.id, slow_async.id]) == []
    assert Broker().client.llen(keys.pending) == 2


def test_second_signal_hurries(history_path: Path, tmp_path: Path) -> None:
    """A second SIGTERM does not wait for the grace."""
    slow = tasks.nap.enqueue(30)
    with workers(tmp_path) as fleet:
        wait_until(lambda: is_running(slow), "a running task")
        fleet.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        time.sleep(0.5)  # two signals of a kind at one instant are one
        assert fleet.stop() == 0
        assert time.monotonic() - began < 15
    assert record_of(slow).attempt == 0


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_signal_to_all_processes_at_once_leaves_the_grace(
    start_method: str, history_path: Path, tmp_path: Path
) -> None:
    """As Heroku and systemd send it: to a worker process it comes twice, since the supervisor passes it on."""
    slow = tasks.nap.enqueue(2)
    with workers(tmp_path, ASYNCQ_TEST_START_METHOD=start_method) as fleet:
        wait_until(lambda: is_running(slow), "a running task")
        for pid in (*fleet.children(), *child_pids(fleet.process.pid), fleet.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert fleet.process.wait(20) == 0
    record = record_of(slow)
    assert (record.state, record.attempt) == (TaskState.SUCCEEDED, 1)


def test_workers_are_found_while_threads_of_the_supervisor_exit() -> None:
    """A thread that is listed may have exited when its children are asked for."""
    over = threading.Event()

    def start_and_end() -> None:
        while not over.is_set():
            threading.Thread(target=lambda: None).start()

    starting = threading.Thread(target=start_and_end)
    starting.start()
    try:
        for _ in range(500):
            assert worker_pids(os.getpid()) == []
    finally:
        over.set()
        starting.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_until_the_exit_do_not_kill_a_process_that_has_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """Signalled again and again until it exits, it stops in order, and its exit code says so."""
    with workers(tmp_path, "--processes", "1") as fleet:
        wait_until(fleet.children, "a worker")
        deadline = time.monotonic() + 30
        while fleet.process.poll() is None and time.monotonic() < deadline:
            fleet.process.send_signal(number)
            time.sleep(0.001)
        assert fleet.process.returncode == 0, fleet.output()


def test_idle_worker_does_not_wait_out_its_wait_in_redis(tmp_path: Path) -> None:
    """SIGTERM wakes a worker that waits in Redis, though the end of the wait is far away."""
    done = tasks.add.enqueue(1)
    with workers(tmp_path, ASYNCQ_TEST_BLOCK="90", ASYNCQ_TEST_LOOK="90") as fleet:
        wait_until(lambda: record_of(done).state == TaskState.SUCCEEDED, "a first task")
        began = time.monotonic()
        assert fleet.stop() == 0
        assert time.monotonic() - began < 30


def test_children_drain_when_their_supervisor_is_killed(history_path: Path, tmp_path: Path) -> None:
    """A dead supervisor leaves no worker behind."""
    done = tasks.add.enqueue(1)
    with workers(tmp_path) as fleet:
        wait_until(lambda: record_of(done).state == TaskState.SUCCEEDED, "a first task")
        children = fleet.children()
        fleet.process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no children")
        assert fleet.output().count("the supervisor is dead; draining") == len(children)
        assert "failed; draining" not in fleet.output()


def test_worker_whose_main_loop_fails_says_why(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """It drains, and its exit code tells the supervisor that it has failed."""
    with worker_process() as process:
        exit_codes: list[int] = []

        def fail() -> bool:
            raise RuntimeError("a mistake of ours")

        # The test's process stays one of the project, without a heartbeat.
        monkeypatch.setattr(guard, "_is_own_process", guard._is_own_process)
        monkeypatch.setattr(process.heartbeat, "start", lambda: None)
        monkeypatch.setattr(process, "install_signals", lambda: None)
        monkeypatch.setattr(process.fetcher, "fetch", fail)
        monkeypatch.setattr(process, "shut_down", exit_codes.append)
        process.run()
        assert process.reporter.close(5)
    assert exit_codes == [EX_SOFTWARE]
    assert "a mistake of ours" in caplog.text


def test_no_outcome_is_expected_once_nothing_runs_and_nothing_is_fetched() -> None:
    """While the queues are asked, more outcomes may follow; the reporter may wait for them."""
    with worker_process() as process:
        capacity = process.capacity
        capacity.expect_outcomes()
        capacity.leave_slot(job())
        assert not capacity.quiet.is_set()
        process.fetcher.fetch()
        capacity.leave_slot(job())
        assert capacity.quiet.is_set()
        capacity.jobs.add([job()])
        capacity.expect_outcomes()
        assert not capacity.quiet.is_set()


def test_unregistered_task_waits_and_the_log_says_why(history_path: Path) -> None:
    """A name that the code does not know: it waits for code that has it, however long; others go on."""
    record = TaskRecord.objects.create(name="os.system", args=["true"], queue_name="default")
    lifecycle.dispatch([record])
    forgotten = TaskRecord.objects.create(name="tests.benchmarks.servers.send", args=[], queue_name="default")
    lifecycle.dispatch([forgotten])
    fine = tasks.add.enqueue(1)
    said = run_workers(ASYNCQ_TEST_PATIENCE="0").stderr
    for waiting in (record, forgotten):
        waiting.refresh_from_db()
        assert (waiting.state, waiting.attempt, waiting.errors) == (TaskState.QUEUED, 0, [])
    remedy = "tests.benchmarks.servers is not imported by any tasks.py of an installed app; import it in tests/tasks.py"
    (line,) = [line for line in said.splitlines() if "1 of task tests.benchmarks.servers.send wait" in line]
    assert f"no task named 'tests.benchmarks.servers.send' is registered: {remedy}" in line
    assert record_of(fine).state == TaskState.SUCCEEDED


def test_row_with_broken_arguments_is_failed_with_the_reason() -> None:
    """Arguments that are no list and object cannot be given to any function."""
    record = TaskRecord.objects.create(name="tests.tasks.add", args={"not": "a list"}, queue_name="default")
    lifecycle.dispatch([record])
    run_workers()
    record.refresh_from_db()
    assert record.state == TaskState.FAILED
    assert record.errors[0]["exception"] == "django_asyncq.exceptions.TaskNotRunnable"


def test_what_is_no_message_is_rejected_and_logged() -> None:
    """Forged and undecodable messages are never run and never stop the worker."""
    broker = Broker()
    broker.register_queue("default")
    broker.enqueue("default", [Entry("no-uuid", b"\xff\xff not protobuf"), Entry("../x", b"\x00" * 100)])
    fine = tasks.add.enqueue(1)
    done = run_workers()
    assert record_of(fine).state == TaskState.SUCCEEDED
    assert {kept.id for kept in read_rejected(broker, "default")} == {"no-uuid", "../x"}
    assert "rejected a message: it is no message of asynq" in done.stderr


def test_tidies_the_connection_a_task_left_in_a_transaction() -> None:
    """A task that leaves a transaction open does not reach into the next one in the same slot."""
    results = [tasks.counts_rows.enqueue(leaves) for leaves in ("autocommit", "atomic", "autocommit", "atomic")]
    run_workers("--concurrency", "1")
    assert [record_of(result).state for result in results] == [TaskState.SUCCEEDED] * 4
    assert not TaskRecord.objects.exclude(group="").exists()


def test_runs_by_priority_over_all_levels(history_path: Path) -> None:
    """Higher first; the same level in the order it came."""
    levels = [0, -100, 100, 7, 0, -1, 7, 1]
    for number, level in enumerate(levels):
        tasks.add.using(priority=level).enqueue(number)
    run_workers("--concurrency", "1")
    ran = [line["a"] for line in history(history_path)]
    assert ran == sorted(range(len(levels)), key=lambda number: (-levels[number], number))


def test_does_not_run_before_run_after(history_path: Path) -> None:
    """A delayed task waits for its time; a burst does not wait for a far one."""
    soon = tasks.add.using(run_after=timedelta(seconds=1)).enqueue(1)
    far = tasks.add.using(run_after=timedelta(hours=1)).enqueue(2)
    run_workers()
    assert record_of(soon).started_at >= record_of(soon).run_after
    assert record_of(far).state == TaskState.QUEUED


def test_worker_takes_only_the_queues_it_was_given() -> None:
    """`--queues` names them, with weights."""
    here, there = tasks.add.using(queue_name="here").enqueue(1), tasks.add.using(queue_name="there").enqueue(2)
    run_workers("--queues", "here=3,other")
    assert (record_of(here).state, record_of(there).state) == (TaskState.SUCCEEDED, TaskState.QUEUED)


def test_max_tasks_replaces_processes() -> None:
    """Each process runs two tasks; all get run."""
    tasks.add.enqueue_many([(n,) for n in range(6)])
    run_workers("--max-tasks", "2", "--concurrency", "1")
    assert TaskRecord.objects.succeeded().count() == 6
    assert len({record.worker_ids[0] for record in TaskRecord.objects.all()}) == 3


def test_spiteful_results_and_errors_are_recorded_and_others_do_not_suffer() -> None:
    """Objects that raise when they are read, errors that cannot be printed, SystemExit: all are recorded."""
    spite, unspeakable, leaving = (
        tasks.returns_spite.enqueue(),
        tasks.raises_unspeakable.enqueue(),
        tasks.exits.enqueue(),
    )
    fine = tasks.add.enqueue(1)
    run_workers("--concurrency", "1")
    assert record_of(spite).errors[0]["message"].endswith("return value could not be read: OSError")
    assert "its __str__ raised RuntimeError" in record_of(unspeakable).errors[0]["message"]
    assert record_of(leaving).errors[0]["exception"] == "builtins.SystemExit"
    assert record_of(fine).state == TaskState.SUCCEEDED
    assert record_of(fine).worker_ids == record_of(leaving).worker_ids


def test_async_tasks_keep_to_the_concurrency(history_path: Path) -> None:
    """Short tasks make the worker prefetch more; no more than N of them run at once."""
    tasks.add_async.enqueue_many([(n,) for n in range(100)])
    tasks.counts_others.enqueue_many([(0.05,)] * 20)
    run_workers("--concurrency", "3")
    inside = most = 0
    for line in history(history_path):
        inside += 1 if line["event"] == "begin" else -1
        most = max(most, inside)
    assert TaskRecord.objects.succeeded().count() == 120
    assert most <= 3


def test_max_memory_below_what_django_takes_still_runs_tasks() -> None:
    """Each process runs at least one task before it is replaced."""
    tasks.add.enqueue_many([(n,) for n in range(3)])
    run_workers("--max-memory-mb", "1", "--concurrency", "1")
    assert TaskRecord.objects.succeeded().count() == 3


def test_burst_ends_with_an_error_when_processes_cannot_start() -> None:
    """A module that cannot be imported in the workers is no endless loop; nothing is lost."""
    tasks.add.enqueue(1)
    done = start_workers("--burst", ASYNCQ_TEST_BREAK_WORKERS="1")
    assert done.returncode == 1
    assert "exit before they are ready" in done.stderr
    assert "broken on purpose" in done.stderr
    assert TaskRecord.objects.queued().count() == 1


def test_reload_starts_again_when_code_changes(tmp_path: Path) -> None:
    """The supervisor too, in the same process; running tasks are not lost."""
    first = tasks.add.enqueue(1)
    with workers(tmp_path, "--reload") as fleet:
        wait_until(lambda: record_of(first).state == TaskState.SUCCEEDED, "a first task")
        before = fleet.children()
        os.utime(tasks.__file__)
        wait_until(lambda: fleet.children() and not set(fleet.children()) & set(before), "new processes")
        second = tasks.add.enqueue(2)
        wait_until(lambda: record_of(second).state == TaskState.SUCCEEDED, "a second task")
        assert fleet.output().count(f"supervisor {fleet.process.pid} started") == 2


def test_reload_has_the_supervisor_know_new_schedules_and_goes_on_while_code_is_broken(tmp_path: Path) -> None:
    """A schedule of changed code fires. Before that, code that cannot be loaded changes nothing."""
    module = tmp_path / "reloaded" / "tasks.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").touch()
    module.touch()
    settings = "from tests.settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'reloaded']\n"
    (tmp_path / "reload_settings.py").write_text(settings)
    own = {"DJANGO_SETTINGS_MODULE": "reload_settings", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with workers(tmp_path, "--reload", **own) as fleet:
        wait_until(lambda: "Ready." in fleet.output(), "workers")
        before = fleet.children()
        module.write_text("def broken(:")
        wait_until(lambda: "cannot be loaded" in fleet.output(), "a word on the broken code")
        assert "SyntaxError" in fleet.output()
        result = tasks.add.enqueue(1)
        wait_until(lambda: record_of(result).state == TaskState.SUCCEEDED, "a task of the old code")
        assert fleet.children() == before
        module.write_text("from django_asyncq import every, task\n@task(schedule=every(seconds=1))\ndef tick(): ...\n")
        ticks = TaskRecord.objects.filter(name="reloaded.tasks.tick", state=TaskState.SUCCEEDED)
        wait_until(ticks.exists, "the schedule of the new code")


def test_a_program_that_calls_runworkers_cannot_reload() -> None:
    """It would be replaced by its own start."""
    with pytest.raises(CommandError, match=r"--reload .* command line"):
        call_command("runworkers", "--reload")


def test_liveness_file_is_touched_while_all_is_well(tmp_path: Path) -> None:
    """A probe can look at its age."""
    alive = tmp_path / "alive"
    with workers(tmp_path, "--liveness-file", str(alive)):
        wait_until(alive.exists, "the liveness file")
        first = alive.stat().st_mtime_ns
        wait_until(lambda: alive.stat().st_mtime_ns > first, "a later touch")


def test_frameworks_signals_are_sent_in_the_worker(history_path: Path) -> None:
    """`task_started` for each attempt; `task_finished` once, for the last, and `sys.exc_info()` shows the failure."""
    retried, failing = tasks.fail_until.enqueue(2), tasks.fail_until.enqueue(9, fatal=True)
    run_workers(ASYNCQ_TEST_SIGNALS="1")
    sent = [line for line in history(history_path) if line["event"] in ("started", "finished")]
    by_id = {id: [line for line in sent if line["id"] == id] for id in (retried.id, failing.id)}
    assert [line["event"] for line in by_id[retried.id]] == ["started", "started", "finished"]
    assert [line["status"] for line in by_id[retried.id]] == ["RUNNING", "RUNNING", "SUCCESSFUL"]
    assert [(line["event"], line["handling"]) for line in by_id[failing.id]] == [
        ("started", None),
        ("finished", "Fatal"),
    ]


def job(seconds_ago: float = 0.0) -> Job:
    """A job of a task that is in no store. seconds_ago: when it was taken."""
    record = TaskRecord(name="tests.tasks.add", args=[1])
    taken_at = time.monotonic() - seconds_ago
    return Job(lifecycle.Run(record, Lease(str(record.id), 1)), registered("tests.tasks.add"), taken_at)


class Reported:
    """Stands in for the reporter; keeps the outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.report = self.outcomes.append

    def leave_row(self, job: Job) -> None:
        """Leave it."""


def runner_of(jobs: Jobs, slots: int = 1) -> JobRunner:
    """A runner of jobs whose outcomes its stand-in of a reporter keeps."""
    loop = asyncio.new_event_loop()
    loop.close()
    return JobRunner("w", SlotTable(slots), Reported(), Capacity(jobs, slots, Wakeup()), loop)  # type: ignore[arg-type]


def test_fetches_for_free_slots_and_prefetches_the_more_the_shorter_tasks_are() -> None:
    """No prefetch of slow tasks; 50 ms of work of short ones; no refill while half of the prefetch is left."""
    jobs, clock = Jobs(), Clock()
    capacity = Capacity(jobs, 4, Wakeup(), clock=clock)
    assert capacity.to_fetch() == 4
    capacity.finished, clock.now = 1000, clock.now + 0.01
    capacity.task_seconds = 1.0
    assert capacity.to_fetch() == 4
    capacity.task_seconds = 0.01
    assert capacity.to_fetch() == 4 + 20
    capacity.task_seconds = 0.00001
    assert capacity.to_fetch() == 4 + MOST_PREFETCHED
    jobs.add(waiting := [job() for _ in range(4 + MOST_PREFETCHED // 2 + 1)])
    assert capacity.to_fetch() == 0
    jobs.take_waiting(waiting[-1].arrived_at)
    assert capacity.to_fetch() == 4 + MOST_PREFETCHED


def test_prefetches_no_more_than_the_slots_finish_together() -> None:
    """Eight slots of a busy machine finish as many as one would, though each run takes a moment only."""
    jobs, clock = Jobs(), Clock()
    capacity = Capacity(jobs, 8, Wakeup(), clock=clock)
    capacity.task_seconds = 0.0001
    assert capacity.to_fetch() == 8
    for finished, to_fetch in ((8, 8 + 3), (12, 8 + 3), (412, 8 + 160)):
        capacity.finished, clock.now = finished, clock.now + 0.125
        capacity.leave_slot(job())
        assert capacity.to_fetch() == to_fetch
    # From here on each slot has had work all the time.
    jobs.add([job() for _ in range(8)])
    for finished, to_fetch in ((422, 82), (432, 43)):
        capacity.finished, clock.now = finished, clock.now + 0.125
        capacity.leave_slot(job())
        assert capacity.to_fetch() == to_fetch


def test_job_taken_too_long_ago_is_requeued_and_not_begun() -> None:
    """The process stood still, and its leases may have run out: others may run these tasks by now."""
    jobs = Jobs()
    runner = runner_of(jobs)
    old, fresh = job(seconds_ago=conf.current().lease_seconds / 2 + 1), job()
    slots = ThreadExecutor(runner, jobs, 1)
    slots.put([old, fresh])
    outcomes = runner.reporter.outcomes  # type: ignore[attr-defined]
    wait_until(lambda: outcomes, "outcome of the fresh one")
    assert [outcome.job for outcome in outcomes] == [fresh]
    assert (old.run.begun, old.phase, list(jobs.waiting)) == (False, JobPhase.WAITING, [old])
    assert jobs.take_waiting(time.monotonic()) == [old]


def test_isolated_task_that_is_cancelled_while_it_waits_for_its_mark_has_failed() -> None:
    """The slot outlives it: an error that leaves it would end the whole process."""
    record = TaskRecord(name=isolated_tasks.plain.module_path, args=["returns", 1], unique_key="k")
    run = lifecycle.Run(record, Lease(str(record.id), 1))
    cancelled = Job(run, registered(record.name), time.monotonic())
    runner = runner_of(Jobs())

    def mark(jobs: Any) -> None:
        cancelled.ask_to_stop(StopReason.CANCELLED)
        run.written = True
        settle_marks([cancelled], [])

    runner.reporter.mark = mark  # type: ignore[method-assign]
    runner.run(cancelled, refresh=False)
    (outcome,) = runner.reporter.outcomes  # type: ignore[attr-defined]
    assert isinstance(outcome.exception, TaskCancelled)


def test_prefetches_nothing_while_long_tasks_fill_all_slots() -> None:
    """Short ones would wait behind them, while another process may be idle."""
    jobs, clock = Jobs(), Clock()
    capacity = Capacity(jobs, 2, Wakeup(), clock=clock)
    capacity.task_seconds, capacity.finished, clock.now = 0.001, 1000, clock.now + 1
    for _ in range(2):
        jobs.busy.add(long := job())
        long.begun_at = clock.now - 1
    assert capacity.to_fetch() == 0
    jobs.busy.discard(long)
    assert capacity.to_fetch() > 1


def test_job_on_its_way_to_a_slot_is_counted() -> None:
    """Otherwise the main thread would not look after it, and sleep for seconds."""
    jobs = Jobs()
    moving = job()

    class Busy(set[Job]):
        def __len__(self) -> int:
            size = super().__len__()
            # A slot has the interpreter now.
            jobs.enter_slot(moving)
            return size

    jobs.add([moving])
    jobs.busy = Busy()
    assert jobs.count
    assert moving in jobs.busy


def test_main_thread_is_woken_for_capacity_only_when_it_waits_for_it() -> None:
    """Not for each slot that is freed: when half of the prefetch is left, and when nothing is."""
    jobs, wakeup = Jobs(), Wakeup()
    capacity = Capacity(jobs, 1, wakeup)
    jobs.add([first := job(), second := job()])
    assert capacity.to_fetch() == 0
    jobs.waiting.pop(first)
    capacity.leave_slot(job())
    assert wakeup.wait(0).reasons == set()
    jobs.waiting.pop(second)
    capacity.leave_slot(job())
    assert wakeup.wait(0).reasons == {Reason.CAPACITY_FREED}
    assert capacity.to_fetch() == 1
    capacity.leave_slot(job())
    assert wakeup.wait(0).reasons == set()


@pytest.mark.parametrize("limits", [{"max_tasks": 2}, {"max_memory_mb": 1}])
def test_main_thread_is_woken_when_its_process_is_used_up(limits: dict[str, int]) -> None:
    """By the slot that has run the last task."""
    wakeup = Wakeup(expected=[Reason.USED_UP])
    capacity = Capacity(Jobs(), 1, wakeup, **limits)
    capacity.finished = limits.get("max_tasks", 1) - 1
    capacity.leave_slot(job())
    assert wakeup.wait(0).reasons == set()
    begun = job()
    begun.note_begin(timezone.now())
    begun.run.begun = True
    capacity.leave_slot(begun)
    assert wakeup.wait(0).reasons == {Reason.USED_UP}


def test_waiting_job_goes_to_a_slot_or_is_requeued_never_both() -> None:
    """The thread that removes it first has it."""
    jobs = Jobs()
    slots = Executor(runner_of(jobs), jobs)
    found = [job() for _ in range(2000)]
    slots.put(found)
    begun: list[Job] = []
    entering = threading.Thread(target=lambda: begun.extend(each for each in found if slots.enter_slot(each)))
    entering.start()
    back = jobs.take_waiting(time.monotonic())
    entering.join()
    assert len(begun) + len(back) == len(found)
    assert jobs.busy == set(begun)
    assert not set(begun) & set(back)


def test_what_a_task_activates_goes_with_its_context() -> None:
    """A language and a time zone need not be reset between tasks."""
    before = translation.get_language(), timezone.get_current_timezone_name()
    context = contextvars.copy_context()
    context.run(translation.activate, "de")
    context.run(timezone.activate, "Asia/Tokyo")
    assert context.run(translation.get_language) == "de"
    assert (translation.get_language(), timezone.get_current_timezone_name()) == before


def test_result_is_what_the_frameworks_constructor_makes() -> None:
    """Every field of the framework's result is set, as if by its constructor."""
    record = TaskRecord(name="tests.tasks.add", args=[1, {"a": [2]}], kwargs={"b": None}, worker_ids=["w"])
    result = result_of(record)
    names = {field.name for field in dataclasses.fields(compat.TaskResult) if field.init}
    made: compat.TaskResult[Any, Any] = compat.TaskResult(**{name: getattr(result, name) for name in names})
    for field in dataclasses.fields(compat.TaskResult):
        assert getattr(made, field.name) == getattr(result, field.name)
