"""Look up what the project's code declares: tasks, their parameters, and schedules.

The answers are those of this web process; a worker may run newer code.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from .. import registry
from ..definitions.calls import called, passes_context
from ..exceptions import TaskNotRegistered
from ..guard import get_logger
from ..redaction import mask_text
from ..scheduling.scheduler import declared_schedules

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
