"""What a supervisor gives back to a Redis that lost its memory, and what it must not bring back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys, queues_key
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import TaskRecord

from .redis_state import unknown
from .runs import claimed, taken_by

pytestmark = pytest.mark.django_db(transaction=True)

# Rows, Redis, rows again, the script that gives back, rows once more: before each of them something may happen.
STEPS = range(1, 6)


def end(run: lifecycle.Run, worker_id: str) -> None:
    """The row first, then Redis."""
    lifecycle.succeed(run, 1, timezone.now())
    lifecycle.acknowledge(Broker(), worker_id, [run], lifecycle.record_runs([run]))


def reassert(worker_id: str, run: lifecycle.Run, step: int, event: Callable[[], object]) -> list[str]:
    """Re-assert a run, and let something happen before the n-th step; return the steps that there were.

    When there were not so many, it happens afterwards.
    """
    steps: list[str] = []
    module = sys.modules[lifecycle.reassert.__module__]

    def counted(ask: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            steps.append(name or arguments[0])
            if len(steps) == step:
                with pytest.MonkeyPatch.context() as unpatch:
                    unpatch.setattr(module, "load", load)
                    unpatch.setattr(scripts, "run", run_script)
                    event()
            return ask(*arguments)

        return call

    load, run_script = module.load, scripts.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load", counted(load, "rows"))
        patch.setattr(scripts, "run", counted(run_script))
        lifecycle.reassert(Broker(), worker_id, [run.lease.id])
    if len(steps) < step:
        event()
    return steps


def test_running_task_is_reasserted_by_its_supervisor(redis_client: Any) -> None:
    """After Redis was emptied the run keeps its row and its fence, and has its lease back."""
    run = claimed()
    Broker().remove("default", [run.lease.id])
    assert lifecycle.reassert(Broker(), "w", [run.lease.id]) == 1
    assert lifecycle.reassert(Broker(), "w", [run.lease.id]) == 0
    assert Broker().held("default", "w") == [run.lease]
    assert Broker().extend("default", ["w"], 5)[0].kept == 1


@pytest.mark.parametrize("is_lost", [False, True], ids=["known", "lost"])
@pytest.mark.parametrize("step", STEPS)
def test_what_ends_meanwhile_leaves_nothing(step: int, is_lost: bool) -> None:
    """A live worker's leases are renewed: an entry of a task that has ended would stay for ever."""
    run = claimed()
    if is_lost:
        Broker().remove("default", [run.lease.id])
    steps = reassert("w", run, step, lambda: end(run, "w"))
    assert ("reassert" in steps) is (is_lost and step > 3)
    assert unknown([run.lease.id]) == [run.lease.id]
    assert Broker().held("default", "w") == []
    assert not any(Inspection().sizes("default").values())


@pytest.mark.parametrize("step", STEPS)
def test_what_another_took_over_and_ended_is_not_brought_back(step: int) -> None:
    """The process stood still until its lease had run out: none of its answers is taken any more."""
    run = claimed("frozen")

    def take_over() -> None:
        lifecycle.recover(Broker(), "default", "frozen", [run.lease], reason="its lease ran out")
        end(taken_by("other"), "other")

    assert "reassert" not in reassert("frozen", run, step, take_over)
    assert Broker().done("default", "frozen", [run.lease]) == ["missing"]
    assert TaskRecord.objects.get().worker_ids == ["frozen", "other"]


@pytest.mark.parametrize("step", STEPS)
def test_what_was_closed_meanwhile_is_not_held(step: int) -> None:
    """Redis lost it, and the reconciler was faster: the task is queued again, and nothing keeps it from being run."""
    run = claimed("slow")
    Broker().remove("default", [run.lease.id])
    assert len(reassert("slow", run, step, lambda: lifecycle.abandon(TaskRecord.objects.get(), "unknown"))) >= step
    assert Broker().held("default", "slow") == []
    assert [task.state for task in Inspection().entry_states("default", [run.lease.id])] in (["pending"], [""])


def test_run_of_another_worker_is_not_reasserted() -> None:
    """A frozen worker wakes up after Redis was emptied; its task is another's by now, and stays so."""
    run = claimed("frozen")
    lifecycle.recover(Broker(), "default", "frozen", [run.lease], reason="gone")
    again = taken_by("other")
    Broker().remove("default", [again.lease.id])
    lifecycle.reassert(Broker(), "frozen", [again.lease.id])
    lifecycle.reassert(Broker(), "other", [again.lease.id])
    assert Broker().held("default", "frozen") == []
    assert Broker().held("default", "other") == [again.lease]


def test_queue_with_nothing_but_reasserted_tasks_is_named_again() -> None:
    """Redis was emptied, the supervisor gave its tasks back, then its host died: the lease must be found."""
    run = claimed()
    Broker().remove("default", [run.lease.id])
    Broker().client.delete(queues_key())
    assert lifecycle.reassert(Broker(), "w", [run.lease.id]) == 1
    assert Broker().queues() == {"default"}
    Broker().client.zadd(QueueKeys("default").lease, {run.lease.id: 1})
    assert Reconciler(Broker()).recover_expired() == 1


def test_a_running_task_keeps_its_priority_through_a_loss(redis_client: Any) -> None:
    """Re-asserted and handed back, it stands where its priority puts it."""
    run = claimed(priority=7)
    Broker().remove("default", [run.lease.id])
    assert lifecycle.reassert(Broker(), "w", [run.lease.id]) == 1
    lifecycle.requeue(Broker(), "w", [run])
    assert Broker().client.zrange(QueueKeys("default").priority, 0, -1) == [run.lease.id.encode()]
