"""How a run ends whose worker must stop while the database is away: its outcome waits in Redis, in its task's hash.

It is JSON of what the run would have written in its row. Only what it has changed is there, and of the errors only its
own: the row knows the others.
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

from .. import failpoints
from ..broker import Broker, Lease
from ..definitions.payload import json_bytes
from ..models import TaskRecord, TaskState
from ..storage.batches import FencedWrite, write_fenced
from .dispatching import by_queue
from .events import announce
from .running import Run, acknowledge, strip_result

logger = logging.getLogger("django_asyncq.lifecycle")

LARGEST_BYTES = 1_048_576
PLAIN = ("state", "attempt", "return_value", "worker_ids")
TIMES = ("started_at", "last_attempted_at", "finished_at", "retry_at")


class Stored(NamedTuple):
    """Which run an outcome is of, and whether its end used up an attempt."""

    fence: int
    counted: bool


def encode(record: TaskRecord, stored: Stored) -> bytes:
    """Encode what the record's latest run has changed; without its result where that is too much for Redis."""
    outcome: dict[str, Any] = {**stored._asdict(), **{name: getattr(record, name) for name in PLAIN}}
    for name in TIMES:
        at: datetime | None = getattr(record, name)
        outcome[name] = at.isoformat() if at else None
    outcome["error"] = record.errors[-1] if record.state == TaskState.FAILED and stored.counted else None
    encoded = json_bytes(outcome)
    if len(encoded) <= LARGEST_BYTES:
        return encoded
    reason = f"the database was away, and {len(encoded):,} bytes are too many to be left in Redis meanwhile"
    if outcome["error"]:
        outcome["error"] = {**outcome["error"], "message": f"not stored: {reason}", "traceback": ""}
    else:
        outcome["return_value"] = {"result_not_stored": reason}
    return json_bytes(outcome)


def apply(record: TaskRecord, encoded: bytes) -> Stored:
    """Change the record in memory as an encoded outcome says.

    Raises: ValueError, KeyError, TypeError for what is no outcome; the record may be changed in part then.
    """
    outcome = json.loads(encoded)
    stored = Stored(int(outcome["fence"]), bool(outcome["counted"]))
    for name in PLAIN:
        setattr(record, name, outcome[name])
    for name in TIMES:
        setattr(record, name, datetime.fromisoformat(outcome[name]) if outcome[name] else None)
    if outcome["error"]:
        record.errors = [*record.errors, outcome["error"]]
    record.fence = stored.fence
    return stored


def spill_outcomes(broker: Broker, worker_id: str, runs: Sequence[Run]) -> int:
    """Leave with Redis how runs ended that the database cannot be told now; return how many it took.

    | check    | the fence: what another run holds is left alone                    |
    | row      | nothing yet: whoever gets the entry next writes it (`replay_outcomes`)     |
    | Redis    | the outcome in the task's hash, its lease over, so that it is found |
    | announce | nothing yet                                                        |

    If we die before, the lease runs out and the task runs again. Raises: BrokerUnavailable, with the same outcome.
    """
    taken = 0
    for queue, group in by_queue([run.record for run in runs]):
        ids = {record.id for record in group}
        items = [
            (run.lease, encode(run.record, Stored(run.lease.fence, run.counted)))
            for run in runs
            if run.record.id in ids
        ]
        taken += broker.spill_outcomes(queue, worker_id, items).count("spilled")
        failpoints.reach("spill.queue_spilled")
    return taken


def replay_outcomes(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], rows: Mapping[str, TaskRecord]
) -> set[str]:
    """Record how runs ended whose worker could not; return the ids that are seen to by that.

    rows: by id; they are not changed.

    | check    | the fence of the run that ended: once another has begun, what was left is void |
    | row      | 1 or 0 → 2 or 3, as its worker would have written it                           |
    | Redis    | done, retry or archive                                                         |
    | announce | `task_state_changed`                                                           |

    If we die in between, the next taker does the same again.
    Raises: BrokerUnavailable, django.db.Error.
    """
    left = broker.spilled_outcomes(queue, [lease.id for lease in leases])
    found = [
        _record_left(copy.copy(rows[lease.id]), lease, left[lease.id])
        for lease in leases
        if lease.id in left and lease.id in rows
    ]
    runs = [run for run in found if run is not None]
    if not runs:
        return set()
    failpoints.reach("replay.row_written")
    acknowledge(broker, worker_id, runs)
    for state in (TaskState.SUCCEEDED, TaskState.FAILED):
        announce([run.record for run in runs if run.record.state == state], TaskState.RUNNING, state)
    logger.info("queue %s: recorded %d outcomes that their worker had to leave in Redis", queue, len(runs))
    return {run.lease.id for run in runs}


def _record_left(record: TaskRecord, lease: Lease, encoded: bytes) -> Run | None:
    """Write one outcome that was left; return its run, or None when it is void."""
    try:
        stored = apply(record, encoded)
    except (ValueError, KeyError, TypeError):
        logger.exception("task %s: what was left in Redis is no outcome", lease.id)
        return None
    run = Run(record, lease, counted=stored.counted)
    database = router.db_for_write(TaskRecord)
    try:
        written = write_fenced([FencedWrite(record, stored.fence)], database)
    except (OperationalError, InterfaceError):
        raise
    except DatabaseError as error:
        logger.exception("task %s: the database refuses its result", lease.id)
        strip_result(run, str(error))
        written = write_fenced([FencedWrite(record, stored.fence)], database)
    return run if written else None
