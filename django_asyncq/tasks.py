"""Declare and call tasks: `@task`, `.using()`, `.enqueue()`, `.enqueue_many()`.

User code imports this before the app registry is ready, so it must not import models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from . import compat, conf, registry
from .context import RowlessContext, TaskContext
from .definitions.backoff import Backoff
from .definitions.calls import check_call, shown_signature, without_context
from .definitions.functions import why_unresolvable
from .definitions.moments import moment_after
from .definitions.retention_policy import Retention
from .definitions.schedules import Declaration
from .definitions.task_options import check_known, check_options, one_or_more
from .durations import Duration, seconds_of
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

    A duration is given in seconds or as a timedelta; the task keeps seconds.
    max_attempts: attempts in all, the first included. timeout: how long a run may take. Where either is None, OPTIONS
    of the alias in TASKS decides, then ASYNCQ.
    backoff: the time between attempts, or a callable (see `definitions.backoff`); None means `ExponentialBackoff()`.
    retry_on, give_up_on: exception classes that are retried, or never retried, one or a tuple; give_up_on wins.
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
        _check_function(self.func)
        for option in ("timeout", "expected_seconds"):
            object.__setattr__(self, option, seconds_of(getattr(self, option)))
        for option in ("retry_on", "give_up_on"):
            object.__setattr__(self, option, one_or_more(getattr(self, option)))
        check_options(self)
        super(Task, self).__post_init__()
        registry.register(self)

    def __repr__(self) -> str:
        """Show the name, what a call takes, and the options that are not the default."""
        parameters = [
            parameter.replace(annotation=inspect.Parameter.empty) for parameter in _signature(self).parameters.values()
        ]
        changed = [
            f" {field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name not in ("func", "takes_context") and getattr(self, field.name) != _default(field)
        ]
        return f"<Task {self.module_path}{inspect.Signature(parameters)}{''.join(changed)}>"

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | timedelta | None = None,
        backend: str | None = None,
        gate: GateSource | None = None,
        queue_limit: int | None = None,
        expected_seconds: Duration | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
    ) -> Task[P, R]:
        """Return a copy with other options; None keeps the present value.

        run_after: the earliest time of the run; a timedelta counts from now, by the database's clock.
        Raises: InvalidOption, which names the option and the remedy; the framework's InvalidTask.
        """
        if isinstance(run_after, timedelta):
            now = database_clock.now() if _stores_rows(backend or self.backend) else database_clock.of_host()
            run_after = moment_after("run_after", now, run_after)
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

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> compat.TaskResult[P, R]:
        """Enqueue one call.

        Raises: InvalidArguments, InvalidOption, InvalidTask, EnqueueRefused; nothing is written then.
        """
        if not _stores_rows(self.backend):
            check_call(self, args, kwargs)
        return self.get_backend().enqueue(self, list(args), kwargs)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> compat.TaskResult[P, R]:
        """Enqueue one call, as `enqueue` does."""
        if not _stores_rows(self.backend):
            check_call(self, args, kwargs)
        return await self.get_backend().aenqueue(self, list(args), kwargs)

    def call(self, *args: Any, **kwargs: Any) -> R:
        """Call the function here and now. A context of the framework's becomes a `TaskContext`."""
        return super(Task, self).call(*self._with_own_context(args), **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> R:
        """Call the function here and now, as `call` does."""
        return await super(Task, self).acall(*self._with_own_context(args), **kwargs)

    def _with_own_context(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.takes_context and args and type(args[0]) is compat.TaskContext:
            return (RowlessContext.of(args[0]), *args[1:])
        return args

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
            for call in listed:
                check_call(self, call.args, call.kwargs)
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


class _TaskText:
    """The `__doc__` of `Task`: the class's own text, and for a task that of its function."""

    def __init__(self, of_class: str | None) -> None:
        self.of_class = of_class

    def __get__(self, instance: Task[Any, Any] | None, owner: type[Any]) -> str | None:
        return self.of_class if instance is None else instance.func.__doc__


Task.__doc__ = _TaskText(Task.__doc__)  # type: ignore[assignment]


def _signature(task: Task[Any, Any]) -> inspect.Signature:
    return without_context(task, shown_signature(task.func))


def _default(field: Any) -> Any:
    """Return the default of an option. The framework's Task has none for some of them on Django 6.0."""
    framework = {
        "priority": 0,
        "backend": compat.DEFAULT_TASK_BACKEND_ALIAS,
        "queue_name": compat.DEFAULT_TASK_QUEUE_NAME,
    }
    return framework.get(field.name, None if field.default is MISSING else field.default)


def _stores_rows(alias: str) -> bool:
    """Return whether the tasks of an alias are rows. Those of Django's immediate and dummy backends are not."""
    return issubclass(compat.task_backends[alias].task_class, Task)


def _check_function(function: Callable[..., Any]) -> None:
    """Refuse a function that no worker finds by its name. Raises: the framework's InvalidTask."""
    if reason := why_unresolvable(function):
        name = f"{function.__module__}.{function.__qualname__}" if inspect.isfunction(function) else repr(function)
        raise compat.InvalidTask(
            f"{name} cannot be a task: {reason}. A task function must be defined with `def` or `async def` at "
            f"a module level, in a module that the workers import, such as the tasks.py of an installed app."
        )


# --- the decorator -------------------------------------------------------------------------------------------------


class TaskOptions(TypedDict, total=False):
    """The options of `@task`, for type checkers and editors; `Task` says what each means."""

    priority: int
    queue_name: str
    backend: str
    max_attempts: int | None
    backoff: Backoff | None
    retry_on: type[BaseException] | tuple[type[BaseException], ...]
    give_up_on: type[BaseException] | tuple[type[BaseException], ...]
    timeout: Duration | None
    gate: GateSource | None
    queue_limit: int | None
    expected_seconds: Duration | None
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
    """Declare a module-level function as a task: `@task`, or `@task(max_attempts=3)` with options.

    Like `django.tasks.task`, with the options of this backend. A duration is given in seconds or as a timedelta.
    priority: -100 to 100; higher first (default 0). queue_name, backend: where its calls are enqueued.
    takes_context: pass a `TaskContext` as the first argument, which must be called `context`.
    max_attempts: attempts in all, the first included. timeout: how long one may take.
    backoff: the time between attempts, or a callable `(exception, result)` that returns it, or None to give up.
    retry_on, give_up_on: exception classes that are retried, or never retried, one or a tuple; give_up_on wins.
    gate: the name of an admission limit, a format over the arguments such as "{model}", or a callable of them.
    queue_limit: the gate's limit unless the gate has a Gate row. expected_seconds: how long a run usually takes.
    schedule: when the task is enqueued automatically: `cron(…)` or `every(…)`, or a tuple of them, each named.
    schedulable: whether people may create schedules of it in the admin.
    retention: how long its finished rows are kept: `Retention(succeeded=…, failed=…)`.
    atomic: run the function and record its success in one database transaction (`def` only).
    Raises: InvalidOption; TypeError for an unknown option; the framework's InvalidTask, also for a function that no
    worker finds by its name, and for a second one of the same name.
    """
    check_known(set(options), {*TaskOptions.__annotations__, "takes_context"})

    def declare(function: Callable[..., Any]) -> Any:
        _check_function(function)
        task_class: Any = compat.task_backends[backend].task_class
        if issubclass(Task, task_class):  # Django's immediate and dummy backends take any Task of the framework's
            task_class = Task
        return task_class(
            func=function,
            priority=priority,
            backend=backend,
            queue_name=queue_name,
            run_after=None,
            takes_context=takes_context,
            **options,
        )

    return declare if function is None else declare(function)


def default_of(task: Task[Any, Any], option: Literal["max_attempts", "timeout"], options: Mapping[str, Any]) -> Any:
    """Return the task's own option, else the value in the backend's OPTIONS, else the setting in ASYNCQ."""
    if (value := getattr(task, option)) is not None:
        return value
    if option in options:
        return seconds_of(options[option])
    settings = conf.current()
    return settings.max_attempts if option == "max_attempts" else settings.timeout_seconds
