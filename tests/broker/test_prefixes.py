"""Two aliases in TASKS with queues of the same name: each has a Redis prefix, and workers, of its own."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.backend import AsyncqBackend
from django_asyncq.broker import Broker
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys, queues_key, scheduler_history_key, scheduler_key, schedulers_key
from django_asyncq.checks import check_aliases
from django_asyncq.core import registry
from django_asyncq.core.aliases import one_alias_per_prefix, prefix_of
from django_asyncq.exceptions import QueueFull
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.interop.asynq_display import SchedulerEntries
from django_asyncq.models import Schedule, TaskRecord, TaskState
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.testing import EmbeddedRedis

from .. import acl, tasks
from ..workers import history, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

BACKEND = "django_asyncq.backend.AsyncqBackend"
PACKAGE = Path(__file__).parent.parent.parent / "django_asyncq"


class OwnBackend(AsyncqBackend):
    """What a project may have in place of ours."""


@pytest.fixture
def second(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`tasks.add` of a second alias, which the processes that a test starts know too."""
    monkeypatch.setenv("ASYNCQ_TEST_SECOND", "1")
    settings.TASKS = {name: {"BACKEND": BACKEND, "QUEUES": []} for name in ("default", "second")}
    return tasks.add.using(backend="second")


@pytest.fixture
def broker(second: Any) -> Broker:
    """The queues of the second alias."""
    return Broker("worker", "second")


def pending(alias: str) -> list[str]:
    """Return the ids in pending of the queue "default" of an alias."""
    return [id.decode() for id in Broker().client.lrange(QueueKeys("default", alias).pending, 0, -1)]


def test_prefix_of_an_alias(settings: Any, key_prefix: str) -> None:
    """KEY_PREFIX for the default one, with the alias behind it for any other; the option replaces either."""
    assert [prefix_of("default"), prefix_of("second")] == [key_prefix, f"{key_prefix}:second"]
    settings.TASKS = {
        "default": {"BACKEND": BACKEND},
        "second": {"BACKEND": BACKEND, "OPTIONS": {"prefix": "asynq"}},
        "third": {"BACKEND": BACKEND, "OPTIONS": {"prefix": "asynq"}},
        "dummy": {"BACKEND": "tests.nowhere.Backend"},
    }
    assert prefix_of("second") == "asynq"
    assert one_alias_per_prefix(["gone"]) == ["default", "gone", "second"]


def test_entries_lie_under_the_prefix_of_their_alias(second: Any, redis_client: redis.Redis) -> None:
    """Those of one enqueue too, whatever the queue's name."""
    ours, other = tasks.add.enqueue(1).id, second.enqueue(2).id
    assert (pending("default"), pending("second")) == ([ours], [other])
    assert Broker("worker", "second").queues() == {"default"}
    assert redis_client.smembers(queues_key()) == {b"default"}
    TaskRecord.objects.get(id=other).delete()
    assert (pending("default"), pending("second")) == ([ours], [])


def test_workers_run_the_tasks_of_their_alias_only(
    second: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst of one alias leaves the other's alone, in the same queue; both see delayed tasks become due."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    soon = timezone.now() + timedelta(seconds=1)
    for number in (1, 2):
        tasks.add.enqueue(number)
        second.enqueue(10 * number)
    second.using(run_after=soon).enqueue(30)
    done = run_workers("--backend", "second")
    assert f"keys begin with {prefix_of('second')}:" in done.stdout + done.stderr
    assert {line["a"] for line in history(tmp_path / "history")} == {10, 20, 30}
    assert (
        TaskRecord.objects.filter(state=TaskState.QUEUED).values_list("backend", flat=True).distinct().get()
        == "default"
    )
    run_workers()
    assert sorted(line["a"] for line in history(tmp_path / "history")) == [1, 2, 10, 20, 30]


def test_the_leader_serves_every_alias(second: Any, tmp_path: Path, own_redis: EmbeddedRedis) -> None:
    """Its host is another alias's: it pushes what a lost memory took from both, and recovers a killed worker's task."""
    run = second.enqueue(1)
    (claimed,) = lifecycle.claim(Broker("worker", "second"), "default", "lost", 1, "second").runs
    assert str(claimed.record.id) == run.id
    with workers(tmp_path):
        sizes = Inspection("worker", "second").sizes
        wait_until(lambda: sizes("default")["pending"] == 1, "recovery of the task of the other alias")
        acl.unrestricted(Broker().client).flushall()
        ours = tasks.add.enqueue(2)
        wait_until(lambda: pending("second") == [run.id], "push of the task of the other alias")
        wait_until(lambda: TaskRecord.objects.get(id=ours.id).state == TaskState.SUCCEEDED, "run of our own task")


def test_repairs_reach_every_prefix(second: Any, broker: Broker) -> None:
    """Those of lists and of hashes too; rows of an alias that the settings no longer name are served as before."""
    result = second.enqueue(1)
    broker.client.lpush(QueueKeys("default", "second").pending, "stray")
    assert Reconciler(Broker()).sweep().strays == 1
    TaskRecord.objects.update(backend="gone", enqueued_at=timezone.now() - timedelta(minutes=1))
    reconciler = Reconciler(Broker())
    assert reconciler.sweep().pushed == 1
    assert pending("gone") == [result.id]
    lifecycle.claim(Broker("worker", "gone"), "default", "w", 1, "gone")
    broker.client.zadd(QueueKeys("default", "gone").lease, {result.id: 1})
    reconciler._reachability = None
    assert reconciler.recover_expired() + reconciler.sweep().recovered == 1


def test_a_gate_has_one_limit_for_all_aliases(second: Any) -> None:
    """Whoever enqueues, and under whatever prefix the task lies."""
    for number in range(5):
        (tasks.gated if number % 2 else tasks.gated.using(backend="second")).enqueue("own")
    for each in (tasks.gated, tasks.gated.using(backend="second")):
        with pytest.raises(QueueFull):
            each.enqueue("own")


def test_a_retry_goes_to_the_prefix_of_its_alias(second: Any, broker: Broker) -> None:
    """One that is due, and one that a person asks for."""
    result = second.enqueue(1)
    for by_person in (False, True):
        (run,) = lifecycle.claim(broker, "default", "w", 1, "second").runs
        lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=timezone.now() - timedelta(seconds=1))
        lifecycle.record_runs([run])
        lifecycle.acknowledge(broker, "w", [run])
        if by_person:
            lifecycle.retry([run.record.id], by_person=True)
        else:
            assert forward_due(broker, ["default"]).retried == 1
        assert (pending("default"), pending("second")) == ([], [result.id])


def test_a_retry_in_the_admin_goes_to_the_prefix_of_its_alias(
    second: Any, admin_client: Client, broker: Broker
) -> None:
    """Its page knows the alias from the row."""
    result = second.enqueue(1)
    (run,) = lifecycle.claim(broker, "default", "w", 1, "second").runs
    lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=None)
    lifecycle.record_runs([run])
    lifecycle.acknowledge(broker, "w", [run])
    assert (
        admin_client.post(reverse("admin:django_asyncq_taskrecord_changelist") + f"{result.id}/retry/").status_code
        == 302
    )
    assert (pending("default"), pending("second")) == ([], [result.id])


def test_a_task_moves_when_the_prefix_of_its_alias_changes(second: Any, settings: Any, key_prefix: str) -> None:
    """Whoever finds it under the old one pushes it under the new one; nothing runs twice."""
    result = second.enqueue(1)
    options = {"prefix": f"{key_prefix}:new"}
    settings.TASKS = {
        "second": {"BACKEND": BACKEND, "OPTIONS": options},
        "third": {"BACKEND": BACKEND, "OPTIONS": {"prefix": f"{key_prefix}:second"}},
    }
    assert lifecycle.claim(Broker("worker", "third"), "default", "w", 5, "third").runs == []
    assert (pending("third"), pending("second")) == ([], [result.id])
    (run,) = lifecycle.claim(Broker("worker", "second"), "default", "w", 5, "second").runs
    assert str(run.record.id) == result.id


def test_stats_and_rebuild_name_the_alias(second: Any) -> None:
    """Where there is more than the default one."""
    tasks.add.enqueue(1)
    result = second.enqueue(1)
    Broker().client.delete(QueueKeys("default", "second").pending)

    def output(*words: str) -> str:
        stream = StringIO()
        call_command("asyncq", *words, stdout=stream, stderr=StringIO())
        return stream.getvalue()

    lines = [line.split() for line in output("stats").splitlines()]
    assert [line[:3] for line in lines[:3]] == [
        ["alias", "queue", "waiting"],
        ["default", "default", "1"],
        ["second", "default", "1"],
    ]
    found = json.loads(output("stats", "--json"))["queues"]
    assert [(each["alias"], each["queue"], each["pending"]) for each in found] == [
        ("default", "default", 1),
        ("second", "default", 0),
    ]
    Broker().client.delete(QueueKeys("default", "second").task(result.id))
    TaskRecord.objects.update(enqueued_at=timezone.now() - timedelta(minutes=1))
    (row,) = json.loads(output("rebuild", "--dry-run", "--json"))["queues"]
    assert (row["alias"], row["queue"], row["pending"]) == ("second", "default", 1)


def test_aliases_of_one_prefix_need_queues_of_their_own(settings: Any) -> None:
    """Under prefixes of their own they may share every name; under one, none."""
    settings.TASKS = {name: {"BACKEND": BACKEND, "QUEUES": ["default", name]} for name in ("default", "second")}
    assert list(check_aliases()) == []
    shared = {"BACKEND": BACKEND, "OPTIONS": {"prefix": "app"}}
    settings.TASKS = {name: {**shared, "QUEUES": [name]} for name in ("default", "second")}
    assert list(check_aliases()) == []
    settings.TASKS = {name: {**shared, "QUEUES": [name, "mail"]} for name in ("default", "second")}
    (error,) = check_aliases()
    assert "'mail'" in error.msg
    settings.TASKS = {name: {**each, "BACKEND": f"{__name__}.OwnBackend"} for name, each in settings.TASKS.items()}
    assert [each.id for each in check_aliases()] == [error.id]
    assert "'app'" in error.msg


def test_two_fleets_run_beside_each_other(
    second: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_redis: EmbeddedRedis
) -> None:
    """Each runs the tasks of its alias. The leader, of the first, recovers a task whose host the second has lost."""
    monkeypatch.setenv("ASYNCQ_TEST_HISTORY", str(tmp_path / "history"))
    for name in ("first", "second", "again"):
        (tmp_path / name).mkdir()
    with workers(tmp_path / "first") as leader:
        wait_until(lambda: "leadership acquired" in leader.output(), "leader")
        with workers(tmp_path / "second", "--backend", "second") as lost:
            tasks.add.enqueue(1)
            second.enqueue(10)
            second.using(run_after=timedelta(seconds=1)).enqueue(20)
            wait_until(lambda: {line["a"] for line in history(tmp_path / "history")} == {1, 10, 20}, "three runs")
            long = tasks.nap.using(backend="second").enqueue(2)
            wait_until(lambda: TaskRecord.objects.get(id=long.id).state == TaskState.RUNNING, "the run of a task")
            for pid in [lost.process.pid, *lost.children()]:
                os.kill(pid, signal.SIGKILL)
        sizes = Inspection("worker", "second").sizes
        wait_until(lambda: sum(sizes("default").values()) == sizes("default")["active"] + 1, "recovery of its task")
        with workers(tmp_path / "again", "--backend", "second"):
            wait_until(lambda: TaskRecord.objects.get(id=long.id).state == TaskState.SUCCEEDED, "its second run")
    assert not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists()


def test_the_leader_forwards_for_every_alias(second: Any, tmp_path: Path) -> None:
    """A delayed task, and a retry, become due while no worker of their alias runs."""
    delayed, retried = second.using(run_after=timedelta(seconds=1)).enqueue(1), second.enqueue(2)
    (run,) = lifecycle.claim(Broker("worker", "second"), "default", "w", 1, "second").runs
    lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=timezone.now() + timedelta(seconds=1))
    lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker("worker", "second"), "w", [run])
    with workers(tmp_path, "--queues", "other"):
        wait_until(lambda: set(pending("second")) == {delayed.id, retried.id}, "forwarding of both")
    assert TaskRecord.objects.get(id=retried.id).state == TaskState.QUEUED


def test_a_schedule_fires_under_the_prefix_of_the_alias_of_its_task(
    second: Any, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asynq's tools see its entry and its event there, too."""
    monkeypatch.setitem(registry._registry, second.module_path, second)
    row = Schedule(name="second", task=second.module_path, args=[1], cron="* * * * *", is_declared=True)
    row.plan_next(timezone.now())
    row.save()
    due = row.next_occurrence_at
    result, entries = Scheduler(clock=lambda: due).fire_due(), SchedulerEntries()
    assert [each.schedule for each in result.fired] == [row]
    assert (pending("default"), pending("second")) == ([], [str(result.fired[0].task_id)])
    entries.beat()
    entries.add_events(result.fired)
    counts = [redis_client.llen(scheduler_key(entries.entry_list.id, alias)) for alias in ("default", "second")]
    assert counts == [0, 1]
    assert redis_client.zcard(scheduler_history_key(str(row.pk), "second")) == 1
    entries.clear()
    assert not redis_client.zcard(schedulers_key("second"))
