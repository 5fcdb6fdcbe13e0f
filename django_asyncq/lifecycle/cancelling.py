"""Cancel tasks: those that wait are closed, those that run are asked to stop."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections

from .. import failpoints
from ..definitions.payload import MESSAGE_CHARACTERS, storable_text
from ..exceptions import InvalidOption, TaskCancelled
from ..models import TaskRecord, TaskRecordQuerySet, TaskState
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of, writing_database
from ..storage.row_conditions import as_check
from .closing import ROWS_PER_PAGE, Stop, close

BY_CHARACTERS = 150


class Cancelled(NamedTuple):
    """How many tasks a cancel has closed, how many run and were asked to stop, and how many had finished before."""

    cancelled: int = 0
    asked: int = 0
    over: int = 0


def cancel_rows(rows: TaskRecordQuerySet, *, by: Any = "", reason: str = "") -> Cancelled:
    """Do what `cancel` does for the rows of a query, page by page. by: a user, or a text.

    Raises: InvalidOption for a `by` or a reason of another type; nothing is written then.
    """
    name = by.get_username() if hasattr(by, "get_username") else by
    rows = rows.using(writing_database(TaskRecord))
    total = Cancelled()
    for page in _pages(rows):
        total = Cancelled(*map(sum, zip(total, cancel(page, by=name, reason=reason), strict=True)))
    return total


def _pages(rows: TaskRecordQuerySet) -> Iterator[list[UUID]]:
    if rows.query.is_sliced:
        ids = sorted(rows.values_list("id", flat=True))
        yield from (ids[start : start + ROWS_PER_PAGE] for start in range(0, len(ids), ROWS_PER_PAGE))
        return
    ordered = rows.order_by("id").values_list("id", flat=True)
    page = list(ordered[:ROWS_PER_PAGE])
    while page:
        yield page
        page = list(ordered.filter(id__gt=page[-1])[:ROWS_PER_PAGE]) if len(page) == ROWS_PER_PAGE else []


def cancel(ids: Collection[UUID], *, by: str = "", reason: str = "", backend: str = "") -> Cancelled:
    """Cancel tasks, in the caller's transaction; ids without a row are ignored.

    ids: at most 500. by: who cancels. reason: for the task's error. backend: only tasks of this alias; "" for all.

    | check    | the rows are locked, in the order of their ids                                            |
    | row      | QUEUED or RETRYING → FAILED, as `close` does; RUNNING: it notes that a cancel was asked for; |
    |          | a task that another program runs is FAILED too                                            |
    | Redis    | after the commit: as `close` does; the workers of running tasks are asked to stop         |
    | announce | as `close` does; a task that runs is announced when it has finished                       |

    A batch is cancelled with its members. A cancel of a member that runs is noted; its batch is asked to stop once
    all members are cancelled.

    If we die after the commit, the reconciler asks the workers again.
    Raises: InvalidOption for another type than text; nothing is written then.
    """
    for option, value in (("by", by), ("reason", reason)):
        if not isinstance(value, str):
            raise InvalidOption(f"cancel({option}=…) takes a text, not {type(value).__qualname__}")
    text = ": ".join(filter(None, (by, reason)))
    now = database_clock.now()
    changes = {"cancel_requested_at": now, "cancelled_by": storable_text(text[:BY_CHARACTERS], BY_CHARACTERS)}
    with transaction_of(TaskRecord):
        rows = rows_of(TaskRecord).filter(id__in=with_members(ids))
        # In one order, so that two cancels of the same tasks wait for each other instead of deadlocking.
        locked = (rows.filter(backend=backend) if backend else rows).select_for_update().order_by("id")
        records = list(locked)
        # No worker of ours reports the end of what another program runs: it is closed at once.
        running = [record for record in records if record.state == TaskState.RUNNING and not record.is_remote]
        waiting = [record for record in records if not record.is_final and record not in running]
        error = TaskCancelled(storable_text(text, MESSAGE_CHARACTERS) or "it was cancelled")
        close(waiting, error, now, **changes)
        if running:
            # The row keeps the name of the first person. A repeated cancel asks the worker again.
            new = [record.id for record in running if record.cancel_requested_at is None]
            rows.filter(as_check(state=TaskState.RUNNING), id__in=new).update(**changes)
            connection = connections[writing_database(TaskRecord)]
            hook = Stop.of_transaction(connection)
            hook.running.extend([*running, *_batches_to_stop(running, changes)])
            hook.register(connection)
        failpoints.reach("cancel.rows_written")
    return Cancelled(len(waiting), len(running), len(records) - len(waiting) - len(running))


def with_members(ids: Collection[UUID]) -> set[UUID]:
    """Return the ids of tasks, and of the members of those that are batches."""
    rows = rows_of(TaskRecord)
    of_batches = rows.filter(as_check(waits_for__isnull=False, finished_at__isnull=True), id__in=ids)
    found = list(of_batches.values_list("id", flat=True))
    if not found:
        return set(ids)
    members = rows.filter(as_check(finished_at__isnull=True, retry_at__isnull=True), batch_id__in=found)
    return {*ids, *members.values_list("id", flat=True)}


def _batches_to_stop(running: Sequence[TaskRecord], changes: Mapping[str, Any]) -> list[TaskRecord]:
    """Note a cancel in the rows of batches all of whose running members were cancelled; return those rows."""
    ids = {record.batch_id for record in running if record.batch_id is not None}
    if not ids:
        return []
    rows = rows_of(TaskRecord)
    live = as_check(state__in=(TaskState.QUEUED, TaskState.RUNNING), cancel_requested_at__isnull=True)
    ids -= set(rows.filter(live, batch_id__in=ids).values_list("batch_id", flat=True))
    found = rows.filter(as_check(state=TaskState.RUNNING), id__in=ids)
    found.filter(as_check(cancel_requested_at__isnull=True)).update(**changes)
    return list(found)
