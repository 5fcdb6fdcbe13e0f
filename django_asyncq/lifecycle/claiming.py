"""How a task comes to a worker: claimed with a lease and a fence, its row read, its earlier run closed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from django.db import router
from django.utils import timezone

from .. import conf, failpoints
from ..broker import Broker, Dequeued, Lease
from ..models import TaskRecord, TaskState
from ..storage.batches import FencedWrite, write_fenced
from .dispatching import dispatch
from .events import announce
from .messages import entry_of, message_of
from .outcome_spill import replay_outcomes
from .running import Run, acknowledge, count_crash, load_rows

logger = logging.getLogger("django_asyncq.lifecycle")

POSTPONE_SECONDS = 15


class Claimed(NamedTuple):
    """What a claim brought. paused: nothing can come until the queue is resumed. is_drained: nothing was left."""

    runs: list[Run]
    paused: bool
    is_drained: bool


def claim(broker: Broker, queue: str, worker_id: str, count: int, backend: str) -> Claimed:
    """Take up to `count` tasks of a queue: lease and fence in Redis, then name and arguments from the rows.

    backend: the TASKS alias; a task of another alias is put off for its own workers. Ids without a row are parked.
    If we die in between, the leases run out and the reconciler hands the tasks back.
    """
    taken = broker.dequeue(queue, worker_id, count, conf.current().lease_seconds)
    return receive(broker, queue, worker_id, taken, backend)


def receive(broker: Broker, queue: str, worker_id: str, taken: Dequeued, backend: str) -> Claimed:
    """Make a claim of what was taken, by a worker or for one that stood by. backend: as of `claim`."""
    if taken.leases:
        failpoints.reach("claim.leased")
    runs = classify(broker, queue, worker_id, taken.leases, backend)
    if runs:
        failpoints.reach("claim.rows_read")
    return Claimed(runs, taken.paused, taken.is_drained)


def classify(broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], backend: str) -> list[Run]:
    """Load the rows of leased ids and return what is to be run; see to the rest."""
    if not leases:
        return []
    rows = load_rows(leases)
    # A task's first lease has the fence 1: no earlier run can have left an outcome, so most are not asked about.
    again = [lease for lease in leases if lease.fence > 1]
    recorded_now = replay_outcomes(broker, queue, worker_id, again, rows) if again else set()
    runs: list[Run] = []
    abandoned: list[Run] = []
    behind: list[TaskRecord] = []
    ended, foreign, orphans, waiting = [], [], [], []
    for lease in [lease for lease in leases if lease.id not in recorded_now]:
        record = rows.get(lease.id)
        if record is None:
            orphans.append(lease)
        elif record.is_final:
            ended.append(lease)
        elif record.backend != backend:
            foreign.append(lease)
        elif record.state == TaskState.RUNNING and record.fence > lease.fence:
            # Redis is back with an older memory, and who runs it may live: its end, or the reconciler, settles that.
            foreign.append(lease)
        elif record.state == TaskState.QUEUED and record.fence >= lease.fence:
            behind.append(record)
        elif record.state == TaskState.FAILED:
            waiting.append((lease, message_of(record), entry_of(record).due_at or 0))
        else:
            (abandoned if record.state == TaskState.RUNNING else runs).append(Run(record, lease))
    if orphans:
        logger.error("queue %s: no row for %s; parked in the archive", queue, [lease.id for lease in orphans])
        broker.archive(queue, worker_id, [(lease, b"") for lease in orphans])
    if ended:
        broker.done(queue, worker_id, ended)
    if foreign:
        broker.postpone(queue, worker_id, foreign, POSTPONE_SECONDS)
    if behind:
        # No end of a run with such a fence would be accepted: back into the queue with a higher one.
        broker.remove(queue, [str(record.id) for record in behind])
        dispatch(behind, again=True)
    if waiting:
        # asynq's own forwarder has moved a task whose row must first be retried, which takes a gate slot.
        broker.retry(queue, worker_id, waiting, counted=False)
    return runs + _take_over(broker, worker_id, abandoned) if abandoned else runs


def _take_over(broker: Broker, worker_id: str, runs: Sequence[Run]) -> list[Run]:
    """Close the run that the row still tells of: a foreign recoverer gave the task on without the row."""
    for run in runs:
        count_crash(run.record, "its lease was given to another worker", timezone.now())
    written = write_fenced([FencedWrite(run.record, run.record.fence) for run in runs], router.db_for_write(TaskRecord))
    over = [run for run in runs if run.record.is_final and run.record.id in written]
    acknowledge(broker, worker_id, over)
    announce([run.record for run in over], TaskState.RUNNING, TaskState.FAILED)
    return [run for run in runs if run not in over and run.record.id in written]
