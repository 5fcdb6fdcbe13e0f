"""Actions on many tasks: what a filter chooses, each task changed once, full gates, refusals, two leaders."""

from __future__ import annotations

import io
import itertools
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import Client
from django.utils import timezone

from django_asyncq import control, gates, lifecycle
from django_asyncq.broker import Broker
from django_asyncq.control import preview_bulk, start_bulk, stop_bulk
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption, LockLost
from django_asyncq.fleet import bulk
from django_asyncq.fleet.bulk import BulkRunner
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.management.commanding import bulk as commanding_bulk
from django_asyncq.models import BulkAction, BulkState, FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.signals import task_state_changing
from django_asyncq.storage import database_clock
from django_asyncq.storage.matching import checked

from .. import tasks  # noqa: F401 - its tasks are registered

pytestmark = pytest.mark.django_db(transaction=True)

ADD = "tests.tasks.add"
# Seconds of a clock that is ahead of every pause.
moments = itertools.count(0, 100)


def make(count: int = 1, state: str = "failed", **fields: Any) -> list[TaskRecord]:
    """Rows in a state, the oldest first."""
    now = timezone.now()
    of_state: dict[str, dict[str, Any]] = {
        "queued": {"state": TaskState.QUEUED, "run_after": now + timedelta(hours=1)},
        "running": {"state": TaskState.RUNNING, "fence": 1, "worker_ids": ["w"]},
        "succeeded": {"state": TaskState.SUCCEEDED, "finished_at": now},
        "failed": {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION, "finished_at": now},
        "retrying": {
            "state": TaskState.FAILED,
            "reason": FailureReason.EXCEPTION,
            "retry_at": now + timedelta(hours=1),
        },
    }
    rows = [TaskRecord(**{"name": ADD, "args": [1, 2], **of_state[state], **fields}) for _ in range(count)]
    return TaskRecord.objects.bulk_create(rows)


def make_one_of_each() -> dict[str, TaskRecord]:
    """A row in each state."""
    return {state: make(1, state)[0] for state in ("queued", "running", "succeeded", "failed", "retrying")}


@contextmanager
def plain() -> Iterator[None]:
    """A transaction without a term: these tests have one leader."""
    with transaction.atomic():
        yield


def work(action: BulkAction, runner: BulkRunner | None = None, pages: int = 50) -> BulkAction:
    """Do the action until it is over, or for some pages; the rate is not waited for."""
    runner = runner or BulkRunner(plain)
    for _ in range(pages):
        runner.tick(float(next(moments)))
        action.refresh_from_db()
        if action.state != BulkState.RUNNING:
            break
    return action


def counts(action: BulkAction) -> tuple[int, int, int]:
    """Done, refused, left."""
    return action.done, action.refused, action.left


# --- filters


WRONG: list[tuple[str, Any, str]] = [
    ("retry", {}, "the filter is empty"),
    ("retry", [], "must be a dictionary"),
    ("park", {"state": "failed"}, "no action on many tasks is called 'park'"),
    ("retry", {"stat": "failed"}, "no filter is called stat: the keys are state, reason"),
    ("retry", {"state": "lost"}, "state knows no 'lost'"),
    ("retry", {"state": "running"}, "a retry takes tasks that are failed, not running"),
    ("delete", {"state": ["failed", "running"]}, "a delete takes tasks that are succeeded or failed, not running"),
    ("cancel", {"finished_since": datetime(2026, 1, 1, tzinfo=UTC)}, "remove finished_since"),
    ("retry", {"reason": "none"}, "reason knows no 'none'"),
    ("retry", {"name": 5}, "name takes one value or a list of 1 to 100, not int"),
    ("retry", {"name": []}, "a list of 1 to 100, not 0"),
    ("retry", {"name": "a\x00"}, "printable"),
    ("retry", {"name": "x" * 201}, "1 to 200"),
    ("retry", {"enqueued_since": "yesterday"}, "takes a time with its zone"),
    ("retry", {"enqueued_since": "2026-02-31T00:00:00+00:00"}, "takes a time with its zone"),
    ("retry", {"enqueued_since": datetime(2026, 1, 1)}, "takes a time with its zone"),
    ("retry", {"ids": ["no"]}, "takes ids of tasks"),
    ("retry", {"ids": [uuid.uuid4()] * 1001}, "a list of 1 to 1,000, not 1,001"),
]


@pytest.mark.django_db
def test_a_wrong_filter_is_refused_with_the_remedy() -> None:
    """Nothing is written."""
    for kind, matching, text in WRONG:
        with pytest.raises(InvalidOption, match=text):
            start_bulk(kind, matching)
    assert not BulkAction.objects.exists()


@pytest.mark.django_db
def test_a_wrong_rate_is_refused() -> None:
    """So is a person who is neither a user nor a text."""
    wrong: list[Any] = [0, -1, True, 2.5, 10_001, "5"]
    for rate in wrong:
        with pytest.raises(InvalidOption, match="rows_per_second takes a whole number from 1 to 10,000"):
            start_bulk("retry", {"state": "failed"}, rows_per_second=rate)
    with pytest.raises(InvalidOption, match="takes a user or a text, not int"):
        start_bulk("retry", {"state": "failed"}, by=5)


@pytest.mark.django_db
def test_filters_that_choose_the_same_way_have_one_form() -> None:
    """The order, the zone and the type of a value do not matter."""
    id = uuid.uuid4()
    first = checked("delete", {"name": ["b", "a"], "ids": [str(id)], "finished_since": "2026-01-01T01:00:00+01:00"})
    second = checked("delete", {"ids": [id], "finished_since": datetime(2026, 1, 1, tzinfo=UTC), "name": ("a", "b")})
    assert first == second
    assert first["state"] == ["failed", "succeeded"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [("retry", ["failed"]), ("cancel", ["queued", "retrying", "running"]), ("delete", ["failed", "succeeded"])],
)
def test_each_kind_takes_its_states(kind: str, chosen: list[str]) -> None:
    """A preview shows what matches, and changes nothing."""
    rows = make_one_of_each()
    found = preview_bulk(kind, {"name": ADD})
    states = {row.id: state for state, row in rows.items()}
    assert sorted(states[row.id] for row in found.examples) == chosen
    assert found.total == len(chosen)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "matching",
    [
        {"name": "tests.tasks.other"},
        {"queue_name": ["other", "third"]},
        {"backend": "second"},
        {"gate": "g"},
        {"group": "G"},
        {"last_exception": "builtins.ValueError"},
        {"reason": "timeout"},
    ],
)
def test_each_key_narrows_the_choice(matching: dict[str, Any]) -> None:
    """Texts are exact: another case is another text."""
    other = {key: value[0] if isinstance(value, list) else value for key, value in matching.items()}
    if "reason" in other:
        other["reason"] = FailureReason.TIMEOUT
    (wanted,) = make(**other)
    make()
    found = preview_bulk("retry", matching)
    assert [row.id for row in found.examples] == [wanted.id]
    if text := other.get("group"):
        assert preview_bulk("retry", {"group": text.lower()}).total == 0


@pytest.mark.django_db
def test_times_and_ids_narrow_the_choice() -> None:
    """A time is one of the enqueue or of the finish; `until` is the first moment that is not chosen."""
    old = timezone.now() - timedelta(days=3)
    (early,) = make(finished_at=old)
    late = make(2)
    since = old + timedelta(seconds=1)
    assert preview_bulk("retry", {"finished_since": since}).total == 2
    assert [row.id for row in preview_bulk("retry", {"finished_until": since}).examples] == [early.id]
    assert preview_bulk("retry", {"enqueued_since": timezone.now() - timedelta(minutes=5)}).total == 3
    assert preview_bulk("retry", {"enqueued_until": timezone.now() - timedelta(minutes=5)}).total == 0
    assert preview_bulk("retry", {"ids": [late[0].id, early.id]}).total == 2


# --- one action


def test_a_retry_queues_what_had_failed_and_nothing_else() -> None:
    """Tasks in other states, other tasks, and tasks that fail later stay."""
    rows = make(5)
    others = [*make(name="tests.tasks.other"), *make_one_of_each().values()]
    action = start_bulk("retry", {"ids": [row.id for row in [*rows, *others]], "name": ADD}, by="ann")
    assert (action.total, action.created_by, action.rows_per_second) == (6, "ann", 200)
    late = make(3)
    action = work(action)
    assert (action.state, counts(action), action.key) == (BulkState.FINISHED, (6, 0, 0), None)
    assert action.finished_at is not None
    assert TaskRecord.objects.filter(id__in=[row.id for row in rows], state=TaskState.QUEUED).count() == 5
    assert TaskRecord.objects.filter(id__in=[row.id for row in late], state=TaskState.FAILED).count() == 3
    assert Broker().client.llen(Broker().keys("default").pending) == 6


def test_a_task_that_fails_again_is_not_retried_again() -> None:
    """Whether the action has passed it or, at a full gate, comes back."""
    Gate.objects.create(name="g", limit=1)
    first, second = make(2, gate="g")
    runner = BulkRunner(plain)
    action = work(start_bulk("retry", {"gate": "g"}), runner, pages=2)
    assert counts(action) == (1, 0, 1)
    for row in (first, second):
        assert TaskRecord.objects.get(id=row.id).state == TaskState.QUEUED
        TaskRecord.objects.filter(id=row.id).update(
            state=TaskState.FAILED, reason=FailureReason.EXCEPTION, finished_at=database_clock.now()
        )
        gates.release_ids("g", [str(row.id)])
        action = work(action, BulkRunner(plain), pages=3)
    assert (action.state, counts(action)) == (BulkState.FINISHED, (2, 0, 0))
    assert TaskRecord.objects.filter(state=TaskState.FAILED).count() == 2


def test_a_cancel_closes_what_waits_and_asks_what_runs() -> None:
    """The rows name the person."""
    rows = make_one_of_each()
    lifecycle.dispatch([rows["queued"]])
    action = work(start_bulk("cancel", {"name": ADD}, by="ann"))
    assert (action.state, counts(action)) == (BulkState.FINISHED, (3, 0, 0))
    found = {state: TaskRecord.objects.get(id=row.id) for state, row in rows.items()}
    for state in ("queued", "retrying"):
        assert (found[state].state, found[state].reason) == (TaskState.FAILED, FailureReason.CANCELLED)
    assert found["running"].cancelled_by == "ann" and found["running"].state == TaskState.RUNNING
    assert found["succeeded"].cancelled_by == found["failed"].cancelled_by == ""


def test_a_deletion_takes_final_rows_only() -> None:
    """Their entries leave Redis too."""
    rows = make_one_of_each()
    action = work(start_bulk("delete", {"name": ADD}))
    assert (action.state, counts(action)) == (BulkState.FINISHED, (2, 0, 0))
    left = set(TaskRecord.objects.values_list("id", flat=True))
    assert left == {rows[state].id for state in ("queued", "running", "retrying")}


def test_pages_are_as_large_as_the_rate_and_paused_by_it() -> None:
    """So five rows at two a second take three pages, with a second between them."""
    make(5)
    action = start_bulk("retry", {"name": ADD}, rows_per_second=2)
    runner, done = BulkRunner(plain), []
    for now in (0.0, 0.5, 1.0, 1.9, 2.0, 2.5):
        runner.tick(now)
        action.refresh_from_db()
        done.append(action.done)
    assert done == [2, 2, 4, 4, 5, 5]
    assert action.state == BulkState.FINISHED


def test_a_double_click_makes_one_action() -> None:
    """Until it is over; another filter or kind makes another one."""
    make(2)
    first = start_bulk("retry", {"name": ADD})
    assert start_bulk("retry", {"name": [ADD], "state": "failed"}).pk == first.pk
    assert start_bulk("delete", {"name": ADD, "state": "failed"}).pk != first.pk
    stop_bulk(first)
    assert start_bulk("retry", {"name": ADD}).pk != first.pk


def test_two_clicks_at_the_same_time_make_one_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second INSERT is refused by the database, and finds the first."""
    real, others = control.page_of, []

    def page_of(*args: Any, **options: Any) -> Any:
        """Between the look and the INSERT, another click is made."""
        monkeypatch.setattr(control, "page_of", real)
        others.append(start_bulk("retry", {"name": ADD}))
        return real(*args, **options)

    monkeypatch.setattr(control, "page_of", page_of)
    assert start_bulk("retry", {"name": ADD}).pk == others[0].pk
    assert BulkAction.objects.count() == 1


def test_another_runner_goes_on_behind_the_last_page() -> None:
    """As after the death of a leader: nothing but the row is needed."""
    make(6)
    action = start_bulk("retry", {"name": ADD}, rows_per_second=2)
    for done in (2, 4, 6):
        assert counts(work(action, BulkRunner(plain), pages=1)) == (done, 0, 6 - done)
    assert work(action, BulkRunner(plain)).state == BulkState.FINISHED


def test_a_stopped_action_keeps_what_it_has_done() -> None:
    """It is over: no further page begins, and it cannot be stopped again."""
    make(6)
    action = start_bulk("retry", {"name": ADD}, rows_per_second=2)
    runner = BulkRunner(plain)
    work(action, runner, pages=1)
    stopped = stop_bulk(str(action.pk))
    assert (stopped.state, counts(stopped), stopped.key) == (BulkState.STOPPED, (2, 0, 0), None)
    assert stopped.finished_at is not None
    assert counts(work(action, runner, pages=1)) == (2, 0, 0)
    for wrong, text in ((action, "is over"), (uuid.uuid4(), "there is no action"), ("5", "is no id")):
        with pytest.raises(InvalidOption, match=text):
            stop_bulk(wrong)


@pytest.mark.django_db
def test_an_action_without_a_task_finishes() -> None:
    """Also when the table is empty."""
    action = work(start_bulk("retry", {"name": ADD}), pages=1)
    assert (action.state, action.total, counts(action)) == (BulkState.FINISHED, 0, (0, 0, 0))


# --- refusals


def test_a_task_that_cannot_be_changed_is_counted_and_stops_no_other() -> None:
    """A receiver vetoes one, the code does not have another; the row keeps the first texts."""
    rows = make(8)
    (removed,) = make(name="tests.tasks.removed")

    def veto(*, records: list[TaskRecord], **_: Any) -> None:
        if any(record.id == rows[3].id for record in records):
            raise ValueError("not this one")

    task_state_changing.connect(veto)
    try:
        action = work(start_bulk("retry", {"state": "failed"}))
    finally:
        task_state_changing.disconnect(veto)
    assert (action.state, counts(action)) == (BulkState.FINISHED, (7, 2, 0))
    lines = sorted(action.error.splitlines())
    assert lines == sorted(
        [
            f"{rows[3].id}: not this one",
            f"{removed.id}: the leader's code has no task tests.tasks.removed; deploy it, then retry the task",
        ]
    )
    assert TaskRecord.objects.get(id=rows[3].id).state == TaskState.FAILED


def test_a_gate_without_a_limit_and_a_taken_key_are_refused() -> None:
    """Each with its reason; only the first five texts are kept."""
    make(7, gate="unknown")
    (waiting,) = make(unique_key="k", unique_slot=None)
    (holder,) = make(1, "queued", unique_key="k", unique_slot="k")
    action = work(start_bulk("retry", {"name": ADD}))
    assert counts(action) == (0, 8, 0)
    assert len(action.error.splitlines()) == 5
    assert "gate 'unknown' has no limit" in action.error
    action = work(start_bulk("retry", {"ids": [waiting.id]}))
    assert action.error == f"{waiting.id}: another task has its unique key: {holder.id}"


def test_an_unreachable_store_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is rolled back, the error raised; another action is worked off, and the page is done later."""
    Gate.objects.create(name="g", limit=9)
    make(2, gate="g")
    make(1, queue_name="other")
    first, second = start_bulk("retry", {"gate": "g"}), start_bulk("retry", {"queue_name": "other"})
    runner = BulkRunner(plain)

    def fail(*, records: list[TaskRecord], **_: Any) -> None:
        if any(record.gate for record in records):
            raise BrokerUnavailable("Redis is unreachable")

    task_state_changing.connect(fail)
    try:
        with pytest.raises(BrokerUnavailable):
            runner.tick(0.0)
    finally:
        task_state_changing.disconnect(fail)
    first.refresh_from_db()
    second.refresh_from_db()
    assert (counts(first), first.positions, counts(second)) == ((0, 0, 2), [["", ""]], (1, 0, 0))
    assert counts(work(first, runner)) == (2, 0, 0)


@pytest.mark.parametrize("damaged", [{"state": ["odd"]}, {"odd": [ADD], "state": ["failed"]}, {"name": [ADD]}, {}])
def test_a_filter_that_was_damaged_in_the_row_stops_its_action(damaged: dict[str, Any]) -> None:
    """With the reason in the row; the loop goes on. A filter that is empty does not choose every task."""
    action = start_bulk("retry", {"name": ADD})
    make()
    BulkAction.objects.update(matching=damaged, newest_id=uuid.UUID(int=2**128 - 1))
    action = work(action)
    assert (action.state, counts(action)) == (BulkState.STOPPED, (0, 0, 0))
    assert "the filter of the row cannot be read" in action.error


# --- full gates


def test_tasks_of_a_full_gate_wait_until_it_has_a_free_slot() -> None:
    """Others are not kept waiting. In the second round each gate gets as many as it admits."""
    Gate.objects.create(name="g", limit=2)
    at_gate = make(5, gate="g")
    make(3)
    runner = BulkRunner(plain)
    action = work(start_bulk("retry", {"name": ADD}), runner, pages=3)
    assert (action.state, counts(action)) == (BulkState.RUNNING, (5, 0, 3))
    assert work(action, runner, pages=2).left == 3
    gates.release_ids("g", [str(row.id) for row in at_gate[:2]])
    action = work(action, runner, pages=1)
    assert counts(action) == (7, 0, 1)
    gates.release_ids("g", [str(row.id) for row in at_gate[2:4]])
    action = work(action, runner)
    assert (action.state, counts(action), action.full_gates) == (BulkState.FINISHED, (8, 0, 0), [])


def test_a_task_of_several_gates_waits_for_the_one_that_is_full() -> None:
    """It keeps no task out that needs only the other gate, and each is retried once."""
    Gate.objects.create(name="g", limit=9)
    Gate.objects.create(name="h", limit=1)
    of_both = make(3, gate="g", other_gates="\nh\t\n")
    make(2, gate="g")
    make(2, gate="h", other_gates="\ng\t\n")
    runner = BulkRunner(plain)
    action = work(start_bulk("retry", {"name": ADD}), runner, pages=3)
    assert (counts(action), action.full_gates) == ((3, 0, 4), ["h"])
    for done, row in enumerate(TaskRecord.objects.exclude(gate="g", other_gates="").order_by("id")[:4], 4):
        for gate in ("g", "h"):
            gates.release_ids(gate, [str(row.id)])
        action = work(action, runner, pages=2)
        assert counts(action)[0] == done
    assert of_both
    assert (action.state, counts(action)) == (BulkState.FINISHED, (7, 0, 0))


def test_a_full_gate_is_asked_every_two_seconds() -> None:
    """No busy loop: in between no page touches its tasks."""
    Gate.objects.create(name="g", limit=1)
    make(3, gate="g")
    action = start_bulk("retry", {"name": ADD})
    runner, asked = BulkRunner(plain), []

    def note(*, records: list[TaskRecord], **_: Any) -> None:
        asked.append(now)

    task_state_changing.connect(note)
    try:
        for now in (0.0, 0.1, 0.2, 1.0, 2.0, 2.1, 3.9, 4.0, 4.1):
            runner.tick(now)
    finally:
        task_state_changing.disconnect(note)
    assert asked == [0.0, 2.1, 4.1]
    action.refresh_from_db()
    assert counts(action) == (1, 0, 2)


def test_full_gates_take_turns() -> None:
    """Each is asked every two seconds; one that has a free slot again gets its tasks, whatever the others do."""
    for name in ("a", "b", "c", "d"):
        Gate.objects.create(name=name, limit=1)
    rows = {name: make(3, gate=name) for name in ("a", "b", "c", "d")}
    action, runner = start_bulk("retry", {"name": ADD}), BulkRunner(plain)
    runner.tick(0.0)
    asked: list[str] = []

    def note(*, records: list[TaskRecord], **_: Any) -> None:
        asked.append(records[0].gate)

    task_state_changing.connect(note)
    try:
        for tick in range(1, 10):
            runner.tick(tick / 2)
    finally:
        task_state_changing.disconnect(note)
    assert "".join(asked) == "abcdabcd"
    gates.release_ids("c", [str(rows["c"][0].id)])
    for tick in range(10, 15):
        runner.tick(tick / 2)
    action.refresh_from_db()
    assert (counts(action), sorted(action.full_gates)) == ((5, 0, 7), ["a", "b", "c", "d"])


def test_what_a_gate_never_admits_is_refused_in_the_end() -> None:
    """After an hour without an admission; not when the action is stopped."""
    Gate.objects.create(name="g", limit=1)
    make(3, gate="g")
    action = work(start_bulk("retry", {"name": ADD}), pages=3)
    assert counts(action) == (1, 0, 2)
    BulkAction.objects.update(progressed_at=database_clock.now() - timedelta(hours=2))
    action = work(action)
    assert (action.state, counts(action), action.error) == (BulkState.FINISHED, (1, 2, 0), "gate g stayed full")
    action = work(start_bulk("retry", {"name": ADD}), pages=3)
    assert counts(action) == (0, 0, 2)
    stopped = stop_bulk(action)
    assert (counts(stopped), stopped.full_gates) == ((0, 0, 0), ["g"])


def test_a_refusal_behind_a_full_gate_is_counted_once() -> None:
    """It is looked at again with the others of its gate."""
    Gate.objects.create(name="g", limit=1)
    rows = make(4, gate="g")

    def veto(*, records: list[TaskRecord], **_: Any) -> None:
        if any(record.id == rows[2].id for record in records):
            raise ValueError("never")

    task_state_changing.connect(veto)
    try:
        action = work(start_bulk("retry", {"name": ADD}), pages=3)
        assert counts(action) == (1, 0, 3)
        for row in (rows[0], rows[1], rows[3]):
            gates.release_ids("g", [str(row.id)])
            action = work(action, pages=3)
    finally:
        task_state_changing.disconnect(veto)
    assert (action.state, counts(action)) == (BulkState.FINISHED, (3, 1, 0))


# --- leaders


def test_a_leader_that_was_replaced_changes_nothing() -> None:
    """Its page is rolled back, and the next leader does it."""
    make(3)
    action = start_bulk("retry", {"name": ADD})

    class Fence:
        """A term that is over when the page is to be committed."""

        def __call__(self) -> AbstractContextManager[object]:
            return self.fenced()

        @contextmanager
        def fenced(self) -> Iterator[None]:
            with transaction.atomic():
                yield
                raise LockLost("maintenance", 1)

    with pytest.raises(LockLost):
        BulkRunner(Fence()).tick(0.0)
    action.refresh_from_db()
    assert (counts(action), TaskRecord.objects.filter(state=TaskState.FAILED).count()) == ((0, 0, 3), 3)
    assert counts(work(action)) == (3, 0, 0)


def test_the_leader_works_an_action_off() -> None:
    """As one of its loops."""
    make(3)
    service = MaintenanceService([], single_instance=False)
    action = start_bulk("retry", {"name": ADD})
    service.seek_leadership()
    try:
        assert service.run_bulk_actions() <= bulk.POLL_SECONDS
    finally:
        service.coordinator.release(service.lock_name)
    action.refresh_from_db()
    assert counts(action) == (3, 0, 0)


@pytest.mark.skipif("connections['default'].vendor == 'sqlite'", reason="SQLite has one writer")
def test_two_runners_at_once_change_each_task_once() -> None:
    """The row of the action is locked while a page of it is changed."""
    make(60)
    action = start_bulk("retry", {"name": ADD}, rows_per_second=5)

    def run() -> None:
        try:
            work(BulkAction.objects.get(pk=action.pk), BulkRunner(plain))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    action.refresh_from_db()
    assert (action.state, counts(action)) == (BulkState.FINISHED, (60, 0, 0))


def test_a_fleet_without_an_action_asks_one_question(django_assert_num_queries: Any) -> None:
    """Every two seconds."""
    runner = BulkRunner(nullcontext)
    with django_assert_num_queries(1):
        assert runner.tick(0.0) == bulk.POLL_SECONDS


# --- the command line


def command(*arguments: str) -> Any:
    """What `manage.py asyncq bulk … --json` prints."""
    out = io.StringIO()
    call_command("asyncq", "bulk", *arguments, "--json", stdout=out, stderr=io.StringIO())
    return json.loads(out.getvalue())


def text(*arguments: str) -> str:
    """What `manage.py asyncq bulk …` prints for people."""
    out = io.StringIO()
    call_command("asyncq", "bulk", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def test_the_command_line_starts_and_operates_actions() -> None:
    """A dry run only counts."""
    assert text("list") == "no actions\n"
    rows = make(3)
    make(queue_name="other")
    found = command("start", "retry", "--task", ADD, "--queue", "default", "--dry-run")
    assert (found["total"], found["examples"]) == (3, [str(row.id) for row in rows])
    assert found["matching"] == {"state": ["failed"], "name": [ADD], "queue_name": ["default"]}
    assert "3 tasks match" in text("start", "retry", "--task", ADD, "--queue", "default", "--dry-run")
    assert not BulkAction.objects.exists()
    action = command("start", "retry", "--task", ADD, "--queue", "default", "--rate", "2", "--yes")
    assert (action["total"], action["rows_per_second"], action["created_by"]) == (3, 2, "manage.py asyncq")
    assert command("start", "retry", "--task", ADD, "--queue", "default", "--yes")["id"] == action["id"]
    assert [each["id"] for each in command("list")] == [action["id"]]
    assert "state = ['failed']" in text("show", action["id"])
    assert action["id"] in text("list")
    assert command("stop", action["id"])["state"] == "stopped"


def test_the_command_line_shows_progress_until_the_action_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it sleeps, the leader works."""
    make(5)
    action = start_bulk("retry", {"name": ADD}, rows_per_second=2)
    runner = BulkRunner(plain)
    monkeypatch.setattr(commanding_bulk.time, "sleep", lambda _: runner.tick(float(next(moments))))
    assert command("show", str(action.pk), "--watch")["done"] == 5


@pytest.mark.parametrize(("kind", "state"), [("retry", "failed"), ("cancel", "queued"), ("delete", "succeeded")])
def test_the_command_line_without_a_filter_names_an_option(kind: str, state: str) -> None:
    """Not a key of a dictionary, which is Python's."""
    with pytest.raises(CommandError, match=f"at least one filter, such as --state {state};") as caught:
        command("start", kind, "--dry-run")
    assert caught.value.returncode == 2


def test_the_command_line_refuses_what_is_wrong_with_a_remedy() -> None:
    """And starts nothing unasked."""
    make()
    for arguments, error in (
        (("start", "retry", "--yes"), "give at least one filter"),
        (("start", "delete", "--state", "running", "--yes"), "takes tasks that are succeeded or failed"),
        (("start", "retry", "--task", ADD), "There is no terminal to ask on: give --yes"),
        (("start", "retry", "--task", ADD, "--rate", "10001", "--yes"), "1 to 10,000"),
        (("show", str(uuid.uuid4())), "there is no action"),
        (("stop", "x"), "is no id of an action"),
    ):
        with pytest.raises(CommandError, match=error):
            command(*arguments)
    assert not BulkAction.objects.exists()


# --- the admin


def test_the_admin_lists_actions_with_their_progress(admin_client: Client) -> None:
    """Nobody edits one there."""
    make(2)
    make(name="tests.tasks.removed")
    action = work(start_bulk("retry", {"state": "failed", "name": [ADD, "tests.tasks.removed"]}, by="ann"))
    page = admin_client.get("/admin/django_asyncq/bulkaction/").content.decode()
    for shown in ("2 of 3 done, 1 refused", "task: tests.tasks.add, tests.tasks.removed", "ann", "has no task"):
        assert shown in page, shown
    assert admin_client.get("/admin/django_asyncq/bulkaction/add/").status_code == 403
    assert admin_client.post(f"/admin/django_asyncq/bulkaction/{action.pk}/delete/").status_code == 403


def test_each_permission_exists_once() -> None:
    """Those that people are given for what the package does."""
    named = {"retry_task", "cancel_task", "enqueue_task", "view_payload", "pause_queue", "drain_worker"}
    named |= {"release_slot", "run_schedule"}
    found = Permission.objects.filter(content_type__app_label="django_asyncq").exclude(
        codename__regex="^(add|change|delete|view)_[a-z]*$"
    )
    codenames = [*found.values_list("codename", flat=True), "view_payload"]
    assert sorted(codenames) == sorted(named)
    assert Permission.objects.filter(codename="view_payload").count() == 1
