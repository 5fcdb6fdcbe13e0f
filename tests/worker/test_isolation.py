"""What fails for a reason that nobody has thought of fails alone: the other queues, pages and repairs are done.

The reason is made up here, in a script: it raises an error for one queue.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone
from redis.exceptions import ResponseError

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.fleet.pruner import Pruner
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.fleet.supervisor import Supervisor
from django_asyncq.models import TaskRecord
from django_asyncq.storage.errors import in_turn
from django_asyncq.worker.options import WorkerOptions

from .. import tasks
from ..redis_state import unknown
from ..runs import worker_process

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

# It comes before `default` in the order of the names.
BROKEN = "broken"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let scripts raise an error for the queue BROKEN. Arguments: their names."""
    run, names = scripts.run, set[str]()

    def run_or_fail(name: str, client: Any, keys: Any, arguments: Any = ()) -> Any:
        if name in names and f"{{{BROKEN}}}" in keys[0]:
            raise ResponseError("ERR something that nobody has thought of")
        return run(name, client, keys, arguments)

    Broker().register_queue(BROKEN)
    Broker().register_queue("default")
    monkeypatch.setattr(scripts, "run", run_or_fail)
    return names.update  # type: ignore[return-value]


def expired_run() -> str:
    """Begin a task whose lease expires at once."""
    tasks.add.enqueue(1)
    (run,) = lifecycle.claim(Broker(), "default", "lost", 1, "default").runs
    Broker().client.zadd(QueueKeys("default").lease, {run.lease.id: 1})
    return run.lease.id


def unpushed() -> str:
    """Commit a task that is never pushed."""
    minute_ago = timezone.now() - datetime.timedelta(minutes=1)
    return str(TaskRecord.objects.create(name="tests.tasks.add", args=[1], enqueued_at=minute_ago).id)


def logged(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many errors were logged."""
    return sum(record.levelno >= logging.ERROR for record in caplog.records)


def test_expired_leases_of_other_queues_are_recovered(
    broken: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """However often it fails, it is logged once."""
    broken({"expired"})
    reconciler = Reconciler(Broker())
    for _ in range(3):
        expired_run()
        assert reconciler.recover_expired() == 1
    assert logged(caplog) == 1


def test_quick_repairs_do_not_wait_for_a_sweep_that_fails(broken: Callable[..., None]) -> None:
    """Not even in the round in which the sweep begins."""
    reconciler = Reconciler(Broker())
    reconciler.tick(1000.0)
    broken({"entry_states", "misplaced", "prune_held", "expired"})
    Broker().client.rpush(QueueKeys(BROKEN).pending, "x")
    for now in (2000.0, 3000.0):
        id = unpushed()
        reconciler.tick(now)
        assert unknown([id]) == []


def test_a_store_that_is_unreachable_ends_the_round_and_not_the_pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repairs raise; old rows are pruned all the same."""
    service, pruned = MaintenanceService([], single_instance=False), []

    def fail(now: float) -> None:
        raise BrokerUnavailable("unreachable")

    monkeypatch.setattr(service.reconciler, "tick", fail)
    monkeypatch.setattr(service.pruner, "tick", pruned.append)
    with pytest.raises(BrokerUnavailable):
        service.repair_and_prune()
    assert len(pruned) == 1


def test_pages_of_other_queues_are_repaired(broken: Callable[..., None]) -> None:
    """An id without a hash leaves the list of the other queue; a hash in no list returns to it."""
    broken({"remove_dangling", "misplaced"})
    client, id = Broker().client, str(tasks.add.enqueue(1).id)
    for queue in (BROKEN, "default"):
        client.rpush(QueueKeys(queue).pending, "gone")
        client.hset(QueueKeys(queue).task("odd"), "msg", "x")
    client.lrem(QueueKeys("default").pending, 0, id)
    repairs = Reconciler(Broker()).sweep()
    assert (repairs.strays, repairs.orphans) == (1, 1)


def test_tasks_of_other_queues_are_forwarded(broken: Callable[..., None]) -> None:
    """The error is raised when the others are done, so that it is logged."""
    broken({"forward"})
    tasks.add.using(run_after=timezone.now() + datetime.timedelta(hours=1)).enqueue(1)
    client, keys = Broker().client, QueueKeys("default")
    client.zadd(keys.scheduled, dict.fromkeys(client.zrange(keys.scheduled, 0, -1), 1))
    with pytest.raises(ResponseError):
        forward_due(Broker(), [BROKEN, "default"])
    assert client.llen(keys.pending) == 1


def test_completed_tasks_of_other_queues_are_pruned(broken: Callable[..., None]) -> None:
    """Those of Go workers, in Redis."""
    broken({"prune_completed"})
    Broker().client.zadd(QueueKeys("default").completed, {"x": 1})
    assert sum(Pruner(Broker()).prune_completed()) == 1


def test_a_supervisor_renews_and_recovers_in_other_queues(
    broken: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its main loop goes on, and the error is logged once."""
    broken({"extend", "requeue_moved", "held", "dequeue_suspect"})
    id, supervisor = expired_run(), Supervisor(WorkerOptions(queues={BROKEN: 1, "default": 1}))
    child = SimpleNamespace(
        worker_id="lost", is_alone=False, is_quarantined=False, slot_table=SimpleNamespace(running=list)
    )
    supervisor.processes.children.append(child)  # type: ignore[arg-type]
    for _ in range(2):
        supervisor.leases._beat_at = 0.0
        assert supervisor.leases.beat()
    assert Broker().client.zscore(QueueKeys("default").lease, id) > 1
    supervisor.quarantine.tick(1e9)
    assert logged(caplog) <= 2


def test_a_worker_fetches_from_other_queues(broken: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """The queue that fails is asked again; it is logged once."""
    broken({"dequeue"})
    with worker_process() as process:
        process.fetcher.order.weights = {BROKEN: 1, "default": 1}
        for number in range(2):
            tasks.add.enqueue(number)
        wanted = 2
        got, _ = process.fetcher._dequeue(wanted)
        assert got == 2
        process.fetcher._dequeue(wanted)
    assert logged(caplog) == 1


def test_items_in_turn() -> None:
    """Every item is done and the first error raised at last; what concerns all of them is raised at once."""
    done: list[int] = []

    def act(item: int) -> None:
        if item == 1:
            raise ValueError(str(item))
        if item == 4:
            raise BrokerUnavailable("unreachable")
        done.append(item)

    with pytest.raises(ValueError, match="1"):
        in_turn([0, 1, 2], act)
    with pytest.raises(BrokerUnavailable):
        in_turn([3, 4, 5], act)
    assert done == [0, 2, 3]
