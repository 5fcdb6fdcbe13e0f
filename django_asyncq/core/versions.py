"""What a deploy changes of a task: its name, and what its arguments mean.

Rows, schedules and the code of the last deploy know a task by the name that it had then: its `aliases`. A row remembers
the `version` of the code that enqueued it; `upgrade` makes arguments of this code out of older ones. Of a task with
none of the three, nothing here is called.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..exceptions import InvalidOption, UpgradeFailed
from . import payload
from .calls import check_call
from .guard import attempt, class_name
from .names import TASK_NAME
from .payload import Payload, text_of
from .typed import carry_of, is_typed, readable_call

if TYPE_CHECKING:
    from ..models import TaskRecord
    from ..tasks import Task

# A whole number in the column of every database.
MOST_VERSIONS = 30_000
Upgrade = Callable[[list[Any], dict[str, Any], int], tuple[Any, Any]]


def check_versions(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse former names and versions that can never work. refuse: raises for an option, with the remedy."""
    names = task.aliases
    if not isinstance(names, tuple) or not all(isinstance(name, str) and TASK_NAME.fullmatch(name) for name in names):
        refuse("aliases", "give the former name, such as 'shop.tasks.send', or a tuple of them")
    if task.module_path in names or len(set(names)) < len(names):
        refuse("aliases", "give each former name once, and not the present one")
    if type(task.version) is not int or not 1 <= task.version <= MOST_VERSIONS:
        refuse("version", f"give a whole number from 1 to {MOST_VERSIONS:,}")
    if task.upgrade is None:
        return
    if not callable(task.upgrade) or inspect.iscoroutinefunction(task.upgrade):
        refuse("upgrade", "give a `def` that takes (args, kwargs, from_version) and returns (args, kwargs)")


def upgraded(
    task: Task[Any, Any], args: list[Any], kwargs: dict[str, Any], version: int, *, has_typed: bool = False
) -> Payload:
    """Return the arguments of a call as the task's code wants them. version: what they are of; they are not changed.

    has_typed: whether forms stand for typed arguments. Raises: UpgradeFailed.
    """
    if task.upgrade is None or version >= task.version:
        return Payload(args, kwargs)
    about = f"task {task.module_path}: upgrade() of arguments of version {version} to version {task.version}"
    given = readable_call(args, kwargs) if has_typed else Payload(copy.deepcopy(args), copy.deepcopy(kwargs))
    answer, error = attempt(task.upgrade, *given, version)
    if error is not None:
        raise UpgradeFailed(f"{about} failed: {class_name(error)}: {text_of(error)}") from error
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise UpgradeFailed(f"{about} returned {answer!r:.200}: return (args, kwargs)")
    new_args, new_kwargs = answer
    if not isinstance(new_args, tuple | list) or not isinstance(new_kwargs, dict):
        raise UpgradeFailed(f"{about} returned {answer!r:.200}: return a list and a dictionary")
    try:
        check_call(task, list(new_args), new_kwargs)
        return payload.of_call(new_args, new_kwargs, carry=carry_of(task))
    except InvalidOption as error:
        raise UpgradeFailed(f"{about} returned arguments that cannot be passed: {error}") from error


def seen_by_options(task: Task[Any, Any], record: TaskRecord) -> Payload:
    """Return the arguments of a row as the formats and callables of its task see them. Raises: UpgradeFailed."""
    given = upgraded(task, record.args, record.kwargs, record.version, has_typed=record.has_typed_arguments)
    # Those that were upgraded just now may be typed though the row is not.
    if record.has_typed_arguments or (given.args is not record.args and is_typed(task)):
        return readable_call(*given)
    return given
