"""From the filters of the task list to an action on everything that matches, and to words that say what that is."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from django.http import HttpRequest
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from ..exceptions import InvalidOption
from ..models import BulkKind, FailureReason
from ..storage import database_clock
from ..storage.matching import checked
from .display import Text
from .filters import EnqueuedFilter
from .permissions import has_right

# The permission that each kind of action needs.
PERMISSIONS = {
    BulkKind.RETRY: "retry_task",
    BulkKind.CANCEL: "cancel_task",
    BulkKind.DELETE: "delete_taskrecord",
}
# Filters of the list, in its address, that an action knows under another name.
KEYS = {
    "state": "state",
    "reason": "reason",
    "error": "last_exception",
    "queue": "queue_name",
    "name": "name",
    "gate": "gate",
}
# What is in the address, and filters nothing.
NO_FILTERS = {"p", "o", "e", "all", "before", "after", "_changelist_filters", "kind"}
LABELS: dict[str, Text] = {
    "state": gettext_lazy("state"),
    "reason": gettext_lazy("reason of failure"),
    "name": gettext_lazy("task"),
    "queue_name": gettext_lazy("queue"),
    "backend": gettext_lazy("backend"),
    "gate": gettext_lazy("gate"),
    "last_exception": gettext_lazy("last error"),
    "group": gettext_lazy("group"),
    "enqueued_since": gettext_lazy("enqueued since"),
    "enqueued_until": gettext_lazy("enqueued before"),
    "finished_since": gettext_lazy("finished since"),
    "finished_until": gettext_lazy("finished before"),
    "ids": gettext_lazy("ids"),
}


class Link(NamedTuple):
    """A link to the page that asks before an action is started."""

    text: str
    url: str


def matching_of(request: HttpRequest) -> dict[str, Any] | None:
    """Return the filters of a list as an action's; None when the list is filtered by something that no action knows."""
    found: dict[str, Any] = {}
    for name, value in request.GET.items():
        if name in NO_FILTERS or not value:
            continue
        if name in KEYS:
            found[KEYS[name]] = value
        elif name == "within" and value in EnqueuedFilter.spans:
            found["enqueued_since"] = database_clock.now() - EnqueuedFilter.spans[value][0]
        else:
            return None
    if found.get("state") == "stuck":
        return None
    return found


def links_of(request: HttpRequest, changelist: Any) -> dict[str, Any]:
    """Return what the template shows above a list: links for what the user may do, or why nothing is offered."""
    if not any(has_right(request, permission) for permission in PERMISSIONS.values()):
        return {}
    if not changelist.has_active_filters and not changelist.query:
        return {}
    matching = matching_of(request)
    if matching is None:
        return {"why_not": _("To change everything that matches, filter without a search, a worker or Stuck.")}
    texts = {
        BulkKind.RETRY: pgettext("all tasks that match", "Retry…"),
        BulkKind.CANCEL: pgettext("all tasks that match", "Cancel…"),
        BulkKind.DELETE: pgettext("all tasks that match", "Delete…"),
    }
    base = reverse("admin:django_asyncq_taskrecord_bulk", current_app=changelist.model_admin.admin_site.name)
    links = [
        Link(text, f"{base}{changelist.get_query_string({'kind': kind.value})}")
        for kind, text in texts.items()
        if has_right(request, PERMISSIONS[kind]) and _is_possible(kind, matching)
    ]
    return {"links": links}


def _is_possible(kind: str, matching: Mapping[str, Any]) -> bool:
    try:
        checked(kind, matching)
    except InvalidOption:
        return False
    return True


def in_words(matching: Mapping[str, Any]) -> list[str]:
    """Return a filter as texts such as "queue: mail", in the order of its keys. matching: of `checked`, or of a row."""
    text = _("%(what)s: %(values)s")
    return [text % {"what": LABELS.get(key, key), "values": _values(key, value)} for key, value in matching.items()]


def _values(key: str, value: Any) -> str:
    if key.endswith(("_since", "_until")):
        return _moment(str(value))
    values = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if key == "state":
        words = state_words()
        values = [words.get(each, each) for each in values]
    if key == "reason":
        labels = {reason.name.lower(): str(reason.label) for reason in FailureReason}
        values = [labels.get(each, each) for each in values]
    return ", ".join(values[:MOST_VALUES]) + (" …" if len(values) > MOST_VALUES else "")


MOST_VALUES = 10


def state_words() -> dict[str, str]:
    """Return the states as the pages call them."""
    return {
        "queued": _("Queued"),
        "running": _("Running"),
        "retrying": _("Retrying"),
        "failed": _("Failed (final)"),
        "succeeded": _("Succeeded"),
    }


def _moment(text: str) -> str:
    try:
        return date_format(localtime(datetime.fromisoformat(text)), "Y-m-d H:i:s")
    except ValueError:
        return text
