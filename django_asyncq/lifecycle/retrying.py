"""Retry failed tasks: when their time has come, or because a person asks for it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import QuerySet
from django.template.defaultfilters import pluralize

from .. import gates
from ..broker import Broker, Lease
from ..broker.foreign import read_evidence
from ..core.guard import attempt, get_logger, is_a
from ..core.logs import log_extra
from ..exceptions import BrokerUnavailable, GateUnavailable
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import as_check, rows_of, transaction_of, writing_database
from .base import CommitHook, announce, ask, load_rows, look_up, update_waiting
from .closing import close_cancelled, expire, is_expired, settle_final
from .dispatching import GATE_RETRY_SECONDS, by_queue, dispatch
from .messages import entry_of, named_rows, restore
from .reviving import Revived, revive
from .unique import Taken, already_taken, take_again, without
from .waiting import let_in

logger = get_logger("django_asyncq.lifecycle")

# A task in the line of its gate is let in by the leader. If it has an entry, that asks too, if ever in vain.
ASK_AGAIN_SECONDS = 3600
NOTHING_REVIVED = Revived([], [])
# A receiver that vetoes a retry announces nothing when it would veto no longer.
VETO_RETRY_SECONDS = 5


class Retried(NamedTuple):
    """The result of a retry.

    full: their gate was full. not_failed: not FAILED, or deleted. taken: another task holds their unique slot.
    blocked: they wait for a task that has failed.
    """

    retried: list[TaskRecord]
    full: list[TaskRecord]
    not_failed: list[UUID]
    taken: list[Taken]
    blocked: Sequence[TaskRecord] = ()


class Redispatch(CommitHook):
    """Dispatches all tasks that a transaction retried."""

    def follow_up(self) -> None:
        dispatch(self.records, again=True)
        announce(self.records, TaskState.FAILED, TaskState.QUEUED)


def retry(ids: Collection[UUID], *, by_person: bool) -> Retried:
    """Queue failed tasks again, as many as their gates admit.

    by_person: also tasks that have no attempts left. Their worker crashes are forgotten, their attempts are not, so
        such a task gets one more attempt. Otherwise those whose gate is full are postponed by GATE_RETRY_SECONDS.

    | check    | `task_state_changing`: the gate's receiver acquires again, and may refuse some            |
    | row      | FAILED → QUEUED, the rows locked: of two retries of a task at the same time, one succeeds |
    |          | one that may wait, and whose gate is full, becomes QUEUED without a slot (`waiting`)      |
    |          | by_person: a unique task takes its slot again, and stays FAILED if another has it; what    |
    |          | had failed for one of these waits again (`reviving`)                                      |
    | Redis    | after the commit: out of retry or archived, into pending; the caller parks the others     |
    | announce | `task_state_changed`                                                                      |

    A rollback releases the slots. If we die after the commit, the reconciler pushes the row.
    Raises: GateUnavailable, and what other receivers veto with; nothing is changed then.
    """
    database = writing_database(TaskRecord)
    with transaction_of(TaskRecord):
        # What is written names its rows itself: of two lists of ids PostgreSQL expects as many reads as of each id of
        # one with each of the other, and would rather read the whole table.
        failed = rows_of(TaskRecord).filter(as_check(state=TaskState.FAILED))
        rows = failed.select_for_update().filter(id__in=ids)
        # In one order, so that two retries of the same tasks wait for each other instead of deadlocking. The oldest is
        # the first to ask its gate.
        records = list((rows if by_person else rows.filter(as_check(retry_at__isnull=False))).order_by("id"))
        found = {record.id for record in records}
        # Those that failed while they waited for tasks wait again, or stay as they are.
        waiting = [record for record in records if record.waits_for]
        records = [record for record in records if not record.waits_for] if waiting else records
        were_final = {record.id for record in records if record.workflow_id is not None and record.is_final}
        # An automatic retry holds its slot already.
        taken = already_taken(records) if by_person else []
        records = without(records, taken)
        refused = ask(records, TaskState.FAILED, partial=True, timed=not by_person) if records else set()
        admitted = [record for record in records if record.id not in refused]
        full = [record for record in records if record.id in refused and record.max_waiting is None]
        # They wait as rows alone, like new tasks that found their gate full.
        joining = [record for record in records if record.id in refused and record.max_waiting is not None]
        # As they are before the change: that still says who waited at a gate.
        unchanged = [copy.copy(record) for record in admitted if record.gate]
        try:
            if full and not by_person:
                # While the rows are locked: once they are not, the leader may let the tasks in.
                _postpone(failed, full, GATE_RETRY_SECONDS, reason=FailureReason.GATE_FULL)
            if by_person and (lately := take_again(failed, [*admitted, *joining])):
                gates.give_back([each.record for each in lately])
                taken, admitted, joining = taken + lately, without(admitted, lately), without(joining, lately)
            _write_retries(failed, admitted, by_person=by_person)
            if joining:
                _write_retries(failed, joining, by_person=by_person, reason=FailureReason.GATE_FULL)
            were_final &= {record.id for record in (*admitted, *joining)}
            revived = NOTHING_REVIVED
            if were_final or waiting:
                _forget_late(failed, waiting)
                revived = revive(failed, were_final, waiting)
        except BaseException:
            gates.give_back(admitted)
            raise
        if admitted or joining or revived.waiting:
            connection = connections[database]
            hook = Redispatch.of_transaction(connection)
            hook.records.extend([*admitted, *joining, *revived.waiting])
            hook.release_at_rollback(unchanged, connection)
            hook.register(connection)
    # What has come back with another one says that it was retried too, if it was asked for.
    retried = [*admitted, *joining, *(record for record in revived.waiting if record.id in found)]
    return Retried(retried, full, [id for id in ids if id not in found], taken, revived.blocked)


def _write_retries(
    rows: QuerySet[TaskRecord],
    records: Sequence[TaskRecord],
    *,
    by_person: bool,
    reason: FailureReason = FailureReason.NONE,
) -> None:
    """FAILED → QUEUED in the database, then in memory: after an error that still says who waited at a gate."""
    changes: dict[str, Any] = {
        "state": TaskState.QUEUED,
        "reason": reason,
        "retry_at": None,
        "finished_at": None,
        # One that failed in a batch waits for another one.
        "batch_id": None,
    }
    if by_person:
        # A cancel is forgotten, and so is a time to begin that is over: the person wants it to run all the same.
        changes |= {"crash_count": 0, "cancel_requested_at": None, "cancelled_by": ""}
        _forget_late(rows, records)
    # Not `bulk_update`: it writes a CASE for each value, though all rows get the same. They are due from now on.
    update_waiting(rows, records, **changes, run_after=database_clock.now())
    for record in records:
        # Nobody has to ask whether that has come.
        record.run_after = None
        for name, value in changes.items():
            setattr(record, name, value)


def _forget_late(rows: QuerySet[TaskRecord], records: Sequence[TaskRecord]) -> None:
    """Forget the times to begin and to finish that are over, in the rows and in memory."""
    limited = [record for record in records if record.expires_at is not None]
    if not limited:
        return
    now = database_clock.now()
    for record in (record for record in limited if is_expired(record, now)):
        record.deadline = None if record.deadline is None or record.deadline <= now else record.deadline
        record.expires_at = record.deadline
        rows.filter(id=record.id).update(expires_at=record.expires_at, deadline=record.deadline)


def settle_final_claims(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], rows: Mapping[str, TaskRecord]
) -> None:
    """Settle the leases of tasks whose row is final: their entries are removed, unless a person wants a retry.

    A failed task that our reporter archived, and that was pending when it was claimed, was put there by asynq's tools.
    It is retried as by a person. Where that is refused, its entry is removed like the others. leases, rows: as of
    `settle_final`; a lease may be over, because the list of expired ones is old when it is used.

    | check    | the field `settled` of an entry that the lease holds: our own processes leave no |
    |          | archived task in pending with it                                                 |
    | row      | FAILED → QUEUED, as `retry` does                                                 |
    | Redis    | the claimed entry is replaced by one with a higher fence                         |
    | announce | `task_state_changed`                                                             |

    If we die after the commit, the lease expires and the task is recovered. Raises: BrokerUnavailable, django.db.Error.
    """
    failed = {lease.id: lease.fence for lease in leases if rows[lease.id].state == TaskState.FAILED}
    found = read_evidence(broker, queue, list(failed)) if failed else []
    held = [each for each in found if each.state == "active" and each.fence == failed[each.id]]
    wanted = {rows[each.id].id for each in held if each.settled}
    retried = _retry_for_person(wanted) if wanted else set()
    rest = [lease for lease in leases if rows[lease.id].id not in retried]
    settle_final(broker, queue, worker_id, rest, rows)
    if retried:
        broker.remove(queue, [lease.id for lease in leases if lease not in rest], named_rows(rows.values()))
        again = load_rows(map(str, retried)).values()
        dispatch([row for row in again if row.state == TaskState.QUEUED], again=True)


def _retry_for_person(ids: Collection[UUID]) -> set[UUID]:
    """Retry tasks that somebody has made pending with asynq's tools; return the ids of those that were queued."""
    outcome, error = attempt(retry, ids, by_person=True)
    if error is not None:
        if is_a(error, GateUnavailable):
            raise BrokerUnavailable(str(error)) from error
        if is_a(error, (BrokerUnavailable, DatabaseError)):
            raise error
        logger.error("a retry that asynq's tools asked for was refused", exc_info=error)
        return set()
    for row in outcome.retried:
        logger.info("task %s %s: queued again by asynq's tools", row.id, row.name, extra=log_extra(row))
    if refused := [*outcome.full, *(each.record for each in outcome.taken)]:
        count = len(refused)
        text = "asynq's tools asked to retry %d task%s; refused: the gate is full, or another task has the key"
        logger.warning(text, count, pluralize(count), extra=log_extra(*refused))
    return {row.id for row in outcome.retried}


def retry_due(broker: Broker, queue: str, ids: Sequence[str]) -> int:
    """Queue RETRYING tasks again whose `retry_at` has come; return how many were queued.

    ids: as found due in Redis. A row that is QUEUED already has an entry here because the push after its retry was
    lost, and is pushed again. Entries whose row is final or cannot be read are removed; a sweep parks the latter when
    their row has been corrected. Entries without a row become pending. Tasks whose gate is full wait there, for at most
    GATE_RETRY_SECONDS. Those whose retry a receiver vetoes are retried VETO_RETRY_SECONDS later.
    """
    rows, missing, _ = look_up(broker, queue, ids)
    # Another program's forwarder would make them pending now.
    words = restore(broker, queue, "", missing)
    orphans = [id for id, word in zip(missing, words, strict=True) if word != "missing"]
    # Those of an alias whose prefix was changed wait under the new one.
    live = [row for row in rows.values() if not row.is_final and broker.holds(row.backend)]
    if stale := set(ids).difference(orphans, (row.redis_id for row in live)):
        broker.remove(queue, sorted(stale), named_rows(rows.values()))
    # Another process may be retrying it at this moment, and pushes it too: the second push changes nothing.
    queued = [row for row in live if row.state == TaskState.QUEUED and not row.is_remote]
    dispatch([row for row in queued if not row.waits_for_slot], again=True)
    attempted = _retry_rows(broker, live)
    if attempted.in_line:
        # Not removed: one that is let in at this moment has an entry. What waits here moves only when its row has.
        ask_at = database_clock.unix_seconds() + ASK_AGAIN_SECONDS
        broker.park(queue, [entry_of(row)._replace(due_at=ask_at) for row in attempted.in_line])
    return len(attempted.admitted)


class Asked(NamedTuple):
    """What became of waiters. left: the ids that must go on waiting. admitted: those that have their slots.

    moved: ids that wait at another of their gates now, which refused them → that gate.
    """

    left: list[str]
    admitted: set[str]
    moved: dict[str, str]


def retry_waiting(broker: Broker, ids: Sequence[str]) -> Asked:
    """Queue tasks for which their gate has a free slot.

    ids: at most 100, in any queues. All that are not returned wait no longer: they do not wait by their rows, or have
    a later time for another reason, or cannot be read, or a receiver vetoed.
    Raises: BrokerUnavailable, also when the gate cannot be asked, django.db.Error.
    """
    now = database_clock.now()
    rows = load_rows(ids).values()
    stood_at = {row.id: row.gate for row in rows}
    # A task that begins to wait is due; only then its row says that it waits.
    due = [row for row in rows if _waits_in_line(row) or (row.retry_at and row.retry_at <= now)]
    attempted = _retry_rows(broker, due, must_ask=True)
    refused = [*attempted.full, *attempted.in_line]
    moved = {str(row.id): row.gate for row in refused if row.gate != stood_at[row.id]}
    left = [str(row.id) for row in refused if str(row.id) not in moved]
    return Asked(left, {str(id) for id in attempted.admitted}, moved)


class _Attempted(NamedTuple):
    """What became of retries. admitted: the ids that were queued. full: their gate was full. vetoed: by a receiver.

    in_line: QUEUED tasks that go on waiting at their gate.
    """

    admitted: set[UUID]
    full: list[TaskRecord]
    vetoed: list[TaskRecord]
    in_line: Sequence[TaskRecord] = ()


def _retry_rows(broker: Broker, rows: Iterable[TaskRecord], *, must_ask: bool = False) -> _Attempted:
    """Retry the rows that are RETRYING, and let those in that wait; postpone retries that cannot be queued now.

    must_ask: a gate that cannot be asked is an error, and postpones none.
    """
    waiting = _without_closed([row for row in rows if row.waits_for_slot or _is_retrying(row)])
    attempted = _attempt([row for row in waiting if _is_retrying(row)], must_ask=must_ask)
    if in_line := [row.id for row in waiting if row.waits_for_slot]:
        let, error = attempt(let_in, in_line)
        if error is not None:
            if not is_a(error, GateUnavailable):
                raise error
            if must_ask:
                raise BrokerUnavailable(str(error)) from error
        else:
            attempted = attempted._replace(admitted=attempted.admitted | let.admitted, in_line=let.left)
    if attempted.vetoed:
        retrying = rows_of(TaskRecord).filter(as_check(state=TaskState.FAILED, retry_at__isnull=False))
        _postpone(retrying, attempted.vetoed, VETO_RETRY_SECONDS)
    for of_alias, queue, group in by_queue(broker, [*attempted.full, *attempted.vetoed]):
        of_alias.park(queue, [entry_of(row) for row in group])
    return attempted


def _waits_in_line(row: TaskRecord) -> bool:
    return row.reason == FailureReason.GATE_FULL and (row.state == TaskState.FAILED or row.retry_at is None)


def _is_retrying(row: TaskRecord) -> bool:
    return row.state == TaskState.FAILED and row.retry_at is not None


def _without_closed(rows: list[TaskRecord]) -> list[TaskRecord]:
    """Close the tasks that were cancelled while they ran, or have not begun in time; return the others."""
    limited = [row for row in rows if row.cancel_requested_at is not None or row.expires_at is not None]
    if not limited:
        return rows
    now = database_clock.now()
    cancelled = {row.id for row in limited if row.cancel_requested_at is not None}
    late = {row.id for row in limited if is_expired(row, now)} - cancelled
    if cancelled:
        close_cancelled(cancelled)
    if late:
        expire(late)
    return [row for row in rows if row.id not in cancelled | late]


def _attempt(rows: Sequence[TaskRecord], *, must_ask: bool) -> _Attempted:
    """Retry tasks. A receiver that vetoes one of them, with whatever error, does not keep the others waiting."""
    if not rows:
        return _Attempted(set(), [], [])
    outcome, error = attempt(retry, [row.id for row in rows], by_person=False)
    if error is None:
        return _Attempted({row.id for row in outcome.retried}, outcome.full, [])
    if is_a(error, GateUnavailable):
        if must_ask:
            raise BrokerUnavailable(str(error)) from error
        return _Attempted(set(), [], list(rows))
    if is_a(error, (BrokerUnavailable, DatabaseError)):
        raise error
    if len(rows) > 1:
        parts = [_attempt([row], must_ask=must_ask) for row in rows]
        return _Attempted(
            {id for part in parts for id in part.admitted},
            [row for part in parts for row in part.full],
            [row for part in parts for row in part.vetoed],
        )
    logger.error("task %s: its retry was refused", rows[0].id, exc_info=error, extra=log_extra(rows[0]))
    return _Attempted(set(), [], list(rows))


def _postpone(rows: QuerySet[TaskRecord], records: Sequence[TaskRecord], seconds: float, **changes: Any) -> None:
    """Have RETRYING tasks retried later, and change other columns with it, in those of the rows that are theirs."""
    changes["retry_at"] = database_clock.now() + timedelta(seconds=seconds)
    update_waiting(rows, records, **changes)
    for record in records:
        for name, value in changes.items():
            setattr(record, name, value)
