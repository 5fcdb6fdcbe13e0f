"""How runs keep their entries when Redis loses its memory: what it lacks, and the row still tells of, is given back."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .. import conf
from ..broker import Broker, Lease
from ..broker.inspection import Inspection
from ..models import TaskRecord, TaskState
from .dispatching import by_queue
from .messages import entry_of
from .running import load_rows


def reassert(broker: Broker, worker_id: str, ids: Collection[str]) -> int:
    """Give running tasks their entry and lease back after Redis lost its memory; return how many had none.

    ids: what the worker runs, by its own knowledge. No state changes.

    Meanwhile tasks end, and a process that stood still finds its runs in other hands. Whoever ends or takes over a run
    writes the row before its entry goes, hence the order: what Redis lacks *and then* has its row was lost, not ended.
    What was ended while its entry was on the way is taken back: the worker lives, and would renew its lease for ever.

    If we die in between, the lease runs out and the reconciler finds the row final. Raises: BrokerUnavailable,
    django.db.Error; raised in between, it leaves such an entry until the worker looks through what it holds, or ends.
    """
    reasserted = 0
    for queue, rows in by_queue(_run_by(worker_id, ids)):
        entry_states = Inspection(broker.role).entry_states(queue, [str(row.id) for row in rows])
        lost = _run_by(worker_id, [task.id for task in entry_states if not task.state])
        if not lost:
            continue
        broker.forget_registered()
        broker.register_queue(queue)
        entries = [entry_of(row, fence=row.fence) for row in lost]
        words = broker.reassert(queue, worker_id, entries, conf.current().lease_seconds)
        given = [Lease(str(row.id), row.fence) for row, word in zip(lost, words, strict=True) if word == "reasserted"]
        kept = {(str(row.id), row.fence) for row in _run_by(worker_id, [lease.id for lease in given])}
        if ended := [lease for lease in given if (lease.id, lease.fence) not in kept]:
            broker.done(queue, worker_id, ended)
        reasserted += len(given) - len(ended)
    return reasserted


def _run_by(worker_id: str, ids: Iterable[str]) -> list[TaskRecord]:
    """Return the rows of those ids that say the worker runs them; it may believe so of what is another's by now."""
    rows = load_rows([Lease(id, 0) for id in ids]).values()
    return [row for row in rows if row.state == TaskState.RUNNING and row.worker_ids[-1:] == [worker_id]]
