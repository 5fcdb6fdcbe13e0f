"""The registered tasks, by name. A name that comes from data is looked up here and must never be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django.apps import apps
from django.utils.module_loading import autodiscover_modules

from .compat import InvalidTask
from .definitions import batches, wire_names
from .definitions.functions import Origin, origin_of, why_ambiguous
from .exceptions import TaskNotRegistered

if TYPE_CHECKING:
    from .tasks import Task

_registry: dict[str, Task[Any, Any]] = {}
# (alias, type that another program handles) → the task that stands for it. No worker looks here.
_remote: dict[tuple[str, str], Task[Any, Any]] = {}
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
    batches.declare(task)
    if task.wire_name is not None:
        wire_names.declare(task)


def register_remote(task: Task[Any, Any]) -> None:
    """Note a task that only another program runs, so that results can name it. The first of a name stays."""
    _remote.setdefault((task.backend, task.module_path), task)


def find_remote(name: str, alias: str) -> Task[Any, Any] | None:
    """Return the task of an alias that only another program runs, by the type that it handles there, or None."""
    return _remote.get((alias, name))


def registered(name: str) -> Task[Any, Any]:
    """Return the task declared under this dotted path. Raises: TaskNotRegistered."""
    try:
        return _registry[name]
    except KeyError:
        raise TaskNotRegistered(f"no task named {name!r} is registered: {why_missing(name)}") from None


def why_missing(name: str) -> str:
    """Return why this process may not have a task, and what to do about it, without a full stop.

    name: may come from data, so nothing is imported. It is compared with what is loaded and installed, and a file is
    looked for in the folders of the installed apps.
    """
    module, _, function = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        return "the name is not a path such as shop.tasks.send; give the task's function a name in a module"
    if module in sys.modules:
        return f"{module} is imported here and declares no task {function}; deploy the code that has it, or restore it"
    found = [config for config in apps.get_app_configs() if f"{module}.".startswith(f"{config.name}.")]
    if not found:
        return (
            f"{module} is not imported here, and no app in INSTALLED_APPS has it; add its app, or import {module} in "
            f"the tasks.py of an installed app"
        )
    config = max(found, key=lambda each: len(each.name))
    path = Path(config.path, *module.removeprefix(config.name).strip(".").split("."))
    if _is_module(path):
        if module == f"{config.name}.tasks":
            return f"{module} is not loaded in this process; workers load it when they start, so restart them"
        return f"{module} is not imported by any tasks.py of an installed app; import it in {config.name}/tasks.py"
    return f"the app {config.name} has no module {module} here; deploy the code that has it, and restart the workers"


def _is_module(path: Path) -> bool:
    try:
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    except OSError:  # The name is longer than that of a file can be.
        return False


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
