"""The registered tasks, by name. A name that comes from data is looked up here and must never be imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.utils.module_loading import autodiscover_modules

from .exceptions import TaskNotRegistered

if TYPE_CHECKING:
    from .tasks import Task

_registry: dict[str, Task[Any, Any]] = {}


def register(task: Task[Any, Any]) -> None:
    """Register a declared task. A copy with other options (`using`) does not replace it."""
    declared = _registry.get(task.module_path)
    if declared is None or declared.func is not task.func:
        _registry[task.module_path] = task


def registered(name: str) -> Task[Any, Any]:
    """Return the task declared under this dotted path. Raises: TaskNotRegistered."""
    try:
        return _registry[name]
    except KeyError:
        raise TaskNotRegistered(
            f"no task named {name!r} is registered: check that its module is imported when the app starts "
            f"(the tasks.py of an installed app is), and that the worker runs the current code"
        ) from None


def find(name: str) -> Task[Any, Any] | None:
    """Return the task declared under this dotted path, or None."""
    return _registry.get(name)


def every_task() -> list[Task[Any, Any]]:
    """Return all registered tasks, sorted by name."""
    return [_registry[name] for name in sorted(_registry)]


def schedulable_names() -> list[str]:
    """Return the sorted names of the tasks for which people may create schedules."""
    return [task.module_path for task in every_task() if task.schedulable]


def load_task_modules() -> None:
    """Import the `tasks` module of every installed app, so that its tasks are registered."""
    autodiscover_modules("tasks")


def registered_names() -> list[str]:
    """Return the sorted names of all registered tasks."""
    return sorted(_registry)
