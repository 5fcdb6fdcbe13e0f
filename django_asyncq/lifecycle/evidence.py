"""Have rows show what another program has done to their entries: the one door from an entry back to its row.

`verdicts` says what an entry says; this module writes it. Only entries in a state that our own processes would not have
left are read, so plain tasks pay nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from django.template.defaultfilters import pluralize

from .. import conf, failpoints
from ..broker import Broker
from ..broker.evidence import Evidence, note_unhandled, read_evidence, settle_entries
from ..guard import get_logger
from ..logs import log_extra
from ..models import TaskRecord, TaskState
from ..runs import log_failed
from ..storage import database_clock
from ..storage.batches import COLUMNS, FencedWrite
from ..storage.routing import rows_of, transaction_of, writing_database
from ..storage.row_conditions import as_check
from .dispatching import by_queue, dispatch
from .events import announce
from .following import free_slots, write_usable
from .messages import asks_retention, entry_of, later_fence
from .verdicts import OUTCOMES, Verdict, apply, fail_as, unhandled_error, verdict_of

logger = get_logger("django_asyncq.lifecycle")

WARN_AGAIN_SECONDS = 3600.0
# Prefix, queue and verdict of the warnings that were logged lately → monotonic seconds.
_warned: dict[tuple[str, str, Verdict], float] = {}


class Seen(NamedTuple):
    """A row as it was read, what its entry says of it, and what the row must show."""

    row: TaskRecord
    found: Evidence
    verdict: Verdict


def see(broker: Broker, queue: str, rows: Sequence[TaskRecord]) -> list[Seen]:
    """Read what the entries of rows of one queue say. Raises: BrokerUnavailable."""
    found = read_evidence(broker, queue, [row.redis_id for row in rows])
    return [Seen(row, each, verdict_of(row, each)) for row, each in zip(rows, map(_of_row, rows, found), strict=True)]


def _of_row(row: TaskRecord, found: Evidence) -> Evidence:
    """Return what an entry says of a row; nothing, when another program has used its id again."""
    return found if row.wire_id is None or found.row == str(row.id) else found._replace(state="")


def settle_evidence(broker: Broker, rows: Sequence[TaskRecord]) -> set[UUID]:
    """Have rows show what another program has done to their entries; return the ids of those that need nothing more.

    rows: of tasks that our workers run, in any state; a row whose entry says nothing new is left alone.

    | check    | the fence: an entry that is older than its row says nothing                               |
    | row      | QUEUED, RUNNING or RETRYING → SUCCEEDED, FAILED or RETRYING, with a fence above all others |
    |          | where the settings refuse it: none, and the task is pushed again                          |
    | Redis    | what has succeeded is removed, except tasks of another program; the others are marked      |
    | announce | `task_state_changed`, which releases the slot of a gate                                    |

    If we die in between, the next pass finds the row final and settles the entry; a RETRYING row agrees with its entry.
    Raises: BrokerUnavailable, django.db.Error; the call may be repeated.
    """
    handled: set[UUID] = set()
    for of_alias, queue, group in by_queue(broker, [row for row in rows if row.batch_id is None]):
        seen = see(of_alias, queue, group)
        final = [each for each in seen if each.verdict is Verdict.FINAL]
        settle_entries(of_alias, queue, [(each.found, each.row.fence) for each in final])
        handled |= {each.row.id for each in final}
        handled |= write_outcomes(of_alias, queue, [each for each in seen if each.verdict in OUTCOMES])
        handled |= push_unhandled(of_alias, queue, [each for each in seen if each.verdict is Verdict.UNHANDLED])
        handled |= push_refused(of_alias, queue, [each.row for each in seen if each.verdict is Verdict.REFUSED])
    return handled


class _Change(NamedTuple):
    old: TaskRecord
    new: TaskRecord
    found: Evidence | None


def write_outcomes(broker: Broker, queue: str, seen: Sequence[Seen]) -> set[UUID]:
    """Write what entries say of their rows, then settle the entries; return the ids of the rows that were written."""
    if not seen:
        return set()
    now = database_clock.now()
    changes = []
    for each in seen:
        new = copy.copy(each.row)
        apply(new, each.found, each.verdict, now)
        changes.append(_Change(each.row, new, each.found))
    return _write(broker, queue, changes)


def fail_rows(broker: Broker, queue: str, failed: Sequence[tuple[Seen, BaseException]]) -> set[UUID]:
    """Fail tasks for good that another program has given up without an outcome; return the ids of those written."""
    now = database_clock.now()
    changes = []
    for each, error in failed:
        new = copy.copy(each.row)
        fail_as(new, error, now)
        changes.append(_Change(each.row, new, each.found if each.found.state else None))
    return _write(broker, queue, changes) if changes else set()


def _write(broker: Broker, queue: str, changes: Sequence[_Change]) -> set[UUID]:
    for each in changes:
        each.new.fence = _fence_of(each)
    written = _write_rows(changes)
    failpoints.reach("evidence.rows_written")
    done = [each for each in changes if each.new.id in written]
    # A task that only another program runs stays that program's until it is final.
    over = [each for each in done if each.found and (each.new.is_final or not each.new.is_remote)]
    # The program that has enqueued a task may read the result for as long as its message said.
    over = [each for each in over if not (each.new.state == TaskState.SUCCEEDED and asks_retention(each.new))]
    settle_entries(broker, queue, [(each.found, each.new.fence) for each in over if each.found])
    for each in done:
        if each.new.state == TaskState.FAILED:
            log_failed(each.new)
    _announce(done)
    return written


def _fence_of(change: _Change) -> int:
    """Return the fence of the changed row. That of a remote task says since when Redis has it (`lifecycle.remote`)."""
    if change.new.is_remote:
        return 0 if change.new.is_final else change.old.fence
    return later_fence(change.old)


def _write_rows(changes: Sequence[_Change]) -> set[UUID]:
    """Write rows that still are as they were read; return their ids."""
    claimable = [each for each in changes if each.old.state != TaskState.FAILED]
    # A QUEUED row is written below this fence, a RUNNING one with exactly this one.
    writes = [FencedWrite(each.new, each.old.fence + (each.old.state == TaskState.QUEUED)) for each in claimable]
    written = write_usable(writes, writing_database(TaskRecord)) if writes else set()
    for each in changes:
        if each.old.state != TaskState.FAILED:
            continue
        still = as_check(state=TaskState.FAILED, retry_at__isnull=False, fence=each.old.fence)
        retrying = rows_of(TaskRecord).filter(still, id=each.old.id)
        with transaction_of(TaskRecord):
            if retrying.update(**{name: getattr(each.new, name) for name in COLUMNS}):
                written.add(each.new.id)
                if each.new.is_final:
                    free_slots([each.new])
    return written


def _announce(changes: Iterable[_Change]) -> None:
    groups: dict[tuple[TaskState, TaskState], list[TaskRecord]] = {}
    for each in changes:
        groups.setdefault((TaskState(each.old.state), TaskState(each.new.state)), []).append(each.new)
    for (old, new), records in groups.items():
        announce(records, old, new)


def push_unhandled(broker: Broker, queue: str, seen: Sequence[Seen]) -> set[UUID]:
    """Push tasks again that a program without a handler for them has given up; return the ids that need nothing more.

    No attempt is used. After UNREGISTERED_PATIENCE_SECONDS they fail.
    """
    if not seen:
        return set()
    if _may_warn(broker, queue, Verdict.UNHANDLED):
        text = (
            "queue %s: another program has taken %d task%s that it has no handler for, such as %s; pushed again. Give "
            "each program a queue of its own; `asynq server ls` lists the servers and their queues"
        )
        rows = [each.row for each in seen]
        logger.warning(text, *_named(broker, queue, rows), extra=log_extra(*rows))
    ages = note_unhandled(broker, queue, [each.row.redis_id for each in seen])
    patience = conf.current().unregistered_patience_seconds
    late = [(each, unhandled_error(each.row)) for each, age in zip(seen, ages, strict=True) if age >= patience]
    handled = fail_rows(broker, queue, late)
    waiting = [each.row for each, age in zip(seen, ages, strict=True) if 0 <= age < patience]
    return handled | _push_again(broker, queue, waiting)


def push_refused(broker: Broker, queue: str, rows: Sequence[TaskRecord]) -> set[UUID]:
    """Push tasks again whose outcome is not accepted from another program; return the ids that need nothing more."""
    if not rows:
        return set()
    if _may_warn(broker, queue, Verdict.REFUSED):
        text = (
            "queue %s: another program has written the outcome of %d task%s, such as %s, which "
            "ASYNCQ['ACCEPT_OUTCOMES'] = False refuses; pushed again"
        )
        logger.warning(text, *_named(broker, queue, rows), extra=log_extra(*rows))
    return _push_again(broker, queue, rows)


def _push_again(broker: Broker, queue: str, rows: Sequence[TaskRecord]) -> set[UUID]:
    """Have entries be as their rows are; return the ids of those that nobody runs, so that nothing more is needed."""
    dispatch([row for row in rows if row.state == TaskState.QUEUED], again=True)
    # The forwarder finds them due, and asks their gates.
    retrying = [row for row in rows if row.state == TaskState.FAILED]
    broker.park(queue, [entry_of(row, fence=later_fence(row)) for row in retrying])
    return {row.id for row in rows if row.state != TaskState.RUNNING}


def _may_warn(broker: Broker, queue: str, verdict: Verdict) -> bool:
    """Return, once an hour for each queue, that a warning of what another program does to tasks is due."""
    key, now = (broker.prefix, queue, verdict), time.monotonic()
    is_due = now >= _warned.get(key, 0.0)
    if is_due:
        _warned[key] = now + WARN_AGAIN_SECONDS
    return is_due


def _named(broker: Broker, queue: str, rows: Sequence[TaskRecord]) -> tuple[str, int, str, str]:
    """Return what the warnings name: the queue, how many tasks, and one of them."""
    return broker.name_of(queue), len(rows), pluralize(len(rows)), rows[0].name
