"""What `runworkers` does with tasks, seen from outside: real processes, real stores."""

from __future__ import annotations

import contextvars
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone, translation

from django_asyncq import compat, conf, lifecycle
from django_asyncq.broker import Broker, Entry, Lease
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.registry import registered
from django_asyncq.results import result_of
from django_asyncq.worker.execute.executors import Executor, Runner, ThreadExecutor
from django_asyncq.worker.execute.job import Job, Outcome
from django_asyncq.worker.fetch.capacity import MOST_AHEAD, Capacity
from django_asyncq.worker.options import WorkerOptions
from django_asyncq.worker.process import WorkerProcess
from django_asyncq.worker.slot_table import SlotTable
from django_asyncq.worker.wakeup import Wakeup

from . import tasks
from .redis_state import unknown
from .workers import history, run_workers, start_workers, wait_until, worker_pids, workers

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
    """Whether the row says 1."""
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
    """What has succeeded is gone from Redis: no hash, no lease, nothing held."""
    tasks.add.enqueue_many([(n,) for n in range(50)])
    run_workers("--processes", "2")
    left = {key.decode().split("}:")[-1].split(":")[0] for key in redis_client.scan_iter(f"{key_prefix}:{{*")}
    assert left == {"processed"}
    assert redis_client.get(QueueKeys("default").processed) == b"50"


def test_retries_until_it_succeeds(history_path: Path) -> None:
    """A failure with attempts left is tried again; each try leaves its error and its worker."""
    result = tasks.fail_until.enqueue(3)
    run_workers()
    record = record_of(result)
    assert (record.state, record.attempt, record.return_value) == (TaskState.SUCCEEDED, 3, 3)
    assert [error["message"] for error in record.errors] == ["attempt 1", "attempt 2"]
    assert all("tests.tasks.Glitch" in error["traceback"] for error in record.errors)
    assert len(record.worker_ids) == 3


def test_gives_up_after_the_last_attempt_and_at_once_on_give_up_on(history_path: Path) -> None:
    """`max_attempts` bounds the tries; an exception of `give_up_on` ends them."""
    exhausted, fatal = tasks.fail_until.enqueue(9), tasks.fail_until.enqueue(9, fatal=True)
    log = run_workers().stderr
    assert log.count("attempt 1 of 3 failed with Glitch; next try at") == 1
    assert log.count("attempt 3 of 3 failed with Glitch; it is not tried again") == 1
    assert log.count("attempt 1 of 3 failed with Fatal; it is not tried again") == 1
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


def test_result_that_json_cannot_carry_is_replaced_by_a_note() -> None:
    """The task has run, so it has succeeded; the note says what is missing."""
    result = tasks.returns_set.enqueue()
    run_workers()
    record = record_of(result)
    assert record.state == TaskState.SUCCEEDED
    assert "builtins.set" in record.return_value["result_not_stored"]


def test_async_task_over_its_timeout_is_cancelled() -> None:
    """An `async def` task ends at its timeout with TaskTimeout."""
    result = tasks.overruns_async.enqueue()
    run_workers()
    (error,) = record_of(result).errors
    assert error["exception"] == "django_asyncq.exceptions.TaskTimeout"


def test_sync_task_that_listens_fails_with_timeout_and_keeps_its_process(history_path: Path) -> None:
    """The cooperative flag is set; a run that took too long has failed even when it returns."""
    result, other = tasks.overruns.enqueue(listens=True), tasks.add.enqueue(1)
    run_workers("--concurrency", "1")
    assert record_of(result).errors[0]["exception"] == "django_asyncq.exceptions.TaskTimeout"
    assert record_of(other).worker_ids == record_of(result).worker_ids


def test_sync_task_that_ignores_its_timeout_has_its_process_replaced(history_path: Path) -> None:
    """The process is ended; the overdue task has failed, its neighbour runs again without an attempt used."""
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


def test_killed_process_has_exactly_its_tasks_run_again_within_two_seconds(history_path: Path, tmp_path: Path) -> None:
    """kill -9 of one of three processes: what it ran begins again elsewhere, and nothing else does."""
    results = [tasks.nap.enqueue(6) for _ in range(4)]
    # What is left of six slots after the kill holds all four tasks: nobody waits for the new process to start.
    with workers(tmp_path, "--processes", "3", "--concurrency", "2"):
        wait_until(lambda: all(is_running(result) for result in results), "four running tasks")
        begun = {line["id"]: line["pid"] for line in history(history_path)}
        victim = next(iter(begun.values()))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        theirs = {id for id, pid in begun.items() if pid == victim}
        again = wait_until(
            lambda: [line for line in history(history_path)[4:] if line["event"] == "begin"][: len(theirs)][
                len(theirs) - 1 :
            ],
            "the lost tasks begun again",
        )
        assert again[-1]["at"] - killed < 2
        wait_until(lambda: TaskRecord.objects.succeeded().count() == 4, "four succeeded tasks")
    repeated = [line["id"] for line in history(history_path)[4:] if line["event"] == "begin"]
    assert sorted(repeated) == sorted(theirs)
    for record in TaskRecord.objects.all():
        lost = str(record.id) in theirs
        assert (record.crash_count, record.attempt) == (int(lost), 1)


def test_task_that_kills_its_worker_three_times_is_failed(history_path: Path) -> None:
    """A poison pill ends as WorkerLost with the signal that killed its process."""
    result = tasks.kills_its_process.enqueue()
    run_workers()
    record = record_of(result)
    assert (record.state, record.crash_count) == (TaskState.FAILED, 3)
    assert record.errors[-1]["exception"] == "django_asyncq.exceptions.WorkerLost"
    assert "SIGKILL" in record.errors[-1]["message"]
    assert len(history(history_path)) == 3


def test_sigterm_drains_what_ends_in_time(history_path: Path, tmp_path: Path) -> None:
    """Running tasks end, waiting ones are not begun and lose nothing."""
    running = [tasks.nap.enqueue(1.0) for _ in range(2)]
    with workers(tmp_path, "--concurrency", "2") as fleet:
        wait_until(lambda: all(is_running(result) for result in running), "running tasks")
        waiting = tasks.nap.enqueue(0.1)
        assert fleet.stop() == 0
    assert [record_of(result).state for result in running] == [TaskState.SUCCEEDED] * 2
    assert (record_of(waiting).state, record_of(waiting).attempt) == (TaskState.QUEUED, 0)


def test_shutdown_past_the_grace_hands_back_without_an_attempt(history_path: Path, tmp_path: Path) -> None:
    """What does not end in time is queued again, its try taken back, sync and async alike."""
    slow, slow_async = tasks.nap.enqueue(30), tasks.nap_async.enqueue(30)
    with workers(tmp_path, ASYNCQ_TEST_SHUTDOWN_GRACE="1") as fleet:
        wait_until(lambda: is_running(slow) and is_running(slow_async), "running tasks")
        began = time.monotonic()
        assert fleet.stop() == 0
        assert time.monotonic() - began < 5
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
        assert time.monotonic() - began < 6
    assert record_of(slow).attempt == 0


def test_workers_are_looked_for_while_threads_of_the_supervisor_end() -> None:
    """A thread that is listed may be gone when its children are asked for."""
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
def test_signals_to_the_end_do_not_kill_what_has_ended(number: signal.Signals, tmp_path: Path) -> None:
    """Whoever signals again and again, until the process is gone: it has stopped in order, and says so."""
    with workers(tmp_path, "--processes", "1") as fleet:
        wait_until(fleet.children, "a worker")
        deadline = time.monotonic() + 30
        while fleet.process.poll() is None and time.monotonic() < deadline:
            fleet.process.send_signal(number)
            time.sleep(0.001)
        assert fleet.process.returncode == 0, fleet.output()


def test_idle_worker_exits_within_a_second(tmp_path: Path) -> None:
    """SIGTERM to a worker that waits in Redis is heard at once."""
    done = tasks.add.enqueue(1)
    with workers(tmp_path) as fleet:
        wait_until(lambda: record_of(done).state == TaskState.SUCCEEDED, "a first task")
        began = time.monotonic()
        assert fleet.stop() == 0
        assert time.monotonic() - began < 2


def test_children_drain_when_their_supervisor_is_killed(history_path: Path, tmp_path: Path) -> None:
    """A supervisor that is gone leaves no worker behind."""
    done = tasks.add.enqueue(1)
    with workers(tmp_path) as fleet:
        wait_until(lambda: record_of(done).state == TaskState.SUCCEEDED, "a first task")
        children = fleet.children()
        fleet.process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no children")
        assert fleet.output().count("the supervisor is gone; draining") == len(children)
        assert "failed; draining" not in fleet.output()


def test_worker_whose_main_loop_fails_says_why(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """It drains, and its exit code tells the supervisor that this was no orderly end."""
    _ours, theirs = multiprocessing.Pipe()
    process = WorkerProcess(WorkerOptions(concurrency=1), SlotTable(2), theirs)
    ended: list[int] = []

    def fail() -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(process, "_install_signals", lambda: None)
    monkeypatch.setattr(process.fetching, "fetch", fail)
    monkeypatch.setattr(process, "_shut_down", ended.append)
    process.run()
    assert process.reporter.close(5)
    assert ended == [1]
    assert "a mistake of ours" in caplog.text


def test_reporter_is_told_when_nothing_runs_and_nothing_is_fetched() -> None:
    """Not while the queues are asked: the next tasks of a backlog are on their way, and end in the same group."""
    _ours, theirs = multiprocessing.Pipe()
    process = WorkerProcess(WorkerOptions(concurrency=1), SlotTable(2), theirs)
    told = process.reporter._last_has_ended
    process.fetching.turns.begin()
    process._slot_is_free()
    assert not told.is_set()
    process.fetching.turns.end(0, is_more_left=False, look_seconds=5)
    process._slot_is_free()
    assert told.is_set()


def test_unregistered_task_is_failed_with_the_reason(history_path: Path) -> None:
    """A name the code does not know: put off, then 3 with the name in the reason; others go on."""
    record = TaskRecord.objects.create(name="os.system", args=["true"], queue_name="default")
    lifecycle.dispatch([record])
    fine = tasks.add.enqueue(1)
    run_workers(ASYNCQ_TEST_PATIENCE="0")
    record.refresh_from_db()
    assert record.state == TaskState.FAILED
    assert record.errors[0]["exception"] == "django_asyncq.exceptions.TaskNotRegistered"
    assert "os.system" in record.errors[0]["message"]
    assert record_of(fine).state == TaskState.SUCCEEDED


def test_row_with_broken_arguments_is_failed_with_the_reason() -> None:
    """Arguments that are no list and object cannot be given to any function."""
    record = TaskRecord.objects.create(name="tests.tasks.add", args={"not": "a list"}, queue_name="default")
    lifecycle.dispatch([record])
    run_workers()
    record.refresh_from_db()
    assert record.state == TaskState.FAILED
    assert record.errors[0]["exception"] == "django_asyncq.exceptions.TaskNotRunnable"


def test_message_without_a_row_is_parked_and_logged() -> None:
    """Forged and undecodable messages are never run and never stop the worker."""
    broker = Broker()
    broker.register_queue("default")
    broker.enqueue("default", [Entry("no-uuid", b"\xff\xff not protobuf"), Entry("../x", b"\x00" * 100)])
    fine = tasks.add.enqueue(1)
    done = run_workers()
    assert record_of(fine).state == TaskState.SUCCEEDED
    archived = {id.decode() for id in broker.client.zrange(QueueKeys("default").archived, 0, -1)}
    assert archived == {"no-uuid", "../x"}
    assert "no row for" in done.stderr


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
    """Objects that raise when looked at, errors that cannot be printed, SystemExit: all have an end."""
    spite, unspeakable, leaving = (
        tasks.returns_spite.enqueue(),
        tasks.raises_unspeakable.enqueue(),
        tasks.exits.enqueue(),
    )
    fine = tasks.add.enqueue(1)
    run_workers("--concurrency", "1")
    assert record_of(spite).return_value == {"result_not_stored": "return value could not be read: OSError"}
    assert "could not be made" in record_of(unspeakable).errors[0]["message"]
    assert record_of(leaving).errors[0]["exception"] == "builtins.SystemExit"
    assert record_of(fine).state == TaskState.SUCCEEDED
    assert record_of(fine).worker_ids == record_of(leaving).worker_ids


def test_async_tasks_keep_to_the_concurrency(history_path: Path) -> None:
    """Short tasks make the worker take more ahead; no more than N of them run at once."""
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
    assert "end before they begin" in done.stderr
    assert "broken on purpose" in done.stderr
    assert TaskRecord.objects.queued().count() == 1


def test_reload_restarts_the_processes_when_code_changes(tmp_path: Path) -> None:
    """A changed file of the loaded code is seen; running tasks are not lost."""
    first = tasks.add.enqueue(1)
    with workers(tmp_path, "--reload") as fleet:
        wait_until(lambda: record_of(first).state == TaskState.SUCCEEDED, "a first task")
        before = fleet.children()
        os.utime(tasks.__file__)
        wait_until(lambda: fleet.children() and not set(fleet.children()) & set(before), "new processes")
        second = tasks.add.enqueue(2)
        wait_until(lambda: record_of(second).state == TaskState.SUCCEEDED, "a second task")


def test_liveness_file_is_touched_while_all_is_well(tmp_path: Path) -> None:
    """A probe can look at its age."""
    alive = tmp_path / "alive"
    with workers(tmp_path, "--liveness-file", str(alive)):
        wait_until(alive.exists, "the liveness file")
        first = alive.stat().st_mtime_ns
        wait_until(lambda: alive.stat().st_mtime_ns > first, "a later touch")


def test_frameworks_signals_are_sent_in_the_worker(history_path: Path) -> None:
    """`task_started` for each try; `task_finished` once, at the end, where `sys.exc_info()` shows the failure."""
    retried, failing = tasks.fail_until.enqueue(2), tasks.fail_until.enqueue(9, fatal=True)
    run_workers(ASYNCQ_TEST_SIGNALS="1")
    heard = [line for line in history(history_path) if line["event"] in ("started", "finished")]
    by_id = {id: [line for line in heard if line["id"] == id] for id in (retried.id, failing.id)}
    assert [line["event"] for line in by_id[retried.id]] == ["started", "started", "finished"]
    assert [line["status"] for line in by_id[retried.id]] == ["RUNNING", "RUNNING", "SUCCESSFUL"]
    assert [(line["event"], line["handling"]) for line in by_id[failing.id]] == [
        ("started", None),
        ("finished", "Fatal"),
    ]


def job(seconds_ago: float = 0.0) -> Job:
    """A job of a task that is nowhere, and when it was taken."""
    record = TaskRecord(name="tests.tasks.add", args=[1])
    taken_at = time.monotonic() - seconds_ago
    return Job(lifecycle.Run(record, Lease(str(record.id), 1)), registered("tests.tasks.add"), taken_at)


class Bell:
    """Counts how often it is rung."""

    def __init__(self) -> None:
        self.rung = 0

    def ring(self) -> None:
        """Count."""
        self.rung += 1


def test_takes_free_slots_and_the_more_ahead_the_shorter_tasks_are() -> None:
    """Nothing ahead of slow tasks; 50 ms of work ahead of short ones; a line that is half full is not refilled."""
    slots = Executor(None)  # type: ignore[arg-type]
    room = Capacity([slots], 4, Bell().ring)
    assert room.left() == 4
    room.pace_seconds = 1.0
    assert room.left() == 4
    room.pace_seconds = 0.01
    assert room.left() == 4 + 20
    room.pace_seconds = 0.00001
    assert room.left() == 4 + MOST_AHEAD
    slots.put([job() for _ in range(4 + MOST_AHEAD // 2 + 1)])
    assert room.left() == 0
    slots.take_back(slots.waiting.copy().popitem()[0].came_at)
    assert room.left() == 4 + MOST_AHEAD


def test_what_was_taken_too_long_ago_is_handed_back_and_not_begun() -> None:
    """The process stood still, and its leases may have run out: others may run these tasks by now."""
    ended: list[Outcome] = []
    runner = Runner("w", SlotTable(1), ended.append, lambda: None, lambda job: None)
    old, fresh = job(seconds_ago=conf.current().lease_seconds / 2 + 1), job()
    slots = ThreadExecutor(runner, 1)
    slots.put([old, fresh])
    wait_until(lambda: bool(ended), "the end of the fresh one")
    assert [outcome.job for outcome in ended] == [fresh]
    assert (old.run.begun, list(slots.waiting)) == (False, [old])
    assert slots.take_back(time.monotonic()) == [old]


def test_takes_nothing_ahead_while_long_tasks_fill_all_slots() -> None:
    """Short ones would wait behind them, while another process may be idle."""
    slots = Executor(None)  # type: ignore[arg-type]
    room = Capacity([slots], 2, Bell().ring)
    room.pace_seconds = 0.001
    for _ in range(2):
        slots.busy.add(long := job())
        long.begun_at = time.monotonic() - 1
    assert room.left() == 0
    slots.busy.discard(long)
    assert room.left() > 1


def test_job_on_its_way_from_the_line_to_a_slot_is_counted() -> None:
    """Else the main thread would not look after it, and sleep for seconds."""
    slots = Executor(Runner("w", SlotTable(1), lambda outcome: None, lambda: None, lambda job: None))
    moving = job()

    class Busy(set[Job]):
        def __len__(self) -> int:
            size = super().__len__()
            # A slot has the interpreter now.
            slots._enters_slot(moving)
            return size

    slots.put([moving])
    slots.busy = Busy()
    assert Capacity([slots], 1, Bell().ring).occupied
    assert moving in slots.busy


def test_main_thread_is_woken_for_room_only_when_it_waits_for_it() -> None:
    """Not for each slot that becomes free: at half of the line, and at its end."""
    bell = Bell()
    slots = Executor(None)  # type: ignore[arg-type]
    room = Capacity([slots], 1, bell.ring)
    slots.put([first := job(), second := job()])
    assert room.left() == 0
    slots.waiting.pop(first)
    room.slot_is_free()
    assert bell.rung == 0
    slots.waiting.pop(second)
    room.slot_is_free()
    assert bell.rung == 1
    assert room.left() == 1
    room.slot_is_free()
    assert bell.rung == 1


def test_job_in_line_goes_to_a_slot_or_back_never_both() -> None:
    """Whoever removes it from the line has it, whichever thread comes first."""
    slots = Executor(Runner("w", SlotTable(1), lambda outcome: None, lambda: None, lambda job: None))
    jobs = [job() for _ in range(2000)]
    slots.put(jobs)
    begun: list[Job] = []
    taking = threading.Thread(target=lambda: begun.extend(each for each in jobs if slots._enters_slot(each)))
    taking.start()
    back = slots.take_back(time.monotonic())
    taking.join()
    assert len(begun) + len(back) == len(jobs)
    assert slots.busy == set(begun)
    assert not set(begun) & set(back)


def test_alarm_wakes_again_after_each_wait() -> None:
    """Many rings are one; a later one is another."""
    alarm = Wakeup()
    for _ in range(3):
        alarm.ring()
        alarm.ring()
        assert alarm.wait(5)
        assert not alarm.wait(0)


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
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.init}
    made: compat.TaskResult[Any, Any] = compat.TaskResult(**values)
    assert made == result
