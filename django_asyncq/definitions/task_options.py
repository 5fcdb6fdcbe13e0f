"""Which values the options of a task may have. Decides from the task alone, and reads no settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NoReturn

from ..durations import AT_LEAST_ZERO, MORE_THAN_ZERO, is_duration
from ..exceptions import InvalidOption
from .calls import check_call
from .moments import checked_moment
from .names import TASK_NAME, check_queue_name
from .retention_policy import Retention
from .schedules import Declaration

RUN_AFTER = "give an aware datetime, or a timedelta that counts from now, such as timedelta(seconds=60)"


def is_attempt_count(value: object) -> bool:
    """Return whether a value is a number of attempts."""
    return type(value) is int and value >= 1


def check_known(options: set[str], known: set[str]) -> None:
    """Refuse options that `@task` does not have. Raises: TypeError, which says what to write instead."""
    if "run_after" in options:
        raise TypeError(
            "task() has no option 'run_after', because it belongs to one call: write task.using(run_after=…).enqueue(…)"
        )
    for option in sorted(options - known):
        similar = get_close_matches(option, known, n=1)
        meant = f"did you mean {similar[0]!r}? " if similar else ""
        raise TypeError(f"task() has no option {option!r}: {meant}it has {', '.join(sorted(known))}")


def check_options(task: Any) -> None:
    """Refuse options that can never work.

    Raises: InvalidOption, which names the task, the option and the remedy.
    """

    def refuse(option: str, remedy: str) -> NoReturn:
        raise InvalidOption(f"task {task.module_path}: {option}={getattr(task, option)!r} is not valid: {remedy}")

    if not TASK_NAME.fullmatch(task.module_path):
        raise InvalidOption(f"task name {task.module_path!r} is not valid: use 1 to 200 letters, digits, '_', '.'")
    if _is_generator_function(task.func):
        raise InvalidOption(
            f"task {task.module_path}: a function with `yield` is not valid: a call runs nothing of it; "
            f"collect the values and return them"
        )
    check_queue_name(task.queue_name)
    _check_times(task, refuse)
    if task.max_attempts is not None and not is_attempt_count(task.max_attempts):
        refuse("max_attempts", "give a whole number of at least 1")
    if task.queue_limit is not None and type(task.queue_limit) is not int:
        refuse("queue_limit", "give a whole number; 0 or less means no limit")
    if task.gate is not None and not isinstance(task.gate, str) and not callable(task.gate):
        refuse("gate", "give a name, a format such as '{model}', or a callable of the arguments")
    for option in ("retry_on", "give_up_on"):
        value = getattr(task, option)
        if not isinstance(value, tuple) or not all(map(_is_exception_class, value)):
            refuse(option, "give an exception class, or a tuple of them")
    if not isinstance(task.schedulable, bool):
        refuse("schedulable", "give True or False")
    if task.retention is not None and not isinstance(task.retention, Retention):
        refuse("retention", "give Retention(succeeded=…, failed=…)")
    if not isinstance(task.atomic, bool):
        refuse("atomic", "give True or False")
    if task.atomic and inspect.iscoroutinefunction(task.func):
        refuse("atomic", "a transaction belongs to one thread; make the function a `def`, not an `async def`")
    if task.schedule is not None:
        _check_schedule(task, refuse)


def one_or_more(value: Any) -> Any:
    """Return one exception class as a tuple; return any other value unchanged."""
    return (value,) if _is_exception_class(value) else value


def _check_times(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    for option in ("timeout", "expected_seconds"):
        value = getattr(task, option)
        if value is not None and not is_duration(value):
            refuse(option, f"give {MORE_THAN_ZERO}")
    if task.backoff is not None and not callable(task.backoff) and not is_duration(task.backoff, or_zero=True):
        refuse("backoff", f"give {AT_LEAST_ZERO}, or a callable")
    if task.run_after is not None:
        if not isinstance(task.run_after, datetime):
            refuse("run_after", RUN_AFTER)
        checked_moment(f"task {task.module_path}: run_after", task.run_after)


def _is_exception_class(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


@lru_cache(maxsize=1024)
def _is_generator_function(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _check_schedule(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse several schedules without distinct names, and arguments that the function does not take."""
    schedules: tuple[Any, ...] = task.schedule if isinstance(task.schedule, tuple) else (task.schedule,)
    if not all(isinstance(schedule, Declaration) for schedule in schedules):
        refuse("schedule", "give cron(…) or every(…), or a tuple of them")
    names = [schedule.name for schedule in schedules]
    if len(names) > 1 and ("" in names or len(set(names)) < len(names)):
        refuse("schedule", "give each of a task's schedules a name= of its own")
    for schedule in schedules:
        check_call(task, schedule.args, schedule.kwargs)
