"""asynq's unique lock: a Go client and a Django project never have the same unique task at the same time."""

from __future__ import annotations

import hashlib
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import Batch, DuplicateTask, QueueFull, conf, lifecycle, task
from django_asyncq.broker import Broker, unique_locks
from django_asyncq.broker.decoding import decode_message
from django_asyncq.broker.message import TaskMessage
from django_asyncq.definitions.go_json import lock_digest, wire_payload
from django_asyncq.definitions.unique_keys import unique_digest
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.lifecycle import wire_locks
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.storage.rollbacks import release_rolled_back
from django_asyncq.storage.routing import transaction_of

from . import acl, tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]


@task(wire_name="lock:deliver", unique=True)
def deliver(to: str, copies: int = 1) -> None:
    """Stand for a task that a Go program may enqueue too."""


def one_letter(to: str) -> None:
    """Show what one call of the next task takes."""


@task(wire_name="lock:together", unique=True, batch=Batch(size=2, within=60, call=one_letter))
def deliver_together(items: Any) -> None:
    """Stand for a task whose calls are run together."""


@pytest.fixture
def mail() -> Any:
    """A unique task with a wire name."""
    return deliver


def client() -> Any:
    """A client with all rights, as a Go program has."""
    return acl.unrestricted(Broker().client)


def lock(payload: bytes = b'{"to":"a"}', queue: str = "default") -> str:
    """Return the name that Go's client gives the lock of a message."""
    return Broker().keys(queue).unique("lock:deliver", hashlib.md5(payload).hexdigest())


def holder(name: str | None = None) -> str:
    """Return the id that holds a lock; "" for none."""
    return (client().get(name or lock()) or b"").decode()


def go_takes(id: str = "go-1") -> bool:
    """Do what Go's client does for a unique task."""
    return bool(client().set(lock(), id, nx=True, ex=600))


def run(worker_id: str = "w") -> lifecycle.Run:
    """Claim and begin the next task."""
    (found,) = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
    return found


def finish(found: lifecycle.Run) -> None:
    """Tell Redis that a run has succeeded, as a worker does after its row is written."""
    TaskRecord.objects.filter(id=found.record.id).update(
        state=TaskState.SUCCEEDED, unique_slot=None, finished_at=timezone.now()
    )
    Broker().done("default", "w", [found.lease])


def test_the_lock_is_the_one_that_go_computes(mail: Any) -> None:
    """Compact JSON, sorted keys, UTF-8 with Go's escapes, defaults skipped; nothing after the colon for no payload."""
    assert wire_payload(mail, [], {"to": "a"}) == b'{"to":"a"}'
    assert wire_payload(mail, ["ü<&>", 2], {}) == '{"copies":2,"to":"ü\\u003c\\u0026\\u003e"}'.encode()
    assert lock_digest(b"") == ""
    result = mail.enqueue("a")
    assert holder() == result.id
    assert 80_000 < client().ttl(lock()) <= 86_400
    assert client().hget(Broker().keys("default").task(result.id), "unique_key").decode() == lock()


def test_each_refuses_what_the_other_has(mail: Any) -> None:
    """Go holds it: nothing is written, and the error says who. We hold it: Go's SET NX fails until the end."""
    assert go_takes()
    with pytest.raises(DuplicateTask, match=r"another program holds its unique lock.*'go-1'") as caught:
        mail.enqueue("a")
    assert (caught.value.existing_id, caught.value.wire_holder) == (None, "go-1")
    assert not TaskRecord.objects.exists()
    mail.enqueue("b")
    client().delete(lock())
    mail.enqueue("a")
    assert not go_takes()
    assert mail.enqueue_many([("a",), ("c",)], partial=True)[0] is None
    for _ in range(3):
        finish(run())
    assert go_takes()


def test_of_several_only_the_refused_ones_are(mail: Any) -> None:
    """All or none, or with `partial` the others; no lock of a refused list stays."""
    go_takes()
    with pytest.raises(DuplicateTask):
        mail.enqueue_many([("b",), ("a",)])
    assert holder(lock(b'{"to":"b"}')) == ""
    found = mail.enqueue_many([("b",), ("a",)], partial=True)
    assert [each is not None for each in found] == [True, False]


def test_a_plain_unique_task_sends_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one without a wire name, nor one with a key of another kind."""
    monkeypatch.setattr(unique_locks, "acquire", pytest.fail)
    result = tasks.add.using(unique=True).enqueue(1)
    assert client().hget(Broker().keys("default").task(result.id), "unique_key") is None


def test_a_task_with_batch_takes_no_lock() -> None:
    """Its entry leaves Redis before the batch runs, so nothing would release the lock at the end."""
    deliver_together.enqueue("a")
    assert not list(client().scan_iter(f"{Broker().keys('default').unique('lock:together', '')}*"))


@pytest.mark.parametrize("option", [{"unique": "{to}"}, {"unique_until": "start"}])
def test_other_keys_have_no_lock(mail: Any, option: dict[str, Any]) -> None:
    """Such calls may differ from Go's, or end at another time."""
    mail.using(**option).enqueue("a")
    assert holder() == ""


def test_a_rollback_gives_the_lock_back(mail: Any) -> None:
    """Also of a savepoint; the next call finds it free."""
    with pytest.raises(LookupError), transaction_of(TaskRecord):
        mail.enqueue("a")
        assert holder() != ""
        assert client().ttl(lock()) <= conf.current().provisional_seconds
        raise LookupError
    release_rolled_back()
    assert go_takes()


def test_a_full_gate_and_a_failing_insert_give_it_back(mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken before them is not kept."""
    gated = mail.using(gate="g", queue_limit=1)
    gated.enqueue("z")
    with pytest.raises(QueueFull):
        gated.enqueue("a")
    assert holder() == ""
    with monkeypatch.context() as patched, pytest.raises(LookupError):
        patched.setattr("django_asyncq.lifecycle.unique.insert", _lookup_error)
        mail.enqueue("a")
    assert holder() == ""


def _lookup_error(*args: Any) -> None:
    raise LookupError


def test_a_crash_at_each_step_frees_the_lock_or_keeps_the_task(mail: Any) -> None:
    """Before the commit it expires; after it, the reconciler pushes the row and the lock lasts."""
    record = TaskRecord(name=mail.module_path, args=["a"])
    record.unique_key = record.unique_slot = _digest(mail, "a")
    assert wire_locks.take([record]) == []
    assert 0 < client().ttl(lock()) <= conf.current().provisional_seconds
    # The process died before its INSERT was committed, and the minute is over.
    client().delete(lock())
    result = mail.enqueue("a")
    # The process died between commit and push.
    client().delete(Broker().keys("default").pending, Broker().keys("default").task(result.id))
    client().expire(lock(), 5)
    TaskRecord.objects.update(enqueued_at=TaskRecord.objects.get().enqueued_at - timedelta(seconds=10))
    Reconciler(Broker()).sweep()
    assert holder() == result.id
    assert client().ttl(lock()) > 80_000


def _digest(mail: Any, *args: Any) -> str:
    return unique_digest(mail, "default", list(args), {})


def test_an_emptied_redis_gets_the_lock_again_and_a_thief_stops_nothing(mail: Any) -> None:
    """The push takes it; if another program has it by then, the committed row runs without it."""
    result = mail.enqueue("a")
    keys = Broker().keys("default")
    for thief in (False, True):
        client().delete(keys.pending, keys.task(result.id), lock())
        if thief:
            go_takes()
        lifecycle.dispatch([TaskRecord.objects.get()], again=True)
        assert holder() == ("go-1" if thief else result.id)
    finish(run())
    assert holder() == "go-1"


def test_a_lock_that_a_finished_row_still_has_is_taken(mail: Any) -> None:
    """Its worker died before it told Redis."""
    first = mail.enqueue("a")
    TaskRecord.objects.update(state=TaskState.SUCCEEDED, unique_slot=None, finished_at=timezone.now())
    second = mail.enqueue("a")
    assert holder() == second.id
    assert first.id != second.id


def test_a_failed_task_frees_the_lock_with_its_key(mail: Any) -> None:
    """Retried by a person, it takes both again."""
    result = mail.enqueue("a")
    found = run()
    Broker().archive("default", "w", [(found.lease, b"")])
    TaskRecord.objects.update(
        state=TaskState.FAILED, reason=FailureReason.EXCEPTION, unique_slot=None, finished_at=timezone.now()
    )
    assert holder() == ""
    lifecycle.retry([TaskRecord.objects.get().id], by_person=True)
    assert holder() == result.id


def test_a_throttle_lasts_as_long_in_redis(mail: Any) -> None:
    """asynq releases it at the end of the task all the same; among ours the row decides."""
    mail.using(unique_until=timedelta(minutes=10)).enqueue("a")
    assert 590 < client().ttl(lock()) <= 600


def test_a_delayed_task_keeps_it_until_after_its_time(mail: Any) -> None:
    """Its lock begins to count when it is due."""
    mail.using(run_after=timedelta(days=3)).enqueue("a")
    assert client().ttl(lock()) > 3 * 86_400


def test_a_message_for_another_program_names_its_lock(mail: Any) -> None:
    """So that a Go server releases it."""
    message = TaskMessage(type="lock:deliver", payload=b'{"to":"a"}', id="x", queue="default").encode()
    record = TaskRecord(name="lock:deliver", unique_key="k", wire_message=message)
    wire_locks.prepare([record])
    assert decode_message(bytes(record.wire_message or b"")).unique_key == lock()
    assert wire_locks.take([record]) == []
    assert holder() == str(record.id)
    wire_locks.give_back([record])
    assert holder() == ""


def test_an_unreachable_redis_refuses_nothing(mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for other unique tasks, the row decides among ours, and the push takes the lock."""
    with monkeypatch.context() as patched:
        patched.setattr(unique_locks, "acquire", _unavailable)
        result = mail.enqueue("a")
    assert holder() == result.id


def _unavailable(*args: Any, **kwargs: Any) -> None:
    raise BrokerUnavailable("test")


def test_of_two_at_once_one_wins(mail: Any) -> None:
    """A Go client and a Django process race for it, twenty times: never both, never neither."""
    for number in range(20):
        payload = f'{{"to":"r{number}"}}'.encode()
        won: list[str] = []
        barrier = threading.Barrier(2)

        def go(payload: bytes = payload, won: list[str] = won, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            if client().set(lock(payload), "go", nx=True, ex=60):
                won.append("go")

        other = threading.Thread(target=go)
        other.start()
        barrier.wait()
        try:
            mail.enqueue(f"r{number}")
            won.append("django")
        except DuplicateTask:
            pass
        other.join()
        assert len(won) == 1
