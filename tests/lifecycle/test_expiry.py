"""`expires` and `deadline`: what a call may say, and who closes a task that has not begun in time."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import gates, lifecycle, task
from django_asyncq.broker import Broker
from django_asyncq.broker.message import decode_message
from django_asyncq.core import compat
from django_asyncq.exceptions import InvalidOption
from django_asyncq.lifecycle.messages import message_of
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.testing import run_tasks, travel

from .. import batch_tasks, kit_tasks, tasks
from ..redis_state import pending
from ..runs import claimed

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def row(result: Any) -> TaskRecord:
    """Return the row of a result."""
    return TaskRecord.objects.get(id=result.id)


def close_to(moment: datetime | None, expected: datetime) -> bool:
    """Whether a moment is the expected one, within the time that a test takes."""
    return moment is not None and abs(moment - expected) < timedelta(seconds=30)


def late(result: Any) -> None:
    """Have the time of a task pass."""
    TaskRecord.objects.filter(id=result.id).update(expires_at=timezone.now() - timedelta(seconds=1))


def is_expired(result: Any) -> bool:
    """Whether a task has failed because it did not begin in time, and holds no slot and no place in Redis."""
    found = row(result)
    assert found.errors[-1]["exception"] == "django_asyncq.exceptions.TaskExpired"
    return (found.state, found.reason, found.attempt) == (TaskState.FAILED, FailureReason.EXPIRED, 0)


# --- what a call may say


def test_duration_counts_from_run_after_or_else_from_now() -> None:
    """By the database's clock; a moment is kept."""
    now = timezone.now()
    assert close_to(row(tasks.add.using(expires=3600).enqueue(1)).expires_at, now + HOUR)
    assert close_to(row(tasks.add.using(expires=HOUR, run_after=now + HOUR).enqueue(1)).expires_at, now + 2 * HOUR)
    assert row(tasks.add.using(expires=now + HOUR).enqueue(1)).expires_at == now + HOUR
    assert row(tasks.add.enqueue(1)).expires_at is None


def test_no_run_begins_after_the_deadline() -> None:
    """The earlier of the two limits decides; the deadline stays in its own column and in asynq's message."""
    now = timezone.now()
    found = row(tasks.add.using(expires=now + 2 * HOUR, deadline=now + HOUR).enqueue(1))
    assert found.expires_at == found.deadline == now + HOUR
    assert decode_message(message_of(found)).deadline == int((now + HOUR).timestamp())
    found = row(tasks.add.using(expires=now + HOUR, deadline=2 * HOUR, timeout=5).enqueue(1))
    assert found.expires_at == now + HOUR
    assert close_to(found.deadline, now + 2 * HOUR)
    assert decode_message(message_of(found)).timeout == 5


@pytest.mark.parametrize("name", ["expires", "deadline"])
@pytest.mark.parametrize("wrong", ["past", "naive", "before run_after", "at run_after"])
def test_limit_at_which_it_could_never_begin_is_refused(name: str, wrong: str) -> None:
    """Nothing is written; the error names the option."""
    now = timezone.now()
    moment = {
        "past": now - HOUR,
        "naive": (now + HOUR).replace(tzinfo=None),
        "before run_after": now + HOUR,
        "at run_after": now + 2 * HOUR,
    }[wrong]
    options: dict[str, Any] = {name: moment}
    if wrong.endswith("run_after"):
        options["run_after"] = now + 2 * HOUR
    with pytest.raises(InvalidOption, match=name):
        tasks.add.using(**options).enqueue(1)
    assert not TaskRecord.objects.exists()


def test_moment_of_one_call_does_not_belong_on_the_declaration() -> None:
    """It would be over one day."""
    with pytest.raises(InvalidOption, match="belongs to one call"):
        task(expires=timezone.now() + HOUR)(tasks.add.func)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"using\(deadline=…\)"):
        task(deadline=timezone.now() + HOUR)(tasks.add.func)  # type: ignore[call-overload]


# --- who closes it


def test_worker_closes_what_it_claims_too_late() -> None:
    """The function is not called, and the gate slot is free again."""
    result = tasks.gated.using(expires=HOUR).enqueue("g")
    late(result)
    assert lifecycle.claim(Broker(), "default", "w", 5, "default").runs == []
    assert is_expired(result)
    assert gates.slots("g") == []
    assert Broker().held("default", "w") == []
    assert pending() == []


def test_it_is_closed_without_any_worker() -> None:
    """A queue without workers gives its gate slots back too; what has time left, or runs, stays."""
    result = tasks.gated.using(expires=HOUR).enqueue("g")
    running = claimed(expires=HOUR, priority=1)
    waiting = tasks.gated.using(expires=HOUR).enqueue("g")
    late(result)
    late(TaskRecord.objects.get(id=running.lease.id))
    assert lifecycle.expire() == 1
    assert is_expired(result)
    assert [slot.id for slot in gates.slots("g")] == pending() == [waiting.id]
    assert TaskRecord.objects.get(id=running.lease.id).state == TaskState.RUNNING


def test_retry_expires_too() -> None:
    """Its time is about each start; its errors stay."""
    run = claimed(expires=HOUR)
    lifecycle.fail(run, ValueError("x"), "", timezone.now(), retry_at=timezone.now())
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    late(run.record)
    assert lifecycle.retry_due(Broker(), "default", [run.lease.id]) == 0
    found = TaskRecord.objects.get(id=run.lease.id)
    assert (found.reason, found.retry_at, len(found.errors)) == (FailureReason.EXPIRED, None, 2)
    assert pending() == []


def test_person_may_retry_an_expired_task() -> None:
    """Its time is forgotten, or it would expire at once."""
    result = tasks.add.using(expires=HOUR).enqueue(1)
    TaskRecord.objects.filter(id=result.id).update(deadline=timezone.now() + HOUR)
    late(result)
    lifecycle.expire()
    lifecycle.retry([row(result).id], by_person=True)
    assert row(result).expires_at == row(result).deadline
    TaskRecord.objects.filter(id=result.id).update(deadline=timezone.now() - HOUR)
    late(result)
    lifecycle.expire()
    lifecycle.retry([row(result).id], by_person=True)
    assert (row(result).expires_at, row(result).deadline, row(result).state) == (None, None, TaskState.QUEUED)


def test_many_expire_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are."""
    monkeypatch.setattr("django_asyncq.lifecycle.closing.ROWS_PER_PAGE", 3)
    results = tasks.add.using(expires=HOUR).enqueue_many([(number,) for number in range(8)])
    TaskRecord.objects.update(expires_at=timezone.now())
    assert lifecycle.expire() == 8
    assert all(is_expired(result) for result in results)


# --- under the test kit


@pytest.fixture
def _kit(settings: Any) -> None:
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}


@pytest.mark.usefixtures("_kit")
def test_kit_expires_by_its_clock() -> None:
    """A task that is due later than its limit fails; another one runs."""
    result = kit_tasks.add.using(expires=HOUR).enqueue(1, 2)
    other = kit_tasks.add.enqueue(1, 2)
    with travel(seconds=3601):
        finished = run_tasks()
    assert {each.id for each in finished} == {result.id, other.id}
    assert is_expired(result)
    assert row(other).state == TaskState.SUCCEEDED


@pytest.mark.usefixtures("_kit")
def test_kit_cancels_without_redis() -> None:
    """What waits is closed, and does not run."""
    result = kit_tasks.add.enqueue(1, 2)
    assert result.cancel("x") == "cancelled"
    assert run_tasks() == []
    assert row(result).reason == FailureReason.CANCELLED
    assert TaskRecord.objects.all().cancel() == (0, 0, 1)


@pytest.mark.usefixtures("_kit")
@pytest.mark.parametrize("name", ["run", "arun", "run_atomic"])
def test_expiry_is_judged_where_the_body_begins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the claim: what comes between, such as a receiver or the begin of a transaction, may take long."""
    ran: list[str] = []
    monkeypatch.setitem(kit_tasks.BODIES, "note", lambda context: ran.append(context.task_result.id))
    task = getattr(kit_tasks, name)
    result, in_time = task.using(expires=HOUR).enqueue("note"), task.enqueue("note")
    with travel() as clock:

        def take_long(task_result: Any, **kwargs: Any) -> None:
            if task_result.id == result.id:
                clock.move(hours=2)

        compat.task_started.connect(take_long)
        try:
            run_tasks()
        finally:
            compat.task_started.disconnect(take_long)
    assert is_expired(result)
    assert ran == [in_time.id]


@pytest.mark.usefixtures("_kit")
def test_member_that_expires_before_the_body_of_its_batch_is_not_in_it() -> None:
    """The others run; it is closed by the next look."""
    batch_tasks.SEEN.clear()
    late_one, other = batch_tasks.collect.using(expires=90).enqueue(1), batch_tasks.collect.enqueue(2)
    with travel() as clock:

        def take_long(**kwargs: Any) -> None:
            clock.move(hours=2)

        compat.task_started.connect(take_long)
        try:
            run_tasks(until=timedelta(seconds=70))
        finally:
            compat.task_started.disconnect(take_long)
    assert [[item.id for item in items] for items in batch_tasks.SEEN] == [[other.id]]
    assert row(other).state == TaskState.SUCCEEDED
    assert is_expired(late_one)


def test_task_that_began_in_time_is_not_closed_before_its_row_says_so() -> None:
    """Its row says QUEUED for a while, or for long while the database is away: its outcome counts."""
    result = tasks.gated.using(expires=HOUR).enqueue("g")
    (run,) = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.begin(run, "w", timezone.now())
    waiting = tasks.gated.using(expires=HOUR).enqueue("g")
    late(result)
    late(waiting)
    assert lifecycle.expire() == 1
    assert is_expired(waiting)
    lifecycle.succeed(run, "done", timezone.now())
    assert lifecycle.record_runs([run]) == []
    assert row(result).state == TaskState.SUCCEEDED


def test_claimed_tasks_do_not_hide_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them are late, in whatever order."""
    monkeypatch.setattr("django_asyncq.lifecycle.closing.ROWS_PER_PAGE", 2)
    results = [tasks.add.using(expires=HOUR).enqueue(number) for number in range(7)]
    for result in results:
        late(result)
    TaskRecord.objects.filter(id__in=[result.id for result in results[:4]]).update(expires_at=timezone.now() + HOUR)
    assert len(lifecycle.claim(Broker(), "default", "w", 4, "default").runs) == 4
    TaskRecord.objects.filter(id__in=[result.id for result in results[:4]]).update(expires_at=timezone.now() - HOUR)
    assert lifecycle.expire() == 3
    assert all(is_expired(result) for result in results[4:])
    assert {row(result).state for result in results[:4]} == {TaskState.QUEUED}
