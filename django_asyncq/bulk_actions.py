"""Retry, cancel or delete every task that matches a filter: start such an action, pause it, stop it.

A row says what is to be done; the leader of the fleet does it, page by page (`maintenance.bulk`). So an action of a
million tasks takes no request, and survives restarts of everything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import F, QuerySet

from . import conf
from .definitions.payload import storable_text
from .exceptions import InvalidOption
from .models import BulkAction, BulkKind, BulkState, TaskRecord, TaskRecordQuerySet
from .storage import database_clock
from .storage.isolation import MOST_AT_ONCE, page_of
from .storage.matching import checked, rows_matching
from .storage.routing import rows_of, writing_database

__all__ = ["BulkPreview", "action_of", "pause_bulk", "preview", "resume_bulk", "start_bulk", "stop_bulk"]

EXAMPLES = 5
MOST_PER_SECOND = 10_000
BY_CHARACTERS = 150
# The action with this filter may finish between the look and the INSERT.
MOST_LOOKS = 3
LIVE = (BulkState.RUNNING, BulkState.PAUSED)


class BulkPreview(NamedTuple):
    """What an action would be about. total: of all tasks that match now. examples: the oldest of them, at most 5."""

    total: int
    examples: list[TaskRecord]


def preview(kind: str, matching: Mapping[str, Any]) -> BulkPreview:
    """Return how many tasks an action would be about, and some of them; nothing is written.

    kind, matching: as for `start_bulk`. Raises: InvalidOption.
    """
    rows = rows_matching(checked(kind, matching))
    return BulkPreview(rows.count(), list(rows.order_by("id")[:EXAMPLES]))


def start_bulk(
    kind: str, matching: Mapping[str, Any], *, by: Any = "", rows_per_second: int | None = None
) -> BulkAction:
    """Start an action on every task that matches; the leader of the fleet does it, at the given pace.

    kind: "retry", "cancel" or "delete". matching: a dictionary of at least one of `state`, `reason`, `name`,
    `queue_name`, `backend`, `gate`, `last_exception`, `group` (a text or a list of texts each), `enqueued_since`,
    `enqueued_until`, `finished_since`, `finished_until` (datetimes), and `ids` (at most 1,000). by: a user, or a text.
    rows_per_second: default BULK_ROWS_PER_SECOND.
    Tasks that are enqueued later are not touched. While an action with this kind and filter is not over, it is
    returned, and none is started.
    Raises: InvalidOption; nothing is written then.
    """
    found = checked(kind, matching)
    pace = conf.current().bulk_rows_per_second if rows_per_second is None else rows_per_second
    if isinstance(pace, bool) or not isinstance(pace, int) or not 1 <= pace <= MOST_PER_SECOND:
        raise InvalidOption(f"rows_per_second takes a whole number from 1 to {MOST_PER_SECOND:,}, not {pace!r}")
    name = by.get_username() if hasattr(by, "get_username") else by
    if not isinstance(name, str):
        raise InvalidOption(f"start_bulk(by=…) takes a user or a text, not {type(by).__qualname__}")
    key = hashlib.sha256(json.dumps([str(kind), found], sort_keys=True).encode()).hexdigest()
    for _ in range(MOST_LOOKS):
        same = rows_of(BulkAction).filter(key=key)
        if action := same.first():
            return action
        new = BulkAction(kind=BulkKind(kind), matching=found, rows_per_second=pace, key=key)
        new.created_by = storable_text(name[:BY_CHARACTERS], BY_CHARACTERS)
        _count(new)
        # Of two at the same time, the database takes one.
        rows_of(BulkAction).bulk_create([new], ignore_conflicts=True)
        if action := same.first():
            return action
    raise InvalidOption("actions with this filter start and finish at this moment: start it again")


def _count(action: BulkAction) -> None:
    """Set which tasks a new action may touch, and how many they are."""
    # Not `first()`: on SQLite an id may be a text that is none.
    newest = page_of(rows_of(TaskRecord).order_by("-id"), size=MOST_AT_ONCE + 1)
    action.newest_id = newest[0][0] if newest else None
    action.created_at = database_clock.now(writing_database(BulkAction))
    action.total = rows_of_action(action).count()


def rows_of_action(action: BulkAction) -> TaskRecordQuerySet:
    """Return the tasks of an action that match now. Raises: InvalidOption when the filter of its row cannot be read.

    A task that has finished since the action was made is not among them, so one that fails again is retried once.
    """
    if action.newest_id is None:
        return rows_of(TaskRecord).none()
    rows = rows_matching(action.matching).filter(id__lte=action.newest_id)
    if action.kind == BulkKind.CANCEL:
        return rows
    return rows.filter(finished_at__lte=action.created_at)


def pause_bulk(action: BulkAction | UUID | str) -> BulkAction:
    """Pause an action: no further page of it is begun. action: the row, or its id.

    Raises: InvalidOption when there is none with this id, or it is over.
    """
    return _change(action, "paused", state=BulkState.PAUSED)


def resume_bulk(action: BulkAction | UUID | str) -> BulkAction:
    """Continue a paused action behind the last task that it has looked at. Raises: as `pause_bulk`."""
    return _change(action, "resumed", state=BulkState.RUNNING)


def stop_bulk(action: BulkAction | UUID | str) -> BulkAction:
    """Stop an action for good. What it has changed stays; tasks that wait at a full gate count as refused.

    Raises: as `pause_bulk`.
    """
    # `refused` comes first: MySQL assigns from the left, and uses the new values.
    return _change(
        action,
        "stopped",
        refused=F("refused") + F("left"),
        left=0,
        state=BulkState.STOPPED,
        key=None,
        waiting_at={},
        finished_at=database_clock.now(writing_database(BulkAction)),
    )


def action_of(id: UUID | str) -> BulkAction:
    """Return the action with this id. Raises: InvalidOption when there is none."""
    found = _rows_of(id).first()
    if found is None:
        raise _no_action(id)
    return found


def _no_action(id: UUID | str) -> InvalidOption:
    return InvalidOption(f"there is no action {id}: `manage.py asyncq bulk list` shows all")


def _change(action: BulkAction | UUID | str, done: str, **changes: Any) -> BulkAction:
    rows = _rows_of(action)
    changed = rows.filter(state__in=LIVE).update(**changes)
    found = rows.first()
    if found is None:
        raise _no_action(_id_of(action))
    if not changed:
        raise InvalidOption(f"the action {found.pk} is over ({found.state}), so it cannot be {done}: start a new one")
    return found


def _rows_of(action: BulkAction | UUID | str) -> QuerySet[BulkAction]:
    try:
        return rows_of(BulkAction).filter(pk=UUID(str(_id_of(action))))
    except ValueError as error:
        raise InvalidOption(
            f"{_id_of(action)!r} is no id of an action: `manage.py asyncq bulk list` shows all"
        ) from error


def _id_of(action: BulkAction | UUID | str) -> Any:
    return action.pk if isinstance(action, BulkAction) else action
