"""Which function the name of a task means. Decides from the function alone, and imports nothing.

A worker finds a task by its name: it imports the module, and the module declares the function again. So the function
must be one that the import defines, and the only one of its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from .. import compat

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
