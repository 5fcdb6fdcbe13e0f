"""A process is killed at each failpoint: every committed task runs, finishes once, and leaves nothing behind.

Case 2 of reliability.md. ASYNCQ_TEST_CRASH_REPEATS says how often everything is done, 20 times in the long form; every
second time a worker that dies takes its supervisor with it, as a lost host would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone

from django_asyncq import chain, conf, gates, group, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import alive_key
from django_asyncq.broker.keys import keys_of as keys_of_queue
from django_asyncq.control import start_bulk
from django_asyncq.core.names import lowest_uuid7_at
from django_asyncq.models import (
    BulkAction,
    BulkState,
    FailureReason,
    Gate,
    Occurrence,
    Schedule,
    StartupRun,
    TaskRecord,
    TaskState,
)
from django_asyncq.testing import crash_at, failpoints
from django_asyncq.testing.crashes import CRASH_MARK_VARIABLE, CRASH_VARIABLE

from .. import inbox_tasks, tasks
from ..redis_state import stored
from ..workers import ROOT, environment, history, wait_until, workers
from . import test_outages
from .test_outages import Outage

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("turn", range(int(os.environ.get("ASYNCQ_TEST_CRASH_REPEATS", "1")))),
]

GATE = "crash"
EXECUTED = ("begin", "stamp", "fail_until", "completes")
# The row in which `tasks.completes` counts its effects.
COUNTER = "counter"


@pytest.fixture(autouse=True)
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that the tasks of every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    # A slot is confirmed within a pass of the reconciler and 5 s: in no shorter time.
    monkeypatch.setenv("ASYNCQ_TEST_PROVISIONAL", "7")
    return path


@pytest.fixture(autouse=True)
def no_survivors(key_prefix: str) -> Iterator[None]:
    """No process of this test writes into the next test's rows."""
    yield
    wait_until(lambda: not survivors(key_prefix), "all processes to stop")


def survivors(key_prefix: str) -> list[str]:
    """The processes of this test, found by the key prefix in their environment."""
    found, prefix = [], f"ASYNCQ_TEST_PREFIX={key_prefix}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if prefix in (process / "environ").read_bytes():
                    found.append(process.name)
            except OSError:
                continue
    return found


class Crash:
    """A point at which a process is to die, and the proof that one did."""

    def __init__(self, point: str, folder: Path, nth: int = 1) -> None:
        self.point = point
        self.mark = folder / f"{point}.mark"
        armed = crash_at(point, nth=nth, mark=self.mark)
        self.variables = {name: armed[name] for name in (CRASH_VARIABLE, CRASH_MARK_VARIABLE)}

    def pid(self) -> int:
        """The process that reached the point."""
        pid, point = self.mark.read_text().split()
        assert point == self.point
        return int(pid)


# --- what must hold afterwards


def executions(history_path: Path) -> Counter[tuple[str, int]]:
    """How often each attempt of each task ran."""
    lines = [line for line in history(history_path) if line["event"] in EXECUTED]
    return Counter((line["id"], line.get("attempt", 1)) for line in lines)


def slots_held() -> list[str]:
    """The slots of all gates that have not expired."""
    return [slot.id for name in gates.occupied() for slot in gates.slots(name) if slot.expires_at > time.time()]


def entries() -> set[str]:
    """The ids of all tasks in Redis."""
    return {key.decode().rpartition(":t:")[2] for key in keys_of("t:*")}


def archived() -> set[str]:
    """The ids of all tasks in an archive."""
    return {id.decode() for key in keys_of("archived") for id in Broker().client.zrange(key, 0, -1)}


def keys_of(rest: str) -> list[Any]:
    """The keys of all queues with this last part."""
    return list(Broker().client.scan_iter(f"{conf.current().key_prefix}:{{*}}:{rest}"))


def effects() -> int:
    """How often tasks have had their effect in the database."""
    return sum(Gate.objects.filter(name=COUNTER).values_list("limit", flat=True))


def check(history_path: Path, *, most: int = 1, failed: int = 0, parked: int = 0) -> None:
    """Check history, rows and Redis from outside.

    most: runs that an attempt may have had. failed: rows that are FAILED for good. parked: archived entries.
    """
    exactly_once = {line["id"] for line in history(history_path) if line["event"] == "completes"}
    assert effects() == len(exactly_once), "effects of tasks that commit with their success"
    rows = list(TaskRecord.objects.all())
    unfinished = [row.state for row in rows if not row.is_final]
    assert not unfinished, f"tasks that never finished: states {unfinished}"
    assert sum(row.state == TaskState.FAILED for row in rows) == failed
    ran = executions(history_path)
    succeeded = {str(row.id) for row in rows if row.state == TaskState.SUCCEEDED and not row.is_batch}
    assert {id for id, _ in ran} == succeeded, "the tasks that ran are not those that were committed"
    assert max(ran.values(), default=0) <= most, f"more than {most} runs: {ran.most_common(3)}"
    attempts = {id: max(attempt for found, attempt in ran if found == id) for id in list(succeeded)[:20]}
    assert attempts == {id: TaskRecord.objects.get(id=id).attempt for id in attempts}
    wait_until(lambda: not slots_held(), "all slots to be released", seconds=9)
    left = {id: (TaskRecord.objects.filter(id=id).values_list("name", "state", "reason").first()) for id in entries()}
    assert not entries() - archived(), f"entries of finished tasks: {left}"
    assert len(archived()) == parked
    for place in ("pending", "active", "lease", "held:*", "prio", "scheduled", "retry", "due"):
        assert not keys_of(place), place


@pytest.fixture
def checked(history_path: Path) -> Callable[..., None]:
    """`check` with this test's history."""
    return lambda **expected: check(history_path, **expected)


def nap(seconds: float = 0, queue: str = "default") -> Any:
    """Enqueue a task of the gate."""
    return tasks.nap.using(queue_name=queue, gate=GATE, queue_limit=5).enqueue(seconds)


def recover(folder: Path) -> None:
    """Run healthy workers until all tasks have finished and every slot is released."""
    # Older than the grace in which a row is left to the process that enqueued it.
    TaskRecord.objects.queued().update(enqueued_at=timezone.now() - timedelta(seconds=10))
    TaskRecord.objects.filter(retry_at__isnull=False).update(retry_at=timezone.now())
    # One more task: otherwise everything may be quiet before the workers have started.
    nap()
    with workers(folder) as fleet:
        try:
            wait_until(is_quiet, "quiet", seconds=30)
        except AssertionError:
            print(fleet.output())  # `check` reports what is wrong
        assert fleet.stop() == 0


def is_quiet() -> bool:
    """Whether no work is left."""
    if keys_of("inbox-taken"):
        return False
    if TaskRecord.objects.filter(finished_at=None).exists() or slots_held() or entries() - archived():
        return False
    if BulkAction.objects.filter(state=BulkState.RUNNING).exists():
        return False
    if Schedule.objects.filter(next_occurrence_at__lte=timezone.now()).exists():
        return False
    done = StartupRun.objects.filter(error="", finished_at__isnull=False)
    return "ASYNCQ_TEST_STARTUP" not in os.environ or done.count() == 2


def failed_row(**fields: Any) -> TaskRecord:
    """A task that has failed for good."""
    return TaskRecord.objects.create(
        name="tests.tasks.nap",
        args=[0],
        state=TaskState.FAILED,
        reason=FailureReason.EXCEPTION,
        finished_at=timezone.now(),
        **fields,
    )


# --- a process that enqueues

# point: what the producer does, at which arrival it dies, how many rows there are afterwards
PRODUCERS: dict[str, tuple[str, int, int]] = {
    # First, because its task is delayed: its time comes while the others are produced.
    "hurry.committed": ("hurry", 1, 1),
    "build.gate_built": ("enqueue", 1, 0),
    "enqueue.slot_acquired": ("enqueue", 2, 0),
    "enqueue.row_inserted": ("enqueue", 2, 0),
    "after.rows_inserted": ("enqueue_behind", 1, 0),
    "enqueue.committed": ("enqueue", 1, 2),
    "dispatch.slots_confirmed": ("enqueue_delayed", 1, 2),
    "dispatch.queue_pushed": ("enqueue", 1, 2),
    "push_batch.collected": ("one_after_the_other", 1, 3),
    "enqueue.pushed": ("enqueue", 1, 2),
    "broker.batch_sent": ("enqueue_many", 1, 250),
    "park.row_written": ("lose_the_slot", 1, 1),
    "let_in.slot_acquired": ("let_in", 1, 1),
    "let_in.committed": ("let_in", 1, 1),
    "retry.slot_acquired": ("retry", 1, 1),
    "retry.committed": ("retry", 1, 1),
    "delete.committed": ("delete", 1, 0),
    "close.rows_written": ("cancel", 1, 1),
    "cancel.rows_written": ("cancel", 1, 1),
    "close.committed": ("cancel", 1, 1),
    "close.taken_out": ("cancel", 1, 1),
    "close_claimed.rows_written": ("claim_late", 1, 1),
    "evidence.rows_written": ("settle", 1, 1),
    "replace.committed": ("replace", 1, 1),
    "replace.taken_out": ("replace", 1, 1),
    "acknowledge.queue_acknowledged": ("work", 1, 2),
    # With the row of the batch.
    "batch.taken": ("form_batch", 1, 2),
    "batch.rows_written": ("form_batch", 1, 3),
    "batch.dropped": ("form_batch", 1, 3),
    "members.released": ("lose_batch", 1, 3),
}


def produce(point: str, folder: Path) -> None:
    """Let a producer die at a point, and check that it did."""
    scene, nth, rows = PRODUCERS[point]
    if scene == "retry":
        failed_row(gate=point, queue_limit=5)
    elif scene == "let_in":
        task = tasks.nap.using(gate=point, queue_limit=1, on_full="wait")
        holder = task.enqueue(0)
        task.enqueue(0)
        TaskRecord.objects.get(id=holder.id).delete()
    elif scene == "delete":
        tasks.nap.using(gate=point, queue_limit=5).enqueue(0)
    elif scene == "replace":
        tasks.nap.using(unique=lambda seconds: point, on_duplicate="replace", gate=point, queue_limit=5).enqueue(0)
    elif scene == "work":
        for number in (1, 2):
            tasks.nap.using(queue_name=f"{point}-{number}", gate=point, queue_limit=5).enqueue(0)
    elif scene == "hurry":
        tasks.nap.using(run_after=timedelta(seconds=15), gate=point, queue_limit=5).enqueue(0)
    elif scene in ("cancel", "claim_late", "settle"):
        tasks.nap.using(queue_name=point, gate=point, queue_limit=5).enqueue(0)
    before = set(TaskRecord.objects.exclude(gate=point).values_list("id", flat=True))
    crash = Crash(point, folder, nth)
    command = [sys.executable, "-m", "tests.crash_producer", scene, point]
    done = subprocess.run(command, env=environment(**crash.variables), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, (point, done.stderr)
    assert f"failpoint {point}: process {crash.pid()} kills itself" in done.stderr
    assert TaskRecord.objects.exclude(id__in=before).count() == rows, point


def test_producer_killed_at_each_step(
    turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Callable[..., None]
) -> None:
    """Committed tasks run once; others never run; every slot is released."""
    # The entry of a deleted row is archived by the first worker that meets it.
    monkeypatch.setenv("ASYNCQ_TEST_PATIENCE", "0")
    for point in PRODUCERS:
        produce(point, tmp_path)
    # A person clicks again after a click without an effect.
    again = TaskRecord.objects.get(gate="retry.slot_acquired")
    assert lifecycle.retry([again.id], by_person=True).retried == [again]
    # The other task that has the parked task's slot has no row: its slot expires.
    wait_until(
        lambda: not [slot for slot in gates.slots("park.row_written") if slot.expires_at > time.time()], "a slot"
    )
    for key in keys_of("aggregation_sets"):
        # As if the time had passed after which taken members go back to their group.
        Broker().client.zadd(key, dict.fromkeys(Broker().client.zrange(key, 0, -1), 0))
    recover(tmp_path)
    # The fifth is the batch that was given up; its members have succeeded. One archived entry has no row, the other was
    # archived by another program.
    checked(failed=5, parked=2)


# --- a worker process

# point: what waits in the queue, how often its function may run
WORKERS: dict[str, tuple[Callable[[], Any], int]] = {
    "claim.leased": (nap, 1),
    "claim.rows_read": (nap, 1),
    "start.taken": (lambda: tasks.nap_at_a_rate.enqueue(GATE), 1),
    "begin.counted": (nap, 1),
    "mark_running.row_written": (lambda: nap(0.3), 2),
    "run.function_returned": (nap, 2),
    "report.row_written": (nap, 1),
    "report.acknowledged": (nap, 1),
    "complete.row_written": (lambda: exactly_once(), 2),
    "complete.committed": (lambda: exactly_once(), 1),
    "postpone.put_aside": (lambda: unknown(), 0),
    "follow.committed": (lambda: followed(), 1),
    "settle.rows_counted": (lambda: behind(), 2),
    "settle.committed": (lambda: behind(), 1),
}
# Only the auditor finds the slot of a task that was recorded by a worker that then died.
RECORDED = ("report.row_written", "report.acknowledged", "complete.committed", "follow.committed", "settle.committed")


def exactly_once() -> None:
    """Enqueue a task whose effect and success are one commit."""
    Gate.objects.create(name=COUNTER, limit=0)
    tasks.completes.using(gate=GATE, queue_limit=5).enqueue()


def followed() -> None:
    """Enqueue a task, and another one that waits for its key."""
    for _ in range(2):
        tasks.nap.using(unique="{seconds}", on_duplicate="follow", gate=GATE, queue_limit=5).enqueue(0)


def behind() -> None:
    """Enqueue a task, two that wait for it, and one that waits for these."""
    task = tasks.nap.using(gate=GATE, queue_limit=5)
    chain(task.step(0), group([task.step(0), task.step(0)]), task.step(0)).enqueue()


def unknown() -> None:
    """Enqueue a task that no worker has the code of."""
    record = TaskRecord.objects.create(name="gone.away", queue_name="default")
    lifecycle.dispatch([record])


def give_up_unknown() -> None:
    """Cancel what waits for code: it is still there after the kill, and would be for ever."""
    waiting = TaskRecord.objects.queued().filter(name="gone.away")
    lifecycle.cancel(list(waiting.values_list("pk", flat=True)), by="the test")


@pytest.mark.parametrize("point", WORKERS)
def test_worker_killed_at_a_step(
    turn: int,
    point: str,
    tmp_path: Path,
    checked: Callable[..., None],
) -> None:
    """Its supervisor recovers what it held; when the host is lost, the reconciler of the next leader does."""
    arrange, most = WORKERS[point]
    arrange()
    crash = Crash(point, tmp_path)
    with workers(tmp_path, "--concurrency", "1", **crash.variables) as fleet:
        if turn % 2:
            wait_until(crash.mark.exists, "a death")
            fleet.process.kill()
            fleet.process.wait()
        else:
            wait_until(lambda: "exited unexpectedly" in fleet.output(), "a death notice")
            give_up_unknown()
            wait_until(lambda: all(row.is_final for row in TaskRecord.objects.all()), "all tasks to finish")
            wait_until(lambda: not entries(), "an empty Redis")
            assert fleet.stop() == 0
            assert "exited unexpectedly: its process was killed by signal 9 (SIGKILL)" in fleet.output()
    assert crash.pid() != fleet.process.pid
    assert f"failpoint {point}: process {crash.pid()} kills itself" in fleet.output()
    give_up_unknown()
    if turn % 2 or point in RECORDED:
        recover(tmp_path)
    checked(most=max(most, 1), failed=int(most == 0))


def test_worker_killed_while_it_requeues(turn: int, tmp_path: Path, checked: Callable[..., None]) -> None:
    """When its grace is over, the row is QUEUED and the entry still active; the stopping supervisor recovers it."""
    point = "requeue.row_written"
    slow = nap(1.2)
    crash = Crash(point, tmp_path)
    with workers(tmp_path, ASYNCQ_TEST_SHUTDOWN_GRACE="0.2", **crash.variables) as fleet:
        wait_until(lambda: TaskRecord.objects.get(id=slow.id).state == TaskState.RUNNING, "a running task")
        assert fleet.stop() == 0
    assert f"failpoint {point}: process {crash.pid()} kills itself" in fleet.output()
    assert crash.pid() != fleet.process.pid
    record = TaskRecord.objects.get(id=slow.id)
    assert (record.state, record.attempt) == (TaskState.QUEUED, 0)
    recover(tmp_path)
    checked(most=2)


outage = test_outages.outage


def test_worker_killed_while_it_spills_outcomes(
    turn: int, outage: Outage, tmp_path: Path, history_path: Path, checked: Callable[..., None]
) -> None:
    """SIGTERM while the database is unreachable. A spilled outcome is recorded; only the other task runs again."""
    point = "spill.queue_spilled"
    for queue in ("one", "two"):
        nap(1.0, queue)
    crash = Crash(point, tmp_path)
    both = {"ASYNCQ_TEST_LEASE": "20", "DATABASE_URL": outage.url, **crash.variables}
    with workers(tmp_path, "--concurrency", "2", **both) as fleet:
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.RUNNING).count() == 2, "two running tasks")
        queues = dict(TaskRecord.objects.values_list("id", "queue_name"))
        outage.begin()
        wait_until(lambda: test_outages.count_of(history_path, "end") == 2, "two tasks to finish")
        fleet.process.terminate()
        wait_until(crash.mark.exists, "a death")
        if turn % 2:
            fleet.process.kill()
        left = {str(id) for id, queue in queues.items() if stored(str(id), queue=queue)}
        assert len(left) == 1, "the outcome of the other died with the process"
        outage.end()
        assert fleet.stop() == (-signal.SIGKILL if turn % 2 else 0)
    assert f"failpoint {point}: process {crash.pid()} kills itself" in fleet.output()
    assert crash.pid() != fleet.process.pid
    recover(tmp_path)
    checked(most=2)
    ran = executions(history_path)
    assert {ran[str(id), 1] for id in queues if str(id) in left} == {1}
    assert {ran[str(id), 1] for id in queues if str(id) not in left} == {2}
    assert {row.crash_count for row in TaskRecord.objects.filter(id__in=left)} == {0}


# --- the supervisor and maintenance


def never_pushed(count: int = 1) -> None:
    """Rows that a producer committed a minute ago before it died."""
    at = timezone.now() - timedelta(minutes=1)
    TaskRecord.objects.bulk_create(
        TaskRecord(name="tests.tasks.nap", args=[0], queue_name="default", enqueued_at=at) for _ in range(count)
    )


def held_by_a_lost_host() -> None:
    """A task whose lease has expired."""
    nap()
    assert Broker().dequeue("default", "lost", 1, 0).leases


def outcome_spilled_by_a_lost_host() -> None:
    """A task that has run, whose worker could only spill the outcome to Redis."""
    nap()
    (run,) = lifecycle.claim(Broker(), "default", "lost", 1, "default").runs
    lifecycle.begin(run, "lost", timezone.now())
    tasks.note("begin", id=run.lease.id)
    lifecycle.succeed(run, "rested", timezone.now())
    assert lifecycle.spill_outcomes(Broker(), "lost", [run]) == 1


def pushed_documents() -> None:
    """Two documents of another program in an inbox."""
    for number in (1, 2):
        document = json.dumps({"task": inbox_tasks.letter.module_path, "args": [number]})
        Broker().client.lpush(keys_of_queue(inbox_tasks.QUEUE).inbox, document)


def outcome_signed_with_another_key() -> None:
    """As before, by a host that has another SECRET_KEY."""
    with override_settings(SECRET_KEY="of another host"):
        outcome_spilled_by_a_lost_host()


def unknown_run(redis_client: Any) -> None:
    """A RUNNING row without an entry in Redis, although Redis has not lost its memory."""
    redis_client.set(alive_key(), int(time.time()) - 100)
    long_ago = timezone.now() - timedelta(minutes=1)
    TaskRecord.objects.create(
        name="tests.tasks.nap",
        args=[0],
        queue_name="default",
        state=TaskState.RUNNING,
        fence=1,
        attempt=1,
        worker_ids=["lost"],
        started_at=long_ago,
        last_attempted_at=long_ago,
    )


def overdue_schedule(count: int = 1) -> None:
    """Occurrences that have been due for five seconds, each of its own schedule; the next ones are due tomorrow."""
    at = (timezone.now() - timedelta(seconds=5)).replace(microsecond=0)
    Schedule.objects.bulk_create(
        Schedule(
            name=f"crash {number}",
            task="tests.tasks.stamp",
            interval_seconds=86_400,
            starts_at=at,
            next_occurrence_at=at,
        )
        for number in range(count)
    )


def old_failure() -> None:
    """A failed task that is older than the retention policy allows, with its entry in the archive."""
    then = timezone.now() - timedelta(days=40)
    record = TaskRecord.objects.create(id=lowest_uuid7_at(then), name="tests.tasks.nap", args=[0], queue_name="default")
    lifecycle.dispatch([record])
    broker = Broker()
    leases = broker.dequeue("default", "lost", 1, 30).leases
    broker.archive("default", "lost", [(lease, b"") for lease in leases])
    TaskRecord.objects.update(state=TaskState.FAILED, reason=FailureReason.EXCEPTION, finished_at=then)


def retried_task() -> None:
    """A task that succeeds at its second attempt."""
    tasks.fail_until.using(gate=GATE, queue_limit=5).enqueue(2)


def action_on_many() -> None:
    """A failed task, and an action that retries it."""
    failed_row()
    start_bulk("retry", {"name": "tests.tasks.nap"})


def in_two_queues() -> None:
    """A task in each of two queues, both long enough for a heartbeat on a slow machine."""
    nap(3.0, "one")
    nap(3.0, "two")


# point: what is there, at which arrival it dies, how many archived entries without a row are left
SUPERVISORS: dict[str, tuple[Callable[..., None], int, int]] = {
    "reconcile.marked_alive": (never_pushed, 1, 0),
    "reconcile.page_repaired": (lambda: never_pushed(1200), 1, 0),
    "reconcile.leases_recovered": (held_by_a_lost_host, 1, 0),
    "replay.row_written": (outcome_spilled_by_a_lost_host, 1, 0),
    "wait_for_key.row_written": (outcome_signed_with_another_key, 1, 0),
    "abandon.row_written": (unknown_run, 1, 0),
    "fire.occurrences_written": (overdue_schedule, 1, 0),
    "fire.committed": (overdue_schedule, 1, 0),
    "start_up.row_written": (lambda: None, 1, 0),
    "inbox.taken": (lambda: pushed_documents(), 1, 0),
    "inbox.committed": (lambda: pushed_documents(), 1, 0),
    "bulk.page_changed": (action_on_many, 1, 0),
    "bulk.page_committed": (action_on_many, 1, 0),
    "prune.rows_deleted": (old_failure, 1, 1),
    "forward.retry_found": (retried_task, 1, 0),
    "beat.leases_renewed": (in_two_queues, 1, 0),
}


@pytest.mark.parametrize("point", SUPERVISORS)
def test_supervisor_killed_at_a_step(
    turn: int,
    point: str,
    tmp_path: Path,
    history_path: Path,
    redis_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    checked: Callable[..., None],
) -> None:
    """The next leader does what was left, and nothing twice."""
    arrange, nth, parked = SUPERVISORS[point]
    if point == "start_up.row_written":
        monkeypatch.setenv("ASYNCQ_TEST_STARTUP", "well")
    arrange(redis_client) if arrange is unknown_run else arrange()
    crash = Crash(point, tmp_path, nth)
    with workers(tmp_path, **crash.variables) as fleet:
        assert fleet.process.wait(40) == -signal.SIGKILL, fleet.output()
    assert crash.pid() == fleet.process.pid
    if point == "start_up.row_written":
        assert not [line for line in history(history_path) if line["event"] == "once"]
    if point == "fire.occurrences_written":
        assert not Occurrence.objects.exists()
    recover(tmp_path)
    # What runs for longer than a lease, which nobody renews any more, may begin again elsewhere.
    checked(parked=parked, most=2 if point in ("wait_for_key.row_written", "beat.leases_renewed") else 1)
    if point.startswith("inbox"):
        assert TaskRecord.objects.filter(name=inbox_tasks.letter.module_path).count() == 2
    if point.startswith("fire"):
        assert Occurrence.objects.filter(task__isnull=False).count() == Occurrence.objects.count() == 1
    if point == "start_up.row_written":
        assert Counter(line["event"] for line in history(history_path))["once"] == 1
        finished = [run.finished_at is not None for run in StartupRun.objects.filter(name="once").order_by("id")]
        assert finished == [False, True]


# point: how many of thirty schedules that are due together have fired when the leader dies there
FIRING = {
    "enqueue.slot_acquired": 0,
    "enqueue.row_inserted": 0,
    "fire.occurrences_written": 0,
    "enqueue.committed": 30,
    "dispatch.queue_pushed": 30,
    "enqueue.pushed": 30,
    "fire.committed": 30,
}


@pytest.mark.faults
@pytest.mark.parametrize("point", FIRING)
def test_leader_killed_while_it_fires_many_schedules(
    turn: int, point: str, tmp_path: Path, history_path: Path, checked: Callable[..., None]
) -> None:
    """Before the commit none has fired, after it all have; the next leader does the rest, and nothing twice."""
    overdue_schedule(30)
    crash = Crash(point, tmp_path)
    with workers(tmp_path, **crash.variables) as fleet:
        assert fleet.process.wait(40) == -signal.SIGKILL, fleet.output()
    assert crash.pid() == fleet.process.pid
    assert Occurrence.objects.count() == TaskRecord.objects.count() == FIRING[point]
    recover(tmp_path)
    checked()
    occurrences = Occurrence.objects.filter(task__isnull=False)
    assert len(set(occurrences.values_list("task_id", "schedule_id"))) == Occurrence.objects.count() == 30
    assert TaskRecord.objects.filter(name="tests.tasks.stamp").count() == 30


@pytest.mark.parametrize(
    "point", AFTER_A_DEATH := ("reap.death_noticed", "recover.row_written", "recover.redis_updated")
)
def test_supervisor_killed_while_it_recovers_a_dead_worker(
    turn: int, point: str, tmp_path: Path, history_path: Path, checked: Callable[..., None]
) -> None:
    """Both are dead, as when a host is lost during a recovery: the lease expires, and the next leader continues."""
    slow = nap(0.8)
    crash = Crash(point, tmp_path)
    with workers(tmp_path, **crash.variables) as fleet:
        wait_until(lambda: TaskRecord.objects.get(id=slow.id).state == TaskState.RUNNING, "a running task")
        (child,) = fleet.children()
        os.kill(child, signal.SIGKILL)
        assert fleet.process.wait(40) == -signal.SIGKILL, fleet.output()
    assert crash.pid() == fleet.process.pid
    recover(tmp_path)
    checked(most=2)


# --- proof that the check can fail


def test_without_a_reconciler_the_check_fails(
    turn: int, tmp_path: Path, history_path: Path, checked: Callable[..., None]
) -> None:
    """A producer dies between COMMIT and push: without a reconciler its task stays, with one it runs."""
    produce("enqueue.committed", tmp_path)
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(seconds=10))
    other = tasks.nap.enqueue(0)
    mutant = subprocess.Popen([sys.executable, "-m", "tests.crash_mutant"], env=environment(), cwd=ROOT)
    try:
        wait_until(lambda: TaskRecord.objects.get(id=other.id).state == TaskState.SUCCEEDED, "another task to finish")
    finally:
        mutant.terminate()
        assert mutant.wait(40) == 0
    with pytest.raises(AssertionError, match="tasks that never finished"):
        checked()
    recover(tmp_path)
    checked()


def test_every_point_is_killed_at(turn: int) -> None:
    """Every declared point is in one of the tables above."""
    tried = {*PRODUCERS, *WORKERS, *SUPERVISORS, *AFTER_A_DEATH, "requeue.row_written", "spill.queue_spilled"}
    # Messages of other programs: `test_adopting` lets their claim die there.
    tried |= {"adopt.row_named", "adopt.row_inserted"}
    # Workers wait for code; only the test kit refuses a task without it, and `test_kit_faults` lets it die there.
    tried |= {"refuse.row_written"}
    assert tried == set(failpoints.POINTS)
