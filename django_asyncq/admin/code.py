"""Look up what the project's code declares: tasks, their parameters, and schedules.

The answers are those of this web process; a worker may run newer code.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any

from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from ..core import registry
from ..core.calls import called, passes_context
from ..core.guard import get_logger
from ..core.masking import masker_of
from ..core.redaction import mask_text
from ..core.schedules import declared_schedules
from ..exceptions import TaskNotRegistered
from ..models import TaskRecord, TaskState
from . import base, history
from .base import render_page, url_of
from .history import Did

logger = get_logger("django_asyncq.admin")

SIGNATURE_CHARACTERS = 80


def known_task(name: str) -> Any:
    """Return the task registered under this name, or None."""
    _load_once()
    try:
        return registry.registered(name)
    except TaskNotRegistered:
        return None


def known_names() -> list[str]:
    """Return the names of all registered tasks."""
    _load_once()
    return registry.registered_names()


def schedulable_names() -> list[str]:
    """Return the names of the tasks that people may schedule in the admin."""
    _load_once()
    return registry.schedulable_names()


def declared_schedule_names() -> set[str]:
    """Return the names of the schedules that the code declares."""
    _load_once()
    return {name for name, _declared in declared_schedules()}


def signature_text(task: Any) -> str:
    """Return a task's parameters, such as `(region, *, days=7)`, truncated, with secrets masked."""
    parameters = list(inspect.signature(called(task)).parameters.values())[1 if passes_context(task) else 0 :]
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = mask_text(str(inspect.Signature(bare)))
    return text if len(text) <= SIGNATURE_CHARACTERS else text[: SIGNATURE_CHARACTERS - 1] + "…"


def accepts_positional(task: Any, args: list[Any]) -> bool:
    """Whether the function accepts this number of positional arguments, regardless of keyword arguments."""
    context = [None] if passes_context(task) else []
    try:
        inspect.signature(called(task)).bind_partial(*context, *args)
    except TypeError:
        return False
    return True


@cache
def _load_once() -> None:
    """Import the `tasks` module of every app, because a web process may not have imported them yet."""
    try:
        registry.load_task_modules()
    except Exception:
        logger.exception(
            "cannot import a tasks module of the project, so some tasks will appear to be removed from the code"
        )


# --- The page that shows the values of a task which its own page masks: by POST, and noted in the history of the task.
#
# Browsers do not keep it: Django sends `Cache-Control: no-store` with every page of the admin.


def has_secret_arguments(record: TaskRecord) -> bool:
    """Whether a value is masked among the arguments of a task."""
    known_task(record.name)  # loads what the code declares
    masker = masker_of(record)
    shown: tuple[Any, Any] = (masker.positional(record.args), masker.keyword(record.kwargs))
    return shown != (record.args, record.kwargs)


def secrets(model_admin: ModelAdmin[Any], request: HttpRequest, record: TaskRecord) -> HttpResponse:
    """Show what a task was called with, what it returned and how it failed, with nothing masked."""
    history.note_tasks(request, [record], Did.SECRETS_SHOWN)
    values = [(_("Positional"), record.args), (_("Keyword"), record.kwargs)]
    if record.state == TaskState.SUCCEEDED:
        values.append((_("Return value"), record.return_value))
    values += [
        (title, value) for title, value in ((_("Headers"), record.headers), (_("Progress"), record.progress)) if value
    ]
    if record.checkpoint is not None:
        values.append((_("Checkpoint"), record.checkpoint))
    parts = [(title, json.dumps(value, indent=2, ensure_ascii=False)) for title, value in values]
    for error in reversed(record.errors if isinstance(record.errors, list) else []):
        if isinstance(error, dict):
            line = base.error_line(str(error.get("exception", "")), str(error.get("message", "")))
            parts.append((_("Error"), f"{line}\n\n{error.get('traceback') or ''}".rstrip()))
            break
    context = {
        "parts": [(title, base.excerpt(text, whole=True)) for title, text in parts],
        "back": url_of(model_admin, "change", quote(record.pk)),
    }
    title = _("Secret values of %(task)s") % {"task": record}
    return render_page(model_admin, request, "secrets.html", title, context)
