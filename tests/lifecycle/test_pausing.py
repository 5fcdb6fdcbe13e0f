"""Pauses: the row is the truth, Redis follows it, other programs' keys become rows, and workers hold back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Permission

from django_asyncq import QueueFull, conf, gates, lifecycle, remote
from django_asyncq.broker import Broker
from django_asyncq.broker import pauses as in_redis
from django_asyncq.broker.keys import paused_tasks_key
from django_asyncq.control import ANOTHER_PROGRAM, PauseKeeper, mark_of, pause, pauses, resume
from django_asyncq.core import registry
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption
from django_asyncq.models import FailureReason, Gate, Pause, TaskRecord, TaskState
from django_asyncq.storage.routing import transaction_of
from django_asyncq.worker.fetch import PausedTasks

from .. import acl, inbox_tasks, tasks
from ..workers import run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

Q = "default"
elsewhere = remote("go:task", queue_name="go")


def redis() -> Any:
    """A client with all rights, as a tool has."""
    return acl.unrestricted(Broker().client)


def key(queue: str = Q) -> str:
    """Return asynq's key of a paused queue."""
    return Broker().keys(queue).paused


def tool_pauses(queue: str = Q) -> None:
    """Do what asynq's tools do."""
    redis().set(key(queue), int(time.time()), nx=True)


def tool_resumes(queue: str = Q) -> None:
    """Do what asynq's tools do."""
    redis().delete(key(queue))


def empty(queue: str = Q) -> None:
    """Have Redis forget the pauses, as when it was emptied."""
    keys = Broker().keys(queue)
    redis().delete(keys.paused, keys.pause_mark, paused_tasks_key())


def claim(queue: str = Q) -> lifecycle.Claimed:
    """Claim a task as a worker does."""
    return lifecycle.claim(Broker(), queue, "w", 9, "default")


# --- queues: the row, then the key


def test_a_paused_queue_gives_out_nothing_until_it_is_resumed() -> None:
    """The row says who and why; tasks are enqueued all the same."""
    assert pause("queue", Q, by="ada", note="database move")
    result = tasks.add.enqueue(1)
    assert claim().paused
    (row,) = pauses()
    assert (row.kind, row.backend, row.name, row.paused_by, row.note) == ("queue", "default", Q, "ada", "database move")
    assert int(redis().get(key())) == int(row.paused_at.timestamp())
    assert resume("queue", Q)
    assert not resume("queue", Q)
    assert [run.lease.id for run in claim().runs] == [result.id]
    assert pauses() == []
    assert not redis().exists(Broker().keys(Q).pause_mark)


def test_a_rolled_back_pause_never_was() -> None:
    """Redis follows the commit only; so does a resume."""
    with pytest.raises(LookupError), transaction_of(Pause):
        pause("queue", Q)
        raise LookupError
    assert not redis().exists(key())
    pause("queue", Q)
    with pytest.raises(LookupError), transaction_of(Pause):
        resume("queue", Q)
        raise LookupError
    assert redis().exists(key())
    assert len(pauses("queue")) == 1


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("worker", "x", {}),
        ("queue", "", {}),
        ("queue", "a{b", {}),
        ("queue", Q, {"backend": "unknown"}),
        ("task", "not a path!", {}),
        ("gate", "", {}),
        ("gate", "x" * 201, {}),
    ],
)
def test_what_cannot_be_paused_is_refused_before_anything_is_written(kind: str, name: str, options: Any) -> None:
    """With the thing and the remedy."""
    for verb in (pause, resume):
        with pytest.raises(InvalidOption):
            verb(kind, name, **options)
    assert not Pause.objects.exists()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("letter:send", inbox_tasks.gated_letter.module_path), ("go:task", "pause its queue 'go'")],
)
def test_a_task_name_that_would_hold_nothing_back_is_refused(name: str, remedy: str) -> None:
    """With what to pause instead: our workers compare the paths of their own tasks. To resume it is allowed."""
    with pytest.raises(InvalidOption, match=remedy):
        pause("task", name)
    assert not resume("task", name)
    assert pauses() == []


def test_texts_that_are_too_long_are_cut() -> None:
    """A user's name or a note never fails a pause."""
    pause("gate", "g", by="b" * 400, note="n" * 900)
    (row,) = pauses()
    assert (len(row.paused_by), len(row.note)) == (150, 500)


# --- what both stores say

BOTH = [(row, key) for row in (False, True) for key in (False, True)]


def let_both_say(kind: str, *, row: bool, in_store: bool) -> None:
    """Have the row and Redis say whether something is paused, as a tool or an outage leaves them."""
    name = NAMES[kind]
    if row:
        pause(kind, name)
    if kind == "queue" and in_store and not row:
        tool_pauses()
    elif kind == "task" and in_store != row:
        (redis().sadd if in_store else redis().srem)(paused_tasks_key(), name)
    elif kind == "queue" and row and not in_store:
        tool_resumes()
    elif kind == "gate":
        with pytest.MonkeyPatch.context() as patched:
            # Redis is built with what it shall say, then misses the change.
            (pause if in_store else resume)(kind, name)
            with suppress(QueueFull):
                tasks.gated.enqueue(name)
            patched.setattr("django_asyncq.gates.forget_built", broken)
            (pause if row else resume)(kind, name)


NAMES = {"queue": Q, "task": "tests.tasks.add", "gate": "g"}


def is_in_force(kind: str) -> bool:
    """Whether a worker or a producer finds it paused now."""
    if kind == "queue":
        return claim().paused
    if kind == "task":
        return NAMES[kind] in in_redis.paused_tasks("worker")
    try:
        tasks.gated.enqueue(NAMES[kind])
    except QueueFull:
        return True
    return False


@pytest.mark.parametrize("is_leader_quick", [False, True])
@pytest.mark.parametrize(("row", "in_store"), BOTH)
@pytest.mark.parametrize("kind", sorted(NAMES))
@pytest.mark.parametrize("verb", [pause, resume])
def test_a_verb_writes_to_both_stores_whatever_each_of_them_says(
    verb: Any, kind: str, row: bool, in_store: bool, is_leader_quick: bool
) -> None:
    """It is in force at the return, the leader leaves it, and a queue or a task says what had been in force.

    is_leader_quick: the leader has read both stores before, and acts on that afterwards.
    """
    tasks.add.enqueue(1)
    let_both_say(kind, row=row, in_store=in_store)
    wanted = verb is pause
    answers: list[bool] = []
    if is_leader_quick:
        keeper, read = PauseKeeper(), in_redis.read_states

        def late(*args: Any) -> Any:
            found = read(*args)
            answers.append(verb(kind, NAMES[kind]))
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(in_redis, "read_states", late)
            keeper.tick()
    else:
        answers.append(verb(kind, NAMES[kind]))
    if kind != "gate":
        assert answers == [in_store != wanted]
    assert is_in_force(kind) == wanted
    assert bool(pauses(kind)) == wanted
    for _ in range(2):
        PauseKeeper().tick()
    assert is_in_force(kind) == wanted
    assert bool(pauses(kind)) == wanted


def test_the_leader_deletes_no_row_that_is_newer_than_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool had resumed; a person pauses between the leader's last look and its DELETE."""
    pause("queue", Q)
    tool_resumes()
    forget = in_redis.forget_pause

    def late(*args: Any) -> bool:
        answer = forget(*args)
        assert pause("queue", Q, by="ada"), "a tool had let it run"
        return answer

    monkeypatch.setattr(in_redis, "forget_pause", late)
    PauseKeeper().tick()
    monkeypatch.undo()
    PauseKeeper().tick()
    assert [row.paused_by for row in pauses()] == ["ada"]
    assert claim().paused


def test_a_resume_ends_what_the_leader_notes_for_a_tool_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's row is made after the resume has looked for one, and before it writes to Redis."""
    tasks.add.enqueue(1)
    tool_pauses()
    read = in_redis.read_state

    def late(*args: Any) -> Any:
        monkeypatch.setattr(in_redis, "read_state", read)
        PauseKeeper().tick()
        assert len(pauses()) == 1
        return read(*args)

    monkeypatch.setattr(in_redis, "read_state", late)
    assert resume("queue", Q)
    assert pauses() == []
    assert not claim().paused


def test_a_pause_that_was_resumed_before_it_reached_redis_sets_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is looked at again after the key was set."""
    set_key = in_redis.pause_queue

    def late(*args: Any, **options: Any) -> bool:
        monkeypatch.setattr(in_redis, "pause_queue", set_key)
        resume("queue", Q)
        return set_key(*args, **options)

    monkeypatch.setattr(in_redis, "pause_queue", late)
    pause("queue", Q)
    assert pauses() == []
    assert not claim().paused


def test_aliases_that_share_a_prefix_share_the_pause_of_a_queue(settings: Any) -> None:
    """Redis has one queue, so there is one row, and each alias may resume it."""
    shared = {**settings.TASKS["default"], "OPTIONS": {"prefix": conf.current().key_prefix}}
    settings.TASKS = {**settings.TASKS, "other": shared}
    assert pause("queue", Q)
    assert not pause("queue", Q, backend="other", by="ada")
    assert [(row.backend, row.paused_by) for row in pauses()] == [("default", "ada")]
    assert resume("queue", Q, backend="other")
    assert pauses() == []
    PauseKeeper().tick()
    assert not claim().paused


# --- queues: the leader


def broken(*args: Any, **kwargs: Any) -> Any:
    """As Redis when it is unreachable."""
    raise BrokerUnavailable("test")


def test_redis_unreachable_at_the_commit_follows_later(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The request succeeds with a warning, and the leader sets or removes the key."""
    with monkeypatch.context() as patched:
        patched.setattr(in_redis, "pause_queue", broken)
        assert pause("queue", Q)
    assert not redis().exists(key())
    PauseKeeper().tick()
    assert redis().exists(key())
    with monkeypatch.context() as patched:
        patched.setattr(in_redis, "resume_queue", broken)
        assert resume("queue", Q)
    assert redis().exists(key())
    PauseKeeper().tick()
    assert not redis().exists(key())
    assert pauses() == []
    assert caplog.text.count("Redis follows when it is reachable again") == 2


def test_an_emptied_redis_gets_its_keys_from_the_rows() -> None:
    """Queue, task and gate; nothing of them is taken for a resume."""
    Gate.objects.create(name="g", limit=5)
    pause("queue", Q)
    pause("task", "tests.tasks.add")
    pause("gate", "g")
    empty()
    redis().delete(*gates.keys("g"))
    PauseKeeper().tick()
    assert len(pauses()) == 3
    assert redis().exists(key())
    assert in_redis.paused_tasks("worker") == {"tests.tasks.add"}
    with pytest.raises(QueueFull):
        tasks.gated.enqueue("g")


def test_a_tools_pause_becomes_a_row_and_its_resume_deletes_it(caplog: Any) -> None:
    """With raw commands; said once each."""
    caplog.set_level("INFO")
    tasks.add.enqueue(1)
    claim()
    tool_pauses()
    keeper = PauseKeeper()
    for _ in range(2):
        keeper.tick()
    (row,) = pauses()
    assert row.paused_by == ANOTHER_PROGRAM
    assert redis().get(Broker().keys(Q).pause_mark).decode() == mark_of(row)
    tool_resumes()
    for _ in range(2):
        keeper.tick()
    assert pauses() == []
    assert not redis().exists(key(), Broker().keys(Q).pause_mark)
    assert caplog.text.count("was paused by another program") == 1
    assert caplog.text.count("was resumed by another program") == 1


def test_a_tool_may_resume_what_a_person_has_paused() -> None:
    """The key had been set because of the row: its absence is a wish."""
    pause("queue", Q, by="ada")
    tool_resumes()
    PauseKeeper().tick()
    assert pauses() == []


def test_a_tools_pause_ends_with_our_resume() -> None:
    """Also when the leader has not looked in between a second tool's pause and the resume."""
    tasks.add.enqueue(1)
    tool_pauses()
    PauseKeeper().tick()
    assert resume("queue", Q)
    assert not redis().exists(key())
    assert [run.record.name for run in claim().runs] == [tasks.add.module_path]


def test_a_resume_by_a_tool_between_read_and_row_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that was made for a pause which is over goes again."""
    tasks.add.enqueue(1)
    tool_pauses()
    note = in_redis.note_pause

    def late(*args: Any) -> str:
        tool_resumes()
        return note(*args)

    with monkeypatch.context() as patched:
        patched.setattr(in_redis, "note_pause", late)
        PauseKeeper().tick()
    PauseKeeper().tick()
    assert pauses() == []
    assert not redis().exists(key())


def test_what_a_person_does_between_the_leaders_looks_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause and a resume in the middle of a round, and one before the key was set."""
    read = in_redis.read_state

    def meanwhile(act: Callable[[], object]) -> None:
        def interrupted(*args: Any) -> Any:
            state = read(*args)
            monkeypatch.setattr(in_redis, "read_state", read)
            act()
            return state

        with monkeypatch.context() as patched:
            patched.setattr(in_redis, "read_state", interrupted)
            PauseKeeper().tick()

    tasks.add.enqueue(1)
    meanwhile(lambda: pause("queue", Q))
    assert redis().exists(key())
    meanwhile(lambda: resume("queue", Q))
    assert not redis().exists(key())
    pause("queue", Q)
    empty()
    meanwhile(lambda: resume("queue", Q))
    PauseKeeper().tick()
    assert not redis().exists(key())
    assert pauses() == []


def test_a_late_resume_leaves_a_newer_pause_alone() -> None:
    """Each script names the mark that it expects."""
    pause("queue", Q)
    (old,) = pauses()
    resume("queue", Q)
    pause("queue", Q)
    assert in_redis.resume_queue(Broker(), Q, mark_of(old)) == "stale"
    assert not in_redis.forget_pause(Broker(), Q, mark_of(old))
    assert in_redis.note_pause(Broker(), Q, mark_of(old)) == "marked"
    assert claim().paused


def test_odd_values_of_the_keys_stop_nothing() -> None:
    """A key of another type is set aside, as everywhere; the row sets it again."""
    pause("queue", Q)
    for name in (Broker().keys(Q).pause_mark, key()):
        redis().delete(name)
        redis().rpush(name, "odd")
        PauseKeeper().tick()
        PauseKeeper().tick()
    if pauses():
        assert redis().exists(key())
    resume("queue", Q)
    PauseKeeper().tick()
    assert claim().paused is False


# --- tasks


@pytest.mark.parametrize(("paused_name", "called"), [("now", "then"), ("then", "now"), ("then", "then")])
def test_a_pause_holds_the_calls_under_every_name_that_a_task_has_had(
    paused_name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them was paused, and under whichever it was called."""
    names = {"now": tasks.add.module_path, "then": "shop.tasks.sum"}
    monkeypatch.setattr(registry, "_former", {"shop.tasks.sum": tasks.add.module_path})
    held = tasks.add.enqueue(1)
    TaskRecord.objects.update(name=names[called])
    pause("task", names[paused_name])
    start, postponed = PausedTasks("w").split(claim().runs)
    assert (start, [run.lease.id for run in postponed]) == ([], [held.id])


def test_calls_of_a_paused_task_are_postponed_without_an_attempt(caplog: Any) -> None:
    """The row stays QUEUED; other tasks run; one line a minute; after the resume it is given to a slot."""
    caplog.set_level("INFO")
    held = tasks.add.enqueue(1)
    tasks.takes_anything.enqueue()
    pause("task", tasks.add.module_path)
    paused = PausedTasks("w")
    runs = claim().runs
    start, postponed = paused.split(runs)
    assert [run.record.name for run in start] == [tasks.takes_anything.module_path]
    assert [run.lease.id for run in postponed] == [held.id]
    paused.split(runs)
    assert caplog.text.count("is paused") == 1
    lifecycle.postpone(Broker(), "w", postponed, 1)
    row = TaskRecord.objects.get(id=held.id)
    assert (row.state, row.attempt) == (TaskState.QUEUED, 0)
    entry = redis().hgetall(Broker().keys(Q).task(held.id))
    assert entry[b"state"] == b"scheduled"
    # The time of a pause is not that for which a task without code is kept.
    assert b"parked_at" not in entry
    resume("task", tasks.add.module_path)
    paused.expire()
    assert paused.split(runs) == (runs, [])


def test_names_are_read_only_when_tasks_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in five seconds at most."""
    reads: list[str] = []
    known = in_redis.paused_tasks
    monkeypatch.setattr(in_redis, "paused_tasks", lambda role: reads.append(role) or known(role))
    paused = PausedTasks("w")
    paused.split([])
    assert reads == []
    tasks.add.enqueue(1)
    runs = claim().runs
    for _ in range(3):
        paused.split(runs)
    assert len(reads) == 1
    pause("task", tasks.add.module_path)
    paused.expire()
    assert paused.split(runs) == ([], runs)


def test_no_task_begins_by_names_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """When they cannot be read, what was claimed is not begun; the next look reads them again."""
    tasks.add.enqueue(1)
    runs = claim().runs
    paused = PausedTasks("w")
    with monkeypatch.context() as patched:
        patched.setattr(in_redis, "paused_tasks", broken)
        for _ in range(2):
            with pytest.raises(BrokerUnavailable):
                paused.split(runs)
    assert paused.split(runs) == (runs, [])


def test_a_name_that_another_program_has_put_into_the_set_goes_again() -> None:
    """The rows decide: no tool knows this set."""
    redis().sadd(paused_tasks_key(), "x.y")
    PauseKeeper().tick()
    assert in_redis.paused_tasks("worker") == set()


# --- gates


def test_a_paused_gate_admits_nothing_new_and_keeps_what_it_has() -> None:
    """The error says so; tasks that hold a slot run; a retry waits as at a full gate; the audit undoes nothing."""
    inside = tasks.gated.enqueue("g")
    pause("gate", "g")
    with pytest.raises(QueueFull, match="'g' is paused") as caught:
        tasks.gated.enqueue("g")
    assert caught.value.paused
    assert caught.value.retry_after >= 1
    assert tasks.gated.enqueue_many([("g",), ("h",)], partial=True)[0] is None
    assert gates.audit("g") == gates.Drift(0, 0)
    gates.forget_built("g")
    with pytest.raises(QueueFull):
        tasks.gated.enqueue("g")
    assert {slot.id for slot in gates.slots("g")} == {inside.id}
    (run,) = [run for run in claim().runs if run.lease.id == inside.id]
    assert run.record.state == TaskState.QUEUED
    resume("gate", "g")
    tasks.gated.enqueue("g")


def test_a_gate_without_a_limit_can_be_paused_too() -> None:
    """An open one, and one that no row and no task gives a limit."""
    Gate.objects.create(name="open", limit=0)
    tasks.gated.enqueue("open")
    for name in ("open", "unknown"):
        pause("gate", name)
        with pytest.raises(QueueFull) as caught:
            tasks.add.using(gate=name).enqueue(1)
        assert caught.value.paused
    resume("gate", "open")
    tasks.gated.enqueue("open")


def test_a_retry_waits_at_a_paused_gate_and_is_next_after_the_resume() -> None:
    """Nobody is let in by the leader's look, and nobody loses a place."""
    record = TaskRecord(name=tasks.gated.module_path, gate="g", queue_limit=5)
    pause("gate", "g")
    assert gates.acquire([record], timed=True) == {record.id}
    look = gates.look("g", 9)
    assert (look.waiting, look.ids) == (1, [])
    resume("gate", "g")
    assert gates.look("g", 9).ids == [str(record.id)]


def test_a_pause_that_redis_has_missed_is_found_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis was unreachable at the commit; so with the resume."""
    tasks.gated.enqueue("g")
    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.gates.forget_built", broken)
        pause("gate", "g")
    tasks.gated.enqueue("g")
    gates.audit("g")
    with pytest.raises(QueueFull):
        tasks.gated.enqueue("g")
    with monkeypatch.context() as patched:
        patched.setattr("django_asyncq.gates.forget_built", broken)
        resume("gate", "g")
    gates.audit("g")
    tasks.gated.enqueue("g")
    assert FailureReason.GATE_FULL not in TaskRecord.objects.values_list("reason", flat=True)


# --- the admin


def test_the_admin_pauses_and_resumes_with_the_permission(client: Any, django_user_model: Any) -> None:
    """To add pauses in the user's name, to delete resumes, alone or as an action; without the permission: 403."""
    user = django_user_model.objects.create_user("ada", password="x", is_staff=True)
    client.force_login(user)
    add, listing = "/admin/django_asyncq/pause/add/", "/admin/django_asyncq/pause/"
    queue = {"kind": "queue", "name": Q, "backend": "default", "note": "why"}
    assert client.post(add, queue).status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="pause_queue"))
    assert client.post(add, {**queue, "name": "a{b"}).status_code == 200
    assert client.post(add, queue).status_code == 302
    assert client.post(add, queue).status_code == 200, "it is paused already"
    assert client.post(add, {**queue, "kind": "task", "name": "a.b"}).status_code == 302
    (row, other) = pauses()
    assert (row.paused_by, row.note, other.backend) == ("ada", "why", "")
    assert claim().paused
    assert b"why" in client.get(listing).content
    assert client.post(f"{listing}{row.pk}/change/", queue).status_code == 403
    assert client.post(f"{listing}{row.pk}/delete/", {"post": "yes"}).status_code == 302
    assert not claim().paused
    selected = {"action": "delete_selected", "_selected_action": [other.pk], "post": "yes"}
    assert client.post(listing, selected).status_code == 302
    assert pauses() == []
    assert in_redis.paused_tasks("worker") == set()


# --- real workers


def succeeded() -> int:
    """Return how many tasks have succeeded."""
    return TaskRecord.objects.succeeded().count()


def test_workers_obey_and_notice_a_resume_at_once(tmp_path: Path) -> None:
    """A queue at our resume, and within seconds after a tool's; a task name after a message."""
    with workers(tmp_path, "--concurrency", "2") as running:
        tasks.add.enqueue(1)
        wait_until(succeeded, "first task")
        pause("queue", Q)
        tasks.add.enqueue(2)
        tasks.takes_anything.using(priority=1).enqueue()
        # It has looked once, and found the queue paused.
        time.sleep(0.3)
        assert succeeded() == 1
        resumed_at = time.monotonic()
        resume("queue", Q)
        wait_until(lambda: succeeded() == 3, "tasks after our resume")
        assert time.monotonic() - resumed_at < 0.9
        tool_pauses()
        tasks.add.enqueue(3)
        time.sleep(0.3)
        assert succeeded() == 3
        tool_resumes()
        wait_until(lambda: succeeded() == 4, "task after a tool's resume", seconds=4)
        pause("task", tasks.add.module_path)
        # The message goes another way than the task, which may be faster.
        time.sleep(0.3)
        tasks.add.enqueue(4)
        wait_until(lambda: "is paused" in running.output(), "line about the paused task")
        assert succeeded() == 4


def test_a_burst_ends_with_what_is_paused_still_queued() -> None:
    """So it does with a task that another program runs: nobody here can bring it to an end."""
    for held in (tasks.add, tasks.add.using(queue_name="other"), elsewhere):
        held.enqueue(1)
    tasks.takes_anything.enqueue()
    pause("task", tasks.add.module_path)
    pause("queue", "other")
    run_workers()
    assert (succeeded(), TaskRecord.objects.queued().count()) == (1, 3)
