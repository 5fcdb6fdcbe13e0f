"""Retry failed tasks: when their time has come, or because a person asks for it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import QuerySet

from .. import failpoints, gates
from ..broker import Broker, Lease, without_row
from ..exceptions import BrokerUnavailable, GateUnavailable
from ..guard import attempt, get_logger, is_a
from ..logs import log_extra, log_extra_of_ids
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.isolation import is_set_aside
from ..storage.routing import rows_of, transaction_of, writing_database
from .dispatching import GATE_RETRY_SECONDS, by_queue, dispatch
from .events import announce, ask
from .messages import entry_of
from .on_commit import CommitHook
from .running import load_rows

logger = get_logger("django_asyncq.lifecycle")

# A receiver that vetoes a retry announces nothing when it would veto no longer.
VETO_RETRY_SECONDS = 5


class Retried(NamedTuple):
    """The result of a retry. full: their gate was full. not_failed: not FAILED, or deleted."""

    retried: list[TaskRecord]
    full: list[TaskRecord]
    not_failed: list[UUID]


class Redispatch(CommitHook):
    """Dispatches all tasks that a transaction retried."""

    def follow_up(self) -> None:
        failpoints.reach("retry.committed")
        dispatch(self.records, again=True)
        announce(self.records, TaskState.FAILED, TaskState.QUEUED)


def retry(ids: Collection[UUID], *, by_person: bool) -> Retried:
    """Queue failed tasks again, as many as their gates admit.

    by_person: also tasks that have no attempts left. Their worker crashes are forgotten, their attempts are not, so
        such a task gets one more attempt. Otherwise those whose gate is full are postponed by GATE_RETRY_SECONDS.

    | check    | `task_state_changing`: the gate's receiver acquires again, and may refuse some            |
    | row      | FAILED → QUEUED, the rows locked: of two retries of a task at the same time, one succeeds |
    | Redis    | after the commit: out of retry or archived, into pending; the caller parks the others     |
    | announce | `task_state_changed`                                                                      |

    A rollback releases the slots. If we die after the commit, the reconciler pushes the row.
    Raises: GateUnavailable, and what other receivers veto with; nothing is changed then.
    """
    database = writing_database(TaskRecord)
    with transaction_of(TaskRecord):
        rows = rows_of(TaskRecord).select_for_update().filter(id__in=ids, state=TaskState.FAILED)
        # In one order, so that two retries of the same tasks wait for each other instead of deadlocking. The oldest is
        # the first to ask its gate.
        records = list((rows if by_person else rows.filter(retry_at__isnull=False)).order_by("id"))
        refused = ask(records, TaskState.FAILED, partial=True, timed=not by_person) if records else set()
        failpoints.reach("retry.slot_acquired")
        admitted = [record for record in records if record.id not in refused]
        full = [record for record in records if record.id in refused]
        # As they are before the change: that still says who waited at a gate.
        unchanged = [copy.copy(record) for record in admitted if record.gate]
        try:
            if full and not by_person:
                # While the rows are locked: once they are not, the leader may let the tasks in.
                _postpone(rows, full, GATE_RETRY_SECONDS, reason=FailureReason.GATE_FULL)
            _write_retries(rows, admitted, by_person=by_person)
        except BaseException:
            gates.give_back(admitted)
            raise
        if admitted:
            connection = connections[database]
            hook = Redispatch.of_transaction(connection)
            hook.records.extend(admitted)
            hook.release_at_rollback(unchanged, connection)
            hook.register(connection)
    found = {record.id for record in records}
    return Retried(admitted, full, [id for id in ids if id not in found])


def _write_retries(rows: QuerySet[TaskRecord], records: Sequence[TaskRecord], *, by_person: bool) -> None:
    """FAILED → QUEUED in the database, then in memory: after an error that still says who waited at a gate."""
    changes: dict[str, Any] = {
        "state": TaskState.QUEUED,
        "reason": FailureReason.NONE,
        "retry_at": None,
        "finished_at": None,
        "run_after": None,
    }
    if by_person:
        changes["crash_count"] = 0
    # Not `bulk_update`: it writes a CASE for each value, though all rows get the same.
    rows.filter(id__in=[record.id for record in records]).update(**changes)
    for record in records:
        for name, value in changes.items():
            setattr(record, name, value)


def retry_without_redis(ids: Sequence[UUID]) -> int:
    """Do what `retry_due` does for tasks of aliases without Redis, in the order of their ids; return how many.

    Those that wait at a gate may be named before their time: no slot that becomes free is announced to them.
    """
    rows = load_rows([Lease(str(id), 0) for id in ids])
    return _retry_rows(None, [rows[str(id)] for id in sorted(ids) if str(id) in rows]).retried


def retry_due(broker: Broker, queue: str, ids: Sequence[str]) -> int:
    """Queue RETRYING tasks again whose `retry_at` has come; return how many were queued.

    ids: as found due in Redis. Entries whose row is final or cannot be read are removed; a sweep parks the latter when
    their row has been corrected. Entries without a row are archived. Tasks whose gate is full wait there, for at most
    GATE_RETRY_SECONDS. Those whose retry a receiver vetoes are retried VETO_RETRY_SECONDS later.
    """
    rows = load_rows([Lease(id, 0) for id in ids])
    missing = [id for id in ids if id not in rows]
    # Those of an alias whose prefix was changed wait under the new one.
    live = [row for row in rows.values() if not row.is_final and broker.holds(row.backend)]
    orphans = [id for id in missing if not is_set_aside(id)]
    if stale := set(ids).difference(orphans, (str(row.id) for row in live)):
        broker.remove(queue, sorted(stale))
    if orphans:
        text = "queue %s: no row for %s; archived in Redis"
        logger.error(text, broker.name_of(queue), ", ".join(orphans), extra=log_extra_of_ids(orphans, queue=queue))
        without_row.archive_retrying(broker, queue, orphans)
    return _retry_rows(broker, live).retried


def retry_waiting(broker: Broker, ids: Sequence[str]) -> list[str]:
    """Queue tasks again for which their gate has a free slot; return the ids that must go on waiting.

    ids: at most 100, in any queues. All that are not returned wait no longer: they are queued, or not RETRYING, or
    have a later time for another reason, or cannot be read, or a receiver vetoed.
    Raises: BrokerUnavailable, also when the gate cannot be asked, django.db.Error.
    """
    now = database_clock.now()
    rows = load_rows([Lease(id, 0) for id in ids]).values()
    # A task that begins to wait is due; only then its row says that it waits.
    due = [row for row in rows if row.reason == FailureReason.GATE_FULL or (row.retry_at and row.retry_at <= now)]
    return [str(row.id) for row in _retry_rows(broker, due, must_ask=True).full]


class _Attempted(NamedTuple):
    """What became of retries. retried: how many were queued. full: their gate was full. vetoed: by a receiver."""

    retried: int
    full: list[TaskRecord]
    vetoed: list[TaskRecord]


def _retry_rows(broker: Broker | None, rows: Iterable[TaskRecord], *, must_ask: bool = False) -> _Attempted:
    """Retry the rows that are RETRYING; postpone those that cannot be queued now.

    broker: None for tasks without an entry in Redis.
    must_ask: a gate that cannot be asked is an error, and postpones none.
    """
    waiting = [row for row in rows if row.state == TaskState.FAILED and row.retry_at is not None]
    attempted = _attempt(waiting, must_ask=must_ask)
    if attempted.vetoed:
        retrying = rows_of(TaskRecord).filter(state=TaskState.FAILED, retry_at__isnull=False)
        _postpone(retrying, attempted.vetoed, VETO_RETRY_SECONDS)
    if broker is None:
        return attempted
    for of_alias, queue, group in by_queue(broker, [*attempted.full, *attempted.vetoed]):
        of_alias.park(queue, [entry_of(row) for row in group])
    return attempted


def _attempt(rows: Sequence[TaskRecord], *, must_ask: bool) -> _Attempted:
    """Retry tasks. A receiver that vetoes one of them, with whatever error, does not keep the others waiting."""
    if not rows:
        return _Attempted(0, [], [])
    outcome, error = attempt(retry, [row.id for row in rows], by_person=False)
    if error is None:
        return _Attempted(len(outcome.retried), outcome.full, [])
    if is_a(error, GateUnavailable):
        if must_ask:
            raise BrokerUnavailable(str(error)) from error
        return _Attempted(0, [], list(rows))
    if is_a(error, (BrokerUnavailable, DatabaseError)):
        raise error
    if len(rows) > 1:
        parts = [_attempt([row], must_ask=must_ask) for row in rows]
        return _Attempted(
            sum(part.retried for part in parts),
            [row for part in parts for row in part.full],
            [row for part in parts for row in part.vetoed],
        )
    logger.error("task %s: its retry was refused", rows[0].id, exc_info=error, extra=log_extra(rows[0]))
    return _Attempted(0, [], list(rows))


def _postpone(rows: QuerySet[TaskRecord], records: Sequence[TaskRecord], seconds: float, **changes: Any) -> None:
    """Have RETRYING tasks retried later, and change other columns with it, in those of the rows that are theirs."""
    changes["retry_at"] = database_clock.now() + timedelta(seconds=seconds)
    rows.filter(id__in=[record.id for record in records]).update(**changes)
    for record in records:
        for name, value in changes.items():
            setattr(record, name, value)
