"""Write what a person did to the admin's history (`LogEntry`): on the task, or on what else was changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest

from ..models import TaskRecord
from ..storage.routing import writing_database

# Above that, one entry names the number: a history of a thousand equal lines helps nobody.
MOST_ENTRIES = 100


def note_tasks(request: HttpRequest, records: Collection[TaskRecord], text: str) -> None:
    """Write an entry to the history of each task; of more than 100 one entry that counts them. text: "Retried."."""
    if not records:
        return
    if len(records) > MOST_ENTRIES:
        note(request, TaskRecord, f"{len(records):,} tasks", text)
        return
    user: Any = request.user
    entries = LogEntry.objects.db_manager(writing_database(LogEntry))
    entries.log_actions(user_id=user.pk, queryset=list(records), action_flag=CHANGE, change_message=text)


def note(request: HttpRequest, model: type[Model], what: str, text: str, *, id: str | None = None) -> None:
    """Write an entry about something of a model. what: what the entry names. id: of its row, for its History page."""
    user: Any = request.user
    database = writing_database(LogEntry)
    types = ContentType.objects.db_manager(database)
    LogEntry.objects.using(database).create(
        user_id=user.pk,
        content_type_id=types.get_for_model(model).pk,
        object_id=id,
        object_repr=what[:200],
        action_flag=CHANGE,
        change_message=text,
    )
