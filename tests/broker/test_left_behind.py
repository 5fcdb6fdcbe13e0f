"""What our workers, leader and Inspector leave of a message that a Go client enqueued, place by place against asynq.

Each step begins with the keys of a capture of asynq's own client. What our side leaves is compared with our capture
(`fixtures/own/`, made by `python -m tests.capture`) and with what asynq leaves after the same step: its capture, or,
where there is none, what the peer leaves, which `test_foreign` compares with all captures. Every difference stands in
the tables below with its reason; one that is not there fails, and so does a row that no difference needs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

import pytest
import redis

from django_asyncq import interop, lifecycle
from django_asyncq.broker import Broker, servers
from django_asyncq.broker.groups import Groups
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.broker.message import decode_running, decode_server
from django_asyncq.broker.servers import Details, ShownWorker
from django_asyncq.control import pause, resume
from django_asyncq.core import names as wire_names
from django_asyncq.core.names import ALONE
from django_asyncq.core.registry import registered
from django_asyncq.exceptions import TaskCancelled, TaskTimeout
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import Blame
from django_asyncq.models import TaskRecord
from django_asyncq.observe.inspector import Inspector
from django_asyncq.storage import database_clock
from django_asyncq.worker import outcomes
from django_asyncq.worker.job import Job, Outcome

from .. import batch_tasks, left_tasks
from ..go_peer import GoPeer, Taken
from ..interop.test_fixtures import database, load, raw, server
from ..left_behind import (
    OWN_FOLDER,
    capture,
    differences,
    load_own,
    of_servers,
    of_tasks,
    places,
    put,
    write_own,
)

__all__ = ["database", "server"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

Q = "default"
WORKER = "w"
TYPES = ("bad", "boom", "late", "note", "ok", "skip", "slow", "x")
GROUP = "tests.batch_tasks.collect"
AGGREGATED = "de852650-2d14-463b-a9e7-57f3a4305b34"


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a task of ours run the types of the captures, in this test only."""
    for name in TYPES:
        monkeypatch.setitem(wire_names._declared, ("default", name), left_tasks.body)


# --- what a worker does


def claimed() -> lifecycle.Run:
    """Claim the next message as a worker does, and begin it."""
    (run,) = interop.claim(Broker(), Q, WORKER, 1, "default").runs
    return begun(run, WORKER)


def begun(run: lifecycle.Run, worker_id: str) -> lifecycle.Run:
    lifecycle.begin(run, worker_id, database_clock.now())
    lifecycle.mark_running([run])
    return run


def finish(run: lifecycle.Run, value: Any = None, exception: BaseException | None = None, **more: Any) -> None:
    """Record how a run has ended, as the reporter does."""
    outcome = Outcome(Job(run, registered(run.record.name), 0.0, **more), database_clock.now(), value, exception)
    outcomes.apply(outcome)
    lost = lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), WORKER, [run], lost)
    outcomes.announce([outcome])


def fail() -> None:
    finish(claimed(), exception=ValueError("told to fail"))


def requeue() -> list[UUID]:
    """Claim the next message, so that it has a row, and give it back; return the row's id."""
    run = claimed()
    lifecycle.requeue(Broker(), WORKER, [run])
    return [run.record.id]


def forward_retry() -> None:
    """Have the time of a retry come."""
    TaskRecord.objects.update(retry_at=database_clock.now() - timedelta(seconds=5))
    Broker().client.zadd(QueueKeys(Q).retry, {"t-1": 1})
    assert forward_due(Broker(), [Q]).retried == 1


def cancel_running() -> None:
    run = claimed()
    assert Inspector("default").tasks.cancel([run.record.id]).asked == 1
    finish(run, exception=TaskCancelled("told to stop"), is_cancelled=True)


def every_row() -> list[UUID]:
    return [record.id for record in TaskRecord.objects.all()]


def operate(verb: str) -> None:
    """Do what the command line does to a finished task."""
    assert len(getattr(Inspector("default").tasks, verb)(every_row()).done) == 1


def lose(*crashes: int) -> None:
    """Lose the worker of the next task twice, then as often a process in quarantine."""
    for _ in range(2):
        run = claimed()
        Broker().register_queue(Q)
        Broker().client.zadd(QueueKeys(Q).lease, {run.lease.id: 1})
        assert Reconciler(Broker()).recover_expired() == 1
    alone = f"{WORKER}{ALONE}"
    for _ in crashes:
        (run,) = interop.claim_suspect(Broker(), Q, alone, "default").runs
        begun(run, alone)
        blame = Blame(alone=frozenset([str(run.record.id)]))
        lifecycle.recover(Broker(), Q, alone, [run.lease], reason="it died", blame=blame)


def expire() -> None:
    assert interop.claim(Broker(), Q, WORKER, 1, "default").runs == []


def collect() -> None:
    """Have three calls of a task of ours become a batch, with the queue paused."""
    batch_tasks.collect.enqueue_many([{"number": number} for number in range(3)])
    pause("queue", Q)
    assert interop.form_batches(Broker(), "default")[0] == 1


def adopt_group() -> None:
    """Have the members of a Go client's group become a batch of a task of ours, with the queue paused."""
    wire_names._declared["default", "note"] = left_tasks.together  # `declared` takes it back
    pause("queue", Q)
    assert interop.form_batches(Broker(), Q)[0] == 1


def reclaim() -> None:
    """Bring back a set of a Go server that died, as the capture has it before the recoverer comes."""
    client, keys = Broker().client, QueueKeys(Q)
    stale = f"{keys.group('user:7')}:2d4f3f9c-0d0b-4f9f-a3c4-0a4de2a4ad6c"
    client.rename(keys.group("user:7"), stale)
    client.srem(keys.groups, "user:7")
    client.zadd(keys.aggregation_sets, {stale: 1})
    assert Groups("worker").reclaim(Q) == 2


def beat() -> None:
    """Show the server of the capture, as a supervisor does with each beat."""
    found = load("active")["keys"]
    (of_server,) = [raw(item["value"]) for item in found if item["key"].startswith("asynq:servers:")]
    (running,) = [item["fields"] for item in found if item["key"].startswith("asynq:workers:")]
    runs = [decode_running(raw(value)) for value in running.values()]
    shown = ShownWorker(decode_server(of_server), Details(worker_id="host:1:1:x"), runs)
    servers.show("default", [shown], 10)


def stop() -> None:
    beat()
    found = decode_server(Broker().client.get(Broker().client.zrange("asynq:servers", 0, 0)[0]))
    servers.clear("default", [ShownWorker(found, Details(), []).name])


# --- what asynq's peer does where there is no capture


def take(peer: GoPeer) -> Taken:
    found = peer.take()
    assert found is not None
    return found


def peer_retries(peer: GoPeer) -> None:
    peer.retry(take(peer), "told to fail", delay=-1)
    assert peer.forward() == 1


def peer_runs_again(peer: GoPeer) -> None:
    peer.archive(take(peer), "told to fail")
    assert peer.inspector_run("t-1") == 1


def peer_deletes(peer: GoPeer) -> None:
    peer.archive(take(peer), "told to fail")
    assert peer.inspector_delete("t-1") == 1


# --- the steps, and the tables of differences

Reasons = dict[str, str]
# Patterns of places, in every step.
ALWAYS: Reasons = {
    r"asynq:\{default\}:minutes:<hour>.*": "our own key: what was processed and failed in each minute",
    r".*:t:[^.]*\.row": "our own field: the row of the message",
    r".*:t:[^.]*\.fence": "our own field: a stale run is known by it",
    r".*:t:[^.]*\.settled": "our own field: that it was our reporter that left the entry so",
    r"asynq:\{default\}:paused-by-row.*": "our own key: which row has paused the queue",
    r".*:t:[^.]*\.msg\.retention": "it asks to be kept, so that a program that runs it next leaves its result",
    r"asynq:worker-info:.*": "our own key: what a worker process says of itself beyond asynq's words",
}
RUNS_ALONE: Reasons = {
    r".*:(processed|failed)(:<day>)?( ttl| value)?": "a lost worker is no failure of its task, so none is counted",
    r".*:t:t-1\.msg\.(error_msg|retried|last_failed_at)": "nor does the message count an attempt: the row has the loss",
}
WAITS_ALONE: Reasons = {
    r".*:t:t-1\.(suspect|state)": "it waits to run alone at once, and not for a retry",
    r".*:suspects.*": "our own key: what must run alone next",
}
ERROR = r".*:t:t-1\.msg\.error_msg"
BATCH = r".*:t:de852650-.*\.msg\."


class Step(NamedTuple):
    """One step: begin with the keys of `begins` (`of_asynq` if empty), let us go on with `ours`, and compare.

    of_asynq: the capture with what asynq leaves. peer: what leaves it where there is no capture; it begins with
    `of_asynq`. table: the places that differ here, with the reason. is_paused: the queue is paused before.
    keeps: which places are compared. names: texts of ours, and those of the capture in their place.
    """

    shows: str
    of_asynq: str
    ours: Callable[[], object]
    table: Reasons = {}
    peer: Callable[[GoPeer], object] | None = None
    begins: str = ""
    is_paused: bool = False
    keeps: Callable[[Any], Any] = of_tasks
    names: Callable[[], dict[str, str]] = dict


def names_of_batch() -> dict[str, str]:
    """Return the Go name of the batch."""
    return {str(TaskRecord.objects.get(batch_size__isnull=False).id): AGGREGATED}


STEPS = {
    "succeeded": Step("a run that succeeded, of a unique message", "done", lambda: finish(claimed())),
    "succeeded-with-retention": Step(
        "a run that succeeded, of a message that asks to be kept",
        "completed",
        lambda: finish(claimed(), "the result"),
        {r".*:t:t-1\.result": "a result of ours is JSON"},
    ),
    "failed-with-retries-left": Step("a run that failed", "retry-after-failure", fail),
    "failed-for-good": Step("a run that failed, with no retry left", "archived-retry-exhausted", fail),
    "given-up": Step(
        "a run that failed in a way that no retry helps",
        "archived-skip-retry",
        lambda: finish(claimed(), exception=LookupError("told to skip")),
        {
            ERROR: "the error is that of Python",
            r".*:t:t-1\.msg\.retried": "the last attempt counts too, as in the row; asynq counts those that it retries",
        },
    ),
    "given-back": Step(
        "a message that no task of ours runs",
        "pending-binary-payload",
        lambda: interop.claim(Broker(), Q, WORKER, 1, "default"),
        {
            r".*:(pending|scheduled).*": "it waits some seconds, so that another program can take it",
            r".*:t:t-bin\.(state|pending_since)": "it waits some seconds, so that another program can take it",
            r".*:t:t-bin\.parked_(at|retried)": "our own fields: for how long nobody has taken it",
            r".*:t:t-bin\.left_until": "our own field: until when our workers pass over it",
        },
    ),
    "timed-out": Step(
        "a run that reached its timeout",
        "retry-after-timeout",
        lambda: finish(claimed(), exception=TaskTimeout("it took more than 1 s")),
        {ERROR: "the error is that of Python"},
    ),
    "raised": Step(
        "a run that raised what nobody has foreseen",
        "retry-after-panic",
        lambda: finish(claimed(), exception=RuntimeError("told to panic")),
        {ERROR: "the error is that of Python"},
    ),
    "requeued": Step("a run that a stopping worker gave back", "requeued-on-shutdown", requeue),
    "retried-when-due": Step(
        "a retry whose time has come", "retry-after-failure", lambda: (fail(), forward_retry()), peer=peer_retries
    ),
    "forwarded": Step(
        "a delayed message whose time has come, in a paused queue",
        "forwarded",
        lambda: forward_due(Broker(), [Q]),
        is_paused=True,
    ),
    "lost": Step(
        "a message whose worker was lost twice in a row",
        "recovered-to-retry",
        lose,
        {r".*:retry.*": "it waits to run alone at once, and not for a retry", **RUNS_ALONE, **WAITS_ALONE},
    ),
    "lost-for-good": Step(
        "a message that took a worker and then its processes in quarantine down",
        "recovered-to-archive",
        lambda: lose(1, 2, 3),
        {ERROR: "the error says how the process died"},
    ),
    "cancelled": Step(
        "a waiting message that was cancelled", "deleted-unique", lambda: Inspector("default").tasks.cancel(requeue())
    ),
    "discarded": Step(
        "a waiting message that was cancelled and its row deleted",
        "deleted-unique",
        lambda: Inspector("default").tasks.discard(requeue()),
    ),
    "purged": Step(
        "all that waits in a queue, deleted",
        "deleteall-pending-lock-left",
        lambda: Inspector("default").tasks.discard(requeue()),
        {r".*:unique:.*": "a lock goes with its task, so that the next one is not refused"},
    ),
    "cancelled-while-running": Step(
        "a running message that was cancelled",
        "retry-after-cancel",
        cancel_running,
        {
            r".*:(retry|archived).*": "a cancel of ours is final",
            r".*:t:t-1\.state": "a cancel of ours is final",
            r".*:t:t-1\.cancel": "our own field: the run was asked to stop; the next claim deletes it",
            ERROR: "the error is that of Python",
        },
    ),
    "expired": Step(
        "a message whose deadline had passed before its run",
        "retry-deadline-passed",
        expire,
        {
            r".*:(t:t-1|retry).*": "asynq tries again what can no longer succeed; the row keeps what became of it",
            r".*:failed.*": "what has not run has not failed",
        },
    ),
    "run-again": Step(
        "a failed message that a person has run again",
        "archived-retry-exhausted",
        lambda: (fail(), operate("run")),
        {r".*:t:t-1\.pending_since": "asynq's tools forget since when it waits"},
        peer=peer_runs_again,
    ),
    "deleted": Step(
        "a failed message that was deleted",
        "archived-retry-exhausted",
        lambda: (fail(), operate("delete")),
        peer=peer_deletes,
    ),
    "paused": Step("a paused queue", "queue-paused", lambda: pause("queue", Q)),
    "resumed": Step("a queue, paused and resumed", "queue-unpaused", lambda: (pause("queue", Q), resume("queue", Q))),
    "batched": Step(
        "three calls that became a batch, in a paused queue",
        "aggregated",
        collect,
        {
            BATCH + "(type|payload|retry|timeout|retention)": "the call is a task of ours, not the capture's",
        },
        begins="-",
        names=names_of_batch,
    ),
    "group-adopted": Step(
        "three members of a Go client's group that became a batch, in a paused queue",
        "aggregated",
        adopt_group,
        {BATCH + "(type|payload|retry|timeout|retention)": "the batch is a task of ours"},
        begins="aggregation-set",
        names=names_of_batch,
    ),
    "set-reclaimed": Step(
        "members of a set whose taker has died",
        "aggregation-set-reclaimed",
        reclaim,
        {r".*:groups.*": "the name of the group returns too, so that the members are found"},
    ),
    "shown": Step("the beat of a worker process", "active", beat, begins="-", keeps=of_servers),
    "stopped": Step("a worker process that has stopped", "server-stopped", stop, begins="-", keeps=of_servers),
}


def reasons_unused(step: Step, found: dict[str, Any]) -> set[str]:
    """Check that each difference has a reason; return the patterns of the step that none needed."""
    unused = set(step.table)
    for place, pair in found.items():
        used = {pattern for pattern in (*step.table, *ALWAYS) if re.fullmatch(pattern, place)}
        assert used, f"{place}: ours {pair[0]!r}, asynq's {pair[1]!r}, and no reason"
        unused -= used
    return unused


@pytest.mark.parametrize("name", STEPS)
def test_what_ours_leaves_differs_by_reason_only(name: str, database: redis.Redis) -> None:
    """From our capture in nothing, from asynq's only as the tables say."""
    step = STEPS[name]
    if step.begins != "-":
        put(database, load(step.begins or step.of_asynq), is_paused=step.is_paused)
    step.ours()
    found, names = capture(database, name, step.shows, step.of_asynq), step.names()
    if "ASYNCQ_TEST_CAPTURE" in os.environ:
        write_own(found)
    assert differences(places(found), places(load_own(name))) == {}
    theirs = load(step.of_asynq)
    if step.peer is not None:
        database.flushall()
        put(database, theirs)
        step.peer(GoPeer(database, Q))
        theirs = capture(database, name, "", "")
    different = differences(step.keeps(places(found, names)), step.keeps(places(theirs)))
    assert reasons_unused(step, different) == set()


def test_every_capture_of_ours_has_its_step() -> None:
    """And says what the step says."""
    assert {path.stem for path in OWN_FOLDER.glob("*.json")} == set(STEPS)
    for name, step in STEPS.items():
        found = load_own(name)
        assert (found["name"], found["shows"], found["of_asynq"]) == (name, step.shows, step.of_asynq)


def test_every_reason_that_holds_always_is_needed() -> None:
    """By the captures of ours."""
    every = [place for name in STEPS for place in places(load_own(name))]
    assert [pattern for pattern in ALWAYS if not any(re.fullmatch(pattern, place) for place in every)] == []


def test_a_difference_without_a_reason_is_found() -> None:
    """In a TTL, a score, a field of a message, and a key: else the comparison would show nothing."""
    ours = load_own("failed-with-retries-left")
    before, now = places(ours), int(time.time() - ours["captured_at_unix"])
    assert now >= 0
    for item in ours["keys"]:
        item["ttl_ms"] = 1 if item["ttl_ms"] is None else None
        for member in item.get("members", ()):
            if isinstance(member, dict) and "score" in member:
                member["score"] += 60
    changed = differences(places(ours), before)
    assert {"asynq:queues ttl", "asynq:{default}:retry[t-1]", "asynq:{default}:t:t-1 ttl"} <= set(changed)
    del before["asynq:{default}:t:t-1.msg.retried"], before["asynq:{default}:retry"]
    assert {"asynq:{default}:t:t-1.msg.retried", "asynq:{default}:retry"} <= set(differences(places(ours), before))
