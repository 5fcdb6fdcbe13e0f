"""A state machine over unique tasks: every way to enqueue a key that is taken, and every end of who holds it.

What must hold after each step is read from the rows: one holder and one follower for each key, no slot without a live
task, no result of other arguments than the row's, no two bodies of one key. After the last step all tasks must finish.
The long form: `python runtests.py -m long tests/lifecycle/test_unique_machine.py`; ASYNCQ_TEST_EXAMPLES is its number
of sequences.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.db.models import F, Q
from django.utils import timezone
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core.calls import digest_of
from django_asyncq.exceptions import DuplicateTask
from django_asyncq.fleet import reconciler, repairs
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import closing, enqueueing, following, replacing
from django_asyncq.lifecycle.following import follower_slot
from django_asyncq.lifecycle.running import Run
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.storage import inserting

from .. import tasks
from ..machine import stores
from ..machine.settings import profile, quiet  # noqa: F401 - a fixture

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = int(os.environ.get("ASYNCQ_TEST_EXAMPLES", "1500"))
SHORT_EXAMPLES = 60
MUTANT_EXAMPLES = 300
MOST_ROWS = 12
HOUR = timedelta(hours=1)
# Key → unique_until.
KEYS: dict[str, Any] = {"end": "end", "other": "end", "start": "start", "throttle": HOUR}
HOW = ("reject", "return", "replace", "follow")
keys, how = st.sampled_from(sorted(KEYS)), st.sampled_from(HOW)


class Hand(NamedTuple):
    """A run of a worker. argument: what its body was called with; None while it has not been called."""

    run: Run
    worker_id: str
    argument: int | None = None


class Call(NamedTuple):
    """A call that a transaction made. id: of the row that stands for it; None: it was refused."""

    number: int
    id: UUID | None


class UniqueMachine(RuleBasedStateMachine):
    """Unique tasks, and workers that may be killed."""

    def __init__(self) -> None:
        super().__init__()
        stores.flush()
        Broker.forget_registered()
        TaskRecord.objects.all()._raw_delete(TaskRecord.objects.db)
        self.reconciler = Reconciler(Broker("worker"))
        self.reconciler.tick(0)
        self.hands: list[Hand] = []
        self.workers = 0
        self.number = 0
        # Row → the argument of the last call that was committed for it.
        self.newest: dict[UUID, int] = {}
        self.patches = [
            mock.patch.object(reconciler, "GRACE_SECONDS", 0),
            mock.patch.object(repairs, "GRACE_SECONDS", 0),
        ]
        for patch in self.patches:
            patch.start()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.drain()
        finally:
            for patch in self.patches:
                patch.stop()

    # --- producers

    def task(self, key: str, on_duplicate: str, **more: Any) -> Any:
        options = {"unique": lambda number: key, "unique_until": KEYS[key], "max_attempts": 2, **more}
        return tasks.add.using(on_duplicate=on_duplicate, **options)

    def call(self, key: str, on_duplicate: str, **more: Any) -> Call:
        """Enqueue the next number."""
        self.number += 1
        number = self.number
        try:
            return Call(number, UUID(self.task(key, on_duplicate, **more).enqueue(number).id))
        except DuplicateTask:
            return Call(number, None)

    def note(self, call: Call, on_duplicate: str, before: set[UUID]) -> None:
        """Note a committed call; one that got the result of an existing row has changed nothing."""
        if call.id is not None and (on_duplicate != "return" or call.id not in before):
            self.newest[call.id] = call.number

    @precondition(lambda self: self.has_capacity)
    @rule(key=keys, on_duplicate=how, end=st.sampled_from(["commit"] * 4 + ["rollback", "savepoint", "death"]))
    def enqueue(self, key: str, on_duplicate: str, end: str) -> None:
        """A call gets what it must get by the rows; a rolled-back one changes nothing. death: before anything follows
        the commit.
        """
        before = rows()
        wanted = self.wanted(key, on_duplicate)
        if end in ("rollback", "savepoint"):
            with transaction.atomic(), suppress(ZeroDivisionError), transaction.atomic(savepoint=end == "savepoint"):
                self.call(key, on_duplicate)
                raise ZeroDivisionError
            assert rows() == before
            return
        with dying(dies=end == "death"):
            call = self.call(key, on_duplicate)
        assert wanted in ("new", call.id), f"{on_duplicate} of {key}: {call.id} for {wanted}"
        if wanted == "new":
            assert call.id is not None
            assert call.id not in before
        self.note(call, on_duplicate, set(before))

    @precondition(lambda self: self.claimed_hands)
    @rule(data=st.data())
    def newer_call_comes(self, data: Any) -> None:
        """For a task that a worker has claimed, and whose row still says QUEUED."""
        hand = data.draw(st.sampled_from(self.claimed_hands))
        self.enqueue(next(key for key in KEYS if self.digest(key) == hand.run.record.unique_key), "replace", "commit")

    def wanted(self, key: str, on_duplicate: str) -> UUID | str | None:
        """Return what a call must get: "new", the id of a row, or None for a refusal."""
        digest = self.digest(key)
        holder = TaskRecord.objects.filter(unique_slot=digest).exclude(unique_until__lte=timezone.now()).first()
        follower = TaskRecord.objects.filter(unique_slot=follower_slot(digest)).first()
        if on_duplicate in ("replace", "follow"):
            if follower is not None:
                return follower.id
            waits = holder is not None and not holder.is_final and holder.state != TaskState.RUNNING
            return holder.id if holder is not None and waits and on_duplicate == "replace" else "new"
        if holder is None:
            return "new"
        return holder.id if on_duplicate == "return" else None

    def digest(self, key: str) -> str:
        return digest_of("default", "tests.tasks.add", key)

    @precondition(lambda self: self.has_capacity and connection.vendor != "sqlite")
    @rule(
        key=keys,
        first=how,
        second=how,
        commits=st.booleans(),
        meanwhile=st.sampled_from(["nothing", "begins", "finishes"]),
    )
    def two_transactions(self, key: str, first: str, second: str, commits: bool, meanwhile: str) -> None:
        """One is open while the other calls, and may wait for it; between them a worker goes on."""
        before = set(rows())
        made, may_end = threading.Event(), threading.Event()
        order: list[tuple[Call, str]] = []

        def open_one() -> None:
            try:
                with suppress(ZeroDivisionError), transaction.atomic():
                    call = self.call(key, first)
                    made.set()
                    assert may_end.wait(20)
                    if not commits:
                        raise ZeroDivisionError
                    order.append((call, first))
            finally:
                made.set()
                connection.close()

        def other() -> None:
            try:
                call = self.call(key, second)
                order.append((call, second))
            finally:
                connection.close()

        with ThreadPoolExecutor(2) as pool:
            opened = pool.submit(open_one)
            assert made.wait(20)
            waiting = pool.submit(other)
            with suppress(TimeoutError):
                waiting.result(0.02)
            if meanwhile != "nothing":
                # The worker must never wait for a user's transaction; here it may, so only if the row is free.
                self.step_of_worker(key, finishes=meanwhile == "finishes")
            may_end.set()
            opened.result(20)
            waiting.result(20)
        for call, on_duplicate in order:
            self.note(call, on_duplicate, before)
            before.add(call.id) if call.id else None

    def step_of_worker(self, key: str, *, finishes: bool) -> None:
        digest = self.digest(key)
        with transaction.atomic():
            locked = TaskRecord.objects.select_for_update(skip_locked=True).filter(unique_slot=digest)
            if locked.first() is None:
                return
        for hand in self.hands:
            if hand.run.record.unique_key == digest and (hand.argument is not None) is finishes:
                self.finish(hand) if finishes else self.begin_body(hand)
                return

    # --- workers

    @rule(count=st.integers(1, 2))
    def claim(self, count: int) -> None:
        """The rows say QUEUED."""
        for _ in range(count):
            self.workers += 1
            worker_id = f"w{self.workers}"
            runs = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
            for run in runs:
                lifecycle.begin(run, worker_id, timezone.now())
                self.hands.append(Hand(run, worker_id))

    def claim_suspects(self) -> None:
        self.workers += 1
        worker_id = f"w{self.workers}-alone"
        for run in lifecycle.claim_suspect(Broker(), "default", worker_id, "default").runs:
            lifecycle.begin(run, worker_id, timezone.now())
            self.hands.append(Hand(run, worker_id))

    @precondition(lambda self: self.claimed_hands)
    @rule(data=st.data())
    def begins(self, data: Any) -> None:
        """RUNNING is written, then the body is called."""
        self.begin_body(data.draw(st.sampled_from(self.claimed_hands)))

    def begin_body(self, hand: Hand) -> None:
        self.hands.remove(hand)
        if lifecycle.mark_running([hand.run]):
            lifecycle.acknowledge(Broker(), hand.worker_id, [hand.run], [hand.run])
            lifecycle.settle_lost(Broker(), [hand.run])
            return
        self.hands.append(hand._replace(argument=hand.run.record.args[0]))

    @precondition(lambda self: self.bodies)
    @rule(data=st.data(), ends=st.sampled_from(["succeeds", "succeeds", "fails", "is retried"]))
    def ends(self, data: Any, ends: str) -> None:
        """Its outcome is recorded and acknowledged."""
        self.finish(data.draw(st.sampled_from(self.bodies)), ends)

    def finish(self, hand: Hand, ends: str = "succeeds") -> None:
        self.hands.remove(hand)
        run, now = hand.run, timezone.now()
        if ends == "succeeds":
            lifecycle.succeed(run, hand.argument, now)
        else:
            lifecycle.fail(run, ValueError("no"), "", now, retry_at=now + HOUR if ends == "is retried" else None)
        lost = lifecycle.record_runs([run])
        lifecycle.acknowledge(Broker(), hand.worker_id, [run], lost)
        lifecycle.settle_lost(Broker(), lost)

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), counted=st.booleans())
    def is_killed(self, data: Any, counted: bool) -> None:
        """Its supervisor recovers the task; a counted crash makes it run alone, and after some it has failed."""
        hand = data.draw(st.sampled_from(self.hands))
        self.hands.remove(hand)
        blame = lifecycle.Blame(named=frozenset({hand.run.lease.id} if counted else ()))
        lifecycle.recover(Broker(), "default", hand.worker_id, [hand.run.lease], reason="killed", blame=blame)

    @precondition(lambda self: self.retrying)
    @rule(data=st.data())
    def is_retried(self, data: Any) -> None:
        """Its time has come."""
        self.retry(data.draw(st.sampled_from(self.retrying)))

    def retry(self, id: UUID) -> None:
        TaskRecord.objects.filter(id=id).update(retry_at=timezone.now())
        lifecycle.retry_due(Broker(), "default", [str(id)])

    # --- people and time

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def person_retries(self, data: Any) -> None:
        """A task whose key is taken stays FAILED."""
        id = data.draw(st.sampled_from(self.failed))
        record = TaskRecord.objects.get(id=id)
        is_free = not TaskRecord.objects.filter(unique_slot=record.unique_key).exists()
        retried = lifecycle.retry([id], by_person=True).retried
        holds = record.unique_until is None and not record.unique_until_start
        assert bool(retried) is (is_free or not holds)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def person_cancels(self, data: Any) -> None:
        """One that runs goes on; it may succeed."""
        lifecycle.cancel([data.draw(st.sampled_from(self.live))])

    @precondition(lambda self: rows())
    @rule(data=st.data(), by_sql=st.booleans())
    def row_is_deleted(self, data: Any, by_sql: bool) -> None:
        """By hand, or with SQL that sends no signal."""
        id = data.draw(st.sampled_from(sorted(rows())))
        found = TaskRecord.objects.filter(id=id)
        found._raw_delete("default") if by_sql else found.delete()

    @precondition(lambda self: self.final)
    @rule(data=st.data())
    def row_is_pruned(self, data: Any) -> None:
        """A throttled one only when its time is over."""
        lifecycle.prune(Broker(), [data.draw(st.sampled_from(self.final))], Q(unique_slot=None))

    @rule(key=keys)
    def throttle_is_over(self, key: str) -> None:
        """An hour has passed."""
        past = timezone.now() - timedelta(seconds=1)
        TaskRecord.objects.filter(unique_slot=self.digest(key), unique_until__isnull=False).update(unique_until=past)

    @rule()
    def redis_is_emptied(self) -> None:
        """What runs has no lease any more; the row decides whose outcome counts."""
        stores.flush()
        Broker.forget_registered()
        self.hands = []

    @rule()
    def reconciles(self) -> None:
        """All repairs, without waiting for what is young."""
        Broker("worker").mark_alive()
        self.reconciler.quick_repairs()
        self.reconciler.sweep()

    # --- what always holds

    @invariant()
    def all_holds(self) -> None:
        found = list(TaskRecord.objects.order_by("id"))
        for number, slot in enumerate(slots := [record.unique_slot for record in found if record.unique_slot]):
            assert slot not in slots[:number], "two rows hold one slot"
        live = Counter(
            record.unique_key
            for record in found
            if not record.is_final and record.after_id is None and not record.unique_until_start
            if record.unique_until is None
        )
        assert not live or max(live.values()) == 1, f"two live tasks of one key: {live}"
        for record in found:
            if record.is_final and record.unique_until is None:
                assert record.unique_slot is None, f"a lock outlives its task {record.id}"
            if record.after_id is not None:
                assert record.state == TaskState.QUEUED, "a follower that is not QUEUED"
                assert record.unique_slot == follower_slot(record.unique_key)
            if record.state == TaskState.SUCCEEDED:
                assert [record.return_value] == record.args, f"{record.args} is said to have run; it was another one"
            assert record.args == [self.newest[record.id]], "the newest arguments are lost"
        ids = {record.id: record for record in found}
        bodies = Counter(
            hand.run.record.unique_key
            for hand in self.bodies
            if not hand.run.record.unique_until_start and hand.run.record.unique_until is None
            if hand.run.record.id in ids
        )
        assert not bodies or max(bodies.values()) == 1, f"two bodies of one key at once: {bodies}"

    # --- after the last step

    def drain(self) -> None:
        """Let time pass and workers work until all tasks have finished."""
        for _ in range(MOST_ROWS * 4):
            for hand in list(self.hands):
                self.finish(hand) if hand.argument is not None else self.begin_body(hand)
                self.all_holds()
            for key in KEYS:
                self.throttle_is_over(key)
            for id in self.retrying:
                self.retry(id)
            for record in TaskRecord.objects.filter(state=TaskState.RUNNING):
                if record.id not in {hand.run.record.id for hand in self.hands}:
                    lifecycle.abandon(record, "no worker has it")
            self.reconciles()
            self.claim(MOST_ROWS)
            self.claim_suspects()
            self.all_holds()
            if not self.hands and not self.live:
                break
        left = TaskRecord.objects.filter(finished_at=None).values_list("id", "state", "after_id", "args")
        assert not left, f"never finished: {list(left)}"

    # --- what there is

    @property
    def has_capacity(self) -> bool:
        return TaskRecord.objects.filter(finished_at=None).count() < MOST_ROWS

    @property
    def claimed_hands(self) -> list[Hand]:
        return [hand for hand in self.hands if hand.argument is None]

    @property
    def bodies(self) -> list[Hand]:
        return [hand for hand in self.hands if hand.argument is not None]

    @property
    def live(self) -> list[UUID]:
        return list(TaskRecord.objects.filter(finished_at=None).order_by("id").values_list("id", flat=True))

    @property
    def final(self) -> list[UUID]:
        return list(TaskRecord.objects.exclude(finished_at=None).order_by("id").values_list("id", flat=True))

    @property
    def failed(self) -> list[UUID]:
        return list(TaskRecord.objects.failed().order_by("id").values_list("id", flat=True))

    @property
    def retrying(self) -> list[UUID]:
        return list(TaskRecord.objects.retrying().order_by("id").values_list("id", flat=True))


def rows() -> dict[UUID, tuple[Any, ...]]:
    columns = ("state", "args", "unique_slot", "after_id", "fence", "run_after", "finished_at")
    return {id: tuple(map(str, rest)) for id, *rest in TaskRecord.objects.values_list("id", *columns)}


@contextmanager
def dying(*, dies: bool) -> Iterator[None]:
    """A producer that dies after its commit: nothing follows."""
    if not dies:
        yield
        return
    hooks = (enqueueing.Dispatch, replacing.Replacement)
    with mock.patch.object(hooks[0], "follow_up"), mock.patch.object(hooks[1], "follow_up"):
        yield


@pytest.mark.timeout(600)
def test_unique_tasks_agree_with_their_promises() -> None:
    """After any sequence of calls, transactions, ends, deaths and repairs."""
    phases = [Phase.generate]
    run_state_machine_as_test(UniqueMachine, settings=profile(SHORT_EXAMPLES, derandomize=True, phases=phases))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_unique_tasks_agree_with_their_promises_long() -> None:
    """The same, with random sequences and for long."""
    run_state_machine_as_test(UniqueMachine, settings=profile(EXAMPLES, print_blob=True))


# --- mutants: with a guard removed the machine must fail, or it proves nothing


def fence_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "_raised_fence", lambda record: F("fence"))


def followers_never_move_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "move_up", lambda keys: 0)


def a_cancel_frees_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "free_slots", lambda records: None)


def an_end_frees_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskRecord, "frees_slot", property(lambda record: False))


def a_follower_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = enqueueing.dispatch
    monkeypatch.setattr(enqueueing, "settle_followers", lambda records: [_push_as_holder(r, real) for r in records])


def _push_as_holder(record: TaskRecord, dispatch: Callable[..., Any]) -> None:
    if record.after_id is not None:
        record.after_id = None
        dispatch([record])


def a_follower_that_is_late_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the end of its holder looks for it."""
    for module in (following, lifecycle):
        monkeypatch.setattr(module, "move_up_waiting", lambda keys=None: 0)


def without_the_unique_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what looks before the INSERT is left."""
    quote = connection.ops.quote_name
    of_table = f" ON {quote(TaskRecord._meta.db_table)}" if connection.vendor == "mysql" else ""
    with connection.cursor() as cursor:
        cursor.execute(f"DROP INDEX {quote('asyncq_unique_slot')}{of_table}")
    returning = "" if connection.vendor == "mysql" else f" RETURNING {quote('id')}"
    monkeypatch.setattr(inserting, "_unless_taken", lambda database, columns: returning)


# The first two are found within seconds.
MUTANTS = [
    a_cancel_frees_no_slot,
    an_end_frees_no_slot,
    *(
        pytest.param(mutant, marks=pytest.mark.long)
        for mutant in (
            fence_is_not_raised,
            followers_never_move_up,
            a_follower_is_pushed,
            a_follower_that_is_late_is_forgotten,
        )
    ),
]


def assert_found() -> None:
    """The machine fails; the sequence is not made shorter, because nobody reads it."""
    with pytest.raises(Exception) as caught:
        run_state_machine_as_test(
            UniqueMachine, settings=profile(MUTANT_EXAMPLES, derandomize=True, phases=[Phase.generate])
        )
    assert not isinstance(caught.value, FileNotFoundError | HypothesisException)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_finds_a_mutant(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guard is needed by some sequence."""
    mutant(monkeypatch)
    assert_found()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
@pytest.mark.timeout(600)
def test_finds_a_missing_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transactions that insert one key at the same time."""
    (constraint,) = [each for each in TaskRecord._meta.constraints if each.name == "asyncq_unique_slot"]
    without_the_unique_index(monkeypatch)
    try:
        assert_found()
    finally:
        TaskRecord.objects.all()._raw_delete("default")
        with connection.schema_editor() as editor:
            editor.add_constraint(TaskRecord, constraint)
