"""Tasks of several gates: all slots or none, one line at a time, and no slot idle while something may run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from django_asyncq import QueueFull, conf, gates, lifecycle, task
from django_asyncq.broker import Broker, clients, scripts
from django_asyncq.broker.reading import read
from django_asyncq.core.several_gates import GateLimit, read_others
from django_asyncq.exceptions import InvalidOption, UnknownGate
from django_asyncq.fleet.forwarder import WaiterService
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle.dispatching import park_lost
from django_asyncq.models import FailureReason, Gate, Pause, PauseKind, TaskRecord, TaskState
from django_asyncq.observe.counts import gate_stats
from django_asyncq.observe.deploying import _of_gates
from django_asyncq.observe.scale import read_scale
from django_asyncq.storage import database_clock
from django_asyncq.storage.rollbacks import release_rolled_back

from .. import tasks
from ..topologies import cluster
from ..worker.test_crash import Crash
from ..workers import ROOT, environment, run_workers
from .test_gate import holders
from .test_waiters import leave, look
from .test_waiting import claimed, ids, row_of, waits

pytestmark = pytest.mark.django_db(transaction=True)

# The gates "a" and "b": their limits are those of the task.
both = tasks.gated.using(gate=("{gate}", "b"), queue_limit=(2, 1))
waiting = both.using(on_full="wait")
only_b = tasks.gated.using(gate="b", queue_limit=1, on_full="wait")
only_a = tasks.gated.using(gate="a", queue_limit=2, on_full="wait")


def stands_at(result: Any) -> str:
    """The gate in whose line a task stands, by its row and by Redis; "" for one that does not wait."""
    row = row_of(result)
    lines = [each.name for each in row.gates if str(row.id) in gates.waiters(each.name)]
    assert lines == ([row.gate] if row.waits_for_slot or row.retry_at else [])
    return lines[0] if lines else ""


def tick() -> None:
    """Let the leader look at all gates."""
    WaiterService(Broker("worker")).tick((), 0.0)


# --- what may be declared


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gate": ("a",)}, "one name, or a tuple of two to 4"),
        ({"gate": tuple("abcde")}, "one name, or a tuple of two to 4"),
        ({"gate": ("a", 7)}, "one name, or a tuple of two to 4"),
        ({"gate": ("a", "b"), "queue_limit": (1, 2, 3)}, "has 2 gates: give one limit for each"),
        ({"gate": ("a", "b"), "queue_limit": (1, "2")}, "give whole numbers, and None where"),
        ({"gate": ("a", "b"), "queue_limit": (1, True)}, "give whole numbers, and None where"),
        ({"gate": "a", "queue_limit": (1, 2)}, "the task has one gate"),
        ({"queue_limit": (1, 2)}, "it needs gate="),
    ],
)
def test_gates_that_can_never_be_right_are_refused_at_the_declaration(options: Any, text: str) -> None:
    """The error names the task, the option and the remedy; `using` refuses the same."""
    with pytest.raises(InvalidOption, match=text) as caught:
        task(**options)(_anything)
    assert f"task {__name__}._anything" in str(caught.value)
    with pytest.raises(InvalidOption, match=text):
        tasks.add.using(**options)


def _anything(number: int = 0) -> None:
    pass


@pytest.mark.parametrize(
    ("gate", "limit", "text"),
    [
        (("a", "b c"), 1, "gate name 'b c' is not valid"),
        (("a", "{missing}"), 1, "gate='{missing}' cannot be filled"),
        (lambda *args: (), 1, "gives 0 gates"),
        (lambda *args: tuple("abcde"), 1, "gives 5 gates"),
        (lambda *args: ("a", None), 1, "gate name None is not valid"),
        (lambda *args: ("a", "b", "c"), (1, 2), "has 2 limits, and the task has 3 gates"),
    ],
)
def test_gates_that_are_wrong_for_a_call_are_refused_before_anything_is_written(
    gate: Any, limit: Any, text: str
) -> None:
    """Neither a row nor a slot."""
    with pytest.raises(InvalidOption, match=text):
        tasks.add.using(gate=gate, queue_limit=limit).enqueue(1)
    assert not TaskRecord.objects.exists()
    assert holders("a") == set()


@pytest.mark.parametrize(
    ("gate", "limit", "expected"),
    [
        (("a", "n-{a}"), 3, [("a", 3), ("n-7", 3)]),
        (["n-{a}", "a"], (None, 3), [("a", 3), ("n-7", None)]),
        (("n-{a}", "n-7"), (5, 2), [("n-7", 2)]),
        (("n-{a}", "n-7"), (0, 2), [("n-7", 2)]),
        (lambda a, b=0: (f"c-{a}", "b"), (-2_147_483_647, 1), [("b", 1), ("c-7", -2_147_483_647)]),
        (lambda a, b=0: "single", 4, [("single", 4)]),
        (lambda a, b=0: ("single",), (4,), [("single", 4)]),
        (("A", "a", "x" * 200, "y" * 200), None, [("A", None), ("a", None), ("x" * 200, None), ("y" * 200, None)]),
    ],
)
def test_a_row_has_the_gates_of_its_call(gate: Any, limit: Any, expected: Any) -> None:
    """By name, each with its own limit; one name is one gate, whose stricter limit counts."""
    for name, own in expected:
        if own is None:
            Gate.objects.create(name=name, limit=9)
    row = row_of(tasks.add.using(gate=gate, queue_limit=limit).enqueue(7))
    assert row.gates == tuple(GateLimit(*each) for each in expected)
    for name, own in expected:
        assert holders(name) == ({str(row.id)} if own is None or own > 0 else set())
        assert list(TaskRecord.objects.at_gate(name)) == list(TaskRecord.objects.holding_slot(name)) == [row]
    assert not TaskRecord.objects.at_gate(expected[0][0].swapcase() + "z").exists()


def test_what_is_in_a_row_and_no_gate_is_skipped() -> None:
    """Any program may have written anything there; the rest is read."""
    assert read_others("") == ()
    assert read_others("\na\t1\nb c\t2\n\t3\nd\tx\nb\t\nc\t-4\n") == (("a", 1), ("b", None), ("c", -4))


# --- all or none


def test_a_call_gets_a_slot_of_each_gate_or_of_none() -> None:
    """The error names the gate that refused, with its numbers; no gate has a slot of the refused call."""
    first = both.enqueue("a")
    assert holders("a") == holders("b") == {first.id}
    with pytest.raises(QueueFull) as caught:
        both.enqueue("a")
    assert (caught.value.gate, caught.value.limit, caught.value.occupancy) == ("b", 1, 1)
    assert holders("a") == holders("b") == {first.id}
    assert TaskRecord.objects.count() == 1
    run_workers()
    assert holders("a") == holders("b") == set()
    assert TaskRecord.objects.succeeded().count() == 1


def test_the_narrowest_of_several_full_gates_refuses() -> None:
    """Where both are full, one waits for that which is free more rarely."""
    for _ in range(2):
        tasks.gated.using(gate="a", queue_limit=2).enqueue("a")
    tasks.gated.using(gate="b", queue_limit=1).enqueue("b")
    with pytest.raises(QueueFull) as caught:
        both.enqueue("a")
    assert caught.value.gate == "b"


def test_many_calls_are_admitted_together_or_as_many_as_there_is_room_for() -> None:
    """One script for all calls with the same gates; `partial` leaves out those that a gate refuses."""
    task = both.using(queue_limit=(4, 3))
    with pytest.raises(QueueFull):
        task.enqueue_many([("a",)] * 4)
    assert holders("a") == holders("b") == set()
    results = task.enqueue_many([("a",), ("c",), ("a",), ("a",), ("a",)], partial=True)
    # Those of the same gates are asked for together.
    assert [result is not None for result in results] == [True, False, True, True, False]
    assert len(holders("b")) == 3


def test_a_gate_without_a_limit_is_unknown_and_one_with_zero_admits_all() -> None:
    """An open gate takes no part: no slot of it is held."""
    with pytest.raises(UnknownGate, match="'b'"):
        both.using(queue_limit=(2, None)).enqueue("a")
    assert holders("a") == set()
    result = both.using(queue_limit=(2, 0)).enqueue("a")
    assert (holders("a"), holders("b")) == ({result.id}, set())


def test_a_limit_that_was_removed_keeps_nobody_out_of_the_other_gate() -> None:
    """A committed task whose one gate has no limit any more needs only a slot of the other."""
    row = Gate.objects.create(name="b", limit=1)
    result = tasks.gated.using(gate=("a", "b"), queue_limit=(2, None), run_after=timedelta(hours=1)).enqueue("a")
    row.delete()
    record = row_of(result)
    assert gates.confirm([record]) == set()
    assert holders("a") == {result.id}


def test_a_slot_that_was_lost_of_one_gate_loses_those_of_the_others() -> None:
    """The task is put aside, holds no slot, and waits at the gate that was full meanwhile."""
    result = both.using(run_after=timedelta(hours=1)).enqueue("a")
    gates.release_ids("b", [result.id])
    tasks.gated.using(gate="b", queue_limit=1).enqueue("b")
    row = row_of(result)
    park_lost([row])
    row = row_of(result)
    assert (row.state, row.reason, row.gate) == (TaskState.FAILED, FailureReason.GATE_FULL, "b")
    assert result.id not in holders("a") | holders("b")
    assert gates.waiters("b") == [result.id]


def test_a_rollback_releases_all_slots() -> None:
    """As with one gate: at the next call of the same process."""
    from django.db import transaction

    with transaction.atomic():
        both.enqueue("a")
        transaction.set_rollback(True)
    release_rolled_back()
    assert holders("a") == holders("b") == set()


# --- the line


def test_a_call_waits_at_the_gate_that_refused_it() -> None:
    """Its row and Redis say which; a free slot of that gate lets it in."""
    first, second = waiting.enqueue("a"), waiting.enqueue("a")
    assert waits(second) and stands_at(second) == "b"
    assert holders("a") == {first.id}
    leave(first)
    look("b")
    assert not waits(second)
    assert holders("a") == holders("b") == {second.id}
    assert claimed() == [second.id]


def test_a_task_that_another_gate_refuses_moves_to_its_line_and_loses_no_time() -> None:
    """It stands before those that came later, and the next in its old line gets the slot in the same look."""
    in_a = [only_a.enqueue("a") for _ in range(2)]
    at_b = only_b.enqueue("b")
    moving = waiting.enqueue("a")
    assert stands_at(moving) == "b"
    later = only_b.enqueue("b")
    behind = only_a.enqueue("a")
    assert stands_at(behind) == "a"
    leave(at_b)
    look("b")
    # "a" is full.
    assert stands_at(moving) == "a"
    assert not waits(later)
    # It came before.
    assert gates.waiters("a") == [moving.id, behind.id]
    leave(in_a[0])
    look("a")
    assert (stands_at(moving), waits(behind)) == ("b", False)
    leave(later)
    leave(in_a[1])
    tick()
    assert not waits(moving)
    assert holders("b") == {moving.id}


def test_a_slot_is_used_though_all_before_wait_for_another_gate() -> None:
    """One of them moves; the others keep their place, and whoever can run is let in."""
    fillers = [tasks.gated.using(gate="g", queue_limit=1).enqueue("g")]
    full = [tasks.gated.using(gate=f"full-{n}", queue_limit=1).enqueue("f") for n in range(2)]
    blocked = [
        tasks.gated.using(gate=("g", f"full-{n % 2}"), queue_limit=(1, 1), on_full="wait").enqueue("g")
        for n in range(6)
    ]
    # All of them stand at "g", as after a time in which that was full and the others were not.
    for result in blocked:
        row = row_of(result)
        row.stand_at("g")
        row.save()
        client = Broker().client
        client.zrem(gates.keys(f"full-{blocked.index(result) % 2}").waiters, result.id)
    gates.wait_again([row_of(result) for result in blocked])
    plain = tasks.gated.using(gate="g", queue_limit=1, on_full="wait").enqueue("g")
    assert gates.waiters("g") == [*ids(blocked), plain.id]
    leave(*fillers)
    look("g")
    assert not waits(plain)
    # One for each of the full gates.
    assert sorted(map(stands_at, blocked)) == ["full-0", "full-1"] + ["g"] * 4
    assert full


def test_those_that_wait_for_another_gate_keep_nobody_out() -> None:
    """A call that needs only the free slot is not refused because of those that cannot use it."""
    first = only_a.using(queue_limit=1).enqueue("a")
    tasks.gated.using(gate="b", queue_limit=1).enqueue("b")
    task = waiting.using(queue_limit=(1, 1))
    blocked = [task.enqueue("a") for _ in range(2)]
    for result in blocked:
        Broker().client.zrem(gates.keys("b").waiters, result.id)
        row = row_of(result)
        row.stand_at("a")
        row.save()
    gates.wait_again([row_of(result) for result in blocked])
    leave(first)
    look("a")
    assert sorted(map(stands_at, blocked)) == ["a", "b"]
    # "reject" would refuse it for the sake of the one that still stands there.
    admitted = tasks.gated.using(gate="a", queue_limit=1).enqueue("a")
    assert holders("a") == {admitted.id}


def test_priority_and_age_decide_among_tasks_of_different_gates() -> None:
    """Before a free slot of "b" stand tasks of one gate and of two, in one line."""
    at_b = only_b.enqueue("b")
    old = waiting.enqueue("a")
    middle = only_b.enqueue("b")
    urgent = waiting.using(priority=5).enqueue("a")
    assert gates.waiters("b") == [urgent.id, old.id, middle.id]
    for expected in (urgent, old, middle):
        leave(at_b)
        look("b")
        assert holders("b") == {expected.id}
        at_b = expected


def test_a_retry_moves_to_the_gate_that_refuses_it() -> None:
    """Its row is RETRYING and stands there; a person's retry says which gate is full."""
    tasks.gated.using(gate="b", queue_limit=1).enqueue("b")
    row = TaskRecord.objects.create(
        name=tasks.gated.module_path,
        args=["a"],
        gate="a",
        queue_limit=2,
        other_gates="\nb\t1\n",
        state=TaskState.FAILED,
        reason=FailureReason.EXCEPTION,
        finished_at="2026-01-01T00:00:00Z",
    )
    done = lifecycle.retry([row.id], by_person=True)
    assert [record.gate for record in done.full] == ["b"]
    TaskRecord.objects.filter(id=row.id).update(finished_at=None, retry_at="2026-01-01T00:00:00Z")
    assert lifecycle.retry_due(Broker(), "default", [str(row.id)]) == 0
    row.refresh_from_db()
    assert (row.gate, row.other_gates, row.reason) == ("b", "\na\t2\n", FailureReason.GATE_FULL)
    assert gates.waiters("b") == [str(row.id)]
    assert str(row.id) not in holders("a")


def test_a_lane_keeps_all_its_slots_between_two_attempts() -> None:
    """`ordered`: the next waits until it has finished."""
    lane = tasks.gated_and_fails_once.using(gate=("{gate}", "b"), queue_limit=(2, 1), on_full="wait", ordered=True)
    first, second = lane.enqueue("a", 0.0), lane.enqueue("a", 0.0)
    (run,) = lifecycle.claim(Broker("worker"), "default", "w", 9, "default").runs
    now = database_clock.now()
    lifecycle.begin(run, "w", now)
    lifecycle.fail(run, ValueError("once"), "", now, retry_at=now)
    lost = lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker("worker"), "w", [run], lost)
    lifecycle.announce([run.record], TaskState.RUNNING, TaskState.FAILED)
    assert row_of(first).retry_at is not None
    assert holders("a") == holders("b") == {first.id}
    tick()
    assert waits(second)
    assert lifecycle.retry_due(Broker(), "default", [first.id]) == 1
    assert holders("a") == holders("b") == {first.id}


def test_a_paused_gate_refuses_and_keeps_the_line() -> None:
    """The other gate's slot stays free."""
    Pause.objects.create(kind=PauseKind.GATE, name="b")
    gates.forget_built("b")
    with pytest.raises(QueueFull) as caught:
        both.enqueue("a")
    assert (caught.value.gate, caught.value.paused) == ("b", True)
    result = waiting.enqueue("a")
    assert stands_at(result) == "b"
    assert holders("a") == set()


def test_the_line_of_the_gate_that_refuses_is_bounded() -> None:
    """`max_waiting` counts those that wait there."""
    task = waiting.using(max_waiting=1)
    task.enqueue("a")
    task.enqueue("a")
    with pytest.raises(QueueFull) as caught:
        task.enqueue("a")
    assert (caught.value.gate, caught.value.waiting) == ("b", 1)
    assert TaskRecord.objects.count() == 2


def test_a_cancelled_or_deleted_task_leaves_its_line() -> None:
    """Also when its row was read before the leader moved it."""
    tasks.gated.using(gate="b", queue_limit=1).enqueue("b")
    first, second = waiting.enqueue("a"), waiting.enqueue("a")
    lifecycle.cancel([row_of(first).id])
    leave(second)
    assert gates.waiters("a") == gates.waiters("b") == []


# --- lost memory, and what a crash leaves


def test_slots_and_lines_are_rebuilt_from_the_rows() -> None:
    """Each gate gets its slots and its line again, whichever of them is asked first."""
    first = waiting.enqueue("a")
    others = [waiting.enqueue("a") for _ in range(2)]
    Broker().client.flushdb()
    last = waiting.enqueue("a")
    assert holders("a") == holders("b") == {first.id}
    assert gates.waiters("b") == [*ids(others), last.id]
    Reconciler(Broker()).sweep()
    assert (gates.waiters("a"), gates.waiters("b")) == ([], [*ids(others), last.id])
    leave(first)
    tick()
    assert holders("a") == holders("b") == {others[0].id}


def test_the_audit_gives_each_gate_its_slots_and_takes_those_without_a_task() -> None:
    """A slot that a live task lacks is added, and one that none has is removed, at gates after the first too."""
    result = both.enqueue("a")
    client = Broker().client
    client.zrem(gates.keys("b").members, result.id)
    assert gates.audit("b").added == 1
    assert holders("b") == {result.id}
    TaskRecord.objects.filter(id=result.id).update(state=TaskState.FAILED, reason=1, finished_at="2026-01-01T00:00:00Z")
    Broker().remove("default", [result.id])
    assert gates.audit("b").removed == gates.audit("a").removed == 1


@pytest.mark.parametrize("dies_at", ["before the row", "after the row"])
def test_a_leader_that_dies_while_it_moves_a_task_loses_none(dies_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has moved it and the row has not, or both: the audit and the next look let it in."""
    in_a = [only_a.enqueue("a") for _ in range(2)]
    at_b = only_b.enqueue("b")
    moving = waiting.enqueue("a")
    leave(at_b)
    row = row_of(moving)
    assert gates.confirm([row], again=True) == {row.id}
    assert row.gate == "a"
    if dies_at == "after the row":
        TaskRecord.objects.filter(id=row.id).update(gate="a", queue_limit=2, other_gates="\nb\t1\n")
    reconciler = Reconciler(Broker())
    for _ in range(2):
        reconciler.sweep()
    assert stands_at(moving) == ("b" if dies_at == "before the row" else "a")
    leave(*in_a)
    tick()
    tick()
    assert not waits(moving)
    assert holders("a") == holders("b") == {moving.id}


# Point: what dies there, and how many tasks there are then.
KILLS = {
    "build.gate_built": ("enqueue_at_several", 0),
    "enqueue.slot_acquired": ("enqueue_at_several", 0),
    "enqueue.committed": ("enqueue_at_several", 1),
    "dispatch.queue_pushed": ("enqueue_at_several", 1),
    "let_in.slot_acquired": ("let_in_from_second", 1),
    "let_in.committed": ("let_in_from_second", 1),
    "retry.slot_acquired": ("retry", 1),
    "retry.committed": ("retry", 1),
    "delete.committed": ("delete", 0),
}


@pytest.mark.faults
@pytest.mark.parametrize("point", KILLS)
def test_a_process_killed_at_each_step_leaves_all_slots_or_none(
    point: str, own_keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment of the kill both gates have the same slots; afterwards the rows have theirs, and all end."""
    monkeypatch.setattr("django_asyncq.fleet.reconciler.GRACE_SECONDS", 0)
    scene, rows = KILLS[point]
    names = ("killed", "killed-b")
    task_of_two = tasks.nap.using(gate=names, queue_limit=(2, 1), on_full="wait")
    if scene == "let_in_from_second":
        holder = task_of_two.enqueue(0)
        assert waits(task_of_two.enqueue(0))
        leave(holder)
    elif scene in ("retry", "delete"):
        result = task_of_two.enqueue(0)
        if scene == "retry":
            lifecycle.cancel([row_of(result).id])
    crash = Crash(point, tmp_path)
    command = [sys.executable, "-m", "tests.crash_producer", scene, "killed"]
    done = subprocess.run(command, env=environment(**crash.variables), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert TaskRecord.objects.count() == rows
    assert holders(names[0]) == holders(names[1]) or point == "build.gate_built"
    reconciler = Reconciler(Broker())
    for _ in range(3):
        reconciler.sweep()
        tick()
    run_workers()
    left = [slot for name in names for slot in gates.slots(name)]
    # What only the dead process knew expires.
    assert all(slot.expires_at <= time.time() + conf.PROVISIONAL_SECONDS for slot in left)
    if rows:
        assert left == []
        if scene == "retry" and point == "retry.slot_acquired":
            assert TaskRecord.objects.failed().count() == 1
        else:
            assert TaskRecord.objects.succeeded().count() == 1


# --- what people see


def test_every_gate_of_a_task_counts_it() -> None:
    """Statistics, filters and checks know it at each of its gates; it waits at one."""
    first, second = waiting.enqueue("a"), waiting.enqueue("a")
    found = {each.gate: each for each in gate_stats()}
    assert {name: (each.limit, each.live, each.occupancy, each.waiting) for name, each in found.items()} == {
        "a": (2, 1, 1, 0),
        "b": (1, 1, 1, 1),
    }
    for name in ("a", "b"):
        assert set(map(str, TaskRecord.objects.at_gate(name).values_list("id", flat=True))) == {first.id, second.id}
        assert gates.slots_taken(name) == 1
    assert not TaskRecord.objects.at_gate("A").exists()
    Gate.objects.create(name="c", limit=5)
    both.using(queue_limit=(2, None), gate=("{gate}", "c")).enqueue("a")
    Gate.objects.all().delete()
    assert [mistake.text for mistake in _of_gates()] == [
        "the gate 'c' has no limit: declare queue_limit=…, or make the gate in the admin"
    ]


def test_pages_and_commands_show_all_gates_and_the_one_at_which_it_waits(admin_client: Client) -> None:
    """The page of a task, the filter by either gate, the list of the command line, and the reason."""
    waiting.enqueue("a")
    result = waiting.enqueue("a")
    page = admin_client.get(reverse("admin:django_asyncq_taskrecord_change", args=[result.id])).content.decode()
    assert "a, b" in page and "2, 1" in page
    assert "waits for a slot of gate <bdi>b</bdi>" in page
    for gate in ("a", "b"):
        found = admin_client.get(reverse("admin:django_asyncq_taskrecord_changelist"), {"gate": gate}).content.decode()
        assert result.id in found
        output = StringIO()
        call_command("asyncq", "tasks", "list", "--gate", gate, "--json", stdout=output)
        listed = {task["id"]: task for task in json.loads(output.getvalue())["tasks"]}
        assert (listed[result.id]["gate"], listed[result.id]["other_gates"]) == ("b", ["a"])
    assert read_scale("default").limited_by == "gate:b"


# --- the script, on a table of states

A, B = (("sa", 2), ("sb", 1))
SCRIPT: dict[str, tuple[dict[str, list[str]], dict[str, list[str]], str, list[str], str, dict[str, list[str]]]] = {
    # name: members before, lines before, mode, ids that ask, word and who is refused where, members after
    "all free": ({}, {}, "all", ["x"], "admitted", {"sa": ["x"], "sb": ["x"]}),
    "the second is full": ({"sb": ["o"]}, {}, "all", ["x"], "full 2", {"sa": [], "sb": ["o"]}),
    "the first is full": ({"sa": ["o", "p"]}, {}, "all", ["x"], "full 1", {"sa": ["o", "p"], "sb": []}),
    "no room for all": ({}, {}, "all", ["x", "y"], "full 2", {"sa": [], "sb": []}),
    "as many as possible": ({}, {}, "partial", ["x", "y"], "admitted y@2-", {"sa": ["x"], "sb": ["x"]}),
    "the others wait": ({}, {}, "wait", ["x", "y"], "admitted y@2+", {"sa": ["x"], "sb": ["x"]}),
    "it has both": ({"sa": ["x"], "sb": ["x"]}, {}, "all", ["x"], "admitted", {"sa": ["x"], "sb": ["x"]}),
    "it has one": ({"sa": ["x"]}, {}, "all", ["x"], "admitted", {"sa": ["x"], "sb": ["x"]}),
    "it has one and loses it": (
        {"sa": ["x"], "sb": ["o"]},
        {},
        "wait",
        ["x"],
        "admitted x@2+",
        {"sa": [], "sb": ["o"]},
    ),
    "others wait": ({}, {"sb": ["o"]}, "all", ["x"], "full 2", {"sa": [], "sb": []}),
    "it is next": ({}, {"sb": ["x", "o"]}, "wait", ["x"], "admitted", {"sa": ["x"], "sb": ["x"]}),
    "it is not next": ({}, {"sb": ["o", "x"]}, "wait", ["x"], "admitted x@2+", {"sa": [], "sb": []}),
    "it waits at the other": ({"sb": ["o"]}, {"sa": ["x"]}, "wait", ["x"], "admitted x@2+", {"sa": [], "sb": ["o"]}),
    "it came before": ({}, {"sa": ["x"], "sb": ["o"]}, "wait", ["x"], "admitted", {"sa": ["x"], "sb": ["x"]}),
    "it came later": ({}, {"sb": ["o"], "sa": ["x"]}, "wait", ["x"], "admitted x@2+", {"sa": [], "sb": []}),
}


@pytest.mark.parametrize("case", SCRIPT)
def test_the_script_gives_all_slots_or_none(case: str) -> None:
    """Word, refusing gate, slots and lines afterwards; a refusal of all writes nothing."""
    members, lines, mode, asking, reply, after = SCRIPT[case]
    client, moment = Broker().client, int(time.time())
    of_gates = [key for name, _ in (A, B) for key in gates.keys(name)]
    since = 0
    for name, _limit in (A, B):
        of_gate = gates.keys(name)
        client.hset(of_gate.meta, mapping={"built": 1, "asked": moment, "kept": moment})
        for id in members.get(name, []):
            client.zadd(of_gate.members, {id: moment + 99})
            client.sadd(of_gate.ours, id)
    for name, waiters in lines.items():
        for id in waiters:
            since += 1
            client.zadd(gates.keys(name).waiters, {id: since})
    before = {name: client.zrange(gates.keys(name).waiters, 0, -1, withscores=True) for name, _ in (A, B)}
    arguments: list[Any] = [0, mode, 60, 10, "", 2, A[1], 1, B[1], 1]
    for id in asking:
        arguments += [id, "", 0, ""]
    found = scripts.run("gate_acquire", Broker().client, of_gates, arguments)
    word = found[0].decode() + (f" {found[1]}" if found[0] == b"full" else "")
    for id, number, is_waiting in zip(found[6::3], found[7::3], found[8::3], strict=True):
        word += f" {id.decode()}@{number}{'+' if is_waiting == b'1' else '-'}"
    assert word == reply
    for name, _ in (A, B):
        assert sorted(holders(name)) == sorted(after[name])
    refused = {id.decode(): (A, B)[number - 1][0] for id, number in zip(found[6::3], found[7::3], strict=True)}
    scores = {id.decode(): score for line in before.values() for id, score in line}
    for name, _ in (A, B):
        line = dict(client.zrange(gates.keys(name).waiters, 0, -1, withscores=True))
        if mode != "wait":
            assert dict(before[name]) == line
            continue
        expected = {id.decode() for id, _ in before[name]}.difference(asking)
        expected |= {id for id, gate in refused.items() if gate == name}
        assert {id.decode() for id in line} == expected
        # Whoever had a place keeps its time.
        assert all(score == scores.get(id.decode(), score) for id, score in line.items())


# --- a cluster


@pytest.fixture
def on_several_nodes(settings: Any, monkeypatch: pytest.MonkeyPatch, own_keys: None) -> Iterator[tuple[str, str]]:
    """The names of two gates, the first by name on another node than the second."""
    factory = "django_asyncq.broker.cluster.client"
    with cluster() as found:
        monkeypatch.setenv("ASYNCQ_TEST_CLIENT_FACTORY", factory)
        settings.ASYNCQ = {**settings.ASYNCQ, "CLIENT_FACTORY": factory}
        settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": found.location}}
        first = next(name for name in map("a{}".format, range(99)) if is_on(found, 0, name))
        second = next(name for name in map("b{}".format, range(99)) if is_on(found, 1, name))
        yield first, second
        clients.reset_clients()


def is_on(found: Any, number: int, gate: str) -> bool:
    """Whether a gate's keys are on a node of the cluster."""
    return found.node_of(gates.keys(gate).members) is found.nodes[number]


def test_gates_on_several_nodes_of_a_cluster_are_asked_in_turn(on_several_nodes: tuple[str, str]) -> None:
    """All or none there too: what the first has given is given back, and a task stands in one line with its time."""
    a, b = on_several_nodes
    task = tasks.gated.using(gate=(b, a), queue_limit=(1, 2))
    first = task.enqueue("x")
    assert holders(a) == holders(b) == {first.id}
    with pytest.raises(QueueFull) as caught:
        task.enqueue("x")
    assert caught.value.gate == b
    assert holders(a) == {first.id}
    second = task.using(on_full="wait").enqueue("x")
    assert stands_at(second) == b
    assert holders(a) == {first.id}
    filler = tasks.gated.using(gate=a, queue_limit=2).enqueue("x")
    later = tasks.gated.using(gate=a, queue_limit=2, on_full="wait").enqueue("x")
    place = read("producer", gates.members.reading_place(b, second.id, "default"))
    third = tasks.gated.using(gate=a, queue_limit=2, on_full="wait").enqueue("x")
    run = lifecycle.claim(Broker("worker"), "default", "w", 1, "default").runs[0]
    assert str(run.record.id) == first.id
    gates.release_ids(b, [first.id])
    look(b)
    assert stands_at(second) == a
    assert read("producer", gates.members.reading_place(a, second.id, "default")) == place
    assert gates.waiters(a) == [second.id, later.id, third.id]
    leave(filler)
    look(a)
    assert not waits(second)
    assert holders(b) == {second.id}
