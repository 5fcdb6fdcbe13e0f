"""Whatever other programs write into Redis, tasks go on: each kind of key with each wrong type and with odd values.

Every case has two tasks: one that was committed and never pushed, and one whose host was lost. Both must finish, by
the quick repairs and the sweeps that a fleet makes, here called in turn.
"""

from __future__ import annotations

import datetime
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import conf, gates, interop, lifecycle
from django_asyncq.broker import Broker, Lease, keys
from django_asyncq.broker import entries as replies
from django_asyncq.broker.waits import SupervisorListener
from django_asyncq.exceptions import QueueFull
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.pruner import Pruner
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.fleet.supervisor import Supervisor
from django_asyncq.gates import members
from django_asyncq.interop.asynq_display import SchedulerEntries
from django_asyncq.leadership.coordinator import StartupTaskCoordinator
from django_asyncq.leadership.coordinator import key_of as lock_key
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.worker.options import WorkerOptions

from .. import odd_values, tasks
from ..runs import claimed
from ..workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE, WORKER, ALONE, LOST_WORKER = "default", "w", "w-alone", "lost"
# A sweep pushes a row whose entry is among failed tasks when it has seen it so twice.
MOST_ROUNDS = 6


class Fleet:
    """What the processes of a fleet do, in this process and without their pauses."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.client = self.broker.client
        self.reconciler = Reconciler(self.broker)
        self.supervisor = Supervisor(WorkerOptions(queues={QUEUE: 1}))
        child = SimpleNamespace(worker_id=WORKER, slot_table=SimpleNamespace(running=list))
        self.supervisor.children.append(child)  # type: ignore[arg-type]
        self.keys = keys.QueueKeys(QUEUE)
        self.entries = SchedulerEntries()
        self.broker.register_queue(QUEUE)
        self.client.set(keys.alive_key(), 1)
        self.reconciler.tick(1000.0)

    def unpushed(self) -> str:
        """Commit a task whose process dies before it can push it."""
        minute_ago = timezone.now() - datetime.timedelta(minutes=1)
        return str(TaskRecord.objects.create(name="tests.tasks.add", args=[1], enqueued_at=minute_ago).id)

    def lost(self) -> str:
        """Begin a task whose host is lost."""
        return claimed(LOST_WORKER).lease.id

    def finish_all(self, *ids: str) -> int:
        """Let the fleet work until these tasks have succeeded; return how many rounds that took."""
        for number in range(MOST_ROUNDS):
            self.let_time_pass()
            self.supervisor.leases.renew()
            forward_due(self.broker, [QUEUE])
            self.reconciler.quick_repairs()
            if number:
                self.reconciler.sweep()
                list(Pruner(self.broker).prune_completed())
                self.entries.beat()
            self.run_all()
            if not TaskRecord.objects.filter(id__in=ids).exclude(state=TaskState.SUCCEEDED).exists():
                return number
        entries = {id: self.client.hgetall(self.keys.task(id)) for id in ids} if ids else {}
        raise AssertionError(f"not finished: {list(TaskRecord.objects.values('id', 'state', 'fence'))}, {entries}")

    def let_time_pass(self) -> None:
        """Let every lease of the lost host expire, and let every outage and the begin of every run be long ago."""
        minutes_ago = timezone.now() - datetime.timedelta(minutes=5)
        TaskRecord.objects.filter(state=TaskState.RUNNING).update(last_attempted_at=minutes_ago)
        for id in TaskRecord.objects.filter(state=TaskState.RUNNING).values_list("id", flat=True):
            if self.client.type(self.keys.lease) == b"zset" and self.has_near_lease(str(id)):
                self.client.zadd(self.keys.lease, {str(id): 1}, xx=True)
        if self.client.type(keys.reachability_key()) == b"hash":
            resumed = replies.whole(self.client.hget(keys.reachability_key(), "resumed"))
            if resumed:
                self.client.hset(keys.reachability_key(), "resumed", max(resumed - 60_000, 0))

    def has_near_lease(self, id: str) -> bool:
        """Whether the lease of a task ends within the day, so that it would soon expire."""
        score = self.client.zscore(self.keys.lease, id)
        return score is not None and 0 < score < 1e10

    def run_all(self) -> None:
        """Run every task that a worker can claim."""
        self.broker.wake([QUEUE])
        self.broker.held(QUEUE, WORKER)
        claims = (
            (WORKER, lambda: interop.claim(self.broker, QUEUE, WORKER, 10, "default").runs),
            (ALONE, lambda: interop.claim_suspect(self.broker, QUEUE, ALONE, "default").runs),
        )
        for worker_id, claim in claims:
            while runs := claim():
                for run in runs:
                    lifecycle.begin(run, worker_id, timezone.now())
                    lifecycle.succeed(run, 1, timezone.now())
                refused = lifecycle.record_runs(runs)
                lifecycle.acknowledge(self.broker, worker_id, [run for run in runs if run not in refused], refused)


@pytest.fixture
def fleet(caplog: pytest.LogCaptureFixture) -> Fleet:
    """A fleet that has run before."""
    caplog.set_level(logging.CRITICAL)
    return Fleet()


def today() -> str:
    """Today's date as in the names of counters."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


ARGUMENTS: dict[str, tuple[str, ...]] = {
    "task": ("note",),
    "group": ("g",),
    "processed_on": (today(),),
    "failed_on": (today(),),
    "minutes": (f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H}",),
    "runs": (),
    "unique": ("tests.tasks.add", "0"),
    "held": (LOST_WORKER,),
}


def queue_key(kind: str) -> str:
    """Return a key of the queue by its kind in QUEUE_TYPES."""
    found = getattr(keys.QueueKeys(QUEUE), kind)
    return found if isinstance(found, str) else found(*ARGUMENTS[kind])


def other_key(kind: str) -> str:
    """Return a key of no queue by its kind in OTHER_TYPES."""
    if kind.startswith("gate "):
        return members.keys("g")[["members", "meta", "retaken", "waiters", "ours"].index(kind.removeprefix("gate "))]
    if kind == "lock":
        return lock_key(f"{conf.current().key_prefix}.maintenance")
    arguments = {
        "scheduler_key": ("s",),
        "rate_key": ("r",),
        "rate_looks_key": ("r",),
        "scheduler_history_key": ("1",),
    }
    arguments |= dict.fromkeys(("server_key", "server_running_key", "worker_info_key"), ("h:1:s",))
    return getattr(keys, kind)(*arguments.get(kind, ()))


KINDS = [*keys.QUEUE_TYPES, *keys.OTHER_TYPES]


def key_and_type(kind: str) -> tuple[str, str]:
    """Return a key of a kind, and the type it should have."""
    if kind in keys.QUEUE_TYPES:
        return queue_key(kind), keys.QUEUE_TYPES[kind]
    return other_key(kind), keys.OTHER_TYPES[kind]


def test_every_key_has_a_type() -> None:
    """A key that is added to a queue, or beside the queues, must be listed with its type, so that it is tested here."""
    of_queue = {name for name, value in vars(keys.QueueKeys).items() if callable(value) and not name.startswith("_")}
    of_queue |= {each for each in keys.QueueKeys.__dataclass_fields__ if not each.endswith("_prefix")}
    assert of_queue - {"alias", "queue", "base"} == set(keys.QUEUE_TYPES)
    others = {name for name in vars(keys) if name.endswith("_key")}
    assert others == {name for name in keys.OTHER_TYPES if name.endswith("_key")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_of_a_wrong_type_stops_nothing(fleet: Fleet, kind: str) -> None:
    """The task that was never pushed begins after the quick repairs, the lost host's after a sweep at the latest."""
    key, right = key_and_type(kind)
    for wrong in odd_values.TYPES:
        if wrong == right:
            continue
        unpushed, lost = fleet.unpushed(), fleet.lost()
        odd_values.write(fleet.client, key, wrong)
        assert fleet.finish_all(unpushed) == 0, wrong
        fleet.finish_all(lost)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_values_in_a_key_of_the_right_type_stop_nothing(fleet: Fleet, kind: str) -> None:
    """As members, as fields with their values, and as the whole value. Any value pauses a queue."""
    key, right = key_and_type(kind)
    if kind == "paused":
        pytest.skip("any value pauses")
    for value in odd_values.VALUES.values():
        unpushed, lost = fleet.unpushed(), fleet.lost()
        odd_values.write(fleet.client, key, right, value)
        fleet.finish_all(unpushed, lost)


@pytest.mark.parametrize(
    "kind", ["priority", "suspects", "lease", "scheduled", "due", "retry", "archived", "completed"]
)
def test_odd_scores_stop_nothing(fleet: Fleet, kind: str) -> None:
    """Of the tasks themselves, and of ids without a task."""
    for score in odd_values.SCORES.values():
        unpushed, lost = fleet.unpushed(), fleet.lost()
        fleet.client.zadd(queue_key(kind), {lost: score, unpushed: score, "note": score})
        fleet.finish_all(unpushed, lost)


@pytest.mark.parametrize("name", ["huge", "infinite"])
def test_a_task_that_is_delayed_for_ever_comes_back(fleet: Fleet, name: str) -> None:
    """Its time in Redis is beyond every year; its row knows the right one."""
    soon = timezone.now() + datetime.timedelta(seconds=0.2)
    delayed = str(tasks.add.using(run_after=soon).enqueue(1).id)
    assert fleet.client.zrange(fleet.keys.scheduled, 0, -1) == [delayed.encode()]
    for zset in (fleet.keys.scheduled, fleet.keys.due):
        fleet.client.zadd(zset, {delayed: odd_values.SCORES[name]})
    minute_ago = timezone.now() - datetime.timedelta(minutes=1)
    TaskRecord.objects.update(enqueued_at=minute_ago, run_after=minute_ago)
    fleet.finish_all(delayed)


@pytest.mark.parametrize("field", ["alive", "last", "resumed"])
def test_odd_times_stop_nothing(fleet: Fleet, field: str) -> None:
    """Of the mark that Redis remembers, and of its last outage; also times that are yet to come."""
    for value in [*odd_values.VALUES.values(), b"99999999999999"]:
        unpushed, lost = fleet.unpushed(), fleet.lost()
        if field == "alive":
            fleet.client.set(keys.alive_key(), value)
        else:
            fleet.client.hset(keys.reachability_key(), field, value)
        fleet.finish_all(unpushed, lost)
        fleet.reconciler.tick(2000.0)


FIELDS = ("state", "fence", "priority", "pending_since", "worker", "unique_key", "group", "parked_at", "outcome", "msg")


@pytest.mark.parametrize("field", FIELDS)
def test_an_odd_field_of_a_task_loses_no_task(fleet: Fleet, field: str) -> None:
    """Of a task that waits, that is in no list, that is delayed until now, and that a lost host began."""
    for value in odd_values.VALUES.values():
        lost = fleet.lost()
        waiting, unlisted, late = (str(tasks.add.enqueue(1).id) for _ in range(3))
        fleet.client.lrem(fleet.keys.pending, 0, unlisted)
        fleet.client.lrem(fleet.keys.pending, 0, late)
        fleet.client.hset(fleet.keys.task(late), "state", "scheduled")
        fleet.client.zadd(fleet.keys.scheduled, {late: 1})
        TaskRecord.objects.update(enqueued_at=timezone.now() - datetime.timedelta(minutes=1))
        for id in (lost, waiting, unlisted, late):
            fleet.client.hset(fleet.keys.task(id), field, value)
        fleet.finish_all(lost, waiting, unlisted, late)


@pytest.mark.parametrize("field", ["msg", "state", "fence"])
def test_a_missing_field_of_a_task_loses_no_task(fleet: Fleet, field: str) -> None:
    """As above, with the field deleted."""
    lost = fleet.lost()
    waiting, unlisted = (str(tasks.add.enqueue(1).id) for _ in range(2))
    fleet.client.lrem(fleet.keys.pending, 0, unlisted)
    TaskRecord.objects.update(enqueued_at=timezone.now() - datetime.timedelta(minutes=1))
    for id in (lost, waiting, unlisted):
        fleet.client.hdel(fleet.keys.task(id), field)
    fleet.finish_all(lost, waiting, unlisted)


def test_tasks_whose_own_hash_has_a_wrong_type_come_back(fleet: Fleet) -> None:
    """Waiting, running on a lost host, or never pushed."""
    for wrong in odd_values.TYPES:
        if wrong != "hash":
            ids = [fleet.unpushed(), fleet.lost(), str(tasks.add.enqueue(1).id)]
            TaskRecord.objects.update(enqueued_at=timezone.now() - datetime.timedelta(minutes=1))
            for id in ids:
                odd_values.write(fleet.client, fleet.keys.task(id), wrong)
            fleet.finish_all(*ids)


@pytest.mark.parametrize("fence", [b"0", b"soon", b"\xff", str(2**70).encode()])
def test_a_finished_task_leaves_redis_although_its_fence_was_changed(fleet: Fleet, fence: bytes) -> None:
    """The worker's own removal is refused then. Its supervisor must not renew the lease for ever."""
    run = claimed(WORKER)
    fleet.client.hset(fleet.keys.task(run.lease.id), "fence", fence)
    lifecycle.succeed(run, 1, timezone.now())
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(fleet.broker, WORKER, [run])
    fleet.client.delete(fleet.keys.lease)
    fleet.reconciler.sweep()
    assert not fleet.client.exists(fleet.keys.lease)
    TaskRecord.objects.filter(id=run.lease.id).update(finished_at=timezone.now() - datetime.timedelta(minutes=1))
    assert fleet.client.lrange(fleet.keys.active, 0, -1) == [run.lease.id.encode()]
    for _ in range(2):
        fleet.reconciler.sweep()
        fleet.supervisor.leases.renew()
    assert fleet.client.keys(f"{fleet.keys.base}*{run.lease.id}*") == []
    assert not fleet.client.exists(fleet.keys.active, fleet.keys.lease, fleet.keys.held(WORKER))


# --- setting aside


def test_a_key_that_is_set_aside_can_be_read_for_seven_days(fleet: Fleet) -> None:
    """Under a name of its own, in the same cluster slot; a second look finds nothing more to set aside."""
    fleet.client.set(fleet.keys.task("note"), "x")
    for _ in range(2):
        fleet.reconciler.sweep()
    (name,) = fleet.client.keys(f"{fleet.keys.base}odd:*")
    assert name.endswith(b":t:note")
    assert fleet.client.get(name) == b"x"
    assert 6 * 86_400 < fleet.client.ttl(name) <= 7 * 86_400
    assert not fleet.client.exists(fleet.keys.task("note"))


def test_keys_that_are_set_aside_are_logged_once_an_hour(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """By each supervisor that is there, with the new name."""
    caplog.set_level(logging.WARNING)
    listener = SupervisorListener()
    listener.start()
    try:
        wait_until(listener.event.is_set, "the subscription")
        for _ in range(3):
            odd_values.write(fleet.client, fleet.keys.pending, "string")
            fleet.run_all()
        wait_until(lambda: "set aside" in caplog.text, "a log line")
        odd_values.write(fleet.client, fleet.keys.lease, "string")
        fleet.broker.expired(QUEUE)
        wait_until(lambda: ":lease" in caplog.text, "a second log line")
    finally:
        listener.stop()
    assert caplog.text.count(":pending") == 1


def test_each_project_announces_its_odd_keys_on_a_channel_of_its_own(
    fleet: Fleet, redis_client: Any, settings: Any, key_prefix: str
) -> None:
    """Under its own prefix, so the supervisors of another project on the same server hear nothing of them."""
    with redis_client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.psubscribe("*odd*")
        heard.get_message(timeout=5)
        settings.ASYNCQ = {**settings.ASYNCQ, "KEY_PREFIX": f"{key_prefix}-other"}
        odd_values.write(redis_client, keys.keys_of(QUEUE).lease, "string")
        fleet.broker.expired(QUEUE)
        (name,) = redis_client.keys(f"{key_prefix}-other:*odd:*")
        message = wait_until(lambda: heard.get_message(timeout=1), "the announcement")
    assert (message["channel"], message["data"]) == (f"{key_prefix}-other:odd".encode(), name)
    assert keys.odd_channel() == f"{key_prefix}-other:odd"


def test_a_key_that_got_its_right_type_in_the_meantime_stays(fleet: Fleet) -> None:
    """Between the refused command and its repetition."""
    from django_asyncq.broker import scripts

    assert scripts.run("check_type", fleet.client, [keys.own_queues_key()], ["set"]) == 0
    assert fleet.broker.queues() == {QUEUE}
    assert scripts.run("check_type", fleet.client, [keys.own_queues_key()], ["list"]) == 1
    assert fleet.broker.queues() == set()


def test_another_programs_key_is_never_set_aside(fleet: Fleet) -> None:
    """A hash names the lock of its task: whatever key a forged hash names stays as it is."""
    other = f"{conf.current().key_prefix}:other-program"
    fleet.client.hset(other, "field", "value")
    id = str(tasks.add.enqueue(1).id)
    fleet.client.hset(fleet.keys.task(id), "unique_key", other)
    fleet.finish_all(id)
    assert fleet.client.hgetall(other) == {b"field": b"value"}


# --- gates, locks, schedules


@pytest.mark.parametrize("part", ["members", "meta", "retaken", "waiters", "ours"])
def test_an_odd_gate_still_holds_its_limit(fleet: Fleet, part: str) -> None:
    """It is built again from the rows, so the task that holds its only slot still does."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    for wrong in odd_values.TYPES:
        if wrong != keys.OTHER_TYPES[f"gate {part}"]:
            odd_values.write(fleet.client, other_key(f"gate {part}"), wrong)
            with pytest.raises(QueueFull):
                tasks.add.using(gate="g", queue_limit=1).enqueue(2)
            fleet.reconciler.sweep()
            assert len(gates.slots("g")) == 1


@pytest.mark.parametrize("field", ["built", "limit", "expected_seconds", "asked", "changes"])
def test_odd_fields_of_a_gate_change_no_limit(fleet: Fleet, field: str) -> None:
    """Except a limit that is a number: that is what tools may set, until the next audit."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    for name, value in odd_values.VALUES.items():
        if field == "limit" and name in ("negative", "zero", "beyond 53 bits"):
            continue
        fleet.client.hset(other_key("gate meta"), field, value)
        with pytest.raises(QueueFull):
            tasks.add.using(gate="g", queue_limit=1).enqueue(2)
        gates.forget_built("g")
        fleet.reconciler.sweep()


def test_odd_slots_leave_at_the_audit(fleet: Fleet) -> None:
    """Members that are no id, with any score; those of the past expired long ago."""
    tasks.add.using(gate="g", queue_limit=1).enqueue(1)
    for value in odd_values.VALUES.values():
        for score in odd_values.SCORES.values():
            fleet.client.zadd(other_key("gate members"), {value: score})
    for _ in range(2):
        fleet.reconciler.sweep()
    assert len([slot for slot in gates.slots("g") if slot.expires_at]) == 1


@pytest.mark.parametrize("make", [lambda kind: (kind, b"x"), lambda kind: ("string", odd_values.VALUES["not UTF-8"])])
def test_an_odd_lock_is_no_lock(fleet: Fleet, make: Callable[[str], tuple[str, bytes]]) -> None:
    """A key of another type, and a value that does not expire: every lock of ours does."""
    name = f"{conf.current().key_prefix}.odd"
    for kind in odd_values.TYPES:
        coordinator = StartupTaskCoordinator()
        odd_values.write(fleet.client, lock_key(name), *make(kind))
        assert coordinator.acquire(name, 30)
        odd_values.write(fleet.client, lock_key(name), *make(kind))
        assert coordinator.renew(name) is False
        coordinator.release(name)


# --- replies


@pytest.mark.parametrize("value", [*odd_values.VALUES.values(), None, [], {}, 1.5, 2**70, "x"])
def test_no_reply_raises(value: Any) -> None:
    """Every function of `replies` answers something."""
    assert isinstance(replies.text(value), str)
    assert replies.whole(value, 0, 10) in (None, 0)
    assert replies.count(value) >= 0
    replies.number(value)
    assert all(isinstance(lease, Lease) for lease in replies.leases([value, value, value]))
    replies.expired([value, value, value, value])


# --- a real fleet


def put_odd_data_everywhere(fleet: Fleet) -> None:
    """Write a wrong type into every kind of key at once, and an outcome of 100,000 brackets into a queued task."""
    for number, kind in enumerate(KINDS):
        key, right = key_and_type(kind)
        wrong = [each for each in odd_values.TYPES if each != right]
        odd_values.write(fleet.client, key, wrong[number % len(wrong)])
    id = str(tasks.add.enqueue(1).id)
    fleet.client.hset(fleet.keys.task(id), mapping={"outcome": odd_values.VALUES["deep"], "fence": 1})


def test_a_fleet_lives_with_odd_data_everywhere_and_starts_again(fleet: Fleet, tmp_path: Path) -> None:
    """The supervisor, and one that is started in its place, both run what is there and what comes."""

    def is_finished() -> bool:
        return not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists()

    fleet.unpushed()
    with workers(tmp_path, "--processes", "1") as first:
        for _ in range(2):
            put_odd_data_everywhere(fleet)
            wait_until(is_finished, "all tasks to succeed")
        assert first.process.poll() is None
        put_odd_data_everywhere(fleet)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
    with workers(tmp_path, "--processes", "1") as second:
        fleet.unpushed()
        wait_until(is_finished, "all tasks to succeed")
        assert second.stop() == 0
    assert "exited unexpectedly" not in second.output()
