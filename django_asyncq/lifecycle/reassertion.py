"""Give running tasks their entry and lease again after Redis lost its memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .. import conf
from ..broker import Broker, Lease
from ..broker.inspection import Inspection
from ..models import TaskRecord, TaskState
from .dispatching import by_queue
from .messages import entry_of
from .ownership import load_rows


def reassert(broker: Broker, worker_id: str, ids: Collection[str]) -> int:
    """Give running tasks their entry and lease again after Redis lost its memory; return how many had lost them.

    ids: the tasks that the worker believes to run. No state changes.

    | check    | the row, after Redis: RUNNING, and this worker is the last in `worker_ids`          |
    | row      | read only                                                                           |
    | Redis    | the entry and its lease, with the fence of the row                                  |
    | check    | the row again: a task that finished in the meantime loses its new entry             |
    | announce | nothing                                                                             |

    The order matters. A run may finish, or be recovered from a frozen worker, at any time; the row is always written
    before the entry is removed. So when Redis lacks an entry *and the row is still RUNNING afterwards*, the entry was
    lost and not removed. The second check is needed because the worker is alive: it would renew a stale lease for ever.

    If we die in between, the lease expires and the reconciler finds the row final. Raises: BrokerUnavailable,
    django.db.Error; a stale entry may then stay until the worker checks what it holds, or exits.
    """
    reasserted = 0
    for of_alias, queue, rows in by_queue(broker, _run_by(worker_id, ids)):
        entry_states = Inspection(of_alias.role, of_alias.alias).entry_states(queue, [row.redis_id for row in rows])
        gone = {task.id for task in entry_states if not task.state}
        lost = _run_by(worker_id, [str(row.id) for row in rows if row.redis_id in gone])
        if not lost:
            continue
        of_alias.forget_registered()
        of_alias.register_queue(queue)
        entries = [entry_of(row, fence=row.fence) for row in lost]
        words = of_alias.reassert(queue, worker_id, entries, conf.current().lease_seconds)
        given_rows = [row for row, word in zip(lost, words, strict=True) if word == "reasserted"]
        given = [Lease(row.redis_id, row.fence) for row in given_rows]
        kept = {(row.redis_id, row.fence) for row in _run_by(worker_id, [str(row.id) for row in given_rows])}
        if finished := [lease for lease in given if (lease.id, lease.fence) not in kept]:
            of_alias.done(queue, worker_id, finished)
        reasserted += len(given) - len(finished)
    return reasserted


def _run_by(worker_id: str, ids: Iterable[str]) -> list[TaskRecord]:
    """Return the rows that are RUNNING in this worker; a frozen worker may name tasks that another worker runs."""
    rows = load_rows(ids).values()
    return [row for row in rows if row.state == TaskState.RUNNING and row.worker_ids[-1:] == [worker_id]]
