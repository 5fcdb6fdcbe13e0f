"""The filter of an action on many tasks: a dictionary that can be stored, checked before anything is written.

Each key narrows the choice. The kind of the action says which states may be chosen: a retry takes tasks that failed for
good, a cancel those that have not finished, a deletion those that have.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sized
from datetime import UTC, datetime
from functools import partial, reduce
from operator import and_, or_
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db.models import Case, CharField, Count, F, Max, Min, Q, When
from django.db.models.functions import Cast
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from ..core.names import lowest_uuid7_at
from ..exceptions import InvalidOption
from ..models import BulkKind, FailureReason, TaskRecord, TaskRecordQuerySet, TaskState
from ..models.tasks import of_gates
from .routing import as_check, rows_of
from .walking import LOWEST_ID

MOST_IDS = 1000
MOST_VALUES = 100
MOST_CHARACTERS = 200

STATES = {
    "queued": Q(state=TaskState.QUEUED),
    "running": Q(state=TaskState.RUNNING),
    "succeeded": Q(state=TaskState.SUCCEEDED),
    "failed": Q(state=TaskState.FAILED, retry_at=None),
    "retrying": Q(state=TaskState.FAILED, retry_at__isnull=False),
}
# Which states each kind takes.
STATES_OF: dict[str, tuple[str, ...]] = {
    BulkKind.RETRY: ("failed",),
    BulkKind.CANCEL: ("queued", "running", "retrying"),
    BulkKind.DELETE: ("succeeded", "failed"),
}
REASONS = {reason.name.lower(): reason for reason in FailureReason if reason is not FailureReason.NONE}


def checked(kind: str, matching: Mapping[str, Any]) -> dict[str, Any]:
    """Return a filter in its one form, which JSON can hold; two filters that choose the same way have the same form.

    Raises: InvalidOption, for the kind too; the message names the key and the remedy.
    """
    if kind not in STATES_OF:
        raise InvalidOption(f"no action on many tasks is called {kind!r}: give one of {', '.join(STATES_OF)}")
    if not isinstance(matching, Mapping):
        raise InvalidOption(f"the filter must be a dictionary, not {type(matching).__qualname__}")
    if not matching:
        raise InvalidOption(f"the filter is empty: give at least one key, such as state={STATES_OF[kind][0]!r}")
    if unknown := sorted(str(key) for key in matching if key not in KEYS):
        raise InvalidOption(f"no filter is called {', '.join(unknown)}: the keys are {', '.join(KEYS)}")
    found = {key: KEYS[key].read(key, value) for key, value in matching.items()}
    found.setdefault("state", sorted(STATES_OF[kind]))
    if wrong := sorted(set(found["state"]) - set(STATES_OF[kind])):
        takes = " or ".join(STATES_OF[kind])
        raise InvalidOption(f"a {kind} takes tasks that are {takes}, not {' or '.join(wrong)}: correct state")
    if kind == BulkKind.CANCEL and (wrong := sorted(key for key in found if key.startswith("finished_"))):
        raise InvalidOption(f"a cancel takes tasks that have not finished: remove {' and '.join(wrong)}")
    return {key: found[key] for key in KEYS if key in found}


def rows_matching(found: Mapping[str, Any]) -> TaskRecordQuerySet:
    """Return the tasks that a filter chooses. found: of `checked`, perhaps from a row.

    Raises: InvalidOption when it is not.
    """
    rows: TaskRecordQuerySet = rows_of(TaskRecord)
    for key, condition in _conditions(found).items():
        rows = rows.filter(as_check(condition) if key == "state" and "ids" in found else condition)
    # The index of gates holds no other rows.
    return rows.at_gate() if "gate" in found else rows


def _conditions(found: Mapping[str, Any]) -> dict[str, Q]:
    try:
        # A row without states would choose every task.
        return {key: KEYS[key].condition(value) for key, value in {"state": found["state"], **found}.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidOption(f"the filter of the row cannot be read: {error!r}") from error


# --- count what no index leads to, a part at a time

# With one of these an index leads to the tasks; so it does to those that have not finished, and to those that failed.
INDEXED = ("ids", "batch_id", "workflow_id", "name", "last_exception", "reason", "gate")
ROWS_PER_PART = 50_000


class Counted(NamedTuple):
    """How many tasks match up to one of them. first: the first of them. behind: the last looked at; None: all were."""

    total: int = 0
    first: UUID | None = None
    behind: UUID | None = LOWEST_ID


def is_counted_in_parts(found: Mapping[str, Any]) -> bool:
    """Whether tasks of a filter can only be counted by reading all rows: that takes seconds beside millions."""
    return "succeeded" in found["state"] and not any(key in found for key in INDEXED)


def count_on(found: Mapping[str, Any], counted: Counted, seconds: float) -> Counted:
    """Count on along the ids for some seconds. found: of `checked`. Raises: InvalidOption, django.db.Error."""
    until, condition = time.monotonic() + seconds, reduce(and_, _conditions(found).values())
    while counted.behind is not None:
        counted = _with_next_part(condition, counted, counted.behind)
        if time.monotonic() >= until:
            break
    return counted


def _with_next_part(condition: Q, counted: Counted, behind: UUID) -> Counted:
    part = rows_of(TaskRecord).filter(id__gt=behind).order_by("id").annotate(text=Cast("id", CharField()))
    part = part.annotate(hit=Case(When(condition, then=F("text")), default=None, output_field=CharField()))
    # An aggregate of a slice: the database reads so many rows and no more.
    seen = part.values("text", "hit")[:ROWS_PER_PART].aggregate(
        rows=Count("text"), total=Count("hit"), first=Min("hit"), last=Max("text")
    )
    first = counted.first or (UUID(seen["first"]) if seen["first"] else None)
    return Counted(counted.total + seen["total"], first, UUID(seen["last"]) if seen["rows"] == ROWS_PER_PART else None)


# --- one key each


def _words(known: Mapping[str, Any], key: str, value: Any) -> list[str]:
    words = _texts(key, value)
    if wrong := [word for word in words if word not in known]:
        raise InvalidOption(f"{key} knows no {wrong[0]!r}: give one or some of {', '.join(known)}")
    return words


def _texts(key: str, value: Any) -> list[str]:
    values = _values(key, value, str, MOST_VALUES)
    if not all(isinstance(each, str) for each in values):
        raise InvalidOption(f"{key} takes a text or a list of texts")
    if not all(1 <= len(each) <= MOST_CHARACTERS and each.isprintable() for each in values):
        raise InvalidOption(f"{key} takes texts of 1 to {MOST_CHARACTERS} printable characters")
    return sorted({str(each) for each in values})


def _ids(key: str, value: Any) -> list[str]:
    try:
        return sorted({str(uuid.UUID(str(each))) for each in _values(key, value, (str, uuid.UUID), MOST_IDS)})
    except ValueError as error:
        raise InvalidOption(f"{key} takes ids of tasks, such as {uuid.UUID(int=1)}: {error}") from error


def _values(key: str, value: Any, one: type | tuple[type, ...], most: int) -> list[Any]:
    """Return a value as a list. one: the types of a value that stands alone. most: how long the list may be."""
    values = [value] if isinstance(value, one) else value
    if not isinstance(values, list | tuple | set | frozenset) or not 1 <= len(values) <= most:
        given = f"{len(values):,}" if isinstance(values, Sized) else type(value).__qualname__
        raise InvalidOption(f"{key} takes one value or a list of 1 to {most:,}, not {given}")
    return list(values)


def _moment(key: str, value: Any) -> str:
    try:
        moment = parse_datetime(value) if isinstance(value, str) else value
    except ValueError:
        moment = None
    if not isinstance(moment, datetime) or timezone.is_naive(moment):
        raise InvalidOption(
            f"{key} takes a time with its zone, as a datetime or a text such as 2026-01-31T12:00:00+00:00"
        )
    try:
        return moment.astimezone(UTC).isoformat()
    except OverflowError as error:
        raise InvalidOption(f"{key} is outside the calendar: give a later or an earlier time") from error


def _stored(moment: datetime) -> datetime:
    """Return a time as the project's rows have it: without a zone where Django uses none."""
    return moment if settings.USE_TZ else timezone.make_naive(moment)


class Key(NamedTuple):
    """One key of a filter. read: checks its name and value, and returns the value in its one form."""

    read: Callable[[str, Any], Any]
    condition: Callable[[Any], Q]


def _text(key: str) -> Key:
    return Key(_texts, lambda texts: Q(**{f"{key}__in": texts}))


def _time(lookup: str, bound: Callable[[datetime], Any]) -> Key:
    return Key(_moment, lambda text: Q(**{lookup: bound(datetime.fromisoformat(text))}))


# No index is on the time of the enqueue, but ids rise with it.
KEYS = {
    "state": Key(partial(_words, STATES), lambda words: reduce(or_, (STATES[word] for word in words))),
    "reason": Key(partial(_words, REASONS), lambda words: Q(reason__in=[REASONS[word] for word in words])),
    **{key: _text(key) for key in ("name", "queue_name", "backend", "last_exception", "group")},
    "gate": Key(_texts, of_gates),
    "batch_id": Key(_ids, lambda ids: Q(batch_id__in=[uuid.UUID(id) for id in ids])),
    "workflow_id": Key(_ids, lambda ids: Q(workflow_id__in=[uuid.UUID(id) for id in ids])),
    "enqueued_since": _time("id__gte", lowest_uuid7_at),
    "enqueued_until": _time("id__lt", lowest_uuid7_at),
    "finished_since": _time("finished_at__gte", _stored),
    "finished_until": _time("finished_at__lt", _stored),
    "ids": Key(_ids, lambda ids: Q(id__in=[uuid.UUID(id) for id in ids])),
}
