"""Make rows and Redis agree about pauses, in the leader.

What a pair of key and mark in Redis says of a queue, beside its row:

| row | key | mark      | what has happened                                          | what is done                  |
|-----|-----|-----------|------------------------------------------------------------|-------------------------------|
| yes | yes | the row's | nothing                                                    | nothing                       |
| yes | yes | other     | another program has paused it too                          | the mark is set               |
| yes | no  | the row's | the key was set and is missing: another program resumed    | the mark goes, then the row   |
| yes | no  | other     | a crash after the commit, Redis unreachable or emptied     | key and mark are set          |
| no  | yes | none      | another program has paused it                              | a row is made, then the mark  |
| no  | yes | some      | a crash between the deletion of the row and that of the key | key and mark go              |
| no  | no  | some      | another program resumed it, then this process died         | the mark goes                 |

Key and mark change together, so an emptied Redis has neither, and one restored from a copy has both or neither.

Races. Redis is read before the rows that decide: what a person does in between has written the row first, so the worst
is that a key is set or removed which is set or removed anyway. Each script names the mark that it expects, so a pause
that began in the meantime stays. When a person resumes between our read of the row and our write of the key, the next
round removes the key: the queue is paused for some seconds more. When another program resumes between our read of its
key and the row that is made for it, `note_pause` says so, and the row goes again. If this process dies just between the
removal of a mark and of its row, the row sets the key again: a resume by another program is lost then. A server with
another policy than `noeviction` may evict the key without the mark, which looks like a resume by another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..broker import Broker
from ..broker import pauses as in_redis
from ..broker.pauses import PauseState
from ..faults import Parts
from ..guard import get_logger
from ..models import Pause, PauseKind
from ..prefixes import one_alias_per_prefix
from ..storage import database_clock
from ..storage.routing import rows_of
from .rows import mark_of, put

logger = get_logger("django_asyncq.pausing")

# How soon the leader notices what another program has done, and repairs what a crash has left.
KEEP_SECONDS = 5.0
ANOTHER_PROGRAM = "another program"


class PauseKeeper:
    """Compares rows and Redis, and repairs the differences. Safe when two processes do it at once."""

    def __init__(self) -> None:
        self._parts = Parts(logger)

    def tick(self) -> float:
        """Compare once; return the seconds until the next time. Raises: BrokerUnavailable, django.db.Error."""
        rows = list(rows_of(Pause).filter(kind=PauseKind.QUEUE))
        for alias in one_alias_per_prefix({row.backend for row in rows}):
            self._keep_queues(Broker("worker", alias), rows)
        self._keep_tasks()
        return KEEP_SECONDS

    def _keep_queues(self, broker: Broker, rows: list[Pause]) -> None:
        known = {row.name: row for row in rows if broker.holds(row.backend)}
        states = in_redis.read_states(broker, sorted({*broker.known_queues(), *known}))
        differing = {queue: state for queue, state in states.items() if state != _expected(known.get(queue))}
        if not differing:
            return
        # After Redis, because a person writes the row first.
        found = rows_of(Pause).filter(kind=PauseKind.QUEUE, name__in=list(differing))
        decisive: Mapping[str, Pause] = {row.name: row for row in found if broker.holds(row.backend)}
        for queue, state in differing.items():
            repair = partial(_repair, broker, queue, state, decisive.get(queue))
            self._parts.attempt(f"the pause of queue {broker.name_of(queue)}", repair, None)

    def _keep_tasks(self) -> None:
        known = in_redis.paused_tasks("worker")
        names = set(rows_of(Pause).filter(kind=PauseKind.TASK).values_list("name", flat=True))
        for name in sorted(names - known):
            in_redis.pause_task("worker", name)
        for name in sorted(known - names):
            in_redis.resume_task("worker", name)


def _expected(row: Pause | None) -> PauseState:
    return PauseState(row is not None, "" if row is None else mark_of(row))


def _repair(broker: Broker, queue: str, state: PauseState, row: Pause | None) -> None:
    if row is None:
        if state.is_paused and not state.mark:
            _adopt(broker, queue)
        elif state.is_paused:
            in_redis.resume_queue(broker, queue, state.mark)
        elif state.mark:
            in_redis.forget_pause(broker, queue, state.mark)
    elif not state.is_paused and state.mark == mark_of(row):
        if in_redis.forget_pause(broker, queue, state.mark):
            rows_of(Pause).filter(pk=row.pk).delete()
            logger.info("queue %s was resumed by another program", broker.name_of(queue))
    elif state != _expected(row):
        put(row)


def _adopt(broker: Broker, queue: str) -> None:
    """Make a row for a pause of another program."""
    defaults = {"paused_at": database_clock.now(), "paused_by": ANOTHER_PROGRAM}
    rows = rows_of(Pause)
    row, is_new = rows.get_or_create(kind=PauseKind.QUEUE, backend=broker.alias, name=queue, defaults=defaults)
    if in_redis.note_pause(broker, queue, mark_of(row)) == "gone" and is_new:
        rows.filter(pk=row.pk).delete()
    elif is_new:
        logger.info("queue %s was paused by another program", broker.name_of(queue))
