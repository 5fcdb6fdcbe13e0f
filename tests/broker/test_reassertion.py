"""Reassertion: running tasks get their entries again after Redis lost its memory, and finished ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.inspection import Inspection
from django_asyncq.broker.keys import QueueKeys, own_queues_key
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import dispatching
from django_asyncq.models import TaskRecord

from ..redis_state import unknown
from ..runs import claimed, taken_by

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("long_leases")]

# Rows, Redis, rows again, the script that reasserts, rows once more: before each of them something may happen.
STEPS = range(1, 6)


def finish(run: lifecycle.Run, worker_id: str) -> None:
    """Record success in the row, then in Redis."""
    lifecycle.succeed(run, 1, timezone.now())
    lifecycle.acknowledge(Broker(), worker_id, [run], lifecycle.record_runs([run]))


def reassert(worker_id: str, run: lifecycle.Run, step: int, event: Callable[[], object]) -> list[str]:
    """Reassert a run, and call `event` before the n-th step, or afterwards if there were fewer; return the steps."""
    steps: list[str] = []

    def counted(ask: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            steps.append(name or arguments[0])
            if len(steps) == step:
                with pytest.MonkeyPatch.context() as unpatch:
                    unpatch.setattr(dispatching, "load_rows", load_rows)
                    unpatch.setattr(scripts, "run", run_script)
                    unpatch.setattr(Inspection, "entry_states", entry_states)
                    event()
            return ask(*arguments)

        return call

    load_rows, run_script, entry_states = dispatching.load_rows, scripts.run, Inspection.entry_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatching, "load_rows", counted(load_rows, "rows"))
        patch.setattr(scripts, "run", counted(run_script))
        patch.setattr(Inspection, "entry_states", counted(entry_states, "states"))
        lifecycle.reassert(Broker(), worker_id, [str(run.record.id)])
    if len(steps) < step:
        event()
    return steps


def test_running_task_gets_its_lease_again_after_redis_was_emptied(redis_client: Any) -> None:
    """The run keeps its row and its fence, and a second call changes nothing."""
    run = claimed()
    Broker().remove("default", [str(run.record.id)])
    assert lifecycle.reassert(Broker(), "w", [str(run.record.id)]) == 1
    assert lifecycle.reassert(Broker(), "w", [str(run.record.id)]) == 0
    assert Broker().held("default", "w") == [run.lease]
    assert Broker().extend("default", ["w"], 5)[0].kept == 1


@pytest.mark.parametrize("is_lost", [False, True], ids=["known", "lost"])
@pytest.mark.parametrize("step", STEPS)
def test_task_that_finishes_during_reassertion_leaves_no_entry(step: int, is_lost: bool) -> None:
    """The leases of a live worker are renewed, so a stale entry would stay for ever."""
    run = claimed()
    if is_lost:
        Broker().remove("default", [str(run.record.id)])
    steps = reassert("w", run, step, lambda: finish(run, "w"))
    assert ("reassert" in steps) is (is_lost and step > 3)
    assert unknown([str(run.record.id)]) == [run.lease.id]
    assert Broker().held("default", "w") == []
    assert not any(Inspection().sizes("default").values())


@pytest.mark.parametrize("step", STEPS)
def test_task_that_another_worker_finished_is_not_reasserted(step: int) -> None:
    """A process was frozen until its lease had expired: its runs belong to another worker."""
    run = claimed("frozen")

    def recover_and_finish() -> None:
        lifecycle.recover(Broker(), "default", "frozen", [run.lease], reason="its lease ran out")
        finish(taken_by("other"), "other")

    assert "reassert" not in reassert("frozen", run, step, recover_and_finish)
    assert Broker().done("default", "frozen", [run.lease]) == ["missing"]
    assert TaskRecord.objects.get().worker_ids == ["frozen", "other"]


@pytest.mark.parametrize("step", STEPS)
def test_run_that_was_abandoned_during_reassertion_holds_no_lease(step: int) -> None:
    """Redis lost the entry, and the reconciler was faster: the task is queued again and free to be run."""
    run = claimed("slow")
    Broker().remove("default", [str(run.record.id)])
    assert len(reassert("slow", run, step, lambda: lifecycle.abandon(TaskRecord.objects.get(), "unknown"))) >= step
    assert Broker().held("default", "slow") == []
    assert [task.state for task in Inspection().entry_states("default", [str(run.record.id)])] in (["pending"], [""])


def test_run_of_another_worker_is_not_reasserted() -> None:
    """A frozen worker wakes up after Redis was emptied: its task stays with the worker that runs it now."""
    run = claimed("frozen")
    lifecycle.recover(Broker(), "default", "frozen", [run.lease], reason="gone")
    again = taken_by("other")
    Broker().remove("default", [again.lease.id])
    lifecycle.reassert(Broker(), "frozen", [again.lease.id])
    lifecycle.reassert(Broker(), "other", [again.lease.id])
    assert Broker().held("default", "frozen") == []
    assert Broker().held("default", "other") == [again.lease]


def test_queue_of_reasserted_tasks_is_registered_again() -> None:
    """Redis was emptied, the tasks were reasserted, then their host died: the reconciler must find the lease."""
    run = claimed()
    Broker().remove("default", [str(run.record.id)])
    Broker().client.delete(own_queues_key())
    assert lifecycle.reassert(Broker(), "w", [str(run.record.id)]) == 1
    assert Broker().queues() == {"default"}
    Broker().client.zadd(QueueKeys("default").lease, {run.lease.id: 1})
    assert Reconciler(Broker()).recover_expired() == 1


def test_reasserted_task_keeps_its_priority(redis_client: Any) -> None:
    """After a requeue it is where its priority puts it."""
    run = claimed(priority=7)
    Broker().remove("default", [str(run.record.id)])
    assert lifecycle.reassert(Broker(), "w", [str(run.record.id)]) == 1
    lifecycle.requeue(Broker(), "w", [run])
    assert Broker().client.zrange(QueueKeys("default").priority, 0, -1) == [run.lease.id.encode()]
