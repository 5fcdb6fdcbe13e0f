"""Which tasks an action on many tasks is about: a dictionary that can be stored, checked before anything is written.

Each key narrows the choice. The kind of the action says which states may be chosen: a retry takes tasks that failed for
good, a cancel those that have not finished, a deletion those that have.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import reduce
from operator import or_
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from ..definitions.names import lowest_uuid7_at
from ..exceptions import InvalidOption
from ..models import BulkKind, FailureReason, TaskRecord, TaskRecordQuerySet, TaskState
from .routing import rows_of
from .row_conditions import as_check

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
# Which states each kind takes, and why no others.
STATES_OF: dict[str, tuple[str, ...]] = {
    BulkKind.RETRY: ("failed",),
    BulkKind.CANCEL: ("queued", "running", "retrying"),
    BulkKind.DELETE: ("succeeded", "failed"),
}
REASONS = {reason.name.lower(): reason for reason in FailureReason if reason is not FailureReason.NONE}
TEXTS = ("name", "queue_name", "backend", "gate", "last_exception", "group")
MOMENTS = ("enqueued_since", "enqueued_until", "finished_since", "finished_until")


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
    if unknown := sorted(str(key) for key in matching if key not in READERS):
        raise InvalidOption(f"no filter is called {', '.join(unknown)}: the keys are {', '.join(READERS)}")
    found = {key: READERS[key](key, value) for key, value in matching.items()}
    found.setdefault("state", sorted(STATES_OF[kind]))
    if wrong := sorted(set(found["state"]) - set(STATES_OF[kind])):
        takes = " or ".join(STATES_OF[kind])
        raise InvalidOption(f"a {kind} takes tasks that are {takes}, not {' or '.join(wrong)}: correct state")
    if kind == BulkKind.CANCEL and (wrong := sorted(key for key in found if key.startswith("finished_"))):
        raise InvalidOption(f"a cancel takes tasks that have not finished: remove {' and '.join(wrong)}")
    return {key: found[key] for key in READERS if key in found}


def rows_matching(found: Mapping[str, Any]) -> TaskRecordQuerySet:
    """Return the tasks that a filter chooses. found: of `checked`, perhaps from a row.

    Raises: InvalidOption when it is not.
    """
    rows: TaskRecordQuerySet = rows_of(TaskRecord)
    try:
        states = reduce(or_, (STATES[word] for word in found["state"]))
        rows = rows.filter(as_check(states) if "ids" in found else states)
        for key in TEXTS:
            if key in found:
                rows = rows.filter(**{f"{key}__in": found[key]})
        if "gate" in found:
            # The index of gates holds no other rows.
            rows = rows.at_gate()
        if "reason" in found:
            rows = rows.filter(reason__in=[REASONS[word] for word in found["reason"]])
        if "ids" in found:
            rows = rows.filter(id__in=[uuid.UUID(id) for id in found["ids"]])
        return _within(rows, {key: datetime.fromisoformat(found[key]) for key in MOMENTS if key in found})
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidOption(f"the filter of the row cannot be read: {error!r}") from error


def _within(rows: TaskRecordQuerySet, moments: Mapping[str, datetime]) -> TaskRecordQuerySet:
    """Return the rows between some times. No index is on the time of the enqueue, but ids rise with it."""
    bounds: dict[str, Any] = {}
    for key, moment in moments.items():
        what, _, which = key.partition("_")
        column, value = ("id", lowest_uuid7_at(moment)) if what == "enqueued" else ("finished_at", _stored(moment))
        bounds[f"{column}__{'gte' if which == 'since' else 'lt'}"] = value
    return rows.filter(**bounds)


def _stored(moment: datetime) -> datetime:
    """Return a time as the project's rows have it: without a zone where Django uses none."""
    return moment if settings.USE_TZ else timezone.make_naive(moment)


# --- one key each


def _words_of(known: Mapping[str, Any]) -> Callable[[str, Any], list[str]]:
    def read(key: str, value: Any) -> list[str]:
        words = _texts(key, value)
        if wrong := [word for word in words if word not in known]:
            raise InvalidOption(f"{key} knows no {wrong[0]!r}: give one or some of {', '.join(known)}")
        return words

    return read


def _texts(key: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple | set | frozenset) or not all(isinstance(each, str) for each in values):
        raise InvalidOption(f"{key} takes a text or a list of texts, not {type(value).__qualname__}")
    if not 1 <= len(values) <= MOST_VALUES:
        raise InvalidOption(f"{key} takes 1 to {MOST_VALUES} values, not {len(values)}")
    for each in values:
        if not 1 <= len(each) <= MOST_CHARACTERS or not each.isprintable():
            raise InvalidOption(f"{key} takes texts of 1 to {MOST_CHARACTERS} printable characters")
    return sorted({str(each) for each in values})


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


def _ids(key: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str | uuid.UUID) else value
    if not isinstance(values, list | tuple | set | frozenset):
        raise InvalidOption(f"{key} takes a list of ids, not {type(value).__qualname__}")
    if not 1 <= len(values) <= MOST_IDS:
        raise InvalidOption(f"{key} takes 1 to {MOST_IDS:,} ids, not {len(values):,}; choose more tasks by other keys")
    try:
        return sorted({str(each if isinstance(each, uuid.UUID) else uuid.UUID(each)) for each in values})
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidOption(f"{key} takes ids of tasks, such as {uuid.UUID(int=1)}: {error}") from error


READERS: dict[str, Callable[[str, Any], Any]] = {
    "state": _words_of(STATES),
    "reason": _words_of(REASONS),
    **dict.fromkeys(TEXTS, _texts),
    **dict.fromkeys(MOMENTS, _moment),
    "ids": _ids,
}
