"""What the project's code declares, as far as the web process can tell."""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

from .. import tasks
from ..exceptions import TaskNotRegistered

logger = logging.getLogger("django_asyncq.admin")


def known_task(name: str) -> Any:
    """Return the task registered under this name, or None."""
    _load_once()
    try:
        return tasks.registered(name)
    except TaskNotRegistered:
        return None


def known_names() -> list[str]:
    """Return the names of all registered tasks."""
    _load_once()
    return tasks.registered_names()


def parameter_names(task: Any) -> list[str]:
    """Return the names of a task's parameters in the order of `args`; none for a task that is gone."""
    if task is None:
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(task.func).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    return names[1:] if task.takes_context else names


@cache
def _load_once() -> None:
    """Import the `tasks` module of every app: a web process may not have needed them until now."""
    try:
        tasks.load_task_modules()
    except Exception:
        logger.exception("a tasks module of the project cannot be imported, so some tasks seem to be gone")
