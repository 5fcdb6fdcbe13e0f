"""Headers that a project, or an integration, adds to each task it enqueues, such as those of a trace.

A source is called with the task, once for each `enqueue` or `enqueue_many`. One that fails costs no task: the task is
enqueued without its headers, and the log says so once a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from django.utils.module_loading import import_string

from . import conf
from .definitions.headers import checked_headers
from .guard import get_logger

logger = get_logger("django_asyncq.lifecycle")

Source = Callable[[Any], Mapping[str, str] | None]
LOG_AGAIN_SECONDS = 60.0

_registered: list[Source] = []
_logged: dict[str, float] = {}


def register_header_source(source: Source) -> None:
    """Have a source called too, besides those of ASYNCQ["HEADER_SOURCES"]; once, however often it is given."""
    if source not in _registered:
        _registered.append(source)


def forget_header_source(source: Source) -> None:
    """Have a source called no more."""
    if source in _registered:
        _registered.remove(source)


def sourced_headers(task: Any) -> dict[str, str]:
    """Return what the sources give for a task that is being enqueued; later ones win."""
    paths = conf.current().header_sources
    if not paths and not _registered:
        return {}
    found: dict[str, str] = {}
    sources: list[tuple[str, Source | None]] = [(path, None) for path in paths]
    sources += [(f"{source.__module__}.{source.__qualname__}", source) for source in _registered]
    for name, source in sources:
        try:
            found |= checked_headers((source or _imported(name))(task) or {})
        except Exception:
            now = time.monotonic()
            if now - _logged.get(name, -LOG_AGAIN_SECONDS) >= LOG_AGAIN_SECONDS:
                _logged[name] = now
                logger.exception("header source %s failed; tasks are enqueued without its headers", name)
    return found


@cache
def _imported(path: str) -> Source:
    source: Source = import_string(path)
    return source
