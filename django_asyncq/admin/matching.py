"""Which tasks a number, its link, the question of a button and the action are about: one value makes all four.

Its moments are resolved when it is made, so that a second click within a second is about the same tasks, and what has
failed since a person looked at a number is in none of the four.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from ..exceptions import InvalidOption
from ..models import BulkKind
from ..storage import database_clock
from ..storage.matching import KEYS, checked
from .base import Text, aware, has_right, moment_text
from .filters import LABELS, NAMES, EnqueuedFilter, ReasonFilter, StateFilter

# The permission that each kind of action needs.
PERMISSIONS = {
    BulkKind.RETRY: "retry_task",
    BulkKind.CANCEL: "cancel_task",
    BulkKind.DELETE: "delete_taskrecord",
}
KEY_OF = {NAMES.get(key, key): key for key in KEYS if key != "ids"}
# Words, of which an address has several with a comma between them.
WORDS = {"state", "reason"}
# What is in the address, and filters nothing.
NO_FILTERS = {"p", "o", "e", "all", "before", "after", "_changelist_filters", "kind", "counted"}
# The moment behind which no task is meant, by the kind of the action.
UNTIL = {
    BulkKind.RETRY: "finished_until",
    BulkKind.CANCEL: "enqueued_until",
    BulkKind.DELETE: "finished_until",
}
MOST_VALUES = 10


@dataclass(frozen=True)
class Matching:
    """Which tasks. keys: as `storage.matching.KEYS` has them; times are aware."""

    keys: Mapping[str, Any]

    @classmethod
    def of(cls, values: QueryDict) -> Matching | None:
        """Read an address; None when something in it is no filter of an action."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            if name in NO_FILTERS or not value:
                continue
            if (key := KEY_OF.get(name)) is not None:
                found[key] = str(value).split(",") if key in WORDS else value
            elif name == "within" and value in EnqueuedFilter.spans:
                found["enqueued_since"] = aware(database_clock.now()) - EnqueuedFilter.spans[str(value)]
            else:
                return None
        return None if "stuck" in found.get("state", ()) else cls(found)

    def until(self, kind: BulkKind, moment: datetime) -> Matching:
        """Leave out what comes later than a moment, unless an earlier one is in it."""
        return replace(self, keys={UNTIL[kind]: moment, **self.keys})

    @property
    def query(self) -> str:
        """The query of an address: of the list, which shows these tasks, and of an action on them."""
        return f"?{urlencode({NAMES.get(key, key): _as_text(value) for key, value in self.keys.items()})}"

    def url_of_action(self, site: str, kind: BulkKind) -> str:
        """Return the address of the page that asks before an action on these tasks starts. site: its name."""
        return f"{reverse('admin:django_asyncq_taskrecord_bulk', current_app=site)}{self.query}&kind={kind.value}"

    def suits(self, kind: str) -> bool:
        """Whether an action of this kind takes such tasks."""
        try:
            checked(kind, self.keys)
        except InvalidOption:
            return False
        return True


def _as_text(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return ",".join(value) if isinstance(value, list) else str(value)


def links_of(request: HttpRequest, changelist: Any) -> dict[str, Any]:
    """Return what the template shows above a list: links for what the user may do, or why nothing is offered."""
    if not any(has_right(request, permission) for permission in PERMISSIONS.values()):
        return {}
    if not changelist.has_active_filters and not changelist.query:
        return {}
    matching = Matching.of(request.GET)
    if matching is None:
        return {"why_not": _("To change everything that matches, filter without a search, a worker or Stuck.")}
    texts = {
        BulkKind.RETRY: pgettext("all tasks that match", "Retry…"),
        BulkKind.CANCEL: pgettext("all tasks that match", "Cancel…"),
        BulkKind.DELETE: pgettext("all tasks that match", "Delete…"),
    }
    kinds = [kind for kind in texts if has_right(request, PERMISSIONS[kind]) and matching.suits(kind)]
    now, site = aware(database_clock.now()), changelist.model_admin.admin_site.name
    return {
        "links": [{"text": texts[kind], "url": matching.until(kind, now).url_of_action(site, kind)} for kind in kinds]
    }


def in_words(matching: Mapping[str, Any]) -> list[str]:
    """Return a filter as texts such as "queue: mail", in the order of its keys. matching: of `checked`, or of a row."""
    text = _("%(what)s: %(values)s")
    return [text % {"what": LABELS.get(key, key), "values": _values(key, value)} for key, value in matching.items()]


def _values(key: str, value: Any) -> str:
    if key.endswith(("_since", "_until")):
        return moment_text(str(value))
    values = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    words: dict[str, Mapping[str, Text]] = {"state": StateFilter.choices_of, "reason": ReasonFilter.choices_of}
    values = [str(words.get(key, {}).get(each, each)) for each in values]
    return ", ".join(values[:MOST_VALUES]) + (" …" if len(values) > MOST_VALUES else "")
