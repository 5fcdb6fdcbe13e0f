"""Have rows show what another program has done to their entries: entry → verdict → row.

Only entries in a state that our own processes would not have left are read, so plain tasks pay nothing; those of tasks
that only another program runs are always read.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django.template.defaultfilters import pluralize

from .. import conf
from ..broker import Broker
from ..broker.foreign import Evidence, note_unhandled, read_evidence, settle_entries
from ..core.guard import get_logger
from ..core.logs import log_extra
from ..lifecycle.base import announce, log_failed
from ..lifecycle.children import ended, settle
from ..lifecycle.dispatching import by_queue, dispatch, note_seen
from ..lifecycle.following import free_slots, move_up, write_usable
from ..lifecycle.messages import asks_retention, entry_of, later_fence
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.batches import COLUMNS, FencedWrite
from ..storage.routing import as_check, rows_of, transaction_of, writing_database
from .verdict import WRITTEN, Verdict, apply, verdict_of

logger = get_logger("django_asyncq.interop")

WARN_AGAIN_SECONDS = 3600.0
# Of what another program does to tasks: the queue, how many, "s" unless it is one, and the name of one of them.
WARNINGS = {
    Verdict.UNHANDLED: (
        "queue %s: another program has taken %d task%s that it has no handler for, such as %s; pushed again. Give "
        "each program a queue of its own; `asynq server ls` lists the servers and their queues"
    ),
    Verdict.REFUSED: (
        "queue %s: another program has written the outcome of %d task%s, such as %s, which "
        "ASYNCQ['ACCEPT_OUTCOMES'] = False refuses; pushed again"
    ),
}
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
        handled |= _settle(of_alias, queue, see(of_alias, queue, group))
    return handled


def _settle(broker: Broker, queue: str, seen: Sequence[Seen]) -> set[UUID]:
    """Do what the verdicts say; return the ids of the rows that need nothing more.

    What a program without a handler for it has given up uses no attempt; after UNREGISTERED_PATIENCE_SECONDS it fails.
    """
    of: dict[Verdict, list[Seen]] = defaultdict(list)
    for each in seen:
        of[each.verdict].append(each)
    for verdict in WARNINGS:
        _warn(broker, queue, verdict, [each.row for each in of[verdict]])
    settle_entries(broker, queue, [(each.found, each.row.fence) for each in of[Verdict.FINAL]])
    given_up = of[Verdict.UNHANDLED]
    ages = note_unhandled(broker, queue, [each.row.redis_id for each in given_up])
    patience = conf.current().unregistered_patience_seconds
    late = [each for each, age in zip(given_up, ages, strict=True) if age >= patience]
    again = [each.row for each, age in zip(given_up, ages, strict=True) if 0 <= age < patience]
    again += [each.row for each in of[Verdict.REFUSED]]
    handled = {each.row.id for each in of[Verdict.FINAL]}
    handled |= _write(broker, queue, [each for each in seen if each.verdict in WRITTEN] + late)
    return handled | _push_again(broker, queue, again)


class _Change(NamedTuple):
    old: TaskRecord
    new: TaskRecord
    found: Evidence


def _as_entry_says(seen: Seen, now: datetime) -> _Change:
    new = copy.copy(seen.row)
    apply(new, seen.found, seen.verdict, now)
    if not new.is_remote:
        new.fence = later_fence(seen.row)
    elif new.is_final:
        # Until then it says since when Redis has the entry (see the last part).
        new.fence = 0
    return _Change(seen.row, new, seen.found)


def _write(broker: Broker, queue: str, seen: Sequence[Seen]) -> set[UUID]:
    """Write what entries say of their rows, then settle the entries; return the ids of the rows that were written."""
    if not seen:
        return set()
    now = database_clock.now()
    changes = [_as_entry_says(each, now) for each in seen]
    written = _write_rows(changes)
    done = [each for each in changes if each.new.id in written]
    # A task that only another program runs stays that program's until it is final.
    over = [each for each in done if each.found.state and (each.new.is_final or not each.new.is_remote)]
    # The program that has enqueued a task may read the result for as long as its message said.
    over = [each for each in over if not (each.new.state == TaskState.SUCCEEDED and asks_retention(each.new))]
    settle_entries(broker, queue, [(each.found, each.new.fence) for each in over])
    groups: dict[tuple[TaskState, TaskState], list[TaskRecord]] = defaultdict(list)
    for each in done:
        if each.new.state == TaskState.FAILED:
            log_failed(each.new)
        groups[TaskState(each.old.state), TaskState(each.new.state)].append(each.new)
    for (old, new), records in groups.items():
        announce(records, old, new)
    return written


def _write_rows(changes: Sequence[_Change]) -> set[UUID]:
    """Write rows that still are as they were read; return their ids."""
    claimable = [each for each in changes if each.old.state != TaskState.FAILED]
    writes = [FencedWrite(each.new, each.old.fence, each.old.fence) for each in claimable]
    written = write_usable(writes, writing_database(TaskRecord)) if writes else set()
    for each in changes:
        if each.old.state != TaskState.FAILED:
            continue
        still = as_check(state=TaskState.FAILED, retry_at__isnull=False, fence=each.old.fence)
        retrying = rows_of(TaskRecord).filter(still, id=each.old.id)
        with transaction_of(TaskRecord):
            columns = {name: getattr(each.new, name) for name in COLUMNS}
            if each.new.state == TaskState.SUCCEEDED:
                columns["checkpoint"] = None
            if retrying.update(**columns):
                written.add(each.new.id)
                if each.new.is_final:
                    free_slots([each.new])
                    # It may have got children since it was read.
                    move_up(settle([ended(each.new)]))
    return written


def _push_again(broker: Broker, queue: str, rows: Sequence[TaskRecord]) -> set[UUID]:
    """Have entries be as their rows are; return the ids of those that nobody runs, so that nothing more is needed."""
    if not rows:
        return set()
    dispatch([row for row in rows if row.state == TaskState.QUEUED], again=True)
    # The forwarder finds them due, and asks their gates.
    retrying = [row for row in rows if row.state == TaskState.FAILED]
    broker.park(queue, [entry_of(row, fence=later_fence(row)) for row in retrying])
    return {row.id for row in rows if row.state != TaskState.RUNNING}


def _warn(broker: Broker, queue: str, verdict: Verdict, rows: Sequence[TaskRecord]) -> None:
    """Warn once an hour for each queue of what another program does to tasks."""
    key, now = (broker.prefix, queue, verdict), time.monotonic()
    if rows and now >= _warned.get(key, 0.0):
        _warned[key] = now + WARN_AGAIN_SECONDS
        values = broker.name_of(queue), len(rows), pluralize(len(rows)), rows[0].name
        logger.warning(WARNINGS[verdict], *values, extra=log_extra(*rows))


# --- Follow the tasks that only another program runs: their rows show what Redis says of their entries.
#
# Nothing else writes these rows while they are not final, except a cancel. Their `fence` is no fence: no worker of
# ours runs them. It holds the Unix second, of Redis, since which Redis is known to have the entry, and 0 before
# that. So a missing entry that was deleted differs from one that was never pushed, and from one that Redis has lost
# with its memory.

# A cancel gives a row a fence, which is in microseconds.
SMALLEST_FENCE = 10**12


def follow_remote(broker: Broker, rows: Sequence[TaskRecord], alive_since: int, pushed_before: datetime) -> int:
    """Have rows show what Redis says of their entries; return how many changed, or were pushed again.

    rows: remote ones that are not final. alive_since: Unix seconds since which Redis remembers everything,
    and was reached without an outage.
    pushed_before: the process that has enqueued a younger row may not have pushed it yet.

    | check    | the row is as it was read                                                       |
    | row      | → QUEUED, RUNNING, RETRYING, SUCCEEDED or FAILED, as Redis says                 |
    | Redis    | what has succeeded is removed; what is missing, and was not deleted, is pushed  |
    | announce | `task_state_changed`                                                            |

    If we die in between, the next pass does the same. Raises: BrokerUnavailable, django.db.Error.
    """
    changed = 0
    # What waits for a slot of its gate was never pushed.
    for of_alias, queue, group in by_queue(broker, [row for row in rows if not row.waits_for_slot]):
        seen = see(of_alias, queue, group)
        note_seen([each.row for each in seen if each.found.state and _seen_since(each.row) < alive_since])
        changed += len(_settle(of_alias, queue, seen))
        missing = [each for each in seen if each.verdict is Verdict.MISSING]
        deleted = [each for each in missing if alive_since <= _seen_since(each.row)]
        changed += len(_write(of_alias, queue, deleted))
        changed += _push_remote_again(
            [each for each in missing if each not in deleted and each.row.enqueued_at < pushed_before]
        )
        changed += _push_retried([each.row for each in seen if _is_left(each)])
    return changed


def _seen_since(row: TaskRecord) -> int:
    """Return the Unix second since which Redis is known to have the entry; 0: it is not known to have it."""
    return row.fence if row.fence < SMALLEST_FENCE else 0


def _push_remote_again(missing: Sequence[Seen]) -> int:
    """Push tasks whose entries were never pushed, or that Redis has forgotten; return how many."""
    pushed = 0
    for old in (TaskState.QUEUED, TaskState.RUNNING, TaskState.FAILED):
        rows = [each.row for each in missing if each.row.state == old]
        if not rows:
            continue
        still = as_check(state=old, finished_at__isnull=True)
        unchanged = rows_of(TaskRecord).filter(still, id__in=[row.id for row in rows])
        unchanged.update(state=TaskState.QUEUED, reason=FailureReason.NONE, retry_at=None, fence=0)
        rows = _still_queued(rows)
        for row in rows:
            row.state, row.reason, row.retry_at, row.fence = TaskState.QUEUED, FailureReason.NONE, None, 0
        pushed += dispatch(rows)
        if old != TaskState.QUEUED:
            announce(rows, old, TaskState.QUEUED)
    return pushed


def _still_queued(rows: Sequence[TaskRecord]) -> list[TaskRecord]:
    """Return the rows that are QUEUED. Another program would run one that somebody has cancelled meanwhile."""
    wanted = as_check(state=TaskState.QUEUED, cancel_requested_at__isnull=True)
    queued = rows_of(TaskRecord).filter(wanted, id__in=[row.id for row in rows])
    ids = set(queued.values_list("id", flat=True))
    return [row for row in rows if row.id in ids]


def _is_left(seen: Seen) -> bool:
    """Return whether a person has retried the task, and its entry is where its last failure was settled."""
    return seen.row.state == TaskState.QUEUED and seen.found.state == seen.found.settled == "archived"


def _push_retried(rows: Sequence[TaskRecord]) -> int:
    """Push tasks whose process died, or could not reach Redis, after it had written the retry; return how many."""
    return dispatch(_still_queued(rows), again=True) if rows else 0
