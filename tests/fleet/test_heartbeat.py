"""Real worker processes are shown to asynq's tools, and take no more tasks while they are asked not to."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from django_asyncq import conf
from django_asyncq.broker import Broker, servers
from django_asyncq.broker.servers import WorkerInfo
from django_asyncq.exceptions import StillRunning
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector

from .. import tasks
from ..workers import Workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def fleet(own_keys: None, tmp_path: Path) -> Iterator[Workers]:
    """Two worker processes with two slots each, and a beat of half a second."""
    options = ("--concurrency", "2", "--processes", "2", "--queues", "default=3,mail", "--worker-id", "host-a")
    with workers(tmp_path, *options, ASYNCQ_TEST_SHUTDOWN_GRACE="2") as found:
        wait_until(lambda: len(servers.workers()) == 2, "two workers that are shown")
        yield found


def shown(**wanted: Any) -> list[WorkerInfo]:
    """Return the workers whose details have these values."""
    return [
        worker
        for worker in servers.workers()
        if worker.details is not None and all(getattr(worker.details, name) == each for name, each in wanted.items())
    ]


def state_of(result: Any) -> int:
    """The state of a task's row."""
    return TaskRecord.objects.get(pk=result.id).state


def test_each_worker_process_is_a_server(fleet: Workers) -> None:
    """With what it runs, and what asynq has no word for; a dead one goes at once, all at a clean stop."""
    long, other = tasks.nap.enqueue(30), tasks.add.enqueue(1)
    wait_until(lambda: state_of(other) == TaskState.SUCCEEDED, "the short task")
    (worker,) = wait_until(lambda: [each for each in servers.workers() if each.running], "a worker that is busy")
    (running,) = worker.running
    assert (running.id, running.type, running.queue) == (str(long.id), tasks.nap.module_path, "default")
    assert running.payload == b'{"args":[30],"kwargs":{}}'
    # It is written a tenth of a second after the start.
    record = wait_until(lambda: TaskRecord.objects.filter(pk=long.id, started_at__isnull=False).first(), "RUNNING")
    assert abs((running.started_at - record.started_at).total_seconds()) < 1
    assert (worker.host, worker.concurrency, dict(worker.queues), worker.status) == (
        "host-a",
        2,
        {"default": 3, "mail": 1},
        "active",
    )
    assert sorted(each.pid for each in servers.workers()) == sorted(fleet.children())
    details = worker.details
    assert details is not None
    assert details.worker_id == record.worker_ids[-1]
    assert details.supervisor_pid == fleet.process.pid
    assert details.rss_bytes > 10_000_000
    assert tasks.add.module_path in details.tasks
    wait_until(lambda: len(shown(is_leader=True)) == 2, "a supervisor that leads")
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: worker.id not in [each.id for each in servers.workers()], "the dead worker to go", 2)
    wait_until(lambda: len(shown(is_quarantined=False)) == 2, "its replacement")
    # Lost once more in a row, it runs alone.
    (busy,) = wait_until(lambda: [each for each in servers.workers() if each.running], "the task in another process")
    os.kill(busy.pid, signal.SIGKILL)
    (alone,) = wait_until(lambda: shown(is_quarantined=True), "the quarantine process of its task")
    assert (alone.concurrency, alone.details is not None) == (1, True)
    fleet.process.send_signal(signal.SIGTERM)
    wait_until(lambda: {worker.status for worker in servers.workers()} <= {"stopped"}, "workers that take no more")
    fleet.stop()
    client, prefix = Broker().client, Broker().prefix
    assert [
        key for kind in ("servers", "workers", "worker-info") for key in client.scan_iter(f"{prefix}:{kind}*")
    ] == []


def test_a_queue_of_a_shared_prefix_is_served_by_workers_of_either_alias(fleet: Workers, settings: Any) -> None:
    """So `health` does not say of a late task of the other alias that no worker serves its queue."""
    shared = {**settings.TASKS["default"], "OPTIONS": {"prefix": conf.current().key_prefix}}
    settings.TASKS = {**settings.TASKS, "other": shared}
    wait_until(lambda: len(Inspector("other").workers.serving("default")) == 2, "workers of the queue")
    assert {each.backend for each in Inspector("other").workers.serving("default")} == {"default"}
    assert Inspector("other").workers.serving("nobody's") == []


def test_a_drained_host_finishes_what_it_runs_and_takes_no_more(fleet: Workers) -> None:
    """Also a process that starts later; after `resume` it takes what has waited."""
    running = tasks.nap.enqueue(1.2)
    wait_until(lambda: [worker for worker in servers.workers() if worker.running], "a worker that is busy")
    assert len(servers.drain("host-a")) == 2
    wait_until(lambda: len(shown(is_draining=True)) == 2, "two workers that drain")
    assert {worker.status for worker in servers.workers()} == {"stopped"}
    waiting = [tasks.add.enqueue(number) for number in range(5)]
    wait_until(lambda: state_of(running) == TaskState.SUCCEEDED, "what ran")
    idle = shown(is_draining=True)[0]
    os.kill(idle.pid, signal.SIGKILL)
    wait_until(
        lambda: len(shown(is_draining=True)) == 2 and idle.id not in [worker.id for worker in servers.workers()],
        "a replacement that drains",
    )
    assert {state_of(result) for result in waiting} == {TaskState.QUEUED}
    assert servers.resume("host-a")
    wait_until(lambda: {state_of(result) for result in waiting} == {TaskState.SUCCEEDED}, "what has waited")
    wait_until(lambda: len(shown(is_draining=False)) == 2, "two workers that take tasks")


def test_a_drain_that_waits_returns_when_no_body_runs_or_begins(fleet: Workers) -> None:
    """Before that it says which tasks the processes still have."""
    running = tasks.nap.enqueue(2.0)
    wait_until(lambda: [worker for worker in servers.workers() if worker.running], "a worker that is busy")
    with pytest.raises(StillRunning, match=running.id) as caught:
        Inspector().workers.drain("host-a", wait=0.2)
    assert caught.value.ids == [running.id]
    assert len(Inspector().workers.drain("host-a", wait=30)) == 2
    assert state_of(running) == TaskState.SUCCEEDED
    waiting = tasks.add.enqueue(1)
    assert {each.is_draining for each in Inspector().workers.all()} == {True}
    assert state_of(waiting) == TaskState.QUEUED
    # A request of another name holds too.
    (first, _) = Inspector().workers.all()
    Inspector().workers.drain(first.id)
    out = io.StringIO()
    call_command("asyncq", "workers", "resume", first.id, stdout=out)
    assert "a request to take no more tasks still holds for host-a" in out.getvalue()
    assert Inspector().workers.resume("host-a")
    assert Inspector().workers.drained_by("host-a") == []


def test_one_drained_process_leaves_the_work_to_the_other(fleet: Workers) -> None:
    """Whichever of them has the free slots."""
    first, second = servers.workers()
    assert first.details is not None and second.details is not None
    servers.drain(first.details.worker_id)
    wait_until(lambda: [worker.id for worker in shown(is_draining=True)] == [first.id], "one worker that drains")
    results = [tasks.add.enqueue(number) for number in range(20)]
    wait_until(lambda: all(state_of(result) == TaskState.SUCCEEDED for result in results), "all tasks")
    ran = {worker for record in TaskRecord.objects.all() for worker in record.worker_ids}
    assert ran == {second.details.worker_id}
