"""Which task is to blame when a worker process dies: the one that took it down, and no other."""

from __future__ import annotations

import errno
import multiprocessing.process
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys, alive_key
from django_asyncq.fleet.processes import Child
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.fleet.recovery import LOOK_SECONDS, MemorySampler, blame, describe_death
from django_asyncq.fleet.repairs import Repairs
from django_asyncq.fleet.supervisor import Supervisor
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.worker.child_process import crashed_thread
from django_asyncq.worker.options import WorkerOptions
from django_asyncq.worker.slot_table import SLOT, SlotTable

from .. import tasks
from ..runs import claimed, taken_by
from ..workers import ROOT, environment, history, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def history_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the tasks leave a line each time they begin."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    return path


def row_of(task: Any) -> TaskRecord:
    """The row of a result, or of a record as it is now."""
    return TaskRecord.objects.get(id=task.id)


def is_running(task: Any) -> bool:
    """Whether the row says RUNNING."""
    return row_of(task).state == TaskState.RUNNING


def has_succeeded(task: Any) -> bool:
    """Whether the row says SUCCEEDED."""
    return row_of(task).state == TaskState.SUCCEEDED


def waiting_suspects() -> list[str]:
    """The ids in the suspects of the default queue."""
    return [id.decode() for id in Broker().client.zrange(QueueKeys("default").suspects, 0, -1)]


def suspect(seconds: float | None = None) -> TaskRecord:
    """Return a new task that was lost with its host twice. seconds: how long it sleeps when it runs."""
    run = claimed("lost")
    if seconds is not None:
        TaskRecord.objects.filter(id=run.record.id).update(name="tests.tasks.nap", args=[seconds])
    lose(run)
    lose(taken_by("lost"))
    return run.record


def lose(run: lifecycle.Run) -> None:
    """Lose the host of a run."""
    worker_id = run.record.worker_ids[-1]
    lifecycle.recover(Broker(), "default", worker_id, [run.lease], reason="its host was lost")


# --- what a death counts

IDS = [str(UUID(int=number)) for number in range(1, 4)]
STACK = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00000000000000ff (most recent call first):\n"


def dead(
    exit_code: int,
    *threads: int,
    stack: str = "",
    worker_id: str = "w",
    was_killed: bool = False,
    said: int | None = None,
) -> Child:
    """A dead process that was running one task in each of these threads. said: its last word."""
    table = SlotTable(4)
    for slot, thread in enumerate(threads):
        SLOT.pack_into(table.memory, slot * SLOT.size, 0.0, thread, UUID(IDS[slot]).bytes, 0.0, 1, 0)
    child = Child(SimpleNamespace(pid=1), table, None, worker_id, 0.0, None)  # type: ignore[arg-type]
    child.exit_code, child.said_exit, child.stack, child.was_killed = exit_code, said, stack, was_killed
    return child


@pytest.mark.parametrize(
    ("child", "named", "alone", "suspected", "innocent"),
    [
        (dead(-9, 1), [], [0], [], []),
        (dead(-9, 1, 2), [], [], [0, 1], []),
        (dead(-9), [], [], [], []),
        (dead(0, 1, said=0), [], [], [], [0]),
        (dead(0, 1), [], [0], [], []),
        (dead(-9, 1, was_killed=True), [], [], [], [0]),
        (dead(-11, 1, 255, stack=STACK), [1], [], [], [0]),
        (dead(-11, 1, 255, 255, stack=STACK), [], [], [1, 2], [0]),
        (dead(-11, 1, 2, stack=STACK), [], [], [0, 1], []),
        (dead(70, 1), [], [], [0], []),
        (dead(70, 1, worker_id="w-alone"), [], [0], [], []),
    ],
)
def test_what_a_death_counts(
    child: Child, named: list[int], alone: list[int], suspected: list[int], innocent: list[int]
) -> None:
    """A crash counts only where no other task can have caused it."""
    found = blame(child)
    begun = {running.id for running in child.slot_table.running()}
    wanted = [{IDS[number] for number in numbers} for numbers in (named, alone, suspected, innocent)]
    assert [*map(set, found), begun.difference(*found)] == wanted


@pytest.mark.parametrize(("count", "company"), [(1, "lost alone"), (2, "with 1 other;"), (3, "with 2 others;")])
def test_the_reason_says_how_many_were_lost_together(count: int, company: str, tmp_path: Path) -> None:
    """The signal is there too."""
    text = describe_death(dead(-9, *range(count)), MemorySampler(tmp_path))
    assert company in f"{text};"
    assert "SIGKILL" in text


def test_the_stack_of_a_crash_names_its_thread() -> None:
    """As this Python writes it; a text without a stack names none."""
    code = (
        "import ctypes, faulthandler, threading\nfaulthandler.enable()\n"
        "def crash(): print(threading.get_ident(), flush=True); ctypes.string_at(0)\n"
        "threading.Thread(target=crash).start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert crashed_thread(done.stderr) == int(done.stdout)
    assert crashed_thread("") is None


# --- memory


def sampler_of(root: Path, version: int, *, used: int, kills: int) -> MemorySampler:
    """A sampler of a cgroup with a limit of 1000, seen from its container, and of process 1 that has had 2048 kB."""
    folder = root / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory/box")
    for path in (folder, root / "proc/self", root / "proc/1"):
        path.mkdir(parents=True, exist_ok=True)
    names = {1: ("limit_in_bytes", "usage_in_bytes", "oom_control"), 2: ("max", "current", "events")}[version]
    for name, text in zip(names, ("1000", str(used), f"low 0\noom_kill {kills}\n"), strict=True):
        (folder / f"memory.{name}").write_text(text)
    (root / "proc/self/cgroup").write_text("0::/box\n" if version == 2 else "5:cpu:/box\n4:memory:/box\n")
    (root / "proc/1/status").write_text("Name:\tpython\nVmHWM:\t    2048 kB\n")
    return MemorySampler(root)


@pytest.mark.parametrize("version", [1, 2])
def test_death_for_want_of_memory_is_said(version: int, tmp_path: Path) -> None:
    """Memory was near the limit, or the kernel has counted another kill; not when its supervisor killed it."""
    child = dead(-9, 1)
    near = sampler_of(tmp_path, version, used=950, kills=0)
    near.sample([child], 1000.0)
    assert ["OOM killer" in text for text in near.describe(child)] == [False, True]
    assert "up to 2 MB" in near.describe(child)[0]
    far = sampler_of(tmp_path, version, used=100, kills=3)
    far.sample([child], 1000.0)
    assert len(far.describe(child)) == 1
    sampler_of(tmp_path, version, used=100, kills=4)
    assert len(far.describe(child)) == 2
    assert len(far.describe(dead(-9, 1, was_killed=True))) == 1
    assert len(far.describe(dead(-11, 1))) == 1
    far.forget(child)
    assert far.describe(child) == []


def test_where_nothing_is_known_of_memory_nothing_is_said(tmp_path: Path) -> None:
    """As on macOS."""
    sampler = MemorySampler(tmp_path)
    sampler.sample([dead(-9, 1)], 1000.0)
    assert sampler.describe(dead(-9, 1)) == []


# --- how often in a row


def lose_alone(run: lifecycle.Run) -> None:
    """Lose the process of a run that was alone in it."""
    blame = lifecycle.Blame(alone=frozenset({run.lease.id}))
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="killed; lost alone", blame=blame)


@pytest.mark.parametrize("lose", [lose, lose_alone])
def test_the_first_loss_sends_a_task_back_to_the_head_as_any_other(lose: Callable[[lifecycle.Run], None]) -> None:
    """It is noted, not counted, and an ordinary worker claims it before all that waits; the second makes a suspect."""
    run = claimed()
    tasks.add.enqueue(2)
    lose(run)
    record = row_of(run.record)
    assert (record.state, record.crash_count, record.attempt) == (TaskState.QUEUED, 0, 0)
    assert (record.is_suspect, len(record.errors), waiting_suspects()) == (False, 1, [])
    again = taken_by("w")
    assert again.record.id == record.id
    lose(again)
    assert (row_of(record).is_suspect, waiting_suspects()) == (True, [str(record.id)])
    assert row_of(record).crash_count == int(lose is lose_alone)


@pytest.mark.parametrize("counted", [True, False])
def test_a_run_that_ends_in_between_makes_it_a_first_loss_again(counted: bool) -> None:
    """Also one that asks for a retry and leaves no error."""
    run = claimed()
    lose(run)
    now = run.record.enqueued_at
    again = taken_by("w")
    lifecycle.fail(again, ValueError("no"), "", now, retry_at=now, counted=counted)
    assert lifecycle.record_runs([again]) == []
    lifecycle.acknowledge(Broker(), "w", [again])
    lifecycle.retry_due(Broker(), "default", [again.lease.id])
    lose(taken_by("w"))
    assert not row_of(run.record).is_suspect


def test_the_process_itself_names_the_task() -> None:
    """Then its first loss counts, and it runs alone next."""
    run = claimed()
    blame = lifecycle.Blame(named=frozenset({run.lease.id}))
    lifecycle.recover(Broker(), "default", "w", [run.lease], reason="killed", blame=blame)
    assert (row_of(run.record).crash_count, waiting_suspects()) == (1, [run.lease.id])


# --- the entries of suspects


def test_ordinary_workers_never_claim_a_suspect() -> None:
    """It waits in a key of its own until a worker in quarantine claims it; a run that finishes clears it."""
    record = suspect()
    assert waiting_suspects() == [str(record.id)]
    assert lifecycle.claim(Broker(), "default", "w", 10, "default").runs == []
    run = taken_by("q-alone")
    assert (run.record.id, waiting_suspects()) == (record.id, [])
    lifecycle.succeed(run, 1, run.record.enqueued_at)
    assert lifecycle.record_runs([run]) == []
    assert not row_of(record).is_suspect


def test_a_worker_in_quarantine_gets_the_same_suspect_again_until_it_has_finished() -> None:
    """The reply to the first call may have been lost."""
    first, _ = suspect(), suspect()
    again = [lifecycle.claim_suspect(Broker(), "default", "q-alone", "default").runs[0] for _ in range(2)]
    assert again[0].lease == again[1].lease
    assert again[0].record.id == first.id


def test_suspects_of_a_paused_queue_wait() -> None:
    """As all its tasks do."""
    suspect()
    Broker().client.set(QueueKeys("default").paused, 1)
    assert lifecycle.claim_suspect(Broker(), "default", "q-alone", "default").is_drained
    Broker().client.delete(QueueKeys("default").paused)
    assert not lifecycle.claim_suspect(Broker(), "default", "q-alone", "default").is_drained


def test_suspects_count_as_pending_and_no_repair_touches_them() -> None:
    """A sweep repairs nothing. A deleted suspect leaves nothing."""
    record = suspect()
    Broker().mark_alive()
    assert Inspection().sizes("default")["pending"] == 1
    assert not any(Reconciler(Broker()).sweep())
    record.delete()
    assert waiting_suspects() == []
    assert not any(Inspection().sizes("default").values())


def test_the_entry_of_a_suspect_whose_row_has_finished_is_discarded() -> None:
    """A sweep looks at suspects as at all waiting tasks."""
    record = suspect()
    Broker().mark_alive()
    long_ago = record.enqueued_at.replace(year=2020)
    TaskRecord.objects.update(state=TaskState.SUCCEEDED, finished_at=long_ago)
    assert Reconciler(Broker()).sweep().discarded == 1
    assert waiting_suspects() == []


def test_suspects_are_found_again_when_their_key_was_evicted() -> None:
    """Their hashes say so; an id that a tool has left in pending does not let an ordinary worker run one."""
    record = suspect()
    Broker().mark_alive()
    Broker().client.delete(QueueKeys("default").suspects)
    assert Reconciler(Broker()).sweep().orphans == 1
    assert waiting_suspects() == [str(record.id)]
    Broker().client.lpush(QueueKeys("default").pending, str(record.id))
    assert Broker().dequeue("default", "w", 10, 30).leases == []
    assert waiting_suspects() == [str(record.id)]


def test_a_requeued_suspect_stays_a_suspect() -> None:
    """Its worker in quarantine was stopped."""
    record = suspect()
    lifecycle.requeue(Broker(), "q-alone", [taken_by("q-alone")])
    assert waiting_suspects() == [str(record.id)]
    assert (row_of(record).is_suspect, row_of(record).attempt) == (True, 0)


def test_a_forgotten_suspect_is_set_aside_by_the_worker_that_claims_it() -> None:
    """Redis lost its memory: the row is pushed as any other, and still runs alone."""
    reconciler = Reconciler(Broker())
    reconciler.tick(1000.0)
    record = suspect()
    Broker().remove("default", [str(record.id)])
    Broker().client.delete(alive_key())
    assert reconciler.tick(2000.0) == Repairs(pushed=1)
    assert waiting_suspects() == []
    assert lifecycle.claim(Broker(), "default", "w", 10, "default").runs == []
    assert waiting_suspects() == [str(record.id)]


def test_a_host_that_dies_with_a_suspect_in_quarantine_is_counted() -> None:
    """A container ends with its main process, so the suspect may have taken all of it down."""
    record = suspect()
    for losses in (1, 2, 3):
        run = taken_by("q-alone")
        lifecycle.recover(Broker(), "default", "q-alone", [run.lease], reason="its host was lost")
        assert row_of(record).crash_count == losses
    assert row_of(record).state == TaskState.FAILED
    assert waiting_suspects() == []


def test_a_suspect_whose_process_cannot_be_started_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it has begun. It waits as a suspect again at once, and the next look for one comes later."""

    def refuse(self: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    record, supervisor, now = suspect(), Supervisor(WorkerOptions(queues={"default": 1})), time.monotonic()
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    supervisor.quarantine.tick(now)
    assert waiting_suspects() == [], "it is claimed"
    supervisor.processes.take_started(now)
    assert supervisor.recovery.recover_dead(time.monotonic())
    assert waiting_suspects() == [str(record.id)]
    assert (row_of(record).state, row_of(record).crash_count) == (TaskState.QUEUED, 0)
    supervisor.quarantine.tick(now + LOOK_SECONDS)
    assert waiting_suspects() == [str(record.id)], "nobody claims it again so soon"


# --- whole fleets


def test_poison_beside_three_sleepers_fails_alone(history_path: Path, tmp_path: Path) -> None:
    """One process with four slots: the poison takes the sleepers along twice, and fails after three losses alone."""
    sleepers = [tasks.nap.enqueue(1.0) for _ in range(3)]
    poison = tasks.dies.enqueue()
    with workers(tmp_path, "--concurrency", "4"):
        wait_until(lambda: row_of(poison).state == TaskState.FAILED, "the poison to fail", 100)
        wait_until(lambda: all(map(has_succeeded, sleepers)), "the sleepers to succeed")
    record = row_of(poison)
    assert (record.state, record.crash_count, record.attempt) == (TaskState.FAILED, 3, 0)
    messages = [error["message"] for error in record.errors]
    assert ["lost together with 3 others" in message for message in messages] == [True, True, False, False, False]
    assert ["lost alone" in message for message in messages] == [False, False, True, True, True]
    assert all("SIGKILL" in message and "MB of memory" in message for message in messages)
    for sleeper in map(row_of, sleepers):
        assert (sleeper.state, sleeper.crash_count, sleeper.attempt) == (TaskState.SUCCEEDED, 0, 1)
        assert not sleeper.is_suspect
        assert ["lost together with 3 others" in error["message"] for error in sleeper.errors] == [True, True]
        assert sleeper.worker_ids[-1].endswith("-alone")


def test_a_task_that_exits_with_code_0_does_not_run_for_ever(history_path: Path, tmp_path: Path) -> None:
    """Its process did not stop by itself, whatever its exit code says."""
    record = tasks.dies.enqueue("0", 0.0)
    with workers(tmp_path, "--concurrency", "1"):
        wait_until(lambda: row_of(record).state == TaskState.FAILED, "the task to fail")
    assert (row_of(record).reason, row_of(record).crash_count) == (FailureReason.WORKER_LOST, 3)


def test_fatal_signal_names_the_task_that_took_its_process_down(history_path: Path, tmp_path: Path) -> None:
    """It alone is counted and runs alone; its neighbours are no suspects."""
    sleepers = [tasks.nap.enqueue(1.5) for _ in range(2)]
    crash = tasks.dies.enqueue("SIGSEGV")
    with workers(tmp_path, "--concurrency", "4"):
        wait_until(lambda: row_of(crash).state == TaskState.FAILED, "the crashing task to fail", 100)
        wait_until(lambda: all(map(has_succeeded, sleepers)), "the sleepers to succeed")
    record = row_of(crash)
    assert (record.state, record.crash_count, len(record.errors)) == (TaskState.FAILED, 3, 3)
    for sleeper in map(row_of, sleepers):
        assert (sleeper.state, sleeper.crash_count, sleeper.errors) == (TaskState.SUCCEEDED, 0, [])
        assert not sleeper.worker_ids[-1].endswith("-alone")


def test_healthy_work_goes_on_beside_a_long_suspect(history_path: Path, tmp_path: Path) -> None:
    """The suspect runs for long in its own process, and nobody waits for it."""
    record = suspect(6)
    with workers(tmp_path, "--concurrency", "1"):
        wait_until(lambda: is_running(record), "a suspect that runs")
        quick = [tasks.nap.enqueue(0.01) for _ in range(20)]
        wait_until(lambda: all(map(has_succeeded, quick)), "healthy work")
        assert is_running(record)
        wait_until(lambda: has_succeeded(record), "the suspect to finish")
    assert row_of(record).worker_ids[-1].endswith("-alone")


def test_suspects_that_wait_for_long_get_another_process(history_path: Path, tmp_path: Path) -> None:
    """One that hangs does not keep the next from running; stopped, it stays a suspect without a crash."""
    hanging, short = suspect(60), suspect()
    with workers(tmp_path, "--concurrency", "4", ASYNCQ_TEST_SHUTDOWN_GRACE="1"):
        wait_until(lambda: has_succeeded(short), "the second suspect to finish")
        assert is_running(hanging)
    record = row_of(hanging)
    assert (record.state, record.crash_count, record.is_suspect) == (TaskState.QUEUED, 0, True)
    assert waiting_suspects() == [str(hanging.id)]


def test_suspects_run_side_by_side(history_path: Path, tmp_path: Path) -> None:
    """As many at once as there are processes: none waits for one that takes long."""
    suspects = [suspect(60) for _ in range(3)]
    with workers(tmp_path, "--processes", "3", "--concurrency", "1", ASYNCQ_TEST_SHUTDOWN_GRACE="1"):
        wait_until(lambda: all(map(is_running, suspects)), "three suspects that run")


def test_shutdown_drains_a_quarantine_process(history_path: Path, tmp_path: Path) -> None:
    """A suspect that finishes in time has succeeded."""
    record = suspect(1.5)
    with workers(tmp_path) as fleet:
        wait_until(lambda: is_running(record), "a suspect that runs")
        assert fleet.stop() == 0
    assert (row_of(record).state, row_of(record).is_suspect) == (TaskState.SUCCEEDED, False)


def test_suspects_run_one_after_the_other_in_one_process(history_path: Path) -> None:
    """A lost host may leave hundreds; a process for each would take a second each. A burst waits for them."""
    suspects = [suspect(0.05) for _ in range(5)]
    run_workers()
    assert all(map(has_succeeded, suspects))
    events = history(history_path)
    assert len({line["pid"] for line in events}) == 1
    assert [line["event"] for line in events] == ["begin", "end"] * 5


def test_task_that_kills_its_whole_process_group_is_failed(history_path: Path, tmp_path: Path) -> None:
    """The supervisor dies each time, as in a container without memory; it is FAILED after at most five restarts."""
    poison, sleeper = tasks.dies.enqueue("group"), tasks.nap.enqueue(0.01)
    starts = 0
    while row_of(poison).state != TaskState.FAILED:
        starts += 1
        assert starts <= 6
        command = [sys.executable, "-m", "django", "runworkers", "--burst"]
        with (tmp_path / "log").open("a") as log:
            fleet = subprocess.Popen(
                command, env=environment(), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
            assert fleet.wait(40) in (0, -signal.SIGKILL)
    record = row_of(poison)
    assert (record.crash_count, record.attempt) == (3, 0)
    assert record.errors[-1]["exception"] == "django_asyncq.exceptions.WorkerLost"
    assert row_of(sleeper).state == TaskState.SUCCEEDED
