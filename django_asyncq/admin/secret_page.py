"""The page that shows the values of a task which its own page masks: by POST, and noted in the history of the task.

Browsers do not keep it: Django sends `Cache-Control: no-store` with every page of the admin.
"""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote, unquote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.translation import gettext as _

from ..masking import masker_of
from ..models import TaskRecord, TaskState
from . import display, history
from .code import known_task
from .pages import paths, render_page, url_of
from .permissions import only_post, requires

NOTED = "Secret values shown."


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the address of the page."""
    return paths(model_admin, {"secrets": secrets_view}, of_object=True)


def has_secret_arguments(record: TaskRecord) -> bool:
    """Whether a value is masked among the arguments of a task."""
    known_task(record.name)  # loads what the code declares
    masker = masker_of(record)
    shown: tuple[Any, Any] = (masker.positional(record.args), masker.keyword(record.kwargs))
    return shown != (record.args, record.kwargs)


@only_post
@requires("view_taskrecord", "view_payload")
def secrets_view(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> HttpResponse:
    """Show what a task was called with, what it returned and how it failed, with nothing masked."""
    record: TaskRecord | None = model_admin.get_object(request, unquote(object_id))
    if record is None:
        messages.warning(request, _("This task no longer exists."))
        return HttpResponseRedirect(url_of(model_admin, "changelist"))
    history.note_tasks(request, [record], NOTED)
    parts = [
        (_("Positional"), _json(record.args)),
        (_("Keyword"), _json(record.kwargs)),
    ]
    if record.state == TaskState.SUCCEEDED:
        parts.append((_("Return value"), _json(record.return_value)))
    if record.headers:
        parts.append((_("Headers"), _json(record.headers)))
    if record.progress:
        parts.append((_("Progress"), _json(record.progress)))
    for error in reversed(record.errors if isinstance(record.errors, list) else []):
        if isinstance(error, dict):
            line = display.error_line(str(error.get("exception", "")), str(error.get("message", "")))
            parts.append((_("Error"), f"{line}\n\n{error.get('traceback') or ''}".rstrip()))
            break
    context = {
        "parts": [(title, display.excerpt(text, whole=True)) for title, text in parts],
        "back": url_of(model_admin, "change", quote(record.pk)),
    }
    title = _("Secret values of %(task)s") % {"task": record}
    return render_page(model_admin, request, "secrets.html", title, context)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
