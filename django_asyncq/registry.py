"""The registered tasks, by name. A name that comes from data is looked up here and must never be imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django.utils.module_loading import autodiscover_modules

from .compat import InvalidTask
from .definitions.functions import Origin, origin_of, why_ambiguous
from .exceptions import TaskNotRegistered

if TYPE_CHECKING:
    from .tasks import Task

_registry: dict[str, Task[Any, Any]] = {}
# Where each function that was ever declared comes from. A reload may change the namespace that it would be read from.
_origins: WeakKeyDictionary[Callable[..., Any], Origin] = WeakKeyDictionary()


def register(task: Task[Any, Any]) -> None:
    """Register a declared task. A copy with other options (`using`) does not replace it.

    A module that is loaded again replaces its tasks. Raises: InvalidTask, when another function has the name.
    """
    name, function = task.module_path, task.func
    declared = _registry.get(name)
    if declared is not None and (declared.func is function or function in _origins):
        return  # a copy, perhaps of a task whose module was loaded again since
    origin = origin_of(function)
    if declared is not None and (reason := why_ambiguous(_origins[declared.func], origin)):
        raise InvalidTask(
            f"task {name} is declared twice, and a worker could run only one of the two: {reason}. "
            f"Give each function a name of its own."
        )
    _origins[function] = origin
    _registry[name] = task


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
