"""What waits in a queue is one number on each surface, whatever door it came through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.utils import timezone

from django_asyncq import interop, lifecycle, remote
from django_asyncq.broker import Broker, keys
from django_asyncq.contrib.prometheus import AsyncqCollector
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.observe import scale
from django_asyncq.observe.counts import queue_stats
from django_asyncq.observe.inspector import Inspector

from .. import batch_tasks, inbox_tasks, wire_tasks
from ..go_peer import GoPeer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

QUEUE = "letters"


@pytest.fixture
def peer(redis_client: redis.Redis, key_prefix: str) -> Iterator[GoPeer]:
    """Another program on the queue."""
    Broker().register_queue(QUEUE)
    yield GoPeer(redis_client, QUEUE, key_prefix)
    # Under no prefix of this test.
    redis_client.delete(inbox_tasks.order.inbox)


def from_django(count: int, peer: GoPeer) -> None:
    for number in range(count):
        inbox_tasks.letter.enqueue(number)


def from_go(count: int, peer: GoPeer) -> None:
    for _ in range(count):
        peer.enqueue("email:deliver", b"{}")


def from_an_inbox(count: int, peer: GoPeer) -> None:
    document = json.dumps({"task": inbox_tasks.letter.module_path})
    for _ in range(count):
        Broker().client.lpush(keys.keys_of(QUEUE, "default").inbox, document)


def in_a_list_of_another_program(count: int, peer: GoPeer) -> None:
    peer.client.lpush(inbox_tasks.order.inbox, *["1"] * count)


def in_a_group(count: int, peer: GoPeer) -> None:
    for number in range(count):
        batch_tasks.collect.using(queue_name=QUEUE).enqueue(number)


def in_a_group_of_go(count: int, peer: GoPeer) -> None:
    for _ in range(count):
        peer.add_to_group("events", "event:add")


def delayed_until_now(count: int, peer: GoPeer) -> None:
    for number in range(count):
        inbox_tasks.letter.using(run_after=timedelta(hours=1)).enqueue(number)
    TaskRecord.objects.update(run_after=timezone.now() - timedelta(seconds=1))


def retried_by_a_person(count: int, peer: GoPeer) -> None:
    from_django(count, peer)
    rows = TaskRecord.objects.all()
    rows.update(state=TaskState.FAILED, reason=FailureReason.EXCEPTION, finished_at=timezone.now())
    peer.client.delete(*peer.client.keys(f"{peer.prefix}:*"))
    lifecycle.retry([row.id for row in rows], by_person=True)


DOORS: list[Callable[[int, GoPeer], None]] = [
    from_django,
    from_go,
    from_an_inbox,
    in_a_list_of_another_program,
    in_a_group,
    in_a_group_of_go,
    delayed_until_now,
    retried_by_a_person,
]


def said() -> dict[str, Any]:
    """What each surface says of the queue."""
    (sample,) = (
        each.value
        for family in AsyncqCollector().collect()
        for each in family.samples
        if each.name == "asyncq_queue_waiting" and each.labels["queue"] == QUEUE
    )
    return {
        "health": Inspector().health().waiting,
        "scale": scale.read_scale(QUEUE).waiting,
        "metrics": sample,
        "queues show": Inspector().queues.get(QUEUE).waiting,
        "queues list": {each.queue: each.waiting for each in Inspector().queues.all()}[QUEUE],
        "stats": {each.queue: each.waiting for each in queue_stats()}[QUEUE],
    }


@pytest.mark.parametrize("door", DOORS)
def test_each_surface_says_what_came_through_a_door(door: Callable[[int, GoPeer], None], peer: GoPeer) -> None:
    """Also of what has no row yet; and a limit of the health is about the same number."""
    assert set(said().values()) == {0}
    door(3, peer)
    assert said() == dict.fromkeys(said(), 3)
    assert Inspector().health(max_waiting=2).problems == ["3 tasks are waiting, more than 2"]


def test_doors_add_up(peer: GoPeer) -> None:
    """Nothing is counted twice, and nothing hides behind something else."""
    for door in (from_django, from_go, from_an_inbox, in_a_group_of_go):
        door(2, peer)
    assert said() == dict.fromkeys(said(), 8)
    peer.client.delete(keys.keys_of(QUEUE, "default").pending)
    assert said() == dict.fromkeys(said(), 2 + 2 + 2), "the rows are there, and Redis is not asked for what it has lost"


def test_what_only_another_program_runs_does_not_wait_for_us(peer: GoPeer) -> None:
    """Its entries are in the same lists."""
    for number in range(3):
        remote("email:send", queue_name=QUEUE).enqueue(number)
    from_go(2, peer)
    assert said() == dict.fromkeys(said(), 2)


def test_a_message_is_as_old_as_it_waits(peer: GoPeer) -> None:
    """Its age is in its entry, and a monitor's limit finds it."""
    id = peer.enqueue("email:deliver", b"{}")
    peer.client.hset(peer.task_key(id), "pending_since", (peer.now() - 600) * 10**9)
    assert 599 <= (Inspector().queues.get(QUEUE).oldest_waiting_seconds or 0) <= 660
    (problem,) = Inspector().health(max_age_seconds=300).problems
    assert problem.endswith("longer than 300 s, in queue letters, which no worker serves")


def test_what_came_and_went_is_the_difference_to_the_question_before(
    peer: GoPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of another program are arrivals too, and a queue that gets shorter will be empty."""
    monkeypatch.setattr(scale, "_samples", {})
    times = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(scale, "time", SimpleNamespace(monotonic=lambda: next(times)))
    from_go(40, peer)
    assert scale.read_scale(QUEUE).waiting == 40
    from_go(20, peer)
    grown = scale.read_scale(QUEUE)
    assert (grown.arrival_per_s, grown.service_per_s, grown.seconds_to_empty) == (2.0, 0.0, None)
    for _ in range(30):
        taken = peer.take()
        assert taken is not None
        peer.done(taken)
    drained = scale.read_scale(QUEUE)
    assert (drained.waiting, drained.service_per_s, drained.seconds_to_empty) == (30, 3.0, 10.0)


def test_a_declared_queue_that_nobody_has_used_is_empty_and_not_unknown(settings: Any) -> None:
    """Its series is there before its first task, so that a rule can be about it."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": ["default", QUEUE]}}
    assert said() == dict.fromkeys(said(), 0)


def test_health_says_for_how_long_no_supervisor_has_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While that is within the limit: a fleet that was killed a moment ago is not simply healthy."""
    monkeypatch.setattr("django_asyncq.observe.soundness.read_silence", lambda: (0, 20.0))
    call_command("asyncq", "health")
    assert "0 supervisors running (none has reported for 20 s; limit 60 s)" in capsys.readouterr().out


def test_a_wire_message_is_counted_once_it_is_adopted_too(peer: GoPeer) -> None:
    """Its row and its entry are one."""
    wire = GoPeer(peer.client, "mail", peer.prefix)
    Broker().register_queue("mail")
    wire.enqueue("email:deliver", b'{"to": "a@example.com"}')
    assert Inspector().queues.get("mail").waiting == 1
    claimed = interop.claim(Broker(), "mail", "w", 1, "default")
    assert [run.record.name for run in claimed.runs] == [wire_tasks.deliver.module_path]
    assert Inspector().queues.get("mail").waiting == 1


def test_without_redis_the_rows_alone_say_what_waits(settings: Any) -> None:
    """As with the backend for tests, of which nobody else sees anything."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}
    inbox_tasks.letter.enqueue(1)
    (info,) = Inspector().queues.all()
    assert (info.queue, info.waiting, info.pending) == (QUEUE, 1, 0)
    assert Inspector().health().waiting == 1
