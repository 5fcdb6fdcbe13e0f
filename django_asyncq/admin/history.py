"""What people did, in the admin's history (`LogEntry`): on the task, or on what else was changed.

It is written in English, as plain text that every page of Django's and every other program reads; our pages show it in
the language of their reader.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest
from django.utils.translation import gettext, gettext_noop

from ..models import TaskRecord
from ..storage.routing import writing_database

# Above that, one entry names the number: a history of a thousand equal lines helps nobody.
MOST_ENTRIES = 100


class Did(StrEnum):
    """All that is written, with the names of its values."""

    RETRIED = gettext_noop("Retried.")
    RUN_NOW = gettext_noop("Run now.")
    RUN_NOW_AS = gettext_noop("Run now: task %(task)s.")
    CANCELLED = gettext_noop("Cancelled.")
    CANCELLED_BECAUSE = gettext_noop("Cancelled: %(reason)s")
    SECRETS_SHOWN = gettext_noop("Secret values shown.")
    ENQUEUED = gettext_noop("Enqueued.")
    ENQUEUED_AGAIN_AS = gettext_noop("Enqueued again as %(task)s.")
    ENQUEUED_AGAIN_AFTER = gettext_noop("Enqueued again, after %(task)s.")
    ENQUEUED_ANEW_AS = gettext_noop("Enqueued with new arguments as %(task)s.")
    ENQUEUED_ANEW_AFTER = gettext_noop("Enqueued with new arguments, after %(task)s.")
    GOT_ARGUMENTS = gettext_noop("Got the arguments of a newer call.")
    GOT_ARGUMENTS_OF = gettext_noop("Got the new arguments of %(task)s.")
    RESCHEDULED = gettext_noop("Rescheduled: delay %(seconds)s s, priority %(priority)s.")
    STARTED = gettext_noop("Started: %(filter)s")
    STARTED_BECAUSE = gettext_noop("Started: %(filter)s. Reason: %(reason)s")
    STOPPED = gettext_noop("Stopped.")
    PAUSED = gettext_noop("Paused.")
    PAUSED_BECAUSE = gettext_noop("Paused: %(reason)s")
    RESUMED = gettext_noop("Resumed.")
    ENABLED = gettext_noop("Enabled.")
    DISABLED = gettext_noop("Disabled.")
    REPAIRED = gettext_noop("Repaired: %(added)s added, %(removed)s removed.")
    SLOT_RELEASED = gettext_noop("Released the slot of %(task)s.")
    FORGOTTEN = gettext_noop("Forgot %(count)s rejected messages.")
    ASKED_TO_STOP_TAKING = gettext_noop("Asked to take no more tasks.")
    LET_TAKE_AGAIN = gettext_noop("Let take tasks again.")


def note_tasks(request: HttpRequest, records: Collection[TaskRecord], did: Did, **values: Any) -> None:
    """Write an entry to the history of each task; of more than 100 one entry that counts them."""
    if len(records) > MOST_ENTRIES:
        note(request, TaskRecord, f"{len(records):,} tasks", did, **values)
    elif records:
        note_rows(request, list(records), did, **values)


def note_rows(request: HttpRequest, rows: list[Any], did: Did, **values: Any) -> None:
    """Write an entry to the history of each row."""
    user: Any = request.user
    entries = LogEntry.objects.db_manager(writing_database(LogEntry))
    entries.log_actions(user_id=user.pk, queryset=rows, action_flag=CHANGE, change_message=did % values)


def note(
    request: HttpRequest, model: type[Model], what: str, did: Did, *, row_id: str | None = None, **values: Any
) -> None:
    """Write an entry about something of a model. what: what the entry names. row_id: for the History page of a row."""
    user: Any = request.user
    database = writing_database(LogEntry)
    types = ContentType.objects.db_manager(database)
    LogEntry.objects.using(database).create(
        user_id=user.pk,
        content_type_id=types.get_for_model(model).pk,
        object_id=row_id,
        object_repr=what[:200],
        action_flag=CHANGE,
        change_message=did % values,
    )


def _pattern(did: Did) -> re.Pattern[str]:
    """Return what matches the texts that were written with a sentence; its groups are the values."""
    return re.compile(re.sub(r"%\\\((\w+)\\\)s", r"(?P<\1>.*)", re.escape(did)), re.DOTALL)


# The sentence with the most words of its own first: "Started: … Reason: …" is one of "Started: …" too.
PATTERNS = [
    (did, _pattern(did)) for did in sorted(Did, key=lambda did: len(re.sub(r"%\(\w+\)s", "", did)), reverse=True)
]


def in_readers_language(entry: LogEntry) -> str:
    """Return what an entry says, translated where one of our sentences was written."""
    text = str(entry.get_change_message())
    for did, pattern in PATTERNS:
        if found := pattern.fullmatch(text):
            return gettext(did) % found.groupdict()
    return text
