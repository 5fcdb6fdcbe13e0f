"""What a project or an integration adds to each `enqueue` or `enqueue_many`: headers, and a trace of the call.

A source of headers is called with the task. A tracer is called before the work, and what it returns after it. One that
fails costs no task: the task is enqueued without its headers, or without a trace, and the log says so once a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from django.utils.module_loading import import_string

from .. import conf
from .guard import get_logger
from .headers import checked_headers

logger = get_logger("django_asyncq.lifecycle")

Source = Callable[[Any], Mapping[str, str] | None]
# Called with the results, None if there are none, and with the error.
Finish = Callable[[Sequence[Any] | None, BaseException | None], object]
# Called with the task and its calls.
Tracer = Callable[[Any, Sequence[Any]], Finish]
LOG_AGAIN_SECONDS = 60.0

registered: list[Source] = []
# One, that of OpenTelemetry; empty where no integration traces.
tracers: list[Tracer] = []
_logged: dict[str, float] = {}


def register_header_source(source: Source) -> None:
    """Have a source called too, besides those of ASYNCQ["HEADER_SOURCES"]; once, however often it is given."""
    if source not in registered:
        registered.append(source)


def forget_header_source(source: Source) -> None:
    """Have a source called no more."""
    if source in registered:
        registered.remove(source)


def sourced_headers(task: Any) -> dict[str, str]:
    """Return what the sources give for a task that is being enqueued; later ones win."""
    found: dict[str, str] = {}
    sources: list[tuple[str, Source | None]] = [(path, None) for path in conf.current().header_sources]
    sources += [(f"{source.__module__}.{source.__qualname__}", source) for source in registered]
    for name, source in sources:
        with _outlived("header source %s failed; tasks are enqueued without its headers", name):
            found |= checked_headers((source or _imported(name))(task) or {})
    return found


def traced(
    enqueue: Callable[[Any, Sequence[Any], bool], list[Any]], task: Any, calls: Sequence[Any], partial: bool
) -> list[Any]:
    """Call `enqueue` between what the tracers begin and finish. Raises: what it raises."""
    text, finishes, results, error = "tracer %s failed; tasks are enqueued without it", [], None, None
    for tracer in tracers:
        with _outlived(text, tracer.__module__):
            finishes.append(tracer(task, calls))
    try:
        results = enqueue(task, calls, partial)
    except BaseException as raised:
        error = raised
        raise
    finally:
        for finish in reversed(finishes):
            with _outlived(text, finish.__module__):
                finish(results, error)
    return results


@contextmanager
def _outlived(text: str, name: str) -> Iterator[None]:
    """Log an error of the block, once a minute for each name."""
    try:
        yield
    except Exception:
        now = time.monotonic()
        if now - _logged.get(name, -LOG_AGAIN_SECONDS) >= LOG_AGAIN_SECONDS:
            _logged[name] = now
            logger.exception(text, name)


@cache
def _imported(path: str) -> Source:
    source: Source = import_string(path)
    return source
