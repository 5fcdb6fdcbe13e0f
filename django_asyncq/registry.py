"""The registered tasks, by name. Names are looked up here, never imported from data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.utils.module_loading import autodiscover_modules

from .exceptions import TaskNotRegistered

if TYPE_CHECKING:
    from .tasks import Task

_registry: dict[str, Task[Any, Any]] = {}


def register(task: Task[Any, Any]) -> None:
    """Register a declared task; a copy of it with other options (`using`) leaves the declared one in place."""
    declared = _registry.get(task.module_path)
    if declared is None or declared.func is not task.func:
        _registry[task.module_path] = task


def registered(name: str) -> Task[Any, Any]:
    """Return the task declared under this dotted path. Names are looked up, never imported.

    Raises: TaskNotRegistered.
    """
    try:
        return _registry[name]
    except KeyError:
        raise TaskNotRegistered(
            f"no task named {name!r} is registered: is its module imported when the app starts "
            f"(a tasks.py of an installed app is), and is the worker's code up to date?"
        ) from None


def find(name: str) -> Task[Any, Any] | None:
    """Return the task declared under this dotted path, or None."""
    return _registry.get(name)


def every_task() -> list[Task[Any, Any]]:
    """Return all registered tasks, by name."""
    return [_registry[name] for name in sorted(_registry)]


def schedulable_names() -> list[str]:
    """Return the names of the tasks of which people may make schedules, sorted."""
    return [task.module_path for task in every_task() if task.schedulable]


def load_task_modules() -> None:
    """Import the `tasks` module of every installed app, so that its tasks are registered."""
    autodiscover_modules("tasks")


def registered_names() -> list[str]:
    """Return the names of all registered tasks, sorted."""
    return sorted(_registry)
