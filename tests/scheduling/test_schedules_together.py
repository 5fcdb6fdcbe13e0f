"""Schedules that are due together fire in one transaction, and each does what it would do alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from uuid import NAMESPACE_OID, UUID, uuid5

import pytest
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import QuerySet
from django.db.models.signals import post_save
from django.test.utils import CaptureQueriesContext

from django_asyncq import gates
from django_asyncq.backend import AsyncqBackend
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.control import pause
from django_asyncq.core import guard
from django_asyncq.core.registry import find, registered
from django_asyncq.exceptions import EnqueueRefused, LockLost
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.models import (
    Missed,
    Occurrence,
    OccurrenceOutcome,
    Overlap,
    Pause,
    PauseKind,
    Schedule,
    TaskRecord,
    TaskState,
)
from django_asyncq.scheduling import occurrences as enqueueing
from django_asyncq.scheduling import scheduler as firing
from django_asyncq.scheduling import scheduler as scheduling
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.signals import task_state_changing
from django_asyncq.storage.routing import transaction_of, writing_database

from .. import tasks
from ..redis_state import pending
from .test_scheduler import LOCKS_ROWS, NOON, Clock, locked_row, schedule

pytestmark = pytest.mark.django_db(transaction=True)

DUE = NOON + timedelta(minutes=5)
UUID_TEXT = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many schedules each transaction was to fire, in order."""
    found: list[int] = []
    real = scheduling.fire

    def fire(seen: Any, *rest: Any) -> Any:
        found.append(len(seen))
        return real(seen, *rest)

    monkeypatch.setattr(scheduling, "fire", fire)
    return found


# --- alone and together


def make(name: str, **values: Any) -> Schedule:
    """A schedule with an id that depends on its name alone, as its jitter does on its id."""
    return schedule(name=name, id=uuid5(NAMESPACE_OID, name), **values)


def of_task(name: str, *names: str, **values: Any) -> None:
    """Schedules of another task, without arguments."""
    for each in names:
        make(each, **{"task": f"tests.tasks.{name}", "args": [], "kwargs": {}, **values})


def with_options(patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Schedules of a task with options, of which two have the same arguments."""
    changed = tasks.tally.using(**options)
    patch.setattr(enqueueing, "registered", lambda name: changed if name == changed.module_path else registered(name))
    patch.setattr(enqueueing, "find", lambda name: changed if name == changed.module_path else find(name))
    for name in ("a", "b"):
        make(name)
    make("c", args=["south"])


def changed_meanwhile(patch: pytest.MonkeyPatch, change: Callable[[QuerySet[Schedule]], object]) -> None:
    """A schedule that somebody changes after the scheduler has read it, and before it locks it."""
    make("a")
    real, is_changed = firing.locked, []

    def locked(rows: QuerySet[Schedule]) -> list[Schedule]:
        if not is_changed:
            is_changed.append(True)
            change(Schedule.objects.filter(name="a"))
        return real(rows)

    patch.setattr(firing, "locked", locked)


def vetoed(patch: pytest.MonkeyPatch) -> None:
    """A task that a receiver of the project refuses."""
    make("a", args=["refused"])

    def refuse(*, records: list[TaskRecord], **kwargs: Any) -> None:
        if [record.args for record in records] == [["refused"]]:
            raise EnqueueRefused("not today")

    task_state_changing.connect(refuse, weak=False, dispatch_uid="refuse")
    patch.setattr(vetoed, "undo", lambda: task_state_changing.disconnect(dispatch_uid="refuse"), raising=False)


def failing(patch: pytest.MonkeyPatch, error: Exception, name: str = "a") -> None:
    """The occurrences of one schedule cannot be computed."""
    real = firing.due_occurrences

    def due(row: Schedule, *times: Any) -> Any:
        if row.name == name:
            raise error
        return real(row, *times)

    patch.setattr(firing, "due_occurrences", due)


def set_back(patch: pytest.MonkeyPatch) -> None:
    """A schedule whose occurrence at 12:05 has fired, and that is to fire it again."""
    row = make("a")
    Scheduler(clock=Clock(DUE)).fire_due()
    Schedule.objects.filter(pk=row.pk).update(next_occurrence_at=DUE)


PLAIN = (5, 10)
CASES: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], tuple[int, ...]]] = {
    "jitter": (lambda patch: make("a", jitter_seconds=60), PLAIN),
    "overlap": (lambda patch: [make(name, overlap=Overlap.SKIP) for name in "ab"], PLAIN),
    "gate full": (lambda patch: of_task("gated_tally", "a", "b"), PLAIN),
    "gate paused": (lambda patch: (of_task("gated_tally", "a"), pause(PauseKind.GATE, "tallies")), PLAIN),
    "gate's callable raises": (lambda patch: make("a", task="tests.tasks.badly_gated"), PLAIN),
    "unique": (lambda patch: with_options(patch, unique=True), PLAIN),
    "unique, existing": (lambda patch: with_options(patch, unique=True, on_duplicate="return"), PLAIN),
    "unique, follow": (lambda patch: with_options(patch, unique=True, on_duplicate="follow"), PLAIN),
    "expires": (lambda patch: with_options(patch, expires=60, timeout=5, max_attempts=4), PLAIN),
    "task gone": (lambda patch: of_task("gone", "a"), PLAIN),
    "not schedulable": (lambda patch: make("a", task="tests.tasks.add", args=[1, 2], kwargs={}), PLAIN),
    "invalid arguments": (lambda patch: make("a", kwargs={"colour": "red"}), PLAIN),
    "arguments of no kind": (lambda patch: make("a", kwargs=["pages"]), PLAIN),
    "invalid timing": (lambda patch: Schedule.objects.filter(pk=make("a").pk).update(zone="Mars/Olympus"), PLAIN),
    "deleted meanwhile": (lambda patch: changed_meanwhile(patch, lambda rows: rows.delete()), PLAIN),
    "disabled meanwhile": (lambda patch: changed_meanwhile(patch, lambda rows: rows.update(enabled=False)), PLAIN),
    "planned anew meanwhile": (
        lambda patch: changed_meanwhile(patch, lambda rows: rows.update(next_occurrence_at=DUE + timedelta(minutes=1))),
        PLAIN,
    ),
    "vetoed": (vetoed, PLAIN),
    "no database for one": (
        lambda patch: (make("a"), failing(patch, DatabaseError("a code that nobody knows"))),
        PLAIN,
    ),
    "error of this code": (lambda patch: (make("a"), failing(patch, RuntimeError("odd"))), PLAIN),
    "set back": (set_back, PLAIN),
    **{
        f"missed, {missed}": (lambda patch, missed=missed: make("a", missed=missed, missed_cap=3), (64,))
        for missed in Missed
    },
    "missed, all, overlap": (lambda patch: make("a", missed=Missed.ALL, overlap=Overlap.SKIP), (64, 69)),
    "missed, all, gate": (lambda patch: of_task("gated_tally", "a", "b", missed=Missed.ALL, missed_cap=2), (64,)),
}


def run_case(name: str, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Make the schedules of a case and two plain ones, fire what is due; return what has come of it."""
    arrange, minutes = CASES[name]
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        of_task("stamp", "plain 1", "plain 2", missed=Missed.ONCE)
        arrange(patch)
        scheduler, fired = Scheduler(clock=(clock := Clock())), []
        for minute in minutes:
            clock.now = NOON + timedelta(minutes=minute)
            result = scheduler.fire_due()
            fired += [(each.schedule.name, each.occurs_at) for each in result.fired]
        if name == "vetoed":
            vetoed.undo()  # type: ignore[attr-defined]
    occurrences = Occurrence.objects.values_list("schedule__name", "occurs_at", "outcome", "note", "task")
    rows = TaskRecord.objects.values_list(
        "headers", "name", "args", "kwargs", "run_after", "gate", "unique_slot", "timeout_seconds", "max_attempts"
    )
    found = {
        "occurrences": sorted((*row[:3], UUID_TEXT.sub("<id>", row[3]), row[4] is not None) for row in occurrences),
        "tasks": sorted(map(repr, rows)),
        "expires": [moment is not None for moment in TaskRecord.objects.values_list("expires_at", flat=True)],
        "next": dict(Schedule.objects.values_list("name", "next_occurrence_at")),
        "fired": sorted(fired),
        "wait": result.next_seconds,
        "pushed": len(pending()) + Broker().client.zcard(QueueKeys("default").scheduled),
        "log": sorted(UUID_TEXT.sub("<id>", each.getMessage()) for each in caplog.records),
    }
    TaskRecord.objects.all().delete()
    Schedule.objects.all().delete()
    Pause.objects.all().delete()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_does_together_what_it_does_alone(
    name: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Occurrences, notes, tasks, next times, log lines, entries: the same, and beside it two schedules that fire."""
    caplog.set_level(logging.INFO, "django_asyncq")
    with monkeypatch.context() as patch:
        patch.setattr(scheduling, "SIZES", (1,))
        alone = run_case(name, caplog)
    assert set(sizes) == {1}
    sizes.clear()
    together = run_case(name, caplog)
    assert max(sizes) > 1
    assert together == alone
    plain = [row for row in together["occurrences"] if row[0].startswith("plain") and row[2] == "queued"]
    assert len(plain) == 2 * len(CASES[name][1])


# --- together


def many(count: int, **values: Any) -> list[Schedule]:
    """So many schedules that are due at 12:05."""
    return [make(f"many {number:03}", args=[f"region {number:03}"], **values) for number in range(count)]


@contextmanager
def leading() -> Iterator[Scheduler]:
    """The scheduler of a process that leads, so that its transactions check the fence."""
    service = MaintenanceService([], single_instance=False)
    service.seek_leadership()
    service.scheduler._clock = Clock(DUE)
    try:
        yield service.scheduler
    finally:
        service.coordinator.release(service.lock_name)


@pytest.mark.parametrize("values", [{}, {"overlap": Overlap.SKIP}, {"task": "tests.tasks.gated_many"}], ids=repr)
def test_a_hundred_schedules_take_few_statements(values: dict[str, Any], sizes: list[int]) -> None:
    """Two pages are read, and in between: fence, lock, look, tasks, occurrences, next times, in one transaction."""
    with leading() as scheduler:
        # The number of the term is written, and the gate is built.
        tasks.gated_many.enqueue("first")
        many(1)
        scheduler.fire_due()
        Schedule.objects.all().delete()
        TaskRecord.objects.all().delete()
        sizes.clear()
        many(100, **values)
        with CaptureQueriesContext(connections[writing_database(Schedule)]) as queries:
            fired = scheduler.fire_due().fired
    assert len(fired) == 100 and sizes == [100]
    assert len(queries) <= 12, [query["sql"][:100] for query in queries]
    assert len(pending()) == TaskRecord.objects.count() == Occurrence.objects.filter(outcome="queued").count() == 100
    assert set(Schedule.objects.values_list("next_occurrence_at", flat=True)) == {DUE + timedelta(minutes=5)}
    by_schedule = {row.schedule.args[0]: row.task_id for row in Occurrence.objects.select_related("schedule")}
    assert by_schedule == {row.args[0]: row.pk for row in TaskRecord.objects.all()}


def test_one_that_fails_costs_the_others_little(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its ten fire alone, all others in tens; in the next round it is alone from the beginning."""
    rows = many(100)
    failing(monkeypatch, RuntimeError("odd"), rows[37].name)
    scheduler = Scheduler(clock=(clock := Clock(DUE)))
    result = scheduler.fire_due()
    assert len({each.schedule.pk for each in result.fired}) == len(result.fired) == 99 and result.next_seconds == 1
    assert sorted(sizes) == [1] * 10 + [10] * 10 + [100]
    assert Occurrence.objects.count() == TaskRecord.objects.count() == len(pending()) == 99
    sizes.clear()
    clock.step(minutes=5)
    assert len(scheduler.fire_due().fired) == 99
    assert sorted(sizes) == [1, 99]


def test_a_receiver_that_ends_the_thread_stops_no_other(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of this package no SystemExit of the project's code passes. A receiver gets each task by itself."""
    monkeypatch.setattr(guard, "_is_own_process", True)
    many(5)

    def leave(*, records: list[TaskRecord], **kwargs: Any) -> None:
        if [record.args for record in records] == [["region 002"]]:
            raise SystemExit

    task_state_changing.connect(leave)
    try:
        assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 4
    finally:
        task_state_changing.disconnect(leave)
    assert sizes == [5]
    assert "SystemExit" in Occurrence.objects.get(outcome=OccurrenceOutcome.REFUSED).note
    assert len(pending()) == TaskRecord.objects.count() == 4


def test_all_that_fail_are_tried_alone_once(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can fire, a round costs a tenth more than without trying it together."""
    many(100)

    def due(*_: Any) -> Any:
        raise RuntimeError("odd")

    monkeypatch.setattr(firing, "due_occurrences", due)
    assert Scheduler(clock=Clock(DUE)).fire_due() == ([], 1)
    assert sorted(sizes) == [1] * 100 + [10] * 10 + [100]


def test_a_leader_that_lost_its_lock_writes_nothing_of_many() -> None:
    """Also when it learns of that at the end: the next leader fires all of them."""
    many(20)

    @contextmanager
    def lost() -> Iterator[None]:
        with transaction_of(Schedule):
            yield
            raise LockLost("maintenance", 1)

    with pytest.raises(LockLost):
        Scheduler(lost, Clock(DUE)).fire_due()
    assert Occurrence.objects.count() == TaskRecord.objects.count() == len(pending()) == 0
    assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 20
    assert Scheduler(clock=Clock(DUE)).fire_due().fired == []
    assert TaskRecord.objects.count() == len(pending()) == 20


@LOCKS_ROWS
def test_a_locked_row_does_not_spoil_the_others_transaction(sizes: list[int]) -> None:
    """It is left out, and tried alone."""
    rows = many(20)
    with locked_row(rows[7]):
        assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 19
    assert sizes == [20, 1]
    assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 1


def test_an_occurrence_that_another_process_writes_meanwhile_is_not_written_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The unique index refuses it after the look: nothing of the transaction stays, and the next round goes on."""
    row = make("a")
    real = firing.enqueue

    def enqueue(*call: Any) -> UUID:
        Occurrence.objects.create(schedule=row, occurs_at=DUE)
        return real(*call)

    with monkeypatch.context() as patch:
        patch.setattr(firing, "enqueue", enqueue)
        assert Scheduler(clock=Clock(DUE)).fire_due() == ([], 1)
    assert "another transaction has just written one of its occurrences" in caplog.text
    assert Occurrence.objects.count() == TaskRecord.objects.count() == 0
    assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 1


def test_one_with_very_many_missed_occurrences_has_a_transaction_of_its_own(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no transaction of many schedules lasts long."""
    monkeypatch.setattr(firing, "MOST_OCCURRENCES", 10)
    many(5, missed=Missed.ONCE)
    make("late", cron="* * * * *", missed=Missed.ALL, missed_cap=12)
    fired = Scheduler(clock=Clock(NOON + timedelta(minutes=20))).fire_due().fired
    assert [each.schedule.name for each in fired].count("late") == 12 and len(fired) == 17
    assert sizes == [6, 1]


def test_gate_slots_of_a_transaction_that_is_rolled_back_are_free_at_once(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those fire that the gate has admitted, though it has no other slot."""
    of_task("gated_tally", "a")
    many(3)
    real = firing._insert

    def insert(occurrences: Sequence[Occurrence]) -> None:
        if len(occurrences) > 1:
            raise DatabaseError("a code that nobody knows")
        real(occurrences)

    monkeypatch.setattr(firing, "_insert", insert)
    assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 4
    assert sizes == [4, 1, 1, 1, 1]
    assert len(gates.slots("tallies")) == 1 and len(pending()) == TaskRecord.objects.count() == 4


@pytest.mark.parametrize("model", [TaskRecord, Occurrence])
def test_the_projects_receivers_get_each_row(model: Any) -> None:
    """`post_save` of a task or an occurrence is sent as for a schedule that fires alone."""
    many(10)
    saved = []

    def note(*, instance: Any, created: bool, **kwargs: Any) -> None:
        saved.append((instance.pk, created))

    post_save.connect(note, sender=model)
    try:
        assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 10
    finally:
        post_save.disconnect(note, sender=model)
    assert sorted(saved) == sorted((pk, True) for pk in model.objects.values_list("pk", flat=True))
    assert len(saved) == 10


def test_a_backend_of_the_projects_gets_each_call(settings: Any, sizes: list[int]) -> None:
    """Where its class says what `enqueue` does, that is called for each occurrence, in the same transaction."""
    settings.TASKS = {"default": {"BACKEND": f"{__name__}.CountingBackend", "QUEUES": []}}
    CountingBackend.calls.clear()
    many(10)
    assert len(Scheduler(clock=Clock(DUE)).fire_due().fired) == 10
    assert sizes == [10] and sorted(CountingBackend.calls) == [f"region {number:03}" for number in range(10)]


class CountingBackend(AsyncqBackend):
    """A project's backend that notes each call."""

    calls: ClassVar[list[str]] = []

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note the call, and enqueue it."""
        self.calls.append(args[0])
        return super().enqueue(task, args, kwargs)


@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.SUCCEEDED])
def test_overlap_looks_at_the_last_hundred_occurrences(state: TaskState) -> None:
    """Of each schedule: of one with few occurrences all, of one with many the last hundred that have a task."""
    few, many_before, busy = (make(name, overlap=Overlap.SKIP) for name in ("few", "many", "busy"))
    finished_at = NOON if state == TaskState.SUCCEEDED else None
    old = TaskRecord.objects.create(name="tests.tasks.tally", state=state, finished_at=finished_at)
    done = TaskRecord.objects.create(name="tests.tasks.tally", state=TaskState.SUCCEEDED, finished_at=NOON)
    for row, count in ((few, 99), (many_before, 100), (busy, 100)):
        Occurrence.objects.bulk_create(
            Occurrence(
                schedule=row, occurs_at=NOON - timedelta(minutes=number), task_id=done.id if number < count else old.id
            )
            for number in range(count + (row is not busy))
        )
    Occurrence.objects.filter(schedule=busy, occurs_at=NOON - timedelta(minutes=50)).update(task=old)
    Scheduler(clock=Clock(DUE)).fire_due()
    outcomes = dict(Occurrence.objects.filter(occurs_at=DUE).values_list("schedule__name", "outcome"))
    expected = "skipped" if state == TaskState.QUEUED else "queued"
    assert outcomes == {"few": expected, "many": "queued", "busy": expected}
