"""Spill outcomes to Redis when a worker must stop while the database is unreachable, and replay them later.

An outcome is stored in the hash of its task. It is JSON of what the run would have written to its row: only what the
run has changed, and only its own error, because the row has the earlier ones.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, router
from django.template.defaultfilters import pluralize

from .. import failpoints
from ..broker import Broker, Lease
from ..definitions.payload import json_bytes
from ..models import TaskRecord, TaskState
from ..storage.batches import FencedWrite, write_fenced
from .dispatching import by_queue
from .events import announce, log_extra
from .failures import append_entry
from .running import Run, acknowledge, strip_result

logger = logging.getLogger("django_asyncq.lifecycle")

LARGEST_BYTES = 1_048_576
PLAIN = ("state", "reason", "attempt", "return_value", "worker_ids")
TIMES = ("started_at", "last_attempted_at", "finished_at", "retry_at")


class Stored(NamedTuple):
    """The run of an outcome. counted: whether the run used up an attempt."""

    fence: int
    counted: bool


def encode(record: TaskRecord, stored: Stored) -> bytes:
    """Encode what the latest run of the task has changed; without its result when that is too large for Redis."""
    outcome: dict[str, Any] = {**stored._asdict(), **{name: getattr(record, name) for name in PLAIN}}
    for name in TIMES:
        at: datetime | None = getattr(record, name)
        outcome[name] = at.isoformat() if at else None
    outcome["error"] = record.errors[-1] if record.state == TaskState.FAILED and stored.counted else None
    encoded = json_bytes(outcome)
    if len(encoded) <= LARGEST_BYTES:
        return encoded
    reason = f"the database was unreachable, and {len(encoded):,} bytes are too many to spill to Redis"
    if outcome["error"]:
        outcome["error"] = {**outcome["error"], "message": f"not stored: {reason}", "traceback": ""}
    else:
        outcome["return_value"] = {"result_not_stored": reason}
    return json_bytes(outcome)


def apply(record: TaskRecord, encoded: bytes) -> Stored:
    """Apply an encoded outcome to the `TaskRecord` in memory.

    Raises: ValueError, KeyError, TypeError when it is not an outcome; it may be partly applied then.
    """
    outcome = json.loads(encoded)
    stored = Stored(int(outcome["fence"]), bool(outcome["counted"]))
    for name in PLAIN:
        setattr(record, name, outcome[name])
    for name in TIMES:
        setattr(record, name, datetime.fromisoformat(outcome[name]) if outcome[name] else None)
    if outcome["error"]:
        append_entry(record, outcome["error"])
    record.fence = stored.fence
    return stored


def spill_outcomes(broker: Broker, worker_id: str, runs: Sequence[Run]) -> int:
    """Store in Redis the outcomes of runs that cannot be recorded now; return how many Redis accepted.

    | check    | the fence: an entry that another run holds is left alone                            |
    | row      | nothing yet: `replay_outcomes` writes it, in the reconciler or the next worker      |
    | Redis    | the outcome in the hash of the task; the lease expires at once, so that it is found |
    | announce | nothing yet                                                                         |

    If we die before, the lease expires and the reconciler requeues the task: it runs again.
    Raises: BrokerUnavailable; the same holds then.
    """
    spilled = 0
    for queue, group in by_queue([run.record for run in runs]):
        ids = {record.id for record in group}
        items = [
            (run.lease, encode(run.record, Stored(run.lease.fence, run.counted)))
            for run in runs
            if run.record.id in ids
        ]
        spilled += broker.spill_outcomes(queue, worker_id, items).count("spilled")
        failpoints.reach("spill.queue_spilled")
    return spilled


def replay_outcomes(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], rows: Mapping[str, TaskRecord]
) -> set[str]:
    """Record outcomes that a worker spilled to Redis; return the ids of the tasks that this settles.

    rows: by id; they are not changed.

    | check    | the fence of the finished run: an outcome is void when another run has begun |
    | row      | RUNNING or QUEUED → SUCCEEDED or FAILED, as the worker would have written it |
    | Redis    | removed, retry or archived                                                   |
    | announce | `task_state_changed`                                                         |

    If we die in between, the next worker that claims the entry, or the reconciler, does the same again.
    Raises: BrokerUnavailable, django.db.Error.
    """
    spilled = broker.spilled_outcomes(queue, [lease.id for lease in leases])
    found = [
        _record_outcome(copy.copy(rows[lease.id]), lease, spilled[lease.id])
        for lease in leases
        if lease.id in spilled and lease.id in rows
    ]
    runs = [run for run in found if run is not None]
    if not runs:
        return set()
    failpoints.reach("replay.row_written")
    acknowledge(broker, worker_id, runs)
    for state in (TaskState.SUCCEEDED, TaskState.FAILED):
        announce([run.record for run in runs if run.record.state == state], TaskState.RUNNING, state)
    count = len(runs)
    logger.info("queue %s: recorded %d outcome%s that a worker had spilled to Redis", queue, count, pluralize(count))
    return {run.lease.id for run in runs}


def _record_outcome(record: TaskRecord, lease: Lease, encoded: bytes) -> Run | None:
    """Write one spilled outcome to its row; return its run, or None when the outcome is void."""
    try:
        stored = apply(record, encoded)
    except (ValueError, KeyError, TypeError):
        logger.exception("task %s: its outcome in Redis is unreadable", lease.id, extra=log_extra(record))
        return None
    run = Run(record, lease, counted=stored.counted)
    database = router.db_for_write(TaskRecord)
    try:
        written = write_fenced([FencedWrite(record, stored.fence)], database)
    except (OperationalError, InterfaceError):
        raise
    except DatabaseError as error:
        logger.exception("task %s: the database refuses its result", lease.id, extra=log_extra(record))
        strip_result(run, str(error))
        written = write_fenced([FencedWrite(record, stored.fence)], database)
    return run if written else None
