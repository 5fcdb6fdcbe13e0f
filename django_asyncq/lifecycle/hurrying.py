"""Run delayed tasks now, because a person asks for it."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from django.db import connections

from .. import failpoints
from ..models import TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of, writing_database
from ..storage.row_conditions import as_check
from .dispatching import dispatch
from .on_commit import CommitHook


class Hurry(CommitHook):
    """Makes the delayed tasks pending whose time a transaction has removed."""

    def follow_up(self) -> None:
        failpoints.reach("hurry.committed")
        dispatch(self.records, again=True)


def hurry(ids: Collection[UUID]) -> list[UUID]:
    """Let delayed tasks run now; return the ids of those that were delayed.

    | check    | QUEUED with a `run_after` that has not come; the rows are locked, in the order of their ids |
    | row      | `run_after` is now; the state stays                                                         |
    | Redis    | after the commit: out of scheduled, into pending                                            |
    | announce | nothing: the state is the same                                                              |

    If we die after the commit, the entry becomes due at its former time, as if nothing had been asked for.
    """
    with transaction_of(TaskRecord):
        now = database_clock.now()
        rows = rows_of(TaskRecord).filter(as_check(state=TaskState.QUEUED, run_after__gt=now), id__in=ids)
        records = list(rows.select_for_update().order_by("id"))
        if not records:
            return []
        rows_of(TaskRecord).filter(id__in=[record.id for record in records]).update(run_after=now)
        for record in records:
            record.run_after = now
        connection = connections[writing_database(TaskRecord)]
        hook = Hurry.of_transaction(connection)
        hook.records.extend(records)
        hook.register(connection)
    return [record.id for record in records]
