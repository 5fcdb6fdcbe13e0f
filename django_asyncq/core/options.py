"""Check the options of a task. Decides from the task alone, and reads no settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, NoReturn, TypedDict

from ..exceptions import InvalidOption
from .after import AFTER_FAILURE
from .batches import LONGEST_GROUP, Batch
from .calls import called, check_call, shown_signature
from .fairness import FairKey, FairWeight, check_fair
from .headers import checked_headers
from .names import PAYLOAD_KINDS, TASK_NAME, PayloadKind, check_queue_name, is_wire_name
from .needs import NEEDS_OF_TASK, lacking
from .policies import Backoff, Retention
from .rates import check_rate
from .schedules import Declaration
from .several_gates import MOST_LIMIT, GateSource, QueueLimit, check_gates
from .time import AT_LEAST_ZERO, MORE_THAN_ZERO, Duration, checked_aware, checked_moment, is_duration
from .versions import Upgrade, check_versions

UNIQUE_UNTIL = ("end", "start")
ON_DUPLICATE = ("reject", "return", "replace", "follow")
ON_FULL = ("reject", "wait")
MOST_WAITING = 1000
MOST_LOG_LINES = 2000
MOST_ATTEMPTS = 1_000_000
# Of the rows that an action on many tasks changes.
MOST_PER_SECOND = 10_000
RUN_AFTER = "give an aware datetime, or a timedelta that counts from the call, such as timedelta(seconds=60)"


def is_attempt_count(value: object) -> bool:
    """Return whether a value is a number of attempts."""
    return type(value) is int and 1 <= value <= MOST_ATTEMPTS


def check_declared(options: Mapping[str, Any]) -> None:
    """Refuse values that belong to one call, in the options of `@task`. Raises: InvalidOption."""
    if isinstance(options.get("expires"), datetime):
        raise InvalidOption(
            "task(expires=…) is a datetime, which belongs to one call: give a duration, or write "
            "task.using(expires=…).enqueue(…)"
        )


def check_options(task: Any) -> None:
    """Refuse options that can never work.

    Raises: InvalidOption, which names the task, the option and the remedy.
    """

    def refuse(option: str, remedy: str) -> NoReturn:
        raise InvalidOption(f"task {task.module_path}: {option}={getattr(task, option)!r} is not valid: {remedy}")

    if not task.is_remote and not TASK_NAME.fullmatch(task.module_path):
        raise InvalidOption(f"task name {task.module_path!r} is not valid: use 1 to 200 letters, digits, '_', '.'")
    if _is_generator_function(task.func):
        raise InvalidOption(
            f"task {task.module_path}: a function with `yield` is not valid: a call runs nothing of it; "
            f"collect the values and return them"
        )
    check_queue_name(task.queue_name)
    _check_times(task, refuse)
    if task.max_attempts is not None and not is_attempt_count(task.max_attempts):
        refuse("max_attempts", f"give a whole number from 1 to {MOST_ATTEMPTS:,}")
    check_gates(task, refuse)
    if task.on_full not in ON_FULL:
        refuse("on_full", f"give one of {', '.join(map(repr, ON_FULL))}")
    if type(task.max_waiting) is not int or not 1 <= task.max_waiting <= MOST_LIMIT:
        refuse("max_waiting", f"give a whole number from 1 to {MOST_LIMIT:,}")
    if not isinstance(task.ordered, bool):
        refuse("ordered", "give True or False")
    for option in ("retry_on", "give_up_on", "on_missing"):
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
    _check_stopping(task, refuse)
    _check_unique(task, refuse)
    check_rate(task, refuse)
    if task.keep_logs is not None and (type(task.keep_logs) is not int or not 0 <= task.keep_logs <= MOST_LOG_LINES):
        refuse("keep_logs", f"give a whole number from 0 to {MOST_LOG_LINES}")
    if task.typed_arguments not in (None, True, False):
        refuse("typed_arguments", "give True or False")
    check_fair(task, refuse)
    _check_sensitive(task, refuse)
    if task.after_failure not in AFTER_FAILURE:
        refuse("after_failure", f"give one of {', '.join(map(repr, AFTER_FAILURE))}")
    _check_wire(task, refuse)
    check_versions(task, refuse)
    if task.schedule is not None:
        _check_schedule(task, refuse)
    for option, remedy in lacking(task, NEEDS_OF_TASK):
        refuse(option, remedy)


def names_of(value: Any) -> Any:
    """Return one name as a tuple, and a list of names too; return any other value unchanged."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def one_or_more(value: Any) -> Any:
    """Return one exception class as a tuple; return any other value unchanged."""
    return (value,) if _is_exception_class(value) else value


def _check_sensitive(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse names that are no parameter: a typing error would show what is to be hidden."""
    names = task.sensitive
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        refuse("sensitive", 'give the name of a parameter, or a tuple of them; "return" is the result')
    if not names or task.is_remote:
        return
    parameters = shown_signature(called(task)).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {*(parameter.name for parameter in parameters), "return"}
    if unknown := sorted(set(names) - known):
        refuse("sensitive", f"the function has no parameter {unknown[0]!r}: use {', '.join(sorted(known))}")


def _check_times(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    for option in ("timeout", "expected_seconds"):
        value = getattr(task, option)
        if value is not None and not is_duration(value):
            refuse(option, f"give {MORE_THAN_ZERO}")
    if task.backoff is not None and not callable(task.backoff) and not is_duration(task.backoff, or_zero=True):
        refuse("backoff", f"give {AT_LEAST_ZERO}, or a callable")
    if task.run_after is not None and not isinstance(task.run_after, timedelta):
        if not isinstance(task.run_after, datetime):
            refuse("run_after", RUN_AFTER)
        checked_moment(f"task {task.module_path}: run_after", task.run_after)


def _check_stopping(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse times and limits at which a run could never be stopped, or never begin."""
    if isinstance(task.expires, datetime):
        checked_aware(f"task {task.module_path}: expires", task.expires)
    elif task.expires is not None and not is_duration(task.expires):
        refuse("expires", f"give {MORE_THAN_ZERO}, or in using() an aware datetime")
    if task.deadline is not None and not isinstance(task.deadline, timedelta):
        if not isinstance(task.deadline, datetime):
            refuse("deadline", "give an aware datetime, or a timedelta that counts from the call")
        checked_aware(f"task {task.module_path}: deadline", task.deadline)
    if task.soft_timeout is not None and not is_duration(task.soft_timeout):
        refuse("soft_timeout", f"give {MORE_THAN_ZERO}")
    if task.soft_timeout is not None and task.timeout is not None and task.soft_timeout >= task.timeout:
        refuse("soft_timeout", f"give less than the timeout, which is {task.timeout:g} s")
    if not isinstance(task.isolated, bool):
        refuse("isolated", "give True or False")


def _check_unique(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    if task.unique is not None and not isinstance(task.unique, bool | str) and not callable(task.unique):
        refuse("unique", "give True, a format such as '{user_id}', or a callable of the arguments")
    if task.unique == "":
        refuse("unique", "give a format such as '{user_id}', or True for all arguments")
    if task.unique_until not in UNIQUE_UNTIL and not is_duration(task.unique_until):
        refuse("unique_until", f'give "end", "start", or {MORE_THAN_ZERO}')
    if task.on_duplicate not in ON_DUPLICATE:
        refuse("on_duplicate", f"give one of {', '.join(map(repr, ON_DUPLICATE))}")


def _check_wire(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse options about other programs that can never work."""
    if task.wire_name is not None and not is_wire_name(task.wire_name):
        refuse("wire_name", "give the type that the other program writes, such as 'email:deliver' or 'email:*'")
    if task.payload not in PAYLOAD_KINDS:
        refuse("payload", f"give one of {', '.join(map(repr, PAYLOAD_KINDS))}")
    # A list may have any name that a message may.
    if not isinstance(task.inbox, bool) and not is_wire_name(task.inbox):
        refuse("inbox", "give True, or the name of the Redis list whose values it gets, such as 'orders'")
    if isinstance(task.inbox, str) and task.wire_name is not None:
        refuse("inbox", "a message may hold several arguments, a value is one: remove wire_name, or give True")
    if task.batch is not None:
        _check_batch(task, refuse)
    if task.headers is not None:
        checked_headers(task.headers)
    if task.group is not None:
        _check_group(task, refuse)


def _check_group(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    is_text = isinstance(task.group, str) and task.group.isprintable() and bool(task.group.strip())
    if not is_text or len(task.group) > LONGEST_GROUP:
        refuse("group", f"give a text of 1 to {LONGEST_GROUP} printable characters")


def _check_batch(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse what cannot hold for calls that are run together."""
    if not isinstance(task.batch, Batch):
        refuse("batch", "give Batch(size=…, within=…)")
    if task.priority:
        refuse("priority", "calls of a batch run together, so none comes before the others; remove it")
    if task.isolated:
        refuse(
            "isolated", "a batch runs in a worker process; a batch that takes it down runs alone next, in quarantine"
        )


def _is_exception_class(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


@lru_cache(maxsize=1024)
def _is_generator_function(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _check_schedule(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse several schedules without distinct names, and arguments that the function does not take."""
    schedules: tuple[Any, ...] = task.schedule if isinstance(task.schedule, tuple) else (task.schedule,)
    if not all(isinstance(schedule, Declaration) for schedule in schedules):
        refuse("schedule", "give cron(…) or every(…), or a list of them")
    names = [schedule.name for schedule in schedules]
    if len(names) > 1 and ("" in names or len(set(names)) < len(names)):
        refuse("schedule", "give each of a task's schedules a name= of its own")
    for schedule in schedules:
        check_call(task, schedule.args, schedule.kwargs)


# --- The types of the options of `@task`, for type checkers and editors.

RateSource = str | Callable[..., str]
UniqueKey = bool | str | Callable[..., str]
UniqueUntil = Literal["end", "start"]
OnDuplicate = Literal["reject", "return", "replace", "follow"]
OnFull = Literal["reject", "wait"]


class TaskOptions(TypedDict, total=False):
    """The options of `@task`, for type checkers and editors; `Task` says what each means.

    Not here: `batch`, with which the function takes something else than its callers pass.
    """

    priority: int
    queue_name: str
    backend: str
    max_attempts: int | None
    backoff: Backoff | None
    retry_on: type[BaseException] | tuple[type[BaseException], ...]
    give_up_on: type[BaseException] | tuple[type[BaseException], ...]
    on_missing: type[BaseException] | tuple[type[BaseException], ...]
    timeout: Duration | None
    gate: GateSource | None
    queue_limit: QueueLimit | None
    expected_seconds: Duration | None
    on_full: OnFull
    max_waiting: int
    ordered: bool
    fair: FairKey | None
    fair_weight: FairWeight
    rate: str | None
    rate_per: RateSource | None
    burst: int
    schedule: Declaration | Sequence[Declaration] | None
    schedulable: bool
    retention: Retention | None
    atomic: bool
    expires: Duration | None
    soft_timeout: Duration | None
    isolated: bool
    unique: UniqueKey | None
    unique_until: UniqueUntil | Duration
    on_duplicate: OnDuplicate
    keep_logs: int | None
    typed_arguments: bool | None
    sensitive: str | tuple[str, ...]
    aliases: str | tuple[str, ...]
    version: int
    upgrade: Upgrade | None
    wire_name: str | None
    payload: PayloadKind
    inbox: bool | str
