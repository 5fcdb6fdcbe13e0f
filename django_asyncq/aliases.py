"""What the backends of the aliases in TASKS need, asked without making one: each thread has backends of its own.

A backend whose class says `uses_redis = False`, as the test kit's does, has rows and nothing in Redis: its tasks are
never pushed, and its gates are counted from the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol, TypeVar, cast

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string


class _OfAlias(Protocol):
    backend: str


# All that the tasks framework reads of an alias: that of Django 6.0 and 6.1, and the backport of 5.2.
KEYS = ("BACKEND", "QUEUES", "OPTIONS")

Record = TypeVar("Record", bound=_OfAlias)

_known: dict[str, bool] = {}


def uses_redis(alias: str) -> bool:
    """Whether tasks of an alias go through Redis; also True for an alias that TASKS does not name any more."""
    found = _known.get(alias)
    if found is None:
        found = _known[alias] = bool(getattr(backend_class(alias), "uses_redis", True))
    return found


def through_redis(records: Iterable[Record]) -> list[Record]:
    """Return the tasks of aliases that use Redis."""
    return [record for record in records if uses_redis(record.backend)]


def is_redis_used() -> bool:
    """Whether any alias in TASKS uses Redis. Django's own backends do not."""
    return any(getattr(backend_class(alias), "uses_redis", False) for alias in written_aliases())


@cache
def backend_class(alias: str) -> type | None:
    """Return the class of an alias's backend; None where TASKS names none that can be imported."""
    options = written_aliases().get(alias)
    try:
        return None if options is None else cast("type", import_string(options["BACKEND"]))
    except (ImportError, KeyError, TypeError):
        return None


def written_aliases() -> dict[str, Any]:
    """Return TASKS as the project has written it; an empty dictionary when there is none."""
    found = getattr(settings, "TASKS", {})
    return found if isinstance(found, dict) else {}


def _forget(*, setting: str, **kwargs: Any) -> None:
    """Forget the backends after a test changed them."""
    if setting == "TASKS":
        _known.clear()
        backend_class.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_asyncq.aliases")
