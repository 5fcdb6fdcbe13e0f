"""Look up what the project's code declares: tasks, their parameters, and schedules.

The answers are those of this web process; a worker may run newer code.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from .. import registry
from ..exceptions import TaskNotRegistered
from ..guard import get_logger
from ..scheduling.scheduler import declared_schedules
from .redaction import mask_text

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
    parameters = list(inspect.signature(task.func).parameters.values())[1 if task.takes_context else 0 :]
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = mask_text(str(inspect.Signature(bare)))
    return text if len(text) <= SIGNATURE_CHARACTERS else text[: SIGNATURE_CHARACTERS - 1] + "…"


def accepts_positional(task: Any, args: list[Any]) -> bool:
    """Whether the function accepts this number of positional arguments, regardless of keyword arguments."""
    context = [None] if task.takes_context else []
    try:
        inspect.signature(task.func).bind_partial(*context, *args)
    except TypeError:
        return False
    return True


def parameter_names(task: Any) -> list[str]:
    """Return the names of a task's positional parameters in order; an empty list when task is None."""
    if task is None:
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(task.func).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    return names[1:] if task.takes_context else names


@cache
def _load_once() -> None:
    """Import the `tasks` module of every app, because a web process may not have imported them yet."""
    try:
        registry.load_task_modules()
    except Exception:
        logger.exception(
            "cannot import a tasks module of the project, so some tasks will appear to be removed from the code"
        )
