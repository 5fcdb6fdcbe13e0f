"""Tasks that wait for a slot of their gate as rows alone: QUEUED with the reason GATE_FULL.

Such a task holds no slot and has no entry among those that workers take. The line of a gate is in Redis (`gates`) and
can be rebuilt from the rows at any time. The leader asks the gate for those that are next, as soon as a slot is free.
A delayed one waits for its time in asynq's retry set: what is in it moves only when its row has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import Q

from .. import gates
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import as_check, rows_of, transaction_of, writing_database
from .base import CommitHook, update_waiting
from .dispatching import dispatch

WAITS = Q(state=TaskState.QUEUED, reason=FailureReason.GATE_FULL)


class Let(NamedTuple):
    """What became of tasks that waited. admitted: their ids. left: the tasks that go on waiting, perhaps elsewhere."""

    admitted: set[UUID]
    left: list[TaskRecord]


class Dispatched(CommitHook):
    """Pushes the tasks that a transaction has let in."""

    def follow_up(self) -> None:
        dispatch(self.records, again=True)


def let_in(ids: Collection[UUID]) -> Let:
    """Ask their gates for slots for tasks that wait, and queue those that get one.

    | check    | the row still waits; it is locked. The gate gives slots in the order of its line          |
    | row      | QUEUED stays QUEUED; the reason is none. What another of its gates refuses stands there   |
    | Redis    | after the commit: pending. The others stay in the line, or are in that of the other gate  |
    | announce | nothing: the state is the same                                                            |

    If we die before the commit, the audit takes the slots back, and tasks into their line; after it, the reconciler
    pushes the rows.
    Raises: GateUnavailable, django.db.Error; nothing is changed then.
    """
    before: list[TaskRecord] = []
    try:
        with transaction_of(TaskRecord):
            is_due = Q(retry_at=None) | Q(retry_at__lte=database_clock.now())
            waiting = rows_of(TaskRecord).filter(as_check(WAITS & is_due))
            records = list(waiting.filter(id__in=ids).select_for_update().order_by("id"))
            lost = gates.confirm(records, again=True)
            admitted = [record for record in records if record.id not in lost]
            before = list(map(copy.copy, admitted))
            left = [record for record in records if record.id in lost]
            if admitted:
                rows = waiting.filter(id__in=[record.id for record in admitted])
                rows.update(reason=FailureReason.NONE, retry_at=None)
            parked = [record for record in left if record.retry_at is not None]
            if changed := [record for record in left if record.is_moved or record.retry_at is not None]:
                update_waiting(waiting, changed, retry_at=None)
            for record in admitted:
                record.reason = FailureReason.NONE
                # Its time has come: nobody has to ask for it again.
                record.run_after = None
            for record in [*admitted, *parked]:
                record.retry_at = None
            if admitted:
                connection = connections[writing_database(TaskRecord)]
                hook = Dispatched.of_transaction(connection)
                hook.records.extend(admitted)
                hook.register(connection)
    except BaseException:
        gates.give_back(before)
        raise
    return Let({record.id for record in admitted}, left)
