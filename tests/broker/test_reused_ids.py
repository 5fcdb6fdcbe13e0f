"""Another program uses the id of an open row again: after Redis was emptied, or its tools have deleted the entry.

Go programs that run a task periodically give it one id for ever. The new message is a task of its own: nothing that is
done with the row may remove or replace it.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db.models import Q

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.groups import Groups
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import deletion
from django_asyncq.lifecycle.messages import entry_of
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.storage import database_clock

from .. import go_client, wire_tasks
from ..interop.test_adopting import QUEUE, WORKER, claim, payload, run, state_of

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = payload(to="second")


@pytest.fixture
def row(redis_client: redis.Redis, key_prefix: str) -> TaskRecord:
    """Return the open row of a message, whose id is that of another message now."""
    wire_tasks.heard.clear()
    go_client.enqueue(redis_client, QUEUE, "email:deliver", payload(to="first"), id="report")
    lifecycle.requeue(Broker(), WORKER, claim())
    for key in redis_client.scan_iter(f"{key_prefix}*"):
        redis_client.delete(key)
    Broker.forget_registered()
    go_client.enqueue(redis_client, QUEUE, "email:deliver", SECOND, id="report")
    Broker().register_queue(QUEUE)
    TaskRecord.objects.update(enqueued_at=database_clock.now() - timedelta(seconds=60))
    return TaskRecord.objects.get()


def sweep() -> None:
    reconciler = Reconciler(Broker())
    for _ in range(2):
        reconciler.push_missing(young=False)
        for steps in (reconciler.repair_lists(), reconciler.repair_hashes(), reconciler.park_missing()):
            for _ in steps:
                pass


def run_all() -> list[str]:
    """Run what there is; return the arguments of the runs."""
    for _ in range(3):
        for claimed in claim():
            run(claimed)
        forward_due(Broker(), [QUEUE])
        sweep()
    return sorted(to for _, (to, _, _) in wire_tasks.heard)


def is_whole(client: redis.Redis, state: str) -> bool:
    """Return whether the second message is where it was."""
    return state_of(client, "report") == state and go_client.stored(client, QUEUE, "report").payload == SECOND


def put(client: redis.Redis, place: str) -> None:
    """Put the message elsewhere, as the other program's scripts do."""
    keys = QueueKeys(QUEUE)
    client.lrem(keys.pending, 0, "report")
    client.zadd(getattr(keys, place), {"report": time.time() + 60})
    client.hset(keys.task("report"), "state", place)


@pytest.mark.parametrize("is_pushed", [True, False])
def test_both_run(row: TaskRecord, is_pushed: bool) -> None:
    if is_pushed:
        lifecycle.dispatch([row], again=True)
        sweep()
    assert run_all() == ["first", "second"]


@pytest.mark.parametrize("act", ["delete", "cancel", "expire"])
def test_what_ends_the_row_leaves_the_message(act: str, row: TaskRecord, redis_client: redis.Redis) -> None:
    """Seen: each of them removed the message of the other program unrun."""
    if act == "delete":
        row.delete()
    elif act == "cancel":
        assert lifecycle.cancel([row.id]).asked == 1
        assert lifecycle.close_cancelled() == 1
    else:
        TaskRecord.objects.update(expires_at=database_clock.now() - timedelta(seconds=60))
        lifecycle.expire([row.id])
    assert is_whole(redis_client, "pending")
    assert run_all() == ["second"]


def test_a_retry_by_a_person_waits_for_the_id(row: TaskRecord, redis_client: redis.Redis) -> None:
    """Seen: it replaced the message where that was not pending."""
    put(redis_client, "archived")
    failed = {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "finished_at": database_clock.now()}
    TaskRecord.objects.update(**failed)
    assert lifecycle.retry([row.id], by_person=True).retried
    assert is_whole(redis_client, "archived")


@pytest.mark.parametrize("place", ["scheduled", "retry", "archived", "completed"])
@pytest.mark.parametrize("is_retrying", [True, False])
def test_a_sweep_replaces_no_message(place: str, is_retrying: bool, row: TaskRecord, redis_client: redis.Redis) -> None:
    """Seen: the push of a QUEUED row, and the parking of a RETRYING one, overwrote what waited under the id."""
    put(redis_client, place)
    if is_retrying:
        later = database_clock.now() + timedelta(seconds=60)
        TaskRecord.objects.update(state=TaskState.FAILED, reason=FailureReason.EXCEPTION, retry_at=later)
    for _ in range(2):
        sweep()
    assert is_whole(redis_client, place)


@pytest.mark.parametrize("place", ["scheduled", "retry", "archived", "completed"])
def test_a_member_that_joins_its_group_again_replaces_no_message(
    place: str, row: TaskRecord, redis_client: redis.Redis
) -> None:
    """Seen: the script looked at the state alone, and overwrote what waited under the id."""
    put(redis_client, place)
    words = Groups("producer").add(QUEUE, "g", [entry_of(row)], rules="", again=True)
    assert words == ["exists"]
    assert is_whole(redis_client, place)


def test_the_pruner_removes_the_entry_of_its_row_only(redis_client: redis.Redis) -> None:
    """Seen: it looked for the id of the row, so the archived message stayed, and a retry there made the row anew."""
    for id in ("a", "b"):
        go_client.enqueue(redis_client, QUEUE, "email:deliver", b"{", id=id)
    assert claim() == []
    redis_client.hdel(QueueKeys(QUEUE).task("b"), "row")
    ids = list(TaskRecord.objects.values_list("id", flat=True))
    assert deletion.prune(Broker(), ids, Q(finished_at__isnull=False)) == 2
    assert (state_of(redis_client, "a"), state_of(redis_client, "b")) == ("", "archived")


def test_cancelled_runs_are_asked_again_with_one_statement(row: TaskRecord, django_assert_num_queries: Any) -> None:
    """Each row's id in Redis was read with a statement of its own, which fails for a row that is deleted meanwhile."""
    now = database_clock.now()
    TaskRecord.objects.update(state=TaskState.RUNNING, started_at=now, cancel_requested_at=now)
    with django_assert_num_queries(1):
        assert lifecycle.ask_again() == 1
