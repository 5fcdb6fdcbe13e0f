"""The registered tasks, by name. A name that comes from data is looked up here and must never be imported."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from django.apps import apps
from django.utils.module_loading import autodiscover_modules

from ..exceptions import TaskNotRegistered
from . import batches, compat, fairness, names
from .compat import InvalidTask

if TYPE_CHECKING:
    from ..tasks import Task


# --- Which function the name of a task means. Decides from the function alone, and imports nothing.
#
# A worker finds a task by its name: it imports the module, and the module declares the function again. So the
# function must be one that the import defines, and the only one of its name.

# The names of the module that was started, of its copy in a child of multiprocessing, and of Python's own console.
STARTED_MODULES = {"__main__", "__mp_main__", "__console__"}
# The names of files that are none: a shell, a doctest or `exec`; "<frozen …>" is a module within an executable.
NO_FILE, FROZEN = "<", "<frozen "


class Origin(NamedTuple):
    """Where a function was defined. namespace, spec: of the module; two runs of its code differ in one of them."""

    file: str
    line: int
    namespace: int
    spec: object


def why_unresolvable(function: object) -> str | None:
    """Say why no worker finds a function by its name; None when one can."""
    if inspect.isfunction(function):
        return _why_unresolvable(function)
    if isinstance(function, partial):
        return "a functools.partial has no name of its own"
    if inspect.ismethod(function):
        return "a method belongs to an object, which a worker does not have"
    if isinstance(function, compat.Task):
        return "it is a task already; its .using(…) returns a copy with other options"
    if isinstance(function, str):
        return "a text is no function, and the name of a task is the path of its function; options are given by name"
    if inspect.isclass(function):
        return "it is a class, not a function"
    return f"it is of type {type(function).__qualname__}, not a function"


# A function is checked again for each copy that `using` makes.
@lru_cache(maxsize=1024)
def _why_unresolvable(function: Callable[..., Any]) -> str | None:
    name, module = function.__qualname__, function.__module__
    if "<lambda>" in name:
        return "a lambda has no name of its own, so two of one module would be one task"
    if "<locals>" in name:
        return "it is defined within another function, which a worker does not call"
    if "." in name:
        return "it is defined in a class"
    if module in STARTED_MODULES:
        return f"it is defined in the script or the shell that was started; a worker's {module} is another one"
    if not module or not all(part.isidentifier() for part in module.split(".")):
        return f"its module is {module!r}, which a worker cannot import"
    file = origin_of(function).file
    if file.startswith(NO_FILE) and not file.startswith(FROZEN):
        return f"its code is from {file}, not from a file that a worker imports"
    return None


def origin_of(function: Callable[..., Any]) -> Origin:
    """Return where a function was defined; for one that a decorator wraps, the function within."""
    found = inspect.unwrap(function)
    inner = found if inspect.isfunction(found) else function
    code, namespace = inner.__code__, inner.__globals__
    return Origin(code.co_filename, code.co_firstlineno, id(namespace), namespace.get("__spec__"))


def why_ambiguous(first: Origin, second: Origin) -> str | None:
    """Say why two functions of the same module and name are not the same one; None when they are.

    A module that is loaded again defines the same function again, perhaps in another line, since it was edited.
    """
    if first.file != second.file:
        return f"one is in {first.file}, line {first.line}, the other in {second.file}, line {second.line}"
    # A reload keeps the namespace and gives the module a new spec; a second import has another namespace.
    is_one_run = first.namespace == second.namespace and first.spec is second.spec
    if is_one_run and first.line != second.line:
        return f"{first.file} defines one in line {first.line} and another in line {second.line}"
    return None


_registry: dict[str, Task[Any, Any]] = {}
# Former name of a task → its name.
_former: dict[str, str] = {}
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
    _refuse_shared_names(task)
    # First: a task that is refused must not be found.
    names.declare(task)
    _origins[function] = origin
    for former in [each for each, present in _former.items() if present == name]:
        del _former[former]
    _former.update(dict.fromkeys(task.aliases, name))
    _registry[name] = task
    batches.declare(task)
    fairness.declare(task)


def _refuse_shared_names(task: Task[Any, Any]) -> None:
    """Refuse a name by which two tasks would be known. Raises: InvalidTask."""
    name = task.module_path
    remedy = "remove it there, or give this function another name"
    if (present := _former.get(name, name)) != name:
        raise InvalidTask(f"task {name} cannot be declared: aliases of {present} has this name; {remedy}")
    for former in task.aliases:
        owner = former if former in _registry else _former.get(former, name)
        if owner != name:
            raise InvalidTask(
                f"task {name}: aliases has {former!r}, which is a name of {owner}; remove it in one of both"
            )


def register_remote(task: Task[Any, Any]) -> None:
    """Note a task that only another program runs, so that results can name it. The first of a name stays."""
    _remote.setdefault((task.backend, task.module_path), task)


def find_remote(name: str, alias: str) -> Task[Any, Any] | None:
    """Return the task of an alias that only another program runs, by the type that it handles there, or None."""
    return _remote.get((alias, name))


def registered(name: str) -> Task[Any, Any]:
    """Return the task declared under this dotted path, now or formerly. Raises: TaskNotRegistered."""
    try:
        return _registry[name]
    except KeyError:
        if name in _former:
            return _registry[_former[name]]
        raise TaskNotRegistered(f"no task named {name!r} is registered: {why_missing(name)}") from None


def runnable(name: str, version: int) -> Task[Any, Any]:
    """Return the task that runs a row of this name and version. Raises: TaskNotRegistered; its code may be older."""
    task = registered(name)
    if version > task.version:
        raise TaskNotRegistered(
            f"task {name} was enqueued with version {version} of its arguments, and this code has version "
            f"{task.version}; deploy the code that enqueued it"
        )
    return task


def present_name(name: str) -> str:
    """Return the name that a task has now, for one that it had formerly; any other name unchanged."""
    return _former.get(name, name)


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
    """Return the task declared under this dotted path, now or formerly, or None."""
    return _registry.get(_former.get(name, name))


def every_task() -> list[Task[Any, Any]]:
    """Return all registered tasks, sorted by name."""
    return [_registry[name] for name in sorted(_registry)]


def schedulable_names() -> list[str]:
    """Return the sorted names of the tasks for which people may create schedules."""
    return [task.module_path for task in every_task() if task.schedulable]


def load_task_modules() -> None:
    """Import the `tasks` module of every installed app, so that its tasks are registered."""
    autodiscover_modules("tasks")


def names_digest() -> str:
    """Return a digest of what this code can run: what tells the code of one worker from that of another."""
    known = [f"{name} {version}" for name, version in sorted(known_versions().items())]
    return hashlib.sha256("\n".join(known).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def known_versions() -> dict[str, int]:
    """Return every name by which rows may know a task of this code, former ones too → the version of its arguments."""
    known = {name: task.version for name, task in _registry.items()}
    return known | {former: known[name] for former, name in _former.items() if name in known}


def registered_names() -> list[str]:
    """Return the sorted names of all registered tasks."""
    return sorted(_registry)
