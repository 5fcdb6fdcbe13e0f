"""Find the tasks that workers still have of what is paused or drained, and wait until they have none.

The leases say it: a task is leased from the moment at which a worker takes it until its end is written. What is paused
or drained gets no new lease, so once the old ones are over, no body runs and none begins.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from django.db import connections

from .. import control, gates, lifecycle
from ..broker import Broker, pauses, redis_clock
from ..broker.foreign import read_messages
from ..broker.inspection import QueueReading
from ..broker.message import decode_type
from ..control import follow, row_of
from ..core import names
from ..core.aliases import DEFAULT_ALIAS, is_redis_used, one_alias_per_prefix, uses_redis
from ..exceptions import AsyncqError, InvalidOption, StillRunning
from ..models import Pause, PauseKind, TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage.routing import rows_of, writing_database

POLL_SECONDS = 0.1
# When a worker has read the names of paused tasks in any case: it reads them every five seconds.
NAMES_READ_SECONDS = 6.0


def pause(kind: PauseKind, name: str, alias: str = DEFAULT_ALIAS, *, by: str, note: str, wait: float | None) -> bool:
    """Pause, and wait if that is asked for; return whether it was running. Raises: as `control.pause`, StillRunning."""
    if wait is not None and connections[writing_database(Pause)].in_atomic_block:
        raise InvalidOption("wait= is not valid in a transaction: a pause begins when that commits")
    was_running = control.pause(kind, name, backend=alias, by=by, note=note)
    if wait is not None:
        wait_paused(kind, name, alias, wait)
    return was_running


def held_of(kind: str, name: str, alias: str) -> set[str]:
    """Return the ids of the tasks that workers have of a queue or a task name, or that hold a slot of a gate.

    They run, or may still begin. alias: of a queue. Raises: BrokerUnavailable, django.db.Error.
    """
    if kind == PauseKind.GATE:
        return _in_gate(name)
    if kind == PauseKind.TASK:
        return _of_task(name)
    if uses_redis(alias):
        return set(QueueReading("producer", alias).active(name))
    return _running(backend=alias, queue_name=name)


def wait_paused(kind: str, name: str, alias: str, seconds: float) -> None:
    """Return once no task of what is paused runs and none begins.

    Raises: StillRunning after so many seconds; AsyncqError when it was resumed meanwhile; BrokerUnavailable.
    """
    end = time.monotonic() + seconds
    alias = alias if kind == PauseKind.QUEUE else ""
    if uses_redis(alias) if alias else is_redis_used():
        follow(kind, alias, name)
    read_at = time.monotonic() + (NAMES_READ_SECONDS if kind == PauseKind.TASK and is_redis_used() else 0.0)
    if (row := row_of(kind, alias, name)) is None:
        raise _resumed(kind, name)
    time.sleep(max(0.0, min(read_at, end) - time.monotonic()))
    held = held_of(kind, name, alias)
    while held or time.monotonic() < read_at:
        if time.monotonic() >= end:
            raise StillRunning(f"{kind} {name} is paused", seconds, held)
        time.sleep(POLL_SECONDS)
        # Calls of a paused task are taken again and again, and put aside: those that were taken before count.
        now = held_of(kind, name, alias)
        held = held & now if kind == PauseKind.TASK else now
    current = row_of(kind, alias, name)
    if current is None or current.paused_at != row.paused_at or not _is_known(kind, name, alias):
        raise _resumed(kind, name)


def held_by(workers: Collection[tuple[str, str]]) -> set[str]:
    """Return the ids of the tasks that worker processes have. workers: alias and id of each."""
    found: set[str] = set()
    for alias in {alias for alias, _ in workers}:
        broker = Broker("producer", alias)
        for queue in broker.known_queues():
            for each, worker_id in workers:
                if each == alias:
                    found |= {lease.id for lease in broker.held(queue, worker_id)}
    return found


def _of_task(name: str) -> set[str]:
    if not is_redis_used():
        return _running(name=name)
    found: set[str] = set()
    for alias in one_alias_per_prefix():
        broker = Broker("producer", alias)
        for queue in broker.known_queues():
            ids = QueueReading("producer", alias).active(queue)
            rows = lifecycle.rows_of_entries(broker, queue, ids)
            found |= {id for id, row in rows.items() if row.name == name}
            # A message of another program that a worker has just taken has no row yet.
            unknown = [id for id in ids if id not in rows]
            for id, stored in read_messages(broker, queue, unknown).items() if unknown else ():
                task = names.task_of(decode_type(stored.data or b""), alias)
                if task is not None and task.module_path == name:
                    found.add(id)
    return found


def _in_gate(name: str) -> set[str]:
    # A follower gets its slot when it moves up, and what waits for tasks when it waits for none.
    live = {"state__in": (TaskState.QUEUED, TaskState.RUNNING), "after_id": None}
    rows = rows_of(TaskRecord).at_gate(name).filter(IS_READY, **live)
    found = {str(id) for id in rows.values_list("id", flat=True)}
    if is_redis_used():
        now = redis_clock.seconds("producer")
        # First those of a transaction that has not committed, then those whose bodies run after a cancel.
        found |= {slot.id for slot in gates.slots(name) if slot.expires_at > now}
    return found


def _running(**of: str) -> set[str]:
    rows = rows_of(TaskRecord).filter(state=TaskState.RUNNING, **of)
    return {str(id) for id in rows.values_list("id", flat=True)}


def _is_known(kind: str, name: str, alias: str) -> bool:
    """Whether Redis says that it is paused."""
    if kind == PauseKind.QUEUE and uses_redis(alias):
        return pauses.read_state(Broker("producer", alias), name).is_paused
    if kind == PauseKind.TASK and is_redis_used():
        return name in pauses.paused_tasks("producer")
    return True


def _resumed(kind: str, name: str) -> AsyncqError:
    return AsyncqError(
        f"{kind} {name} was resumed, or paused again, while this waited: look who did, and pause it again"
    )
