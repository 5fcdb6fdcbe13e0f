"""Tasks that only another program runs: what is sent, and how their rows follow it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from django.db import OperationalError, transaction

from django_asyncq import DuplicateTask, InvalidArguments, QueueFull, TaskFailed, interop, lifecycle, remote
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys, reachability_key
from django_asyncq.broker.message import decode_message
from django_asyncq.core.options import MOST_ATTEMPTS
from django_asyncq.exceptions import InvalidOption
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.interop.verdict import DELETED
from django_asyncq.lifecycle import dispatching
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.storage import database_clock
from django_asyncq.tasks import RemoteTask
from django_asyncq.testing import run_tasks
from django_asyncq.testing.faults import ProcessDied, fail_at

from .. import batch_tasks, tasks
from ..go_peer import GoPeer, Taken

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

deliver = remote("email:deliver", queue_name="go", max_attempts=3, timeout=60)


@pytest.fixture
def peer(redis_client: redis.Redis, key_prefix: str) -> GoPeer:
    """The Go server that handles the tasks."""
    return GoPeer(redis_client, "go", key_prefix)


@pytest.fixture
def reconciler() -> Iterator[Reconciler]:
    Broker().mark_alive()
    return Reconciler(Broker())


def taken(peer: GoPeer) -> Taken:
    found = peer.take()
    assert found is not None
    return found


def row() -> TaskRecord:
    return TaskRecord.objects.get()


def grown() -> None:
    """Have all rows be older than the seconds for which the process that enqueued them may still push them."""
    TaskRecord.objects.update(enqueued_at=database_clock.now() - timedelta(minutes=10))


# --- what is sent


def test_the_message_is_what_the_other_program_expects(peer: GoPeer) -> None:
    """Its type, a JSON object or value, and the options that asynq has."""
    result = deliver.using(headers={"trace": "1"}).enqueue(to="a@b.c", copies=2)
    message = taken(peer).message
    assert (message.type, message.id, message.queue) == ("email:deliver", result.id, "go")
    assert json.loads(message.payload) == {"to": "a@b.c", "copies": 2}
    assert (message.retry, message.timeout, message.retention) == (2, 60, 86_400)
    assert message.headers == {"trace": "1"}
    found = row()
    assert (found.name, found.is_remote, found.kwargs) == ("email:deliver", True, {"to": "a@b.c", "copies": 2})


@pytest.mark.parametrize(
    ("task", "args", "sent"),
    [
        (deliver, ([1, "é"],), '[1,"é"]'.encode()),
        (deliver, (None,), b"null"),
        (deliver, (), b"{}"),
        (remote("raw", queue_name="go", payload="bytes"), (b"\xff\x00",), b"\xff\x00"),
    ],
)
def test_payloads(peer: GoPeer, task: RemoteTask, args: tuple[Any, ...], sent: bytes) -> None:
    """One value is sent as it is; bytes are shown as base64."""
    task.enqueue(*args)
    assert taken(peer).message.payload == sent
    assert row().args == ([{"base64": "/wA="}] if task.payload == "bytes" else list(args))


@pytest.mark.parametrize(
    ("task", "args", "kwargs"),
    [
        (deliver, (1,), {"a": 1}),
        (deliver, (1, 2), {}),
        (deliver, ({1},), {}),
        (remote("raw", queue_name="go", payload="bytes"), ("text",), {}),
        (remote("raw", queue_name="go", payload="bytes"), (), {"a": b""}),
    ],
)
def test_calls_that_cannot_be_sent_are_refused(task: RemoteTask, args: Any, kwargs: Any) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidArguments):
        task.enqueue(*args, **kwargs)
    assert not TaskRecord.objects.exists()


@pytest.mark.parametrize(
    "declare",
    [
        lambda: remote("", queue_name="go"),
        lambda: remote("email:*", queue_name="go"),
        lambda: remote("a", queue_name="no queue"),
        lambda: remote("a", queue_name="go", payload="xml"),  # type: ignore[arg-type]
        lambda: remote("a", queue_name="go", max_attempts=0),
        lambda: deliver.using(priority=1),
        lambda: deliver.using(unique=True, on_duplicate="replace"),
    ],
)
def test_what_another_program_cannot_do_is_refused(declare: Any) -> None:
    """With an error that names the option."""
    with pytest.raises(InvalidOption):
        declare()
    with pytest.raises(TypeError, match="atomic"):
        remote("a", queue_name="go", atomic=True)


def test_a_rollback_sends_nothing_and_many_are_sent_at_once(peer: GoPeer) -> None:
    """As any task of ours."""
    with pytest.raises(RuntimeError), transaction.atomic():
        deliver.enqueue(to="x")
        raise RuntimeError
    assert peer.ids("pending") == []
    results = deliver.enqueue_many([{"to": "a"}, ("b",)])
    assert peer.ids("pending") == [result.id for result in reversed(results)]


def test_gate_unique_and_delay(peer: GoPeer) -> None:
    """Limits are kept before the message is sent; a delayed task is scheduled."""
    gated = remote("gated", queue_name="go", gate="smtp", queue_limit=1)
    gated.enqueue(to="a")
    with pytest.raises(QueueFull):
        gated.enqueue(to="b")
    several = remote("several", queue_name="go", gate=("account-{to}", "smtp-2"), queue_limit=(2, 1))
    several.enqueue(to="a")
    with pytest.raises(QueueFull, match="'smtp-2'"):
        several.enqueue(to="b")
    single = remote("single", queue_name="go", unique="{to}")
    single.enqueue(to="a")
    with pytest.raises(DuplicateTask):
        single.enqueue(to="a")
    later = deliver.using(run_after=timedelta(hours=1)).enqueue(to="c")
    assert peer.ids("scheduled") == [later.id]


def test_a_copy_survives_another_process() -> None:
    """Its name is no path, so it is copied by its values."""
    assert pickle.loads(pickle.dumps(deliver)) == deliver


# --- how the row follows


def test_the_row_follows_to_success(peer: GoPeer, reconciler: Reconciler) -> None:
    """QUEUED, RUNNING, RETRYING, RUNNING, SUCCEEDED, with the result and the error of the failed attempt."""
    result = deliver.enqueue(to="a")
    states = []

    def follow() -> None:
        reconciler.quick_repairs()
        states.append((row().state, row().retry_at is not None, row().attempt))

    follow()
    task = taken(peer)
    follow()
    peer.retry(task, "greylisted", delay=-1)
    follow()
    peer.forward()
    follow()
    peer.succeed(taken(peer), b'"sent"')
    follow()
    assert states == [
        (TaskState.QUEUED, False, 0),
        (TaskState.RUNNING, False, 1),
        (TaskState.FAILED, True, 1),
        (TaskState.QUEUED, False, 1),
        (TaskState.SUCCEEDED, False, 2),
    ]
    found = deliver.get_result(result.id)
    assert (found.return_value, found.task) == ("sent", deliver)
    assert result.wait(timeout=1) == "sent"
    assert [error["message"] for error in row().errors] == ["greylisted"]
    assert peer.state(result.id) == ""
    assert not any(reconciler.quick_repairs())


def test_a_final_failure_has_the_text_of_the_other_program(peer: GoPeer, reconciler: Reconciler) -> None:
    """And a person may retry it, from the admin or with asynq's tools."""
    result = deliver.enqueue(to="a")
    peer.archive(taken(peer), "no such address")
    reconciler.quick_repairs()
    found = row()
    assert (found.state, found.reason) == (TaskState.FAILED, FailureReason.EXCEPTION)
    assert found.errors[0]["message"] == "no such address"
    with pytest.raises(TaskFailed):
        result.wait(timeout=1)
    assert lifecycle.retry([found.id], by_person=True).retried
    reconciler.quick_repairs()
    assert row().state == TaskState.QUEUED
    peer.succeed(taken(peer), b"1")
    reconciler.quick_repairs()
    assert row().state == TaskState.SUCCEEDED


def test_our_workers_never_take_it(peer: GoPeer) -> None:
    """A worker of ours that serves the queue gives it back; the other program gets it some seconds later."""
    result = deliver.enqueue(to="a")
    claim = interop.claim(Broker(), "go", "w", 1, "default")
    assert (claim.runs, row().state) == ([], TaskState.QUEUED)
    peer.forward(at=peer.now() + 60)
    assert taken(peer).id == result.id


def test_a_deleted_entry_fails_the_row(peer: GoPeer, reconciler: Reconciler) -> None:
    """Redis has had it, and has lost no memory since."""
    deliver.enqueue(to="a")
    reconciler.quick_repairs()
    assert peer.inspector_delete(str(row().id)) == 1
    reconciler.quick_repairs()
    assert (row().state, row().reason) == (TaskState.FAILED, FailureReason.WORKER_LOST)
    assert row().errors[0]["message"] == DELETED


# What a handler in Go returns, what asynq does then, and what the row shows.
OUTCOMES: dict[str, tuple[Callable[[GoPeer, Taken], None], TaskState, FailureReason]] = {
    "nil": (lambda peer, taken: peer.succeed(taken, b"1"), TaskState.SUCCEEDED, FailureReason.NONE),
    "an error": (lambda peer, taken: peer.fail(taken, "no"), TaskState.FAILED, FailureReason.EXCEPTION),
    "SkipRetry": (lambda peer, taken: peer.archive(taken, "no"), TaskState.FAILED, FailureReason.EXCEPTION),
    "RevokeTask": (lambda peer, taken: peer.done(taken), TaskState.FAILED, FailureReason.WORKER_LOST),
    "nothing: it was killed": (lambda peer, taken: None, TaskState.RUNNING, FailureReason.NONE),
}


@pytest.mark.parametrize("was_seen", [False, True])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_each_outcome_of_a_handler_is_one_run(
    outcome: str, was_seen: bool, peer: GoPeer, reconciler: Reconciler
) -> None:
    """Whether or not the leader looked while Redis had the entry: an absence is not taken for a push that failed."""
    end, state, reason = OUTCOMES[outcome]
    deliver.enqueue(to="a")
    if was_seen:
        reconciler.quick_repairs()
    run = taken(peer)
    if was_seen:
        reconciler.quick_repairs()
    end(peer, run)
    grown()
    for _ in range(3):
        reconciler.quick_repairs()
        assert peer.take() is None
    assert (row().state, row().reason) == (state, reason)


def test_a_note_that_the_database_refuses_is_written_by_the_leader(
    peer: GoPeer, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The push has succeeded all the same."""
    with monkeypatch.context() as patch:
        patch.setattr(dispatching, "note_seen", Mock(side_effect=OperationalError("full")))
        deliver.enqueue(to="a")
    assert "which their rows do not say yet: full" in caplog.text
    assert (row().fence, len(peer.ids("pending"))) == (0, 1)
    reconciler.quick_repairs()
    assert row().fence > 0


@pytest.mark.parametrize("was_running", [False, True])
def test_an_entry_that_redis_forgot_is_pushed_again(peer: GoPeer, reconciler: Reconciler, was_running: bool) -> None:
    """Redis is younger than what the row knows of it."""
    deliver.enqueue(to="a")
    if was_running:
        taken(peer)
    reconciler.quick_repairs()
    Broker().remove("go", [str(row().id)])
    grown()
    TaskRecord.objects.update(fence=peer.now() - 10)
    Broker().client.set(f"{peer.prefix}:alive", peer.now() - 5)
    reconciler.quick_repairs()
    assert (row().state, peer.ids("pending")) == (TaskState.QUEUED, [str(row().id)])


def test_an_older_copy_of_redis_deletes_nothing(peer: GoPeer, reconciler: Reconciler) -> None:
    """It has the mark that it remembers everything, but nobody has reached it since the copy was made."""
    result = deliver.enqueue(to="a")
    reconciler.tick(0.0)
    Broker().remove("go", [result.id])
    peer.client.hset(reachability_key(), "last", (peer.now() - 300) * 1000)
    grown()
    reconciler.quick_repairs()
    assert (row().state, peer.ids("pending")) == (TaskState.QUEUED, [result.id])
    peer.client.hset(reachability_key(), "resumed", (peer.now() - 5) * 1000)
    reconciler.quick_repairs()
    peer.inspector_delete(result.id)
    reconciler.quick_repairs()
    assert row().state == TaskState.FAILED


def test_a_row_whose_process_died_before_the_push_is_pushed(peer: GoPeer, reconciler: Reconciler) -> None:
    """Redis has never had it."""
    with pytest.raises(ProcessDied), fail_at("enqueue.committed"):
        deliver.enqueue(to="a")
    assert reconciler.quick_repairs().followed == 0
    grown()
    assert reconciler.quick_repairs().followed == 1
    assert peer.ids("pending") == [str(row().id)]


def test_a_retry_whose_process_died_before_the_push_is_pushed(peer: GoPeer, reconciler: Reconciler) -> None:
    """Its entry is in the archive still, as its last failure was settled."""
    result = deliver.enqueue(to="a")
    peer.archive(taken(peer), "no")
    reconciler.quick_repairs()
    with pytest.raises(ProcessDied), fail_at("retry.committed"):
        lifecycle.retry([row().id], by_person=True)
    assert peer.ids("archived") == [result.id]
    reconciler.quick_repairs()
    assert (row().state, peer.ids("pending")) == (TaskState.QUEUED, [result.id])
    peer.succeed(taken(peer), b"1")
    reconciler.quick_repairs()
    assert (row().state, row().attempt) == (TaskState.SUCCEEDED, 2)


def test_a_missing_entry_is_not_pushed_when_its_row_was_cancelled_meanwhile(
    peer: GoPeer, reconciler: Reconciler
) -> None:
    """The other program would run it: it knows no rows."""
    result = deliver.enqueue(to="a")
    Broker().remove("go", [result.id])
    TaskRecord.objects.update(fence=0)  # as if it had never been pushed
    grown()
    read_before = [row()]
    assert result.cancel() == "asked"
    since = Broker().alive_since()
    assert since is not None
    assert interop.follow_remote(Broker(), read_before, since, database_clock.now()) == 0
    assert peer.ids("pending") == []


@pytest.mark.parametrize("ending", ["active", "succeed", "retry", "archive"])
def test_any_number_of_retries_fits_the_column(peer: GoPeer, reconciler: Reconciler, ending: str) -> None:
    """Another program may write any number into a message."""
    deliver.enqueue(to="a")
    task = taken(peer)
    task = task._replace(message=task.message._replace(retried=2**31 - 2, retry=2**31 - 1))
    if ending == "active":
        peer.client.hset(peer.task_key(task.id), "msg", task.message.encode())
    elif ending == "succeed":
        peer.succeed(task)
    else:
        getattr(peer, ending)(task, "no")
    reconciler.quick_repairs()
    assert row().state != TaskState.QUEUED
    assert row().attempt <= MOST_ATTEMPTS


def test_cancel_takes_a_waiting_task_out(peer: GoPeer, reconciler: Reconciler) -> None:
    """It never runs; retried by a person, it is sent again, and followed as a new one."""
    result = deliver.enqueue(to="a")
    reconciler.quick_repairs()
    assert result.cancel() == "cancelled"
    assert (row().reason, peer.take()) == (FailureReason.CANCELLED, None)
    lifecycle.retry([row().id], by_person=True)
    reconciler.quick_repairs()
    assert (row().state, peer.ids("pending")) == (TaskState.QUEUED, [result.id])


@pytest.mark.parametrize("outcome", ["succeeds", "fails"])
def test_cancel_of_a_running_task_asks_the_other_program(outcome: str, peer: GoPeer, reconciler: Reconciler) -> None:
    """The row notes it, and follows what the other program makes of it: a task that it gives up does not run again."""
    result = deliver.enqueue(to="a")
    task = taken(peer)
    reconciler.quick_repairs()
    listener = peer.client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(f"{peer.prefix}:cancel")
    assert listener.get_message(timeout=5) is None
    assert result.cancel() == "asked"
    message = listener.get_message(timeout=5)
    listener.close()
    assert message is not None
    assert message["data"].decode() == result.id
    assert (row().state, row().cancel_requested_at is None) == (TaskState.RUNNING, False)
    if outcome == "succeeds":
        peer.succeed(task, b"1")
    else:
        peer.retry(task, "context canceled")
    reconciler.quick_repairs()
    if outcome == "succeeds":
        assert (row().state, row().return_value) == (TaskState.SUCCEEDED, 1)
    else:
        assert (row().state, row().reason) == (TaskState.FAILED, FailureReason.CANCELLED)
    assert peer.state(result.id) == ""


def test_a_test_run_leaves_it_queued(settings: Any) -> None:
    """`run_tasks` has no other program."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}
    deliver.enqueue(to="a")
    run_tasks()
    assert row().state == TaskState.QUEUED


def test_pages_are_followed_in_turn(peer: GoPeer, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is bounded; the next one goes on behind it."""
    from django_asyncq.fleet import repairs as following

    monkeypatch.setattr(following, "ROWS_PER_PAGE", 2)
    monkeypatch.setattr(following, "PAGES_PER_PASS", 1)
    deliver.enqueue_many([{"to": "a"}] * 5)
    while task := peer.take():
        peer.succeed(task)
    assert [reconciler.quick_repairs().followed for _ in range(3)] == [2, 2, 1]


# --- groups of another program


def test_a_call_waits_in_the_group_of_another_program(
    peer: GoPeer, redis_client: redis.Redis, reconciler: Reconciler
) -> None:
    """As asynq's client writes it. The row stays QUEUED, and no process of ours takes it."""
    result = deliver.using(group="news").enqueue(to="a")
    keys = QueueKeys("go")
    assert redis_client.zrange(keys.group("news"), 0, -1) == [result.id.encode()]
    assert redis_client.smembers(keys.groups) == {b"news"}
    data: Any = redis_client.hmget(keys.task(result.id), "msg", "state", "group")
    assert (decode_message(data[0]).group_key, *data[1:]) == ("news", b"aggregating", b"news")
    redis_client.zadd(keys.group("news"), {result.id: 1})
    assert interop.form_batches(Broker(), "go") == (0, None)
    reconciler.quick_repairs()
    assert (row().state, row().group, row().batch_id) == (TaskState.QUEUED, "news", None)


def test_a_call_that_left_its_group_is_not_pushed_again(
    peer: GoPeer, redis_client: redis.Redis, reconciler: Reconciler
) -> None:
    """Also when the leader had never seen it: nobody can know what became of it, and the row says so."""
    result = deliver.using(group="news").enqueue(to="a")
    keys = QueueKeys("go")
    redis_client.delete(keys.task(result.id), keys.group("news"), keys.groups)
    grown()
    reconciler.quick_repairs()
    assert row().state == TaskState.FAILED
    assert row().retry_at is None
    assert "left its group" in row().errors[-1]["message"]
    assert not redis_client.exists(keys.task(result.id))


def test_an_emptied_redis_gets_the_call_again_in_its_group(
    peer: GoPeer, redis_client: redis.Redis, reconciler: Reconciler
) -> None:
    """As every other remote task."""
    result = deliver.using(group="news").enqueue(to="a")
    redis_client.delete(QueueKeys("go").task(result.id), QueueKeys("go").group("news"))
    grown()
    TaskRecord.objects.update(fence=peer.now() - 60)  # seen before Redis lost its memory
    redis_client.set(f"{peer.prefix}:alive", peer.now() - 5)
    reconciler.quick_repairs()
    assert redis_client.zrange(QueueKeys("go").group("news"), 0, -1) == [result.id.encode()]


def test_a_delayed_call_joins_its_group_when_it_is_due(peer: GoPeer, redis_client: redis.Redis) -> None:
    """The hash has the field `group`, by which any forwarder knows it."""
    result = deliver.using(group="news", run_after=timedelta(hours=1)).enqueue(to="a")
    keys = QueueKeys("go")
    assert redis_client.hmget(keys.task(result.id), "state", "group") == [b"scheduled", b"news"]
    assert not redis_client.exists(keys.group("news"))


@pytest.mark.parametrize("group", ["", " ", "a\n", "x" * 201, 3])
def test_groups_that_cannot_be(group: Any) -> None:
    """The error names the option."""
    with pytest.raises(InvalidOption, match="group"):
        deliver.using(group=group)


def test_only_calls_that_run_together_have_a_group() -> None:
    """A task of ours without `batch` would wait there for ever. One with it joins a group of its own name."""
    with pytest.raises(InvalidOption, match="batch"):
        tasks.nap.using(group="g")
    batch_tasks.collect.using(group="g").enqueue(number=1)
    assert row().group == "tests.batch_tasks.collect:g"
