"""Declaring and calling tasks: `@task`, `.using()`, `.enqueue()`, the context, and the table of registered tasks.

Imported by user code before the app registry may be ready, so models and `lifecycle` are imported when first needed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NamedTuple, NoReturn, ParamSpec, TypeVar, overload

from django.utils import timezone
from django.utils.module_loading import autodiscover_modules

from . import compat, conf
from .exceptions import InvalidOption, RetryRequested, TaskNotRegistered, TaskNotRunnable
from .names import TASK_NAME, check_gate_name, check_queue_name
from .retrying import Backoff, ExponentialBackoff

if TYPE_CHECKING:
    from .models import TaskRecord

P = ParamSpec("P")
R = TypeVar("R")

GateSource = str | Callable[..., str]

_registry: dict[str, Task[Any, Any]] = {}

if TYPE_CHECKING:

    class _FrameworkTask(compat.Task[P, R]):
        pass

else:

    class _FrameworkTask(compat.Task, Generic[P, R]):
        __slots__ = ()


class Arguments(NamedTuple):
    """The arguments of one call of `enqueue_many`; made by `task.arguments(…)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(_FrameworkTask[P, R]):
    """A task of Django's framework with the options of this backend. None means: the backend's OPTIONS, then ASYNCQ.

    max_attempts: runs in all, the first included. backoff: seconds, or a callable (see `retrying`).
    retry_on, give_up_on: exception classes that are, or are not, tried again; give_up_on wins.
    timeout: seconds a run may take. gate: a name, a format over the arguments, or a callable of the arguments.
    queue_limit: the gate's limit where no Gate row has one. expected_seconds: how long a run usually takes.
    """

    max_attempts: int | None = None
    backoff: Backoff | None = None
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    give_up_on: tuple[type[BaseException], ...] = ()
    timeout: float | None = None
    gate: GateSource | None = None
    queue_limit: int | None = None
    expected_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_options(self)
        super(Task, self).__post_init__()
        declared = _registry.get(self.module_path)
        if declared is None or declared.func is not self.func:
            _registry[self.module_path] = self

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
        """Return a copy with other values; None leaves a value as it is. A timedelta counts from now."""
        if isinstance(run_after, timedelta):
            run_after = timezone.now() + run_after
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
        """Return one call's arguments for `enqueue_many`."""
        return Arguments(args, kwargs)

    def enqueue_many(
        self, calls: Iterable[Arguments | tuple[Any, ...] | Mapping[str, Any]], *, partial: bool = False
    ) -> list[Any]:
        """Queue many calls with one INSERT statement and one script call per chunk; return their results in order.

        calls: `task.arguments(…)`, or a tuple of positional arguments, or a mapping of keyword arguments.
        partial: queue as many as the gates admit; refused calls have None in their place. Otherwise all or none.
        Raises: as `enqueue`.
        """
        backend = self.get_backend()
        listed = [_as_arguments(call) for call in calls]
        if not hasattr(backend, "enqueue_many"):
            return [backend.enqueue(self, list(call.args), call.kwargs) for call in listed]
        results: list[Any] = backend.enqueue_many(self, listed, partial=partial)
        return results


def _as_arguments(call: Arguments | tuple[Any, ...] | Mapping[str, Any]) -> Arguments:
    if isinstance(call, Arguments):
        return call
    if isinstance(call, Mapping):
        return Arguments((), dict(call))
    if isinstance(call, tuple):
        return Arguments(call, {})
    raise InvalidOption(
        f"enqueue_many takes task.arguments(…), tuples of positional or mappings of keyword arguments, "
        f"not {type(call).__qualname__}"
    )


def _check_options(task: Task[Any, Any]) -> None:
    """Refuse options that can never work. Raises: InvalidOption, naming task, option and remedy."""

    def refuse(option: str, remedy: str) -> NoReturn:
        raise InvalidOption(f"task {task.module_path}: {option}={getattr(task, option)!r} is not valid: {remedy}")

    if not TASK_NAME.fullmatch(task.module_path) and "<" not in task.module_path:
        raise InvalidOption(f"task name {task.module_path!r} is not valid: use 1 to 200 letters, digits, '_', '.'")
    check_queue_name(task.queue_name)
    if task.max_attempts is not None and (type(task.max_attempts) is not int or task.max_attempts < 1):
        refuse("max_attempts", "a whole number of at least 1")
    for option in ("timeout", "expected_seconds"):
        value = getattr(task, option)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            refuse(option, "seconds, more than 0")
    if task.queue_limit is not None and type(task.queue_limit) is not int:
        refuse("queue_limit", "a whole number; 0 or less means no limit")
    if task.gate is not None and not isinstance(task.gate, str) and not callable(task.gate):
        refuse("gate", "a name, a format such as '{model}', or a callable of the arguments")
    for option in ("retry_on", "give_up_on"):
        value = getattr(task, option)
        if not isinstance(value, tuple) or not all(inspect.isclass(e) and issubclass(e, BaseException) for e in value):
            refuse(option, "a tuple of exception classes")
    if task.backoff is not None and not callable(task.backoff) and not _is_seconds(task.backoff):
        refuse("backoff", "seconds of at least 0, or a callable")


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


@lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def gate_name(task: Task[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the gate of one call, or "" for none.

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


# --- the decorator -------------------------------------------------------------------------------------------------


@overload
def task(function: Callable[P, R], /) -> Task[P, R]: ...


@overload
def task(
    function: None = None,
    /,
    *,
    takes_context: Literal[True],
    priority: int = 0,
    queue_name: str = compat.DEFAULT_TASK_QUEUE_NAME,
    backend: str = compat.DEFAULT_TASK_BACKEND_ALIAS,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    retry_on: tuple[type[BaseException], ...] = (Exception,),
    give_up_on: tuple[type[BaseException], ...] = (),
    timeout: float | None = None,
    gate: GateSource | None = None,
    queue_limit: int | None = None,
    expected_seconds: float | None = None,
) -> Callable[[Callable[Concatenate[TaskContext, P], R]], Task[P, R]]: ...


@overload
def task(
    function: None = None,
    /,
    *,
    takes_context: Literal[False] = False,
    priority: int = 0,
    queue_name: str = compat.DEFAULT_TASK_QUEUE_NAME,
    backend: str = compat.DEFAULT_TASK_BACKEND_ALIAS,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    retry_on: tuple[type[BaseException], ...] = (Exception,),
    give_up_on: tuple[type[BaseException], ...] = (),
    timeout: float | None = None,
    gate: GateSource | None = None,
    queue_limit: int | None = None,
    expected_seconds: float | None = None,
) -> Callable[[Callable[P, R]], Task[P, R]]: ...


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
    """Make a task of a module-level function; as `django.tasks.task`, with this backend's options typed.

    Where the alias has another backend (Django's immediate or dummy one in tests), the options are left out.
    Raises: InvalidOption, and the framework's InvalidTask.
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


# --- the table of registered tasks ---------------------------------------------------------------------------------


def registered(name: str) -> Task[Any, Any]:
    """Return the task declared under this dotted path. Names are looked up, never imported.

    Raises: TaskNotRegistered.
    """
    try:
        return _registry[name]
    except KeyError:
        raise TaskNotRegistered(
            f"no task named {name!r} is registered: is its module imported when the app starts "
            f"(a tasks.py of an installed app is), and is the worker's code up to date?"
        ) from None


def load_task_modules() -> None:
    """Import the `tasks` module of every installed app, so that its tasks are registered."""
    autodiscover_modules("tasks")


def registered_names() -> list[str]:
    """Return the names of all registered tasks, sorted."""
    return sorted(_registry)


# --- what a run and a caller get -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(compat.TaskContext):  # type: ignore[misc,type-arg]
    """What a task declared with `takes_context=True` gets as its first argument.

    record: the row. stop: set when the run shall end (timeout passed, or the worker is shutting down).
    """

    record: TaskRecord
    stop: Any = None

    @property
    def attempt(self) -> int:
        """Which try this is, from 1. Runs that were handed back or whose worker was lost do not count."""
        return self.record.attempt

    @property
    def should_stop(self) -> bool:
        """Whether the run shall end soon: its timeout has passed or the worker is shutting down."""
        return self.stop is not None and self.stop.is_set()

    def retry(self, *, in_: float | timedelta | None = None, counted: bool = True) -> NoReturn:
        """End this run and have the task tried again, after `in_` (seconds; default: the task's backoff).

        counted: whether this run uses up an attempt; one that does and was the last fails the task.
        """
        seconds = in_.total_seconds() if isinstance(in_, timedelta) else in_
        if seconds is not None and not seconds >= 0:
            raise InvalidOption(f"retry(in_={in_!r}): a time to wait of at least 0")
        raise RetryRequested(delay_seconds=seconds, counted=counted)


def result_of(record: TaskRecord) -> compat.TaskResult[Any, Any]:
    """Return the row as a result of Django's framework."""
    result: compat.TaskResult[Any, Any] = compat.TaskResult(
        task=_task_of(record),
        id=str(record.id),
        status=_status_of(record),
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        last_attempted_at=record.last_attempted_at,
        finished_at=record.finished_at,
        args=record.args,
        kwargs=record.kwargs,
        backend=record.backend,
        errors=[
            compat.TaskError(exception_class_path=error["exception"], traceback=error["traceback"])
            for error in record.errors
        ],
        worker_ids=list(record.worker_ids),
    )
    object.__setattr__(result, "_return_value", record.return_value)
    return result


def _status_of(record: TaskRecord) -> compat.TaskResultStatus:
    from .models import TaskState

    if record.state == TaskState.FAILED and record.retry_at is not None:
        return compat.TaskResultStatus.READY
    return {
        TaskState.QUEUED: compat.TaskResultStatus.READY,
        TaskState.RUNNING: compat.TaskResultStatus.RUNNING,
        TaskState.SUCCEEDED: compat.TaskResultStatus.SUCCESSFUL,
        TaskState.FAILED: compat.TaskResultStatus.FAILED,
    }[TaskState(record.state)]


def _task_of(record: TaskRecord) -> Any:
    """Return the task as it was enqueued. Not validated again: what the settings say now must not hide a result."""
    declared = _registry.get(record.name) or _gone(record.name)
    task = object.__new__(Task)
    for field in fields(Task):
        object.__setattr__(task, field.name, getattr(declared, field.name))
    for name in ("priority", "queue_name", "backend", "run_after"):
        object.__setattr__(task, name, getattr(record, name))
    return task


@lru_cache(maxsize=256)
def _gone(name: str) -> Any:
    """Return a task in the place of one that the code no longer has, under the same name."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise TaskNotRegistered(f"task {name!r} is gone from the code")

    module, _, function_name = name.rpartition(".")
    function = types.FunctionType(missing.__code__, missing.__globals__, function_name, None, missing.__closure__)
    function.__module__, function.__qualname__ = module, function_name
    task = object.__new__(Task)
    for field in fields(Task):
        value = function if field.name == "func" else field.default
        object.__setattr__(task, field.name, value)
    return task


def next_try(task: Task[Any, Any], record: TaskRecord, exception: BaseException, now: datetime) -> datetime | None:
    """Decide whether and when a failed run is tried again; None means never.

    `give_up_on` wins over `retry_on`; `context.retry(counted=False)` goes on past the last attempt.
    """
    if isinstance(exception, TaskNotRunnable):
        return None
    asked = exception if isinstance(exception, RetryRequested) else None
    if asked is None and (isinstance(exception, task.give_up_on) or not isinstance(exception, task.retry_on)):
        return None
    if record.attempt >= record.max_attempts and (asked is None or asked.counted):
        return None
    if asked is not None and asked.delay_seconds is not None:
        return now + timedelta(seconds=asked.delay_seconds)
    backoff = task.backoff if task.backoff is not None else ExponentialBackoff()
    delay = backoff(exception, result_of(record)) if callable(backoff) else backoff
    if delay is None:
        return None
    return now + (delay if isinstance(delay, timedelta) else timedelta(seconds=delay))


def default_of(task: Task[Any, Any], option: Literal["max_attempts", "timeout"], options: Mapping[str, Any]) -> Any:
    """Return a task's option, else the backend's OPTIONS, else ASYNCQ's."""
    if (value := getattr(task, option)) is not None:
        return value
    if option in options:
        return options[option]
    settings = conf.current()
    return settings.max_attempts if option == "max_attempts" else settings.timeout_seconds
