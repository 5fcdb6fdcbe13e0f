"""Slots per queue: of one process's slots at most so many run tasks of a queue, and none is idle because of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.urls import reverse

from django_asyncq.broker import Broker, servers
from django_asyncq.broker.keys import keys_of
from django_asyncq.broker.waits import PushWait
from django_asyncq.management.commands.runworkers import served_queues
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.observe import scale
from django_asyncq.observe.inspector import Inspector
from django_asyncq.worker.job import Job, JobPhase
from django_asyncq.worker.wakeup import Reason

from .. import slot_tasks as tasks
from ..runs import worker_process
from ..workers import run_workers, wait_until, workers

# Far less than a look is away, and more than a slow machine needs.
SOON_SECONDS = 30
BOTH = {"queues": {"reports": 1, "default": 1}}

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the tasks write. No worker looks by itself: what begins was waited for, or has been woken for."""
    monkeypatch.setenv("ASYNCQ_TEST_LOOK", "60")
    return tmp_path / "slots.jsonl"


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A file that lets the tasks go on; made at the end, whatever happens."""
    path = tmp_path / "go"
    yield path
    path.touch()


def lines(path: Path) -> list[dict[str, Any]]:
    """What the tasks have written, in the order of time."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(found, key=lambda line: line["at"])


def most_at_once(path: Path, *, by: str = "pid") -> dict[str, int]:
    """The maximum of tasks of each queue that ran at the same time in one process; of all queues as "all"."""
    running: Counter[Any] = Counter()
    most: Counter[str] = Counter()
    for line in lines(path):
        for queue in (line["queue"], "all"):
            running[queue, line.get(by)] += 1 if line["event"] == "begin" else -1
            most[queue] = max(most[queue], running[queue, line.get(by)])
    return dict(most)


def of(task: Any, queue: str, count: int, path: Path, *args: Any) -> None:
    """Enqueue so many."""
    task.using(queue_name=queue).enqueue_many([(str(path), queue, *args)] * count)


def succeeded(queue: str) -> int:
    """How many tasks of a queue are finished."""
    return TaskRecord.objects.filter(queue_name=queue, state=TaskState.SUCCEEDED).count()


def begun(path: Path, queue: str) -> int:
    """How many have begun."""
    return len([line for line in lines(path) if line["event"] == "begin" and line["queue"] == queue])


# --- the option


@pytest.mark.parametrize(
    ("text", "weights", "slots"),
    [
        ("reports:2,default", {"reports": 1, "default": 1}, {"reports": 2}),
        ("critical=6,reports=3:2", {"critical": 6, "reports": 3}, {"reports": 2}),
        ("default", {"default": 1}, {}),
    ],
)
def test_queues_are_read(text: str, weights: dict[str, int], slots: dict[str, int]) -> None:
    """A name, its weight and its slots."""
    found = served_queues(text)
    assert (found, found.slots) == (weights, slots)


# --- real workers


@pytest.mark.parametrize("kind", ["occupy", "aoccupy"])
def test_no_process_runs_more_than_its_slots_of_a_queue(kind: str, path: Path) -> None:
    """Of a hundred tasks in two processes of four slots, by the tasks' own records; a burst runs them all."""
    task = getattr(tasks, kind)
    of(task, "reports", 50, path, 0.05)
    of(task, "default", 50, path, 0.05)
    run_workers("--queues", "reports:2,default", "--processes", "2", "--concurrency", "4")
    assert (succeeded("reports"), succeeded("default")) == (50, 50)
    most = most_at_once(path)
    assert most["reports"] == 2
    # While both had tasks, all slots were in use.
    assert most["all"] > 2
    assert most["default"] > 2


def test_isolated_tasks_count(path: Path, go: Path, tmp_path: Path) -> None:
    """They occupy a slot of the process that has claimed them; the others run beside one that waits."""
    with workers(tmp_path, "--queues", "reports:1,default", "--processes", "1", "--concurrency", "3"):
        of(tasks.occupy_isolated, "reports", 3, path, str(go))
        of(tasks.occupy_isolated, "default", 3, path)
        wait_until(lambda: succeeded("default") == 3, "the other tasks")
        wait_until(lambda: begun(path, "reports"), "a report")
        go.touch()
        wait_until(lambda: succeeded("reports") == 3, "all reports")
    assert most_at_once(path, by="of all processes")["reports"] == 1


def test_short_tasks_are_not_prefetched_beyond_the_limit(path: Path) -> None:
    """A process that prefetches hundreds of no-op tasks holds one of the other queue."""
    of(tasks.occupy, "default", 400, path)
    of(tasks.occupy, "reports", 100, path)
    run_workers("--queues", "reports:1,default", "--processes", "1", "--concurrency", "4")
    assert (succeeded("reports"), succeeded("default")) == (100, 400)
    assert most_at_once(path)["reports"] == 1


@pytest.mark.usefixtures("own_redis")
def test_a_full_queue_keeps_no_slot_idle_and_nobody_awake(path: Path, go: Path, tmp_path: Path) -> None:
    """The other queue's tasks run at once; meanwhile the process sleeps; each slot that is free takes the next."""
    options = ("--queues", "reports:1,default", "--processes", "1", "--concurrency", "2")
    with workers(tmp_path, *options):
        of(tasks.occupy, "reports", 5, path, 0.0, str(go))
        wait_until(lambda: begun(path, "reports") == 1, "the first report")
        for count in (1, 2, 3):
            of(tasks.occupy, "default", 1, path)
            wait_until(lambda count=count: succeeded("default") == count, "the other task", SOON_SECONDS)
        # There are tokens for the full queue, and the process does not begin to wait for them again and again.
        wait_until(lambda: tokens("reports"), "a token that nobody takes", SOON_SECONDS)
        before = calls_of_blpop()
        for count in (4, 5, 6):
            of(tasks.occupy, "default", 1, path)
            wait_until(lambda count=count: succeeded("default") == count, "the other task", SOON_SECONDS)
        assert calls_of_blpop() - before < 20
        assert begun(path, "reports") == 1
        go.touch()
        wait_until(lambda: succeeded("reports") == 5, "all reports", SOON_SECONDS)
        # Drained: the process waits for this queue again.
        of(tasks.occupy, "reports", 1, path)
        wait_until(lambda: succeeded("reports") == 6, "the last report", SOON_SECONDS)
    assert most_at_once(path)["reports"] == 1


def calls_of_blpop() -> int:
    """How often anybody has begun to wait."""
    return int(Broker().client.info("commandstats").get("cmdstat_blpop", {}).get("calls", 0))


def tokens(queue: str) -> int:
    """How many tokens wait."""
    return int(Broker().client.llen(keys_of(queue).wake))


@pytest.mark.usefixtures("own_redis")
def test_another_worker_is_woken_for_what_a_full_one_leaves(path: Path, go: Path, tmp_path: Path) -> None:
    """Two reports begin in two processes, each of which may run one."""
    options = ("--queues", "reports:1,default", "--processes", "2", "--concurrency", "2")
    with workers(tmp_path, *options):
        for count in (1, 2):
            of(tasks.occupy, "reports", 1, path, 0.0, str(go))
            wait_until(lambda count=count: begun(path, "reports") == count, "the report", SOON_SECONDS)
        assert len({line["pid"] for line in lines(path)}) == 2
        go.touch()


def test_it_is_shown(own_keys: None, tmp_path: Path, admin_client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """At the start, in heartbeats, on the command line, on the pages, and to autoscalers."""
    options = ("--queues", "reports=3:2,default", "--processes", "1", "--concurrency", "4")
    with workers(tmp_path, *options) as fleet:
        wait_until(servers.workers, "a worker that is shown")
        (worker,) = Inspector().workers.all()
        assert (worker.queue_slots, worker.slots) == ({"reports": 2}, 4)
        assert (worker.slots_for("reports"), worker.slots_for("default")) == (2, 4)
        call_command("asyncq", "workers", "list")
        assert "default,reports:2" in capsys.readouterr().out
        address = reverse("admin:django_asyncq_taskrecord_workers")
        assert "default, reports=3:2" in admin_client.get(address).content.decode()
        found = {queue: scale.read_scale(queue).slots for queue in ("reports", "default")}
        assert found == {"reports": 2, "default": 4}
        assert "reports=3:2, default=1" in fleet.output()


# --- one step of a worker


def put(process: Any, queue: str, *, busy: int = 0, waiting: int = 0) -> list[Job]:
    """Let a process have jobs of a queue."""
    made = [
        Job(_Run(queue), tasks.occupy, 0.0, phase=JobPhase.RUNNING)  # type: ignore[arg-type]
        for _ in range(busy + waiting)
    ]
    process.jobs.busy.update(made[:busy])
    process.jobs.add(made[busy:])
    return made


class _Run:
    """As much of a run as is asked."""

    def __init__(self, queue: str) -> None:
        self.record = TaskRecord(queue_name=queue)
        self.begun = False


def test_as_many_are_fetched_as_may_run() -> None:
    """What waits in the process counts like what runs; the other queue gets the rest."""
    with worker_process(concurrency=8, queue_slots={"reports": 3}, **BOTH) as process:
        slots = process.capacity.queue_slots
        assert slots is not None
        assert [slots.most("reports", wanted) for wanted in (1, 3, 8)] == [1, 3, 3]
        assert slots.most("default", 8) == 8
        put(process, "default", busy=4)
        (busy, *_) = put(process, "reports", busy=1, waiting=1)
        assert (slots.most("reports", 8), slots.is_full("reports"), slots.full) == (1, False, set())
        # One that enters its slot at this moment is listed twice.
        process.jobs.waiting[busy] = None
        assert slots.most("reports", 8) == 1
        put(process, "reports", waiting=1)
        assert (slots.most("reports", 8), slots.is_full("reports"), slots.full) == (0, True, {"reports"})
        slots.keep_full({"default"})
        assert slots.full == set()


def test_a_process_without_limits_counts_nothing() -> None:
    """It has not even an object for it."""
    with worker_process(**BOTH) as process:
        assert process.capacity.queue_slots is None
        assert process.fetcher.queue_slots is None


def test_the_slot_of_a_limited_queue_wakes_the_main_thread() -> None:
    """That of another queue does not; nor is the queue asked when it was not full."""
    with worker_process(concurrency=8, queue_slots={"reports": 1}, **BOTH) as process:
        (other,), (report,) = put(process, "default", busy=1), put(process, "reports", busy=1)
        process.capacity.leave_slot(other)
        assert Reason.QUEUE_FREED not in process.wakeup.wait(0).reasons
        process.fetcher.pacing.begin()
        process.fetcher.note_freed()
        assert not process.fetcher.pacing._may_have_work
        assert process.fetcher.queue_slots is not None
        assert process.fetcher.queue_slots.is_full("reports")
        process.capacity.leave_slot(report)
        assert Reason.QUEUE_FREED in process.wakeup.wait(0).reasons
        process.fetcher.note_freed()
        assert process.fetcher.pacing._may_have_work


def test_jobs_that_are_requeued_free_their_queue() -> None:
    """They have waited for a slot for too long."""
    with worker_process(concurrency=8, queue_slots={"reports": 1}, **BOTH) as process:
        assert process.capacity.queue_slots is not None
        (report,) = put(process, "reports", waiting=1)
        assert process.capacity.queue_slots.is_full("reports")
        process.jobs.waiting.clear()
        process.capacity.queue_slots.leave(report)
        assert Reason.QUEUE_FREED in process.wakeup.wait(0).reasons


def test_a_wait_leaves_out_full_queues() -> None:
    """It begins anew when there is one more to wait for, and says whose token may be lost."""
    broker, wait = Broker("worker"), PushWait(Broker("worker"), ["reports", "default"])
    try:
        assert wait.begin(without={"reports", "default"}) == []
        assert wait.since is None
        broker.client.rpush(keys_of("reports").wake, b"")
        assert wait.begin(without={"reports"}) == []
        # A wait for more than is wanted goes on.
        assert wait.begin(without={"reports", "default"}) == []
        assert wait.since is not None
        assert wait.begin() == ["default"]
        assert wait.read() == "reports"
        assert wait.begin() == []
        assert wait.begin() == []
        broker.client.rpush(keys_of("default").wake, b"")
        assert wait.read() == "default"
    finally:
        wait.close()
