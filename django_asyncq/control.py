"""Control from code: pause and resume queues, tasks and gates; start, look at and stop bulk actions.

The row is the truth in both. Redis follows a pause after the commit; the leader works a bulk action off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from . import conf, gates
from .broker import Broker
from .broker import pauses as in_redis
from .broker.pauses import PauseState
from .core import names
from .core.aliases import (
    DEFAULT_ALIAS,
    aliases_beside,
    is_redis_used,
    one_alias_per_prefix,
    uses_redis,
    written_aliases,
)
from .core.guard import get_logger
from .core.names import TASK_NAME, check_gate_name, check_queue_name
from .core.options import MOST_PER_SECOND
from .core.payload import storable_text
from .core.registry import find, find_remote
from .exceptions import BrokerUnavailable, InvalidOption
from .models import BulkAction, BulkState, Pause, PauseKind, TaskRecord
from .storage import database_clock
from .storage.errors import Parts
from .storage.isolation import MOST_AT_ONCE, page_of
from .storage.matching import checked, rows_matching
from .storage.routing import follow_commit, rows_of, writing_database

__all__ = [
    "BulkPreview",
    "find_bulk",
    "pause",
    "pauses",
    "preview_bulk",
    "resume",
    "start_bulk",
    "stop_bulk",
]

logger = get_logger("django_asyncq.control")

# --- Pause and resume queues, tasks and gates.
#
# | kind  | while the row exists                                                    | what follows it in Redis     |
# |-------|-------------------------------------------------------------------------|------------------------------|
# | queue | no task of the queue begins; tasks are enqueued and become due as before | asynq's `paused` key, a mark |
# | task  | our workers postpone its calls, which use no attempt                    | the set of paused tasks      |
# | gate  | the gate admits no new task; the tasks that hold a slot go on           | a field of the gate          |
#
# What a worker has begun goes on in all three. `PauseKeeper` runs in the leader and repairs what a crash or an
# outage of Redis has left.

ANOTHER_PROGRAM = "another program"
# How often the row is looked at again while others decide about the same thing; then the leader does it.
MOST_ATTEMPTS = 10


def pause(kind: str, name: str, *, backend: str = DEFAULT_ALIAS, by: str = "", note: str = "") -> bool:
    """Pause a queue, a task or a gate; return whether it was running until now.

    kind: of `PauseKind`. backend: the alias in TASKS of a queue; a task or a gate has none. by: who pauses it, cut at
    150 characters. note: why, cut at 500. To pause again replaces moment, by and note.
    The row is written in the caller's transaction. After the commit Redis follows; if it is unreachable then, the
    leader repeats it. Raises: InvalidOption, also for the name of a task that nothing would hold back; django.db.Error.
    """
    kind, backend = checked_target(kind, name, backend)
    if kind == PauseKind.TASK:
        _check_runs_here(name)
    # Written though it is paused already: Redis may say otherwise, and the leader tells the row from the old one.
    decision = {"paused_at": database_clock.now(), "paused_by": by[:150], "note": note[:500]}
    is_new = False
    while not is_new and not rows_about(kind, backend, name).update(**decision):
        _, is_new = rows_of(Pause).get_or_create(kind=kind, backend=backend, name=name, defaults=decision)
    return _follow_after_commit(kind, backend, name, was_changed=is_new)


def resume(kind: str, name: str, *, backend: str = DEFAULT_ALIAS) -> bool:
    """Resume a queue, a task or a gate; return whether it was paused.

    Workers are notified after the commit. A queue goes on at once; calls of a task that were postponed begin within 15
    seconds; a gate admits at once. Raises: InvalidOption, django.db.Error.
    """
    kind, backend = checked_target(kind, name, backend)
    is_known = bool(rows_about(kind, backend, name).delete()[0])
    return _follow_after_commit(kind, backend, name, was_changed=is_known, is_resume=True)


def pauses(kind: str | None = None) -> list[Pause]:
    """Return what is paused now, by kind, alias and name. kind: only of this kind."""
    rows = rows_of(Pause).order_by("kind", "backend", "name")
    return list(rows if kind is None else rows.filter(kind=kind))


def is_paused() -> Q:
    """Return the condition on tasks that their queue is paused, or that they are paused by their name."""
    rows = rows_of(Pause)
    queues = rows.filter(kind=PauseKind.QUEUE, backend=OuterRef("backend"), name=OuterRef("queue_name"))
    return Q(Exists(queues)) | Q(name__in=rows.filter(kind=PauseKind.TASK).values("name"))


def mark_of(row: Pause) -> str:
    """Return the text that names a row beside the key of its queue in Redis."""
    return f"{row.pk}.{int(row.paused_at.timestamp() * 1_000_000)}"


def rows_about(kind: str, backend: str, name: str) -> QuerySet[Pause]:
    """Return the rows that pause something. A queue in Redis is one for all aliases that share its prefix."""
    aliases = aliases_beside(backend) if kind == PauseKind.QUEUE else [backend]
    return rows_of(Pause).filter(kind=kind, backend__in=aliases, name=name)


def row_of(kind: str, backend: str, name: str) -> Pause | None:
    """Return the row that pauses something now."""
    return rows_about(kind, backend, name).first()


def follow(kind: str, backend: str, name: str, *, is_resume: bool = False) -> bool | None:
    """Have Redis say what the row says at the end of this call; return whether it said otherwise, None for a gate.

    The row is read again after Redis was written, so what was decided in between is written too.
    is_resume: also resume what the leader has noted in between for another program.
    Raises: BrokerUnavailable, django.db.Error.
    """
    answer: bool | None = None
    for _ in range(MOST_ATTEMPTS):
        mark = in_redis.read_state(Broker("producer", backend), name).mark if kind == PauseKind.QUEUE else ""
        # After Redis: when the mark's row is missing here, its pause is over.
        row = row_of(kind, backend, name)
        if row is not None and is_resume and row.paused_by == ANOTHER_PROGRAM:
            rows_of(Pause).filter(pk=row.pk, paused_at=row.paused_at).delete()
            row = None
        was_otherwise, is_stale = _write(kind, backend, name, row, mark)
        if answer is None and not is_stale:
            answer = was_otherwise
        now = row_of(kind, backend, name)
        if not is_stale and (now and mark_of(now)) == (row and mark_of(row)):
            break
    return answer


def _write(kind: str, backend: str, name: str, row: Pause | None, mark: str) -> tuple[bool | None, bool]:
    """Have Redis say what a row says; return whether it said otherwise, and whether another row has paused it since.

    mark: that Redis had before the row was read.
    """
    if kind == PauseKind.GATE:
        gates.forget_built(name)
        return None, False
    if kind == PauseKind.TASK:
        return (in_redis.resume_task if row is None else in_redis.pause_task)("producer", name), False
    broker = Broker("producer", backend)
    if row is None:
        word = in_redis.resume_queue(broker, name, mark)
        return word == "resumed", word == "stale"
    # So that the leader looks at it, and asynq's tools list it, though nothing was enqueued yet.
    broker.register_queue(name)
    return in_redis.pause_queue(broker, name, since=int(row.paused_at.timestamp()), mark=mark_of(row)), False


def checked_target(kind: str, name: str, backend: str) -> tuple[PauseKind, str]:
    """Return the kind, and the alias that the row has. Raises: InvalidOption."""
    if kind not in PauseKind.values:
        raise InvalidOption(f"kind={kind!r} is not valid: give one of {', '.join(PauseKind.values)}")
    found = PauseKind(kind)
    if found is PauseKind.QUEUE:
        check_queue_name(name)
        if backend not in written_aliases():
            raise InvalidOption(f"backend={backend!r} is not valid: TASKS has {', '.join(written_aliases())}")
        return found, backend
    if found is PauseKind.TASK and not TASK_NAME.fullmatch(name):
        raise InvalidOption(f"task name {name!r} is not valid: give the dotted path of its function")
    if found is PauseKind.GATE:
        check_gate_name(name)
    return found, ""


def _check_runs_here(name: str) -> None:
    """Refuse the type of a message, and a task of another program. A name that is unknown here may be one elsewhere."""
    if find(name) is not None:
        return
    for alias in written_aliases():
        if (remote := find_remote(name, alias)) is not None:
            raise InvalidOption(
                f"task {name!r} is run by another program, which knows no paused tasks: pause its queue "
                f"{remote.queue_name!r}"
            )
        for task in names.tasks_of(alias):
            if task.wire_name == name:
                raise InvalidOption(f"{name!r} is what other programs call task {task.module_path}: give this name")


def _follow_after_commit(
    kind: PauseKind, backend: str, name: str, *, was_changed: bool, is_resume: bool = False
) -> bool:
    """Have Redis follow after the commit; return whether the verb has changed anything.

    Redis decides that where it is asked before this returns: another program may have paused or resumed the queue.
    """
    if not (uses_redis(backend) if kind is PauseKind.QUEUE else is_redis_used()):
        return was_changed
    answers = [was_changed]

    def act() -> None:
        try:
            answer = follow(kind, backend, name, is_resume=is_resume)
        except BrokerUnavailable as error:
            verb = "resume" if is_resume else "pause"
            text = "%s of the %s %s: Redis follows when it is reachable again: %s"
            logger.warning(text, verb, kind, name, error)
        else:
            answers.append(was_changed if answer is None else answer)

    transaction.on_commit(partial(follow_commit, act), using=writing_database(Pause))
    return answers[-1]


# --- Make rows and Redis agree about pauses, in the leader.
#
# What a pair of key and mark in Redis says of a queue, beside its row:
#
# | row | key | mark      | what has happened                                          | what is done                  |
# |-----|-----|-----------|------------------------------------------------------------|-------------------------------|
# | yes | yes | the row's | nothing                                                    | nothing                       |
# | yes | yes | other     | another program has paused it too                          | the mark is set               |
# | yes | no  | the row's | the key was set and is missing: another program resumed    | the mark goes, then the row   |
# | yes | no  | other     | a crash after the commit, Redis unreachable or emptied     | key and mark are set          |
# | no  | yes | none      | another program has paused it                              | a row is made, then the mark  |
# | no  | yes | some      | a crash between the deletion of the row and that of the key | key and mark go              |
# | no  | no  | some      | another program resumed it, then this process died         | the mark goes                 |
#
# Key and mark change together, so an emptied Redis has neither, and one restored from a copy has both or neither.
#
# Races. Each pause is a new moment in its row, so a new mark. The leader deletes only the pause that it has seen,
# and each script and each DELETE names it. Redis is read before the rows that decide: a person writes the row
# first. What is written to Redis from a row is followed by another look at the row (`follow`), so neither a person
# nor the leader leaves behind what somebody else has decided meanwhile. When another program resumes between our
# read of its key and the row that is made for it, `note_pause` says so, and the row goes again. If this process
# dies just between the removal of a mark and of its row, the row sets the key again: a resume by another program is
# lost then. A server with another policy than `noeviction` may evict the key without the mark, which looks like a
# resume by another program.

# How soon the leader notices what another program has done, and repairs what a crash has left.
KEEP_SECONDS = 5.0


class PauseKeeper:
    """Compares rows and Redis, and repairs the differences. Safe when two processes do it at once.

    It reads the rows when they may have changed, and keeps them; Redis it reads each time.
    """

    def __init__(self) -> None:
        self._parts = Parts(logger)
        self._rows: list[Pause] = []
        self._may_differ = True

    def forget(self) -> None:
        """Have the next call of `tick` read the rows. May be called by any thread."""
        self._may_differ = True

    def tick(self) -> float:
        """Compare once; return the seconds until the next time. Raises: BrokerUnavailable, django.db.Error."""
        if self._may_differ:
            self._may_differ = False
            try:
                self._rows = list(rows_of(Pause).exclude(kind=PauseKind.GATE))
            except BaseException:
                self._may_differ = True
                raise
        rows = [row for row in self._rows if row.kind == PauseKind.QUEUE]
        for alias in one_alias_per_prefix({row.backend for row in rows}):
            self._keep_queues(Broker("worker", alias), rows)
        self._keep_tasks({row.name for row in self._rows if row.kind == PauseKind.TASK})
        return KEEP_SECONDS

    def _keep_queues(self, broker: Broker, rows: list[Pause]) -> None:
        known = {row.name: row for row in rows if broker.holds(row.backend)}
        states = in_redis.read_states(broker, sorted({*broker.known_queues(), *known}))
        differing = {queue: state for queue, state in states.items() if state != _expected(known.get(queue))}
        if not differing:
            return
        self._may_differ = True
        # After Redis, because a person writes the row first.
        found = rows_of(Pause).filter(kind=PauseKind.QUEUE, name__in=list(differing))
        decisive: Mapping[str, Pause] = {row.name: row for row in found if broker.holds(row.backend)}
        for queue, state in differing.items():
            repair = partial(_repair, broker, queue, state, decisive.get(queue))
            self._parts.attempt(f"the pause of queue {broker.name_of(queue)}", repair, None)

    def _keep_tasks(self, names: set[str]) -> None:
        for name in sorted(names ^ in_redis.paused_tasks("worker")):
            self._may_differ = True
            # It reads the row again.
            follow(PauseKind.TASK, "", name)


def _expected(row: Pause | None) -> PauseState:
    return PauseState(row is not None, "" if row is None else mark_of(row))


def _repair(broker: Broker, queue: str, state: PauseState, row: Pause | None) -> None:
    if row is None and state.is_paused and not state.mark:
        _adopt(broker, queue)
    elif row is not None and not state.is_paused and state.mark == mark_of(row):
        if in_redis.forget_pause(broker, queue, state.mark) and _delete(row):
            logger.info("queue %s was resumed by another program", broker.name_of(queue))
    elif row is None and state.mark:
        in_redis.resume_queue(broker, queue, state.mark)
    elif row is not None and state != _expected(row):
        follow(PauseKind.QUEUE, row.backend, queue)


def _delete(row: Pause) -> bool:
    """Delete a row unless somebody has paused again since it was read."""
    return bool(rows_of(Pause).filter(pk=row.pk, paused_at=row.paused_at).delete()[0])


def _adopt(broker: Broker, queue: str) -> None:
    """Make a row for a pause of another program."""
    defaults = {"paused_at": database_clock.now(), "paused_by": ANOTHER_PROGRAM}
    rows = rows_of(Pause)
    row, is_new = rows.get_or_create(kind=PauseKind.QUEUE, backend=broker.alias, name=queue, defaults=defaults)
    if in_redis.note_pause(broker, queue, mark_of(row)) == "gone" and is_new:
        _delete(row)
    elif is_new:
        logger.info("queue %s was paused by another program", broker.name_of(queue))


# --- Retry, cancel or delete every task that matches a filter: start such an action, look at it, stop it.
#
# A row says what is to be done; the leader of the fleet does it, page by page (`fleet.bulk`). So an action of a
# million tasks takes no request, and survives restarts of everything.

EXAMPLES = 5
BY_CHARACTERS = 150


class BulkPreview(NamedTuple):
    """What an action would be about.

    matching: the filter as its row would have it. total: of all tasks that match now. examples: the oldest, at most 5.
    """

    matching: dict[str, Any]
    total: int
    examples: list[TaskRecord]


def preview_bulk(kind: str, matching: Mapping[str, Any]) -> BulkPreview:
    """Return how many tasks an action would be about, and some of them; nothing is written.

    kind, matching: as for `start_bulk`. Raises: InvalidOption.
    """
    found = checked(kind, matching)
    rows = rows_matching(found)
    return BulkPreview(found, rows.count(), list(rows.order_by("id")[:EXAMPLES]))


def start_bulk(
    kind: str, matching: Mapping[str, Any], *, by: Any = "", rows_per_second: int | None = None
) -> BulkAction:
    """Start an action on every task that matches; the leader of the fleet does it, at the given rate.

    kind: "retry", "cancel" or "delete". matching: a dictionary of at least one of `state`, `reason`, `name`,
    `queue_name`, `backend`, `gate`, `last_exception`, `group` (a text or a list of texts each), `enqueued_since`,
    `enqueued_until`, `finished_since`, `finished_until` (datetimes), `batch_id` and `ids` (at most 1,000). by: a user,
    or a text. rows_per_second: default BULK_ROWS_PER_SECOND.
    Tasks that are enqueued later are not touched. While an action with this kind and filter is not over, it is
    returned, and none is started.
    Raises: InvalidOption; nothing is written then.
    """
    found = checked(kind, matching)
    rate = conf.current().bulk_rows_per_second if rows_per_second is None else rows_per_second
    if isinstance(rate, bool) or not isinstance(rate, int) or not 1 <= rate <= MOST_PER_SECOND:
        raise InvalidOption(f"rows_per_second takes a whole number from 1 to {MOST_PER_SECOND:,}, not {rate!r}")
    name = by.get_username() if hasattr(by, "get_username") else by
    if not isinstance(name, str):
        raise InvalidOption(f"start_bulk(by=…) takes a user or a text, not {type(by).__qualname__}")
    # Not `first()`: on SQLite an id may be a text that is none.
    newest = page_of(rows_of(TaskRecord).order_by("-id"), size=MOST_AT_ONCE + 1)
    new = {
        "kind": kind,
        "matching": found,
        "rows_per_second": rate,
        # From the first task on.
        "positions": [("", "")],
        "newest_id": newest[0][0] if newest else None,
        "created_at": database_clock.now(writing_database(BulkAction)),
        "created_by": storable_text(name[:BY_CHARACTERS], BY_CHARACTERS),
        "total": rows_matching(found).count(),
    }
    # Of two that are started at the same time, the database takes one.
    key = hashlib.sha256(json.dumps([str(kind), found], sort_keys=True).encode()).hexdigest()
    action, is_new = rows_of(BulkAction).get_or_create(key=key, defaults=new)
    if is_new:
        transaction.on_commit(_tell_the_leader, using=writing_database(BulkAction), robust=True)
    return action


def _tell_the_leader() -> None:
    """Wake the loop that looks for changes. Without the message it finds the action seconds later."""
    if is_redis_used():
        with suppress(BrokerUnavailable):
            Broker("producer", DEFAULT_ALIAS).notify_due()


def stop_bulk(action: BulkAction | UUID | str) -> BulkAction:
    """Stop an action for good; what it has changed stays. When this returns, no further page of it begins.

    action: the row, or its id. Raises: InvalidOption when there is none with this id, or it is over.
    """
    found = find_bulk(action.pk if isinstance(action, BulkAction) else action)
    now = database_clock.now(writing_database(BulkAction))
    running = rows_of(BulkAction).filter(pk=found.pk, state=BulkState.RUNNING)
    if not running.update(state=BulkState.STOPPED, key=None, finished_at=now):
        raise InvalidOption(f"the action {found.pk} is over, so it cannot be stopped: start a new one")
    return find_bulk(found.pk)


def find_bulk(id: UUID | str) -> BulkAction:
    """Return the action with this id. Raises: InvalidOption when there is none."""
    try:
        return rows_of(BulkAction).get(pk=UUID(str(id)))
    except ValueError as error:
        raise InvalidOption(f"{id!r} is no id of an action: `manage.py asyncq bulk list` shows all") from error
    except BulkAction.DoesNotExist as error:
        raise InvalidOption(f"there is no action {id}: `manage.py asyncq bulk list` shows all") from error
