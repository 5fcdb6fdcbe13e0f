"""Spill outcomes to Redis when a worker must stop while the database is unreachable, and replay them later.

An outcome lies in the hash of its task, behind a signature over the identity of the database, the task's id, the run's
fence and the very bytes that follow. Only what a worker of this database signed reaches a row; anything else counts as
absent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.template.defaultfilters import pluralize

from .. import conf, failpoints
from ..broker import Broker, Lease
from ..broker.outcomes import SpilledOutcome, SpilledOutcomes
from ..guard import get_logger
from ..logs import log_extra
from ..models import TaskRecord, TaskState
from ..storage import identity
from ..storage.batches import FencedWrite
from ..storage.errors import ErrorKind, kind_of
from ..storage.routing import writing_database
from . import outcome_format, signatures
from .claimed_runs import Run
from .dispatching import by_queue
from .events import announce
from .following import write_fenced, write_usable
from .outcome_format import RunOutcome
from .running import acknowledge, strip_result, undo_attempt

logger = get_logger("django_asyncq.lifecycle")

PURPOSE = "outcome"
LARGEST_BYTES = signatures.SIGNATURE_BYTES + outcome_format.LARGEST_BYTES


class Found(NamedTuple):
    """An outcome that fits a lease and the row. has_waited: for a process that can verify it, in vain."""

    lease: Lease
    row: TaskRecord
    outcome: RunOutcome
    is_genuine: bool
    has_waited: bool


def spill_outcomes(broker: Broker, worker_id: str, runs: Sequence[Run]) -> int:
    """Store in Redis the outcomes of runs that cannot be recorded now; return how many Redis accepted.

    | check    | the fence: an entry that another run holds is left alone                            |
    | row      | nothing yet: `replay_outcomes` writes it, in the reconciler or the next worker      |
    | Redis    | the outcome in the hash of the task; the lease expires at once, so that it is found |
    | announce | nothing yet                                                                         |

    If we die before, the lease expires and the reconciler requeues the task: it runs again.
    Raises: BrokerUnavailable; the same holds then.
    """
    if not signatures.can_sign():
        count, extra = len(runs), log_extra(*(run.record for run in runs))
        text = "SECRET_KEY is empty, so outcomes cannot be signed: %d; their tasks run again"
        logger.error(text, count, extra=extra)
        return 0
    spilled = 0
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs]):
        ids = {record.id for record in group}
        items = [(run.lease, signed(run)) for run in runs if run.record.id in ids]
        spilled += SpilledOutcomes(of_alias.role, of_alias.alias).write(queue, worker_id, items).count("spilled")
        failpoints.reach("spill.queue_spilled")
    return spilled


def signed(run: Run) -> bytes:
    """Return the outcome of a finished run as it is stored: its signature, then its JSON."""
    encoded = outcome_format.encode(run.record, run.lease.fence, counted=run.counted)
    # The database is unreachable now. A process that has claimed a task knows the identity.
    message = _message(identity.known(), run.lease.id, run.lease.fence, encoded)
    return signatures.sign(PURPOSE, message) + encoded


def _message(database: UUID | None, id: str, fence: int, encoded: bytes) -> bytes:
    """Return what is signed. The identity of the database, the id and the fence each end at a space."""
    return f"{database} {id} {fence} ".encode() + encoded


def replay_outcomes(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], rows: Mapping[str, TaskRecord]
) -> set[str]:
    """Record outcomes that a worker spilled to Redis; return the ids of the tasks that this settles for now.

    An outcome with a signature that this process cannot verify stays, and its task is postponed once, for one lease:
    another host may have the key. rows: by id; they are not changed.

    | check    | the signature; the fence of the finished run: an outcome is void when another run has begun         |
    | row      | RUNNING or QUEUED → SUCCEEDED or FAILED, as the worker would have written it; RUNNING → QUEUED, if  |
    |          | the task is postponed                                                                               |
    | Redis    | removed, retry or archived; scheduled, if the task is postponed                                     |
    | announce | `task_state_changed`                                                                                |

    If we die in between, the next worker that claims the entry, or the reconciler, does the same again.
    Raises: BrokerUnavailable, django.db.Error.
    """
    ids = [lease.id for lease in leases]
    spilled = SpilledOutcomes(broker.role, broker.alias).read(queue, ids, largest_bytes=LARGEST_BYTES)
    read = [_read(lease, rows[lease.id], spilled[lease.id]) for lease in leases if lease.id in spilled.keys() & rows]
    found = [each for each in read if each is not None]
    runs = [run for each in found if each.is_genuine and (run := _record_outcome(each)) is not None]
    waiting = [each for each in found if not each.is_genuine and not each.has_waited]
    if waiting:
        _wait_for_key(broker, queue, worker_id, waiting)
    if runs:
        failpoints.reach("replay.row_written")
        acknowledge(broker, worker_id, runs)
        for state in (TaskState.SUCCEEDED, TaskState.FAILED):
            announce([run.record for run in runs if run.record.state == state], TaskState.RUNNING, state)
        count, extra = len(runs), log_extra(*(run.record for run in runs))
        text = "queue %s: recorded %d outcome%s that a worker had spilled to Redis"
        logger.info(text, queue, count, pluralize(count), extra=extra)
    return {run.lease.id for run in runs} | {each.lease.id for each in waiting}


def _read(lease: Lease, row: TaskRecord, spilled: SpilledOutcome) -> Found | None:
    """Read one spilled outcome; None when it is unreadable, or the row shows that it is not of the latest run."""
    size = signatures.SIGNATURE_BYTES
    signature, encoded = spilled.outcome[:size], spilled.outcome[size:]
    outcome = outcome_format.decode(encoded)
    if outcome is None:
        logger.warning("task %s: its outcome in Redis is unreadable", lease.id, extra=log_extra(row))
        return None
    # The row decides, because whoever writes to Redis chooses the fence of the entry too.
    # A row that is RETRYING may show the outcome already: the commit's reply was lost, so the outcome was spilled too.
    of_row = row.fence < outcome.fence if row.state == TaskState.QUEUED else row.fence == outcome.fence
    if outcome.fence > lease.fence or not of_row or row.is_final:
        return None
    is_genuine = signatures.is_genuine(PURPOSE, _message(identity.own(), lease.id, outcome.fence, encoded), signature)
    return Found(lease, row, outcome, is_genuine, has_waited=spilled.waited_fence == outcome.fence)


def _wait_for_key(broker: Broker, queue: str, worker_id: str, waiting: Sequence[Found]) -> None:
    """Postpone tasks whose outcome this process cannot verify; the row looks as it did before the run was written.

    If we die in between, the task is postponed again, or runs again.
    """
    delay_seconds = conf.current().lease_seconds
    begun = [copy.copy(each.row) for each in waiting if each.row.state == TaskState.RUNNING]
    held = {record.id: record.fence for record in begun}
    for record in begun:
        undo_attempt(record)
        record.state = TaskState.QUEUED
        # Below the fence of the run, so that another host can still record its outcome.
        record.fence -= 1
    writes = [FencedWrite(record, held[record.id]) for record in begun]
    accepted = write_usable(writes, writing_database(TaskRecord)) if writes else set()
    failpoints.reach("wait_for_key.row_written")
    broker.postpone(queue, worker_id, [each.lease for each in waiting], delay_seconds)
    SpilledOutcomes(broker.role, broker.alias).mark_waited(
        queue, {each.lease.id: each.outcome.fence for each in waiting}
    )
    announce([record for record in begun if record.id in accepted], TaskState.RUNNING, TaskState.QUEUED)
    for each in waiting:
        logger.warning(
            "task %s: its outcome in Redis is not signed with this host's SECRET_KEY or SECRET_KEY_FALLBACKS, or it is "
            "that of another database; the task waits %d s for a host that can verify it, then it runs again",
            each.lease.id,
            delay_seconds,
            extra=log_extra(each.row),
        )


def _record_outcome(found: Found) -> Run | None:
    """Write one spilled outcome to its row; return its run, or None when the row refuses it."""
    record, lease, fence = copy.copy(found.row), found.lease, found.outcome.fence
    outcome_format.apply(found.outcome, record)
    run = Run(record, lease, counted=found.outcome.counted)
    database = writing_database(TaskRecord)
    try:
        written = write_fenced([FencedWrite(record, fence)], database)
    except DatabaseError as error:
        if kind_of(error) is not ErrorKind.ROW:
            raise
        logger.exception("task %s: the database refuses its result", lease.id, extra=log_extra(record))
        strip_result(run, str(error))
        written = write_usable([FencedWrite(record, fence)], database)
    return run if written else None
