"""The progress of running tasks: to Redis within a second, to the row less often, and read from where it is newer.

Only runs that report progress cost anything here, and only their readers ask Redis. The final value is written with the
outcome of the run (`storage.batches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..aliases import uses_redis
from ..broker import Broker
from ..broker.progress import ProgressNotes
from ..definitions.payload import json_bytes
from ..definitions.progress import shown_progress
from ..definitions.untrusted_json import loads_untrusted
from ..exceptions import BrokerUnavailable
from ..guard import get_logger
from ..logs import log_extra
from ..models import TaskRecord, TaskState
from ..storage.batches import FencedWrite, write_fenced
from ..storage.routing import writing_database
from .claimed_runs import Run
from .dispatching import by_queue

logger = get_logger("django_asyncq.lifecycle")

# A row's value may have been written by a release with other limits; Redis may hold anything.
LARGEST_BYTES = 1_048_576
DEEPEST = 32


def note_progress(broker: Broker, runs: Sequence[Run]) -> None:
    """Note the progress of runs in Redis, for those who ask before it is in the row.

    | check    | the fence: a task that another run holds is left alone |
    | row      | nothing                                                |
    | Redis    | the progress in the hash of the task, if it has one    |
    | announce | nothing                                                |

    If we die in between, the row has an older value. Raises: BrokerUnavailable.
    """
    runs_by_id = {run.record.id: run for run in runs}
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs]):
        notes = ProgressNotes(of_alias.role, of_alias.alias)
        notes.write(queue, [(runs_by_id[record.id].lease, json_bytes(record.progress)) for record in group])


def record_progress(runs: Sequence[Run]) -> None:
    """Write the progress of runs to their rows.

    | check    | the fence: a run that lost its lease changes nothing |
    | row      | RUNNING, with the progress                           |
    | Redis    | nothing                                              |
    | announce | nothing                                              |

    runs: those whose rows say RUNNING, and that write no row themselves. Raises: django.db.Error.
    """
    writes = [FencedWrite(run.record, run.lease.fence) for run in runs]
    # A row that a transaction of the project has locked must not hold up the outcomes behind it.
    write_fenced(writes, writing_database(TaskRecord), patient=False)


def newest_progress(record: TaskRecord, *, may_be_unwritten: bool = False) -> dict[str, Any] | None:
    """Return the progress of a task; that of a running one from Redis, where it is newer. None if there is none.

    may_be_unwritten: whether the row of a running task may lack it, because the run is a transaction. For all others
    the first value is written at once, so the rows of tasks that report none say so, and Redis is not asked.
    """
    in_row = shown_progress(record.progress)
    is_in_redis = record.state == TaskState.RUNNING and (record.progress is not None or may_be_unwritten)
    if not is_in_redis or not uses_redis(record.backend):
        return in_row
    notes = ProgressNotes("producer", record.backend)
    try:
        found = notes.read(record.queue_name, record.redis_id, record.fence, largest_bytes=LARGEST_BYTES)
    except BrokerUnavailable as error:
        text = "task %s: its progress is that of its row, because Redis is unreachable: %s"
        logger.debug(text, record.id, error, extra=log_extra(record))
        return in_row
    noted = loads_untrusted(found, max_bytes=LARGEST_BYTES, max_depth=DEEPEST) if found else None
    return shown_progress(noted) or in_row
