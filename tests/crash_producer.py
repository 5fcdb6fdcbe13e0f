"""A process of `test_crash` that does what its argument says, and dies at a failpoint."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import django

django.setup()

from django.conf import settings  # noqa: E402
from django.db import transaction  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.utils import timezone  # noqa: E402

from django_asyncq import chain, gates, interop, lifecycle  # noqa: E402
from django_asyncq.broker import Broker  # noqa: E402
from django_asyncq.fleet.forwarder import WaiterService  # noqa: E402
from django_asyncq.models import TaskRecord, TaskState  # noqa: E402
from tests import batch_tasks, tasks  # noqa: E402
from tests.go_peer import GoPeer  # noqa: E402


def enqueue(name: str, **options: Any) -> None:
    """Two tasks of one gate in two queues, in one transaction."""
    with transaction.atomic():
        for number in (1, 2):
            tasks.nap.using(queue_name=f"{name}-{number}", gate=name, queue_limit=5, **options).enqueue(0)


def enqueue_at_several(name: str) -> None:
    """One task of two gates."""
    tasks.nap.using(gate=(name, f"{name}-b"), queue_limit=5).enqueue(0)


def let_in_from_second(name: str) -> None:
    """The leader's look at the second gate of a task."""
    WaiterService(Broker("worker")).admit(f"{name}-b")


def enqueue_delayed(name: str) -> None:
    """The same tasks, to run a moment later."""
    enqueue(name, run_after=timedelta(seconds=0.2))


def one_after_the_other(name: str) -> None:
    """Three tasks of one gate; the batcher pushes the second and the third together."""
    override_settings(ASYNCQ={**settings.ASYNCQ, "PUSH_BATCH_SECONDS": 1}).enable()
    tasks.nap.using(queue_name=f"{name}-3", gate=name, queue_limit=5).enqueue(0)
    # In one transaction: the batcher's thread dies as soon as it has collected the tasks.
    enqueue(name)


def enqueue_many(name: str) -> None:
    """More tasks than one script call takes."""
    tasks.nap.using(queue_name=name).enqueue_many([(0,)] * 250)


def enqueue_behind(name: str) -> None:
    """A task, and one that waits for it."""
    task = tasks.nap.using(queue_name=name, gate=name, queue_limit=5)
    chain(task.step(0), task.step(0)).enqueue()


def lose_the_slot(name: str) -> None:
    """A task whose slot goes to another before the commit."""
    with transaction.atomic():
        result = tasks.nap.using(gate=name, queue_limit=1).enqueue(0)
        gates.release([TaskRecord.objects.get(id=result.id)])
        gates.acquire([TaskRecord(gate=name, queue_limit=1)])


def retry(name: str) -> None:
    """The retry of a person in the admin."""
    lifecycle.retry(list(TaskRecord.objects.filter(gate=name).values_list("id", flat=True)), by_person=True)


def let_in(name: str) -> None:
    """The leader's look at a gate where a task waits and a slot is free."""
    WaiterService(Broker("worker")).admit(name)


def delete(name: str) -> None:
    """The deletion of a person in the admin."""
    TaskRecord.objects.get(gate=name).delete()


def hurry(name: str) -> None:
    """A person lets a delayed task run now."""
    lifecycle.hurry(list(TaskRecord.objects.filter(gate=name).values_list("id", flat=True)))


def cancel(name: str) -> None:
    """The cancel of a person in the admin."""
    TaskRecord.objects.filter(gate=name).cancel(by="a person")


def claim_late(name: str) -> None:
    """Claim a task that has expired, as a worker of a lost host would."""
    TaskRecord.objects.filter(gate=name).update(expires_at=timezone.now())
    interop.claim(Broker("worker"), name, "lost", 1, "default")


def settle(name: str) -> None:
    """Another program archives a task that waits, and the leader sees it."""
    GoPeer(Broker("worker").client, name, Broker("worker").prefix).inspector_archive(
        str(TaskRecord.objects.get(gate=name).id)
    )
    interop.settle_evidence(Broker("worker"), list(TaskRecord.objects.filter(gate=name)))


def replace(name: str) -> None:
    """A call that replaces the arguments of a task that waits."""
    tasks.nap.using(unique=lambda seconds: name, on_duplicate="replace", gate=name, queue_limit=5).enqueue(0.01)


def form_batch(name: str) -> None:
    """Make a batch of two calls, as the leader does."""
    batch_tasks.noted.using(queue_name=name, gate=name, queue_limit=5).enqueue_many([(), ()])
    interop.form_batches(Broker("worker"), name)


def lose_batch(name: str) -> None:
    """Give a batch up whose code no worker has, so that its members run by themselves."""
    form_batch(name)
    broker = Broker("worker")
    (run,) = interop.claim(broker, name, "lost", 1, "default").runs
    lifecycle.refuse(broker, run, ValueError("no code"))


def work(name: str) -> None:
    """Run two tasks of two queues as a worker of a lost host would, and record them as one group."""
    broker = Broker("worker")
    queues = (f"{name}-1", f"{name}-2")
    runs = [run for queue in queues for run in interop.claim(broker, queue, "lost", 1, "default").runs]
    for run in runs:
        lifecycle.begin(run, "lost", timezone.now())
        tasks.note("begin", id=str(run.record.id))
        lifecycle.succeed(run, None, timezone.now())
    lifecycle.acknowledge(broker, "lost", runs, lifecycle.record_runs(runs))
    lifecycle.announce([run.record for run in runs], TaskState.RUNNING, TaskState.SUCCEEDED)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
