"""Which declared tasks run messages of other programs, by the type that such a program writes.

A name in a message is only ever looked up here: what is not declared with a wire name cannot be reached by a message.
"""

from __future__ import annotations

from typing import Any, Literal

from ..exceptions import InvalidOption

PayloadKind = Literal["json", "bytes"]
PAYLOAD_KINDS = ("json", "bytes")
LONGEST = 200
PREFIX_MARK = "*"

# (alias, exact name, or a prefix with its mark) → task.
_declared: dict[tuple[str, str], Any] = {}


def is_wire_name(name: object) -> bool:
    """Return whether a text can be the type of a message: printable, not blank, at most 200 characters."""
    return isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable() and bool(name.strip())


def declare(task: Any) -> None:
    """Have messages with the wire name of a task run by it; one that is declared again replaces the former.

    Raises: InvalidOption, when another task of the alias has the name.
    """
    key = (task.backend, task.wire_name)
    former = _declared.get(key)
    if former is not None and former.module_path != task.module_path:
        raise InvalidOption(
            f"task {task.module_path}: wire_name={task.wire_name!r} is not valid: {former.module_path} has it already"
        )
    _declared[key] = task


def task_of(wire_type: str, alias: str) -> Any | None:
    """Return the task of an alias that runs messages of this type: by the exact name, else by the longest prefix."""
    exact = _declared.get((alias, wire_type))
    if exact is not None:
        return exact
    prefixes = [
        name
        for backend, name in _declared
        if backend == alias and name.endswith(PREFIX_MARK) and wire_type.startswith(name.removesuffix(PREFIX_MARK))
    ]
    return _declared[alias, max(prefixes, key=len)] if prefixes else None


def exact_task(name: str, alias: str) -> Any | None:
    """Return the task with this dotted path that runs messages of one type; None when it has no such wire name."""
    for (backend, wire_name), task in _declared.items():
        if backend == alias and task.module_path == name and not wire_name.endswith(PREFIX_MARK):
            return task
    return None


def tasks_of(alias: str) -> list[Any]:
    """Return the tasks of an alias that run messages of other programs."""
    return [task for (backend, _), task in _declared.items() if backend == alias]
