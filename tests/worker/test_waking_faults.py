"""Idle workers as whole processes: what is pushed to them is run, whatever happens to one of them."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import keys_of, own_queues_key
from django_asyncq.broker.waits import PushWait
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.fetch import LONGEST_BACKOFF_SECONDS, Fetcher, Pacing, QueueOrder
from django_asyncq.worker.process import WorkerProcess

from .. import tasks
from ..clock import Clock
from ..runs import worker_process
from ..workers import Workers, history, wait_until, workers

# Far less than a look is away, and more than a slow machine needs.
SOON_SECONDS = 30

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def history_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history file that tasks in every process write to."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(path))
    # What wakes a worker here is no look of its own.
    monkeypatch.setenv("ASYNCQ_TEST_LOOK", "60")
    return path


def waits() -> int:
    """How many connections wait for pushes, of all workers of the server."""
    return sum("b" in each["flags"] for each in Broker().client.client_list())


def wait_idle(fleet: Workers) -> None:
    """Wait until each of its processes waits for pushes."""
    wait_until(lambda: waits() == len(fleet.children()) > 0, "idle workers")


def succeeded(count: int) -> bool:
    return TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == count


def begun(path: Path) -> list[str]:
    """The ids of all runs, in their order."""
    return [line["id"] for line in history(path) if line["event"] == "stamp"]


# --- whole processes


@pytest.mark.usefixtures("own_redis")
class TestFleets:
    """Idle processes, and what is pushed to them."""

    def test_single_tasks_start_in_an_idle_fleet(self, tmp_path: Path, history_path: Path) -> None:
        """Each once, long before a worker would look by itself."""
        ids = []
        with workers(tmp_path, "--processes", "2") as fleet:
            for count in range(1, 4):
                wait_idle(fleet)
                ids.append(tasks.stamp.enqueue().id)
                wait_until(lambda count=count: succeeded(count), "the task", SOON_SECONDS)
        assert begun(history_path) == ids

    def test_tasks_of_several_queues_start(self, tmp_path: Path, history_path: Path) -> None:
        """A worker waits for all its queues at once; those that come at the same time are all run."""
        with workers(tmp_path, "--processes", "1", "--queues", "a=3,b=2,c") as fleet:
            for count in (1, 2):
                wait_idle(fleet)
                for queue in "cab":
                    tasks.stamp.using(queue_name=queue).enqueue()
                wait_until(lambda count=count: succeeded(3 * count), "the tasks", SOON_SECONDS)
        assert len(begun(history_path)) == 6

    @pytest.mark.parametrize("priority", [7, -7])
    def test_a_task_with_a_priority_starts(self, priority: int, tmp_path: Path) -> None:
        """At once, as every other."""
        with workers(tmp_path, "--processes", "1") as fleet:
            wait_idle(fleet)
            tasks.stamp.using(priority=priority).enqueue()
            wait_until(lambda: succeeded(1), "the task", SOON_SECONDS)

    def test_a_task_pushed_to_a_frozen_process_is_run_by_another(self, tmp_path: Path, history_path: Path) -> None:
        """The frozen one gets no more than a token. When it wakes, it finds nothing."""
        (tmp_path / "other").mkdir()
        with (
            workers(tmp_path, "--processes", "1", ASYNCQ_TEST_LEASE="60") as frozen,
            workers(tmp_path / "other", "--processes", "1", ASYNCQ_TEST_LEASE="60"),
        ):
            wait_until(lambda: waits() == 2, "waits of both processes")
            (pid,) = frozen.children()
            os.kill(pid, signal.SIGSTOP)
            try:
                task = tasks.stamp.enqueue()
                wait_until(lambda: succeeded(1), "the task", SOON_SECONDS)
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: waits() == 2, "waits of both processes")
        assert begun(history_path) == [task.id]
        assert TaskRecord.objects.get(id=task.id).attempt == 1

    def test_an_idle_process_that_is_killed_takes_no_task_along(self, tmp_path: Path, history_path: Path) -> None:
        """Whether Redis has noticed or not: no task waits for the end of a lease, which lasts a minute here."""
        with workers(tmp_path, "--processes", "1", ASYNCQ_TEST_LEASE="60") as fleet:
            for count in range(1, 4):
                wait_idle(fleet)
                (pid,) = fleet.children()
                os.kill(pid, signal.SIGKILL)
                tasks.stamp.enqueue()
                wait_until(lambda count=count: succeeded(count), "the task", 20)
        assert len(begun(history_path)) == 3

    def test_workers_whose_connections_were_cut_wait_again(self, tmp_path: Path, history_path: Path) -> None:
        """What is pushed at that moment is run, too."""
        with workers(tmp_path, "--processes", "2") as fleet:
            for count in range(1, 4):
                wait_idle(fleet)
                Broker().client.client_kill_filter(_type="normal", skipme=True)
                tasks.stamp.enqueue()
                wait_until(lambda count=count: succeeded(count), "the task", SOON_SECONDS)
        assert len(begun(history_path)) == 3

    def test_workers_wait_again_after_redis_was_restarted(
        self, tmp_path: Path, history_path: Path, own_redis: EmbeddedRedis
    ) -> None:
        """It has lost its memory."""
        with workers(tmp_path, "--processes", "2") as fleet:
            wait_idle(fleet)
            own_redis.kill()
            own_redis.restart()
            wait_idle(fleet)
            tasks.stamp.enqueue()
            wait_until(lambda: succeeded(1), "the task", SOON_SECONDS)
        assert len(begun(history_path)) == 1

    def test_a_paused_queue_is_run_once_it_is_resumed(self, tmp_path: Path, history_path: Path) -> None:
        """What was pushed meanwhile waits, and another queue is not held up."""
        paused = keys_of("a").paused
        with workers(tmp_path, "--processes", "1", "--queues", "a,b") as fleet:
            wait_idle(fleet)
            Broker().client.set(paused, 1)
            task = tasks.stamp.using(queue_name="a").enqueue()
            other = tasks.stamp.using(queue_name="b").enqueue()
            wait_until(lambda: succeeded(1), "the task of the other queue", SOON_SECONDS)
            Broker().client.delete(paused)
            wait_until(lambda: succeeded(2), "the task", SOON_SECONDS)
        assert begun(history_path) == [other.id, task.id]

    def test_tasks_of_other_programs_start_soon(self, tmp_path: Path, history_path: Path) -> None:
        """They come without tokens, as asynq pushes them; the leader notices them within about a second."""
        with workers(tmp_path, "--processes", "1") as fleet:
            wait_idle(fleet)
            wait_until(lambda: "this process leads" in fleet.output(), "the leader")
            for count in range(1, 4):
                client, keys = Broker().client, keys_of("default")
                client.set(keys.paused, 1)
                tasks.stamp.enqueue()
                wait_until(lambda: not tokens(), "a worker that finds the queue paused")
                wait_idle(fleet)
                client.delete(keys.paused)
                wait_until(lambda count=count: succeeded(count), "the task", SOON_SECONDS)
        assert len(begun(history_path)) == 3

    def test_a_stopped_fleet_leaves_nothing(self, tmp_path: Path, key_prefix: str) -> None:
        """Neither a task nor a key of its own."""
        with workers(tmp_path, "--processes", "2") as fleet:
            wait_idle(fleet)
            tasks.stamp.enqueue()
            wait_until(lambda: succeeded(1), "the task")
            wait_idle(fleet)
            assert fleet.stop() == 0
        tasks.stamp.enqueue()
        left = {key.decode() for key in Broker().client.scan_iter(f"{key_prefix}*")}
        assert not [key for key in left if ":held:" in key]
        assert tokens() == 1


# --- one step of a worker


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """A worker process whose main thread is the test's; nothing sleeps but the test."""
    with worker_process() as found:
        yield found


def wait_of(fetcher: Fetcher) -> PushWait:
    """Let a fetcher that has found nothing wait for pushes; return its wait."""
    fetcher.fetch()
    fetcher.begin_waits()
    (wait,) = fetcher.sockets.values()
    return wait


def tokens(queue: str = "default") -> int:
    return int(Broker().client.llen(keys_of(queue).wake))


def test_a_process_that_is_woken_and_full_wakes_another(process: WorkerProcess, monkeypatch: Any) -> None:
    """It asks for tasks itself when it has capacity again."""
    fetcher = process.fetcher
    wait = wait_of(fetcher)
    monkeypatch.setattr(process.capacity, "to_fetch", lambda: 0)
    tasks.stamp.enqueue()
    assert select.select(list(fetcher.sockets), [], [], 10)[0]
    assert tokens() == 0
    fetcher.read_wait(wait)
    assert not fetcher.fetch()
    assert (tokens(), list(fetcher.sockets)) == (1, [])
    assert fetcher.pacing.is_due()


def test_a_process_that_cannot_read_rows_wakes_another(process: WorkerProcess, monkeypatch: Any) -> None:
    """It may be the only one that cannot."""
    fetcher = process.fetcher
    wait = wait_of(fetcher)
    tasks.stamp.enqueue()
    assert select.select(list(fetcher.sockets), [], [], 10)[0]
    fetcher.read_wait(wait)

    def unreachable(*arguments: object) -> None:
        raise BrokerUnavailable("unreachable")

    monkeypatch.setattr(lifecycle, "claim", unreachable)
    fetcher.fetch()
    assert tokens() == 1


def test_a_process_that_is_full_before_it_asks_the_queue_wakes_another(
    process: WorkerProcess, monkeypatch: Any
) -> None:
    """Tasks of another queue came first."""
    process.fetcher.order.weights, process.fetcher.order.finds_queues = {"a": 2, "b": 1}, False
    process.fetcher.order.strict = True
    fetcher = process.fetcher
    wait = wait_of(fetcher)
    monkeypatch.setattr(process.capacity, "to_fetch", lambda: 1)
    tasks.stamp.using(queue_name="b").enqueue()
    assert select.select(list(fetcher.sockets), [], [], 10)[0]
    fetcher.read_wait(wait)
    tasks.stamp.using(queue_name="a").enqueue()
    fetcher.fetch()
    assert (tokens("a"), tokens("b")) == (0, 1)


@pytest.mark.parametrize("stops", [True, False])
def test_a_process_that_stops_or_pauses_passes_its_token_on(process: WorkerProcess, stops: bool) -> None:
    """The one that has come at the last moment, too."""
    fetcher = process.fetcher
    wait_of(fetcher)
    tasks.stamp.enqueue()
    wait_until(lambda: waits() == 0, "end of the wait")
    (fetcher.stop if stops else fetcher.pause)()
    assert (tokens(), fetcher.sockets) == (1, {})


def test_a_new_queue_is_waited_for(process: WorkerProcess) -> None:
    """And one that was removed is not; the connection is another one then."""
    fetcher = process.fetcher
    fetcher.order = QueueOrder(process.broker, {}, strict=False)
    Broker().client.sadd(own_queues_key(), "default", "gone")
    wait = wait_of(fetcher)
    assert "gone" in wait.queues
    Broker().client.srem(own_queues_key(), "gone")
    Broker().client.sadd(own_queues_key(), "new")
    fetcher.order.refresh()
    fetcher.pacing.note_push()
    queues = wait_of(fetcher).queues
    assert ("gone" in queues, "new" in queues) == (False, True)
    assert wait.since is None


def test_waits_that_fail_are_logged_once_and_begun_again(
    own_redis: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when they fail for the second time, one when Redis answers again; nothing waits in between."""
    caplog.set_level("INFO", logger="django_asyncq.worker")
    with worker_process() as process:
        fetcher, clock = process.fetcher, Clock()
        fetcher.pacing = Pacing(clock)
        wait = wait_of(fetcher)
        with redis.Redis.from_url(own_redis.url, protocol=2) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        fetcher.read_wait(wait)
        assert (fetcher.is_idle, fetcher.pacing.is_due(), fetcher.pacing.wait_failures) == (True, True, 1)
        own_redis.kill()
        for failures in range(2, 6):
            clock.now += LONGEST_BACKOFF_SECONDS
            fetcher.begin_waits()
            assert fetcher.pacing.wait_failures == failures
            assert not fetcher.sockets
            fetcher.begin_waits()
            assert fetcher.pacing.wait_failures == failures, "it is too early"
        assert [record.levelname for record in caplog.records if "pushes" in record.message] == ["WARNING"]
        own_redis.restart()
        clock.now += LONGEST_BACKOFF_SECONDS
        fetcher.begin_waits()
        assert list(fetcher.sockets.values()) == [wait]
        tasks.stamp.enqueue()
        assert select.select(list(fetcher.sockets), [], [], 10)[0]
        fetcher.read_wait(wait)
        assert fetcher.pacing.wait_failures == 0
        assert fetcher.pacing.is_due()
        assert [record.levelname for record in caplog.records if "pushes" in record.message] == ["WARNING", "INFO"]


def test_a_wait_that_is_in_progress_goes_on(process: WorkerProcess) -> None:
    """Queues that are found empty again keep their wait; a new wait begins only after its pause."""
    fetcher, clock = process.fetcher, Clock()
    fetcher.pacing = Pacing(clock)
    fetcher.fetch()
    fetcher.pacing.wait_later(0.5)
    assert fetcher.sleep_seconds(0.04) == pytest.approx(0.5)
    fetcher.begin_waits()
    assert not fetcher.sockets
    clock.now += 0.6
    assert fetcher.sleep_seconds(0.04) == 0
    fetcher.begin_waits()
    sockets = fetcher.sockets
    assert len(sockets) == 1
    fetcher.pacing.note_push()
    fetcher.fetch()
    fetcher.begin_waits()
    assert fetcher.sockets == sockets
