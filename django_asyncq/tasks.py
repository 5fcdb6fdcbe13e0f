"""Declare and call tasks: `@task`, `.using()`, `.enqueue()`, `.enqueue_many()`.

User code imports this before the app registry is ready, so it must not import models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from . import compat, conf, registry
from .context import TaskContext
from .definitions import payload
from .definitions.backoff import Backoff
from .definitions.functions import why_unresolvable
from .definitions.moments import checked_moment, moment_after
from .definitions.names import TASK_NAME, check_gate_name, check_queue_name
from .definitions.retention_policy import Retention
from .definitions.schedules import Declaration
from .exceptions import InvalidOption
from .storage import database_clock

P = ParamSpec("P")
R = TypeVar("R")

GateSource = str | Callable[..., str]

if TYPE_CHECKING:

    class _FrameworkTask(compat.Task[P, R]):
        pass

else:

    class _FrameworkTask(compat.Task, Generic[P, R]):
        __slots__ = ()


class Arguments(NamedTuple):
    """The arguments of one call in `enqueue_many`; made by `task.arguments(…)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Call = Arguments | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(_FrameworkTask[P, R]):
    """A task of Django's framework with the options of this backend.

    max_attempts: attempts in all, the first included. timeout: seconds a run may take. Where either is None, OPTIONS
    of the alias in TASKS decides, then ASYNCQ.
    backoff: seconds between attempts, or a callable (see `definitions.backoff`); None means `ExponentialBackoff()`.
    retry_on, give_up_on: exception classes that are retried, or never retried; give_up_on wins.
    gate: the name of an admission limit, a format over the arguments, or a callable of the arguments.
    queue_limit: the gate's limit unless the gate has a Gate row. expected_seconds: how long a run usually takes.
    schedule: when the task is enqueued automatically, made by `cron()` or `every()`; several as a tuple, each named.
    schedulable: whether people may create schedules of it in the admin, with arguments of their choice.
    retention: how long its finished rows are kept; the settings override it.
    atomic: run the function and record its success in one database transaction (`def` only).
    """

    max_attempts: int | None = None
    backoff: Backoff | None = None
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    give_up_on: tuple[type[BaseException], ...] = ()
    timeout: float | None = None
    gate: GateSource | None = None
    queue_limit: int | None = None
    expected_seconds: float | None = None
    schedule: Declaration | tuple[Declaration, ...] | None = None
    schedulable: bool = False
    retention: Retention | None = None
    atomic: bool = False

    def __post_init__(self) -> None:
        _check_name(self.func)
        _check_options(self)
        super(Task, self).__post_init__()
        registry.register(self)

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | timedelta | None = None,
        backend: str | None = None,
        gate: GateSource | None = None,
        queue_limit: int | None = None,
        expected_seconds: float | None = None,
        max_attempts: int | None = None,
        timeout: float | None = None,
    ) -> Task[P, R]:
        """Return a copy with other options; None keeps the present value.

        run_after: the earliest time of the run; a timedelta counts from now, by the database's clock.
        """
        if isinstance(run_after, timedelta):
            run_after = moment_after("run_after", database_clock.now(), run_after)
        given: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
            "gate": gate,
            "queue_limit": queue_limit,
            "expected_seconds": expected_seconds,
            "max_attempts": max_attempts,
            "timeout": timeout,
        }
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> Arguments:
        """Return the arguments of one call, for `enqueue_many`."""
        return Arguments(args, kwargs)

    @overload
    def enqueue_many(
        self, calls: Iterable[Call], *, partial: Literal[False] = False
    ) -> list[compat.TaskResult[P, R]]: ...

    @overload
    def enqueue_many(self, calls: Iterable[Call], *, partial: bool) -> list[compat.TaskResult[P, R] | None]: ...

    def enqueue_many(self, calls: Iterable[Call], *, partial: bool = False) -> Any:
        """Enqueue many calls with one INSERT statement and one script call per chunk; return their results in order.

        calls: `task.arguments(…)`, a tuple of positional arguments, or a mapping of keyword arguments.
        partial: enqueue as many as the gates admit; the result of a refused call is None. Otherwise all or none.
        Raises: as `enqueue`.
        """
        backend = self.get_backend()
        listed = [_as_arguments(call) for call in calls]
        if not hasattr(backend, "enqueue_many"):
            return [backend.enqueue(self, list(call.args), call.kwargs) for call in listed]
        return backend.enqueue_many(self, listed, partial=partial)


def _as_arguments(call: Call) -> Arguments:
    if isinstance(call, Arguments):
        return call
    if isinstance(call, tuple):
        return Arguments(call, {})
    if isinstance(call, Mapping):
        return Arguments((), dict(call))
    raise InvalidOption(
        f"enqueue_many takes task.arguments(…), tuples of positional or mappings of keyword arguments, "
        f"not {type(call).__qualname__}"
    )


def _check_name(function: Callable[..., Any]) -> None:
    """Refuse a function that no worker finds by its name. Raises: the framework's InvalidTask."""
    if reason := why_unresolvable(function):
        name = f"{function.__module__}.{function.__qualname__}" if inspect.isfunction(function) else repr(function)
        raise compat.InvalidTask(
            f"{name} cannot be a task: {reason}. A task function must be defined with `def` or `async def` at "
            f"a module level, in a module that the workers import, such as the tasks.py of an installed app."
        )


def _check_options(task: Task[Any, Any]) -> None:
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
    if task.max_attempts is not None and not is_attempt_count(task.max_attempts):
        refuse("max_attempts", "give a whole number of at least 1")
    for option in ("timeout", "expected_seconds"):
        value = getattr(task, option)
        if value is not None and not is_duration(value):
            refuse(option, "give seconds, more than 0")
    if task.queue_limit is not None and type(task.queue_limit) is not int:
        refuse("queue_limit", "give a whole number; 0 or less means no limit")
    if task.gate is not None and not isinstance(task.gate, str) and not callable(task.gate):
        refuse("gate", "give a name, a format such as '{model}', or a callable of the arguments")
    for option in ("retry_on", "give_up_on"):
        value = getattr(task, option)
        if not isinstance(value, tuple) or not all(inspect.isclass(e) and issubclass(e, BaseException) for e in value):
            refuse(option, "give a tuple of exception classes")
    if task.backoff is not None and not callable(task.backoff) and not is_duration(task.backoff, or_zero=True):
        refuse("backoff", "give seconds of at least 0, or a callable")
    if not isinstance(task.schedulable, bool):
        refuse("schedulable", "give True or False")
    if task.retention is not None and not isinstance(task.retention, Retention):
        refuse("retention", "give Retention(succeeded=…, failed=…)")
    if not isinstance(task.atomic, bool):
        refuse("atomic", "give True or False")
    if task.atomic and inspect.iscoroutinefunction(task.func):
        refuse("atomic", "a transaction belongs to one thread; make the function a `def`, not an `async def`")
    if task.run_after is not None:
        checked_moment(f"task {task.module_path}: run_after", task.run_after)
    if task.schedule is not None:
        _check_schedule(task, refuse)


@lru_cache(maxsize=1024)
def _is_generator_function(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _check_schedule(task: Task[Any, Any], refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse several schedules without distinct names, and arguments that the function does not take."""
    schedules: tuple[Any, ...] = task.schedule if isinstance(task.schedule, tuple) else (task.schedule,)
    if not all(isinstance(schedule, Declaration) for schedule in schedules):
        refuse("schedule", "give cron(…) or every(…), or a tuple of them")
    names = [schedule.name for schedule in schedules]
    if len(names) > 1 and ("" in names or len(set(names)) < len(names)):
        refuse("schedule", "give each of a task's schedules a name= of its own")
    for schedule in schedules:
        check_call(task, schedule.args, schedule.kwargs)


def is_attempt_count(value: object) -> bool:
    """Whether a value is a number of attempts."""
    return type(value) is int and value >= 1


def is_duration(value: object, *, or_zero: bool = False) -> bool:
    """Whether a value is a number of seconds, more than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > 0 or (or_zero and value == 0)


@lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def gate_name(task: Task[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the gate that admits a call; "" when the task has no gate.

    Raises: InvalidOption when the format or the callable gives no valid name for these arguments.
    """
    if task.gate is None:
        return ""
    if callable(task.gate):
        name = task.gate(*args, **kwargs)
    elif "{" not in task.gate:
        name = task.gate
    else:
        context = [None] if task.takes_context else []
        try:
            bound = _signature(task.func).bind(*context, *args, **kwargs)
            bound.apply_defaults()
            named = dict(bound.arguments)
            named |= named.get("kwargs", {}) if isinstance(named.get("kwargs"), dict) else {}
            name = task.gate.format(*args, **{**named, **kwargs})
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise InvalidOption(
                f"task {task.module_path}: gate={task.gate!r} cannot be filled from the arguments: {error!r}"
            ) from error
    check_gate_name(name)
    return name


def check_call(task: Task[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the task's function cannot be called with, or that JSON cannot carry.

    Raises: InvalidOption.
    """
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise InvalidOption(f"task {task.module_path}: arguments are a list and a mapping, not {args!r} and {kwargs!r}")
    payload.of_call(tuple(args), dict(kwargs))
    context = [None] if task.takes_context else []
    signature = _signature(task.func)
    try:
        signature.bind(*context, *args, **kwargs)
    except TypeError as error:
        shown = signature.replace(parameters=list(signature.parameters.values())[len(context) :])
        raise InvalidOption(
            f"task {task.module_path} cannot be called with these arguments: {error}; it takes {shown}"
        ) from error


# --- the decorator -------------------------------------------------------------------------------------------------


class TaskOptions(TypedDict, total=False):
    """The options of `@task`, for type checkers and editors; `Task` says what each means."""

    priority: int
    queue_name: str
    backend: str
    max_attempts: int | None
    backoff: Backoff | None
    retry_on: tuple[type[BaseException], ...]
    give_up_on: tuple[type[BaseException], ...]
    timeout: float | None
    gate: GateSource | None
    queue_limit: int | None
    expected_seconds: float | None
    schedule: Declaration | tuple[Declaration, ...] | None
    schedulable: bool
    retention: Retention | None
    atomic: bool


class _Declare(Protocol):
    """What `@task(…)` returns. The result of an `async def` task is what its coroutine returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class _DeclareWithContext(Protocol):
    """The same for `takes_context=True`: callers do not pass the context."""

    @overload
    def __call__(self, function: Callable[Concatenate[TaskContext, P], Coroutine[Any, Any, R]], /) -> Task[P, R]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[TaskContext, P], R], /) -> Task[P, R]: ...


@overload
def task(function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...


@overload
def task(function: Callable[P, R], /) -> Task[P, R]: ...


@overload
def task(
    function: None = None, /, *, takes_context: Literal[True], **options: Unpack[TaskOptions]
) -> _DeclareWithContext: ...


@overload
def task(
    function: None = None, /, *, takes_context: Literal[False] = False, **options: Unpack[TaskOptions]
) -> _Declare: ...


def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    priority: int = 0,
    queue_name: str = compat.DEFAULT_TASK_QUEUE_NAME,
    backend: str = compat.DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
    **options: Any,
) -> Any:
    """Declare a module-level function as a task.

    Like `django.tasks.task`, with the options of this backend, which `Task` explains. An alias with another backend
    (Django's immediate or dummy backend in tests) ignores these options.
    Raises: InvalidOption; the framework's InvalidTask, also for a function that no worker finds by its name, and for a
    second one of the same name.
    """
    own = {field.name for field in fields(Task)} - {field.name for field in fields(compat.Task)}
    if unknown := set(options) - own:
        raise TypeError(f"task() got unknown options {sorted(unknown)}; it has {sorted(own)}")

    def declare(function: Callable[..., Any]) -> Any:
        task_class: Any = compat.task_backends[backend].task_class
        given = options if issubclass(task_class, Task) else {}
        return task_class(
            func=function,
            priority=priority,
            backend=backend,
            queue_name=queue_name,
            run_after=None,
            takes_context=takes_context,
            **given,
        )

    return declare if function is None else declare(function)


def default_of(task: Task[Any, Any], option: Literal["max_attempts", "timeout"], options: Mapping[str, Any]) -> Any:
    """Return the task's own option, else the value in the backend's OPTIONS, else the setting in ASYNCQ."""
    if (value := getattr(task, option)) is not None:
        return value
    if option in options:
        return options[option]
    settings = conf.current()
    return settings.max_attempts if option == "max_attempts" else settings.timeout_seconds
