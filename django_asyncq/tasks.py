"""Declare and call tasks: `@task`, `.using()`, `.enqueue()`, `.enqueue_many()`.

User code imports this before the app registry is ready, so it must not import models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from datetime import datetime, timedelta
from functools import partial as with_arguments
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from asgiref.sync import sync_to_async

from . import conf
from .context import RowlessContext, TaskContext
from .core import compat, registry
from .core import payload as payloads
from .core.after import After, AfterFailure, checked_after
from .core.batches import Batch, BatchItem
from .core.calls import blocking, called, check_call, shown_signature, without_context
from .core.fairness import FairKey, FairWeight
from .core.foreign_words import OF_TASK, no_attribute, options_of, refuse_unknown, refusing_unknown
from .core.names import PREFIX_MARK, PayloadKind, is_wire_name
from .core.options import (
    MOST_WAITING,
    OnDuplicate,
    OnFull,
    RateSource,
    TaskOptions,
    UniqueKey,
    UniqueUntil,
    check_declared,
    check_options,
    names_of,
    one_or_more,
)
from .core.policies import Backoff, Retention
from .core.registry import why_unresolvable
from .core.schedules import Declaration
from .core.several_gates import GateSource, QueueLimit, as_tuple
from .core.time import Duration, moment_after, seconds_of
from .core.typed import carry_of, is_typed, occurs_in
from .core.versions import Upgrade
from .exceptions import InvalidArguments, InvalidOption, TaskNotRunnable
from .storage import database_clock

if TYPE_CHECKING:
    from .results import AsyncqResult

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from .results import AsyncqResult

    class _FrameworkTask(compat.Task[P, R]):
        pass

else:

    class _FrameworkTask(compat.Task, Generic[P, R]):
        __slots__ = ()


class Arguments(NamedTuple):
    """The arguments of one call in `enqueue_many`; made by `task.arguments(…)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step(Generic[R]):
    """One call that is enqueued with others; made by `task.step(…)`, for `chain` and `group`."""

    task: Task[Any, R]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Call = Arguments | tuple[Any, ...] | Mapping[str, Any]


# What to write in `using` for an option of the declaration.
OF_DECLARATION = {
    option: f"it belongs to the task: write @task({option}=…)"
    for option in (*TaskOptions.__annotations__, "takes_context", "batch")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(_FrameworkTask[P, R]):
    """A task of Django's framework with the options of this backend.

    A duration is given in seconds or as a timedelta; the task keeps seconds.
    max_attempts: attempts in all, the first included. timeout: how long a run may take. Where either is None, OPTIONS
    of the alias in TASKS decides, then ASYNCQ.
    backoff: the time between attempts, or a callable (see `core.policies`); None means `ExponentialBackoff()`.
    retry_on, give_up_on: exception classes that are retried, or never retried, one or a tuple; give_up_on wins.
    on_missing: exception classes with which the task is discarded, as by `raise Discard(…)`, one or a tuple.
    gate: the name of an admission limit, a format over the arguments, or a callable of the arguments; or a tuple of two
    to four: the task then needs a slot of each. queue_limit: the limit of a gate that has no Gate row: one number, or a
    tuple with one for each gate. expected_seconds: how long a run usually takes.
    on_full: "reject" a call at a full gate, or let it "wait"; max_waiting: how many may. ordered: a task keeps its slot
    between two attempts, so that with a limit of one the calls run in their order.
    fair: the key under which a call waits, a format over the arguments, or a callable of them: each key gets its share
    of the queue. fair_weight: how large that share is, or a callable of the arguments.
    rate: how many runs may start in a time, such as "600/m", unless the rate has a Rate row. rate_per: its name, a
    format over the arguments, or a callable of them; None: the task's name. burst: how many may start at once.
    schedule: when the task is enqueued automatically, made by `cron()` or `every()`; several as a tuple, each named.
    schedulable: whether people may create schedules of it in the admin, with arguments of their choice.
    retention: how long its finished rows are kept; the settings override it.
    atomic: run the function and record its success in one database transaction (`def` only).
    expires: how long the task may wait to begin, from the time from which it may run; for one call also a moment.
    deadline: when a run must have finished; `using` sets it, and `run_after`. A timedelta counts from the enqueueing.
    soft_timeout: when the function is asked to finish.
    isolated: run each attempt in a process of its own, which can be stopped at any time.
    unique: True for one task per arguments, a format over the arguments, or a callable of them; None or False for none.
    unique_until: "end", "start", or how long after its enqueueing no other is accepted. on_duplicate: "reject",
    "return" the existing task, "replace" its arguments, or "follow" it.
    keep_logs: how many of the lines that a run logs are kept with the task; None: as the settings say.
    typed_arguments: whether arguments may be dates, decimals, UUIDs and instances of models (see `core.typed`); None:
    as the settings say.
    sensitive: names of parameters whose values the admin masks, and "return" for the result; one or a tuple.
    aliases: former names, under which rows, schedules and code of an earlier deploy know it; one or a tuple.
    version: of the meaning of the arguments; raised when older ones no longer fit. upgrade: makes arguments of this
    version out of older ones: a function of (args, kwargs, from_version) that returns (args, kwargs).
    wire_name: the type of the messages of other programs that it runs, or a prefix that ends in "*". payload: what such
    a message holds: "json", or "bytes" as one argument. headers, group, after, after_failure: of one call; `using` sets
    them.
    inbox: whether any program may enqueue it through the inbox of its queue; or the Redis list whose values it gets.
    batch: run its calls together; the function gets a list of them.
    """

    # Whether only another program runs it (`remote`).
    is_remote: ClassVar[bool] = False

    max_attempts: int | None = None
    backoff: Backoff | None = None
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    give_up_on: tuple[type[BaseException], ...] = ()
    on_missing: tuple[type[BaseException], ...] = ()
    timeout: float | None = None
    gate: GateSource | None = None
    queue_limit: QueueLimit | None = None
    expected_seconds: float | None = None
    on_full: OnFull = "reject"
    max_waiting: int = MOST_WAITING
    ordered: bool = False
    fair: FairKey | None = None
    fair_weight: FairWeight = 1
    rate: str | None = None
    rate_per: RateSource | None = None
    burst: int = 1
    schedule: Declaration | Sequence[Declaration] | None = None
    schedulable: bool = False
    retention: Retention | None = None
    atomic: bool = False
    run_after: datetime | timedelta | None = None  # type: ignore[assignment]
    expires: float | datetime | None = None
    deadline: datetime | timedelta | None = None
    soft_timeout: float | None = None
    isolated: bool = False
    unique: UniqueKey | None = None
    unique_until: UniqueUntil | float = "end"
    on_duplicate: OnDuplicate = "reject"
    keep_logs: int | None = None
    typed_arguments: bool | None = None
    sensitive: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    version: int = 1
    upgrade: Upgrade | None = None
    wire_name: str | None = None
    payload: PayloadKind = "json"
    inbox: bool | str = False
    batch: Batch | None = None
    headers: Mapping[str, str] | None = None
    group: str | None = None
    after: tuple[After, ...] = ()
    after_failure: AfterFailure = "fail"

    if not TYPE_CHECKING:  # where an attribute of any name, and any option, would be right

        def __new__(cls, **options: Any) -> Any:
            """Refuse unknown options, also of Django's own decorator. Raises: TypeError."""
            refuse_unknown("task()", options, cls.__dataclass_fields__)
            return super(Task, cls).__new__(cls)

        def __getattr__(self, name: str) -> Any:
            """Raise the AttributeError, which says what to write in place of `delay` and the like."""
            raise no_attribute(self, name, OF_TASK, self.func.__name__ if name in OF_TASK else "")

    def __post_init__(self) -> None:
        _check_function(self.func)
        for option in ("timeout", "expected_seconds", "expires", "soft_timeout", "unique_until"):
            object.__setattr__(self, option, seconds_of(getattr(self, option)))
        for option in ("retry_on", "give_up_on", "on_missing"):
            object.__setattr__(self, option, one_or_more(getattr(self, option)))
        for option in ("gate", "queue_limit"):
            object.__setattr__(self, option, as_tuple(getattr(self, option)))
        for option in ("sensitive", "aliases"):
            object.__setattr__(self, option, names_of(getattr(self, option)))
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

    # The values of other tasks are arguments that a type checker would miss in the call.
    @overload
    def using(self, *, after: Mapping[str, Any], **options: Any) -> Task[..., R]: ...

    @overload
    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | timedelta | None = None,
        backend: str | None = None,
        gate: GateSource | None = None,
        queue_limit: QueueLimit | None = None,
        expected_seconds: Duration | None = None,
        on_full: OnFull | None = None,
        max_waiting: int | None = None,
        ordered: bool | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
        deadline: datetime | timedelta | None = None,
        soft_timeout: Duration | None = None,
        unique: UniqueKey | None = None,
        unique_until: UniqueUntil | Duration | None = None,
        on_duplicate: OnDuplicate | None = None,
        keep_logs: int | None = None,
        headers: Mapping[str, str] | None = None,
        group: str | None = None,
        after: Sequence[Any] | None = None,
        after_failure: AfterFailure | None = None,
    ) -> Task[P, R]: ...

    @refusing_unknown("using()", OF_DECLARATION)  # type: ignore[misc]  # the first overload takes the same options
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
        on_full: OnFull | None = None,
        max_waiting: int | None = None,
        ordered: bool | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
        deadline: datetime | timedelta | None = None,
        soft_timeout: Duration | None = None,
        unique: UniqueKey | None = None,
        unique_until: UniqueUntil | Duration | None = None,
        on_duplicate: OnDuplicate | None = None,
        keep_logs: int | None = None,
        headers: Mapping[str, str] | None = None,
        group: str | None = None,
        after: Mapping[str, Any] | Sequence[Any] | None = None,
        after_failure: AfterFailure | None = None,
    ) -> Any:
        """Return a copy with other options; None keeps the present value.

        run_after: the earliest time of the run. deadline: when a run must have finished; no run begins after it.
        For both, a timedelta counts from each call of `enqueue`, by the database's clock.
        expires: how long the task may wait to begin, from `run_after` or else from that call; or the moment itself.
        unique: False for a call that need not be unique, whatever the task says of duplicates. headers: texts that
        travel with the task, such as a trace id.
        group: of a task with `batch`, or of a remote one: the call runs together with others of the same group.
        after: results of tasks that must finish first; or a dict of parameters that get their values, each a result or
        a list of some. after_failure: what becomes of the call when one of them fails: "fail" (default) or "run".
        The other options are those of `task`.
        Raises: InvalidOption, which names the option and the remedy; TypeError for an unknown option; the framework's
        InvalidTask.
        """
        given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
        del given["self"]
        if after is not None:
            given["after"] = checked_after(after)
        if unique is False:
            given = {"unique_until": "end", "on_duplicate": "reject", **given}
        for option in ("run_after", "deadline"):
            if isinstance(after := given.get(option, getattr(self, option)), timedelta):
                moment = moment_after(option, database_clock.of_host(), after)
                # A backend of another package knows moments only. Ours has the INSERT add the duration.
                if not _stores_rows(backend or self.backend):
                    given[option] = moment
        return replace(self, **given)

    @blocking("task.aenqueue")
    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> AsyncqResult[P, R]:
        """Enqueue one call.

        Raises: InvalidArguments, InvalidOption, InvalidTask, EnqueueRefused; nothing is written then.
        """
        backend: Any = compat.task_backends[self.backend]
        if not issubclass(backend.task_class, Task):
            _check_elsewhere(self, args, kwargs)
        return backend.enqueue(self, list(args), kwargs)  # type: ignore[no-any-return]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> AsyncqResult[P, R]:
        """Enqueue one call, as `enqueue` does."""
        if not _stores_rows(self.backend):
            _check_elsewhere(self, args, kwargs)
        result: Any = await self.get_backend().aenqueue(self, list(args), kwargs)
        return result  # type: ignore[no-any-return]

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

    def step(self, *args: P.args, **kwargs: P.kwargs) -> Step[R]:
        """Return one call as a step of `chain` or `group`, which enqueue it."""
        return Step(self, args, kwargs)

    @overload
    def enqueue_many(self, calls: Iterable[Call], *, partial: Literal[False] = False) -> list[AsyncqResult[P, R]]: ...

    @overload
    def enqueue_many(self, calls: Iterable[Call], *, partial: bool) -> list[AsyncqResult[P, R] | None]: ...

    @blocking("task.aenqueue_many")
    def enqueue_many(self, calls: Iterable[Call], *, partial: bool = False) -> Any:
        """Enqueue many calls with one INSERT statement and one script call per chunk; return their results in order.

        calls: `task.arguments(…)`, a tuple of positional arguments, or a mapping of keyword arguments.
        partial: enqueue as many as the gates admit; the result of a refused call is None. Otherwise all or none.
        Raises: as `enqueue`.
        """
        backend, listed = self.get_backend(), [_as_arguments(call) for call in calls]
        if not hasattr(backend, "enqueue_many"):
            for call in listed:
                _check_elsewhere(self, call.args, call.kwargs)
            return [backend.enqueue(self, list(call.args), call.kwargs) for call in listed]
        return backend.enqueue_many(self, listed, partial=partial)

    @overload
    async def aenqueue_many(
        self, calls: Iterable[Call], *, partial: Literal[False] = False
    ) -> list[AsyncqResult[P, R]]: ...

    @overload
    async def aenqueue_many(self, calls: Iterable[Call], *, partial: bool) -> list[AsyncqResult[P, R] | None]: ...

    async def aenqueue_many(self, calls: Iterable[Call], *, partial: bool = False) -> Any:
        """Enqueue many calls, as `enqueue_many` does. Like `aenqueue`, in the thread of the database connection."""
        listed = [_as_arguments(call) for call in calls]
        return await sync_to_async(lambda: self.enqueue_many(listed, partial=partial), thread_sensitive=True)()


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
    return without_context(task, shown_signature(called(task)))


def _default(field: Any) -> Any:
    """Return the default of an option. The framework's Task has none for some of them on Django 6.0."""
    alias, queue = compat.DEFAULT_TASK_BACKEND_ALIAS, compat.DEFAULT_TASK_QUEUE_NAME
    framework = {"priority": 0, "backend": alias, "queue_name": queue}
    return framework.get(field.name, None if field.default is MISSING else field.default)


def _stores_rows(alias: str) -> bool:
    """Return whether the tasks of an alias are rows. Those of Django's immediate and dummy backends are not."""
    return issubclass(compat.task_backends[alias].task_class, Task)


def _check_elsewhere(task: Task[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call that a backend of another package cannot make. Raises: InvalidArguments, InvalidOption."""
    if task.after:
        raise InvalidOption(
            f"task {task.module_path}: after=… needs rows, and the backend of {task.backend!r} has none: use a "
            f"backend of django_asyncq; in tests django_asyncq.testing.TestBackend"
        )
    check_call(task, args, kwargs)
    if is_typed(task) and occurs_in(payloads.of_call(args, kwargs, carry=carry_of(task))):
        raise InvalidArguments(
            f"task {task.module_path}: typed arguments need rows, and the backend of {task.backend!r} has none: use a "
            f"backend of django_asyncq; in tests django_asyncq.testing.TestBackend",
            path="",
        )


def _check_function(function: Callable[..., Any]) -> None:
    """Refuse a function that no worker finds by its name. Raises: the framework's InvalidTask."""
    if reason := why_unresolvable(function):
        name = f"{function.__module__}.{function.__qualname__}" if inspect.isfunction(function) else repr(function)
        raise compat.InvalidTask(
            f"{name} cannot be a task: {reason}. A task function must be defined with `def` or `async def` at "
            f"a module level, in a module that the workers import, such as the tasks.py of an installed app."
        )


# --- the decorator -------------------------------------------------------------------------------------------------


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


class _DeclareBatch(Protocol):
    """The same for `batch=…`: the function gets a list of calls. What one call takes is checked when it is enqueued."""

    def __call__(self, function: Callable[[list[BatchItem]], Any], /) -> Task[..., Any]: ...


class _DeclareBatchWithContext(Protocol):
    """The same for `takes_context=True`."""

    def __call__(self, function: Callable[[TaskContext, list[BatchItem]], Any], /) -> Task[..., Any]: ...


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


@overload
def task(
    function: None = None, /, *, batch: Batch, takes_context: Literal[True], **options: Unpack[TaskOptions]
) -> _DeclareBatchWithContext: ...


@overload
def task(
    function: None = None, /, *, batch: Batch, takes_context: Literal[False] = False, **options: Unpack[TaskOptions]
) -> _DeclareBatch: ...


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
    on_missing: exception classes with which the task is discarded, as by `raise Discard(…)`, one or a tuple.
    gate: the name of an admission limit, a format over the arguments such as "{model}", or a callable of them; or a
    tuple of two to four: the task needs a slot of each, and gets all or none. queue_limit: the limit of a gate that has
    no Gate row: one number, or a tuple with one for each gate. expected_seconds: how long a run usually takes.
    on_full: what a call does at a full gate: "reject" (default) raises QueueFull, "wait" is accepted and waits for a
    slot. max_waiting: how many may wait (default 1,000). ordered: a task keeps its slot between two attempts: with
    `queue_limit=1` the calls run one at a time and in their order.
    fair: the key under which a call waits, a format over the arguments such as "{tenant}", or a callable of them: each
    key gets its share of the queue. fair_weight: how large that share is, 0.01 to 100, or a callable of the arguments.
    rate: at most so many starts, such as "600/m" or "10/30s", unless the rate has a Rate row. rate_per: the name of the
    rate, a format such as "{api}", or a callable (default: the task's name). burst: how many may start at once.
    schedule: when the task is enqueued automatically: `cron(…)` or `every(…)`, or a list of them, each named.
    schedulable: whether people may create schedules of it in the admin.
    retention: how long its finished rows are kept: `Retention(succeeded=…, failed=…)`.
    atomic: run the function and record its success in one database transaction (`def` only).
    expires: how long a call may wait to begin, from its `run_after` or else from its enqueueing; then it fails.
    soft_timeout: when the function is asked to finish: `context.check()` raises SoftTimeout; an `async def` and an
    isolated function are interrupted by it.
    isolated: run each attempt in a process of its own, which can be stopped at any time.
    unique: at most one task at a time per key: True for all arguments, a format over them such as "{user_id}", or a
    callable of them that returns a text.
    unique_until: how long a task keeps its key: "end" (default) until it finishes, "start" until a worker begins it,
    or a duration from its enqueueing, whatever becomes of it.
    on_duplicate: what a second call does: "reject" (default) raises DuplicateTask, "return" returns the existing task,
    "replace" gives the queued one the new arguments, "follow" runs once after the existing one.
    keep_logs: how many of its log lines are kept. sensitive: parameters that the admin masks, or "return".
    typed_arguments: whether arguments may also be dates, times, timedeltas, Decimals, UUIDs and instances of models.
    aliases: former names of the task, one or several: what was enqueued under them is run.
    version: of the meaning of the arguments (default 1). upgrade: a callable `(args, kwargs, from_version)` that makes
    arguments of this version out of those of an older one, and returns (args, kwargs).
    wire_name: the type of the messages of other programs that the task runs, such as "email:deliver", or a prefix such
    as "email:*". payload: what such a message holds, "json" or "bytes".
    inbox: whether any program may enqueue it through the inbox of its queue; or the name of a Redis list, each value
    of which is its one argument: as JSON, or with payload="bytes" as a text.
    batch: `Batch(size=…, within=…)` runs calls together; the function gets a list of them.
    Raises: InvalidOption; TypeError for an unknown option; the framework's InvalidTask, also for a function that no
    worker finds by its name, and for a second one of the same name.
    """
    refuse_unknown("task()", options, {*TaskOptions.__annotations__, "takes_context", "batch"}, OF_CALL)
    check_declared(options)
    if isinstance(options.get("schedule"), list):
        # A task can be hashed, and its options do not change.
        options["schedule"] = tuple(options["schedule"])
    options.update(priority=priority, backend=backend, queue_name=queue_name, takes_context=takes_context)
    return with_arguments(_declared, **options) if function is None else _declared(function, **options)


# What to write in a declaration for an option of one call.
OF_CALL = {
    option: f"it belongs to one call: write task.using({option}=…).enqueue(…)"
    for option in options_of(Task.using).difference(TaskOptions.__annotations__)
}


def _declared(function: Callable[..., Any], /, *, backend: str, **options: Any) -> Any:
    """Return a function's task, of the class that its backend takes."""
    _check_function(function)
    task_class: Any = compat.task_backends[backend].task_class
    if issubclass(Task, task_class):  # Django's immediate and dummy backends take any Task of the framework's
        task_class = Task
    return task_class(func=function, backend=backend, run_after=None, **options)


def default_of(task: Task[Any, Any], option: Literal["max_attempts", "timeout"], options: Mapping[str, Any]) -> Any:
    """Return the task's own option, else the value in the backend's OPTIONS, else the setting in ASYNCQ."""
    if (value := getattr(task, option)) is not None:
        return value
    if option in options:
        return seconds_of(options[option])
    settings = conf.current()
    return settings.max_attempts if option == "max_attempts" else settings.timeout_seconds


# --- Declare tasks that another program runs: `remote("email:deliver", queue_name="go")`.
#
# Such a task has a row like any other. Its message is written as that program expects it, no worker of ours runs
# it, and the leader has the row show what the other program has done with it.

# What a later call may do with an earlier one that another program may have begun already.
ON_DUPLICATE = ("reject", "return")


def runs_elsewhere(*args: Any, **kwargs: Any) -> NoReturn:
    """Stand for the function of another program. Raises: TaskNotRunnable."""
    raise TaskNotRunnable("only another program runs this task; `enqueue` it, and let that program consume its queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTask(Task[..., Any]):
    """A task that only another program runs; made by `remote`. `using`, `enqueue` and others are those of a `Task`."""

    is_remote: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for option in ("timeout", "expected_seconds", "expires", "unique_until"):
            object.__setattr__(self, option, seconds_of(getattr(self, option)))
        name = self.wire_name
        if not is_wire_name(name) or PREFIX_MARK in str(name):
            raise InvalidOption(
                f"remote({name!r}) is not valid: give the type that the other program handles, such as 'email:deliver'"
            )
        check_options(self)
        # Priorities and followers are ours alone: the other program would never see such a task.
        if self.priority:
            raise InvalidOption(f"remote task {name}: priority={self.priority!r} is not valid: asynq has no priorities")
        if self.on_duplicate not in ON_DUPLICATE:
            raise InvalidOption(
                f"remote task {name}: on_duplicate={self.on_duplicate!r} is not valid: another program may have begun "
                f'the earlier call; give "reject" or "return"'
            )
        self.get_backend().validate_task(self)
        registry.register_remote(self)

    def __reduce__(self) -> Any:
        """Return how to make a copy in another process; the name is no path that could be imported."""
        return _rebuilt, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def __repr__(self) -> str:
        return f"<RemoteTask {self.wire_name} queue_name={self.queue_name!r}>"

    @property
    def name(self) -> str:
        """The type that the other program handles."""
        return str(self.wire_name)

    @property
    def module_path(self) -> str:
        """The same: it stands where the dotted path of a task of ours does."""
        return str(self.wire_name)

    def get_result(self, result_id: str) -> AsyncqResult[..., Any]:
        """Return the result of this id. Raises: TaskResultDoesNotExist, also for the id of another task."""
        result: Any = self.get_backend().get_result(result_id)
        if result.task.module_path != self.module_path:
            raise compat.TaskResultDoesNotExist(result_id)
        return result  # type: ignore[no-any-return]

    def wire_payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, payloads.Payload]:
        """Return the payload of a call as it is sent, and as its row shows it.

        Raises: InvalidArguments for another number of values, or a value that cannot be sent.
        """
        if self.payload == "bytes":
            return self._bytes_payload(args, kwargs)
        if len(args) > 1 or (args and kwargs):
            raise self._refusal("give keyword arguments, which become a JSON object, or one JSON value")
        shown = payloads.of_call(args, kwargs, carry=carry_of(self))
        return payloads.json_bytes(shown.args[0] if args else shown.kwargs), shown

    def _bytes_payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, payloads.Payload]:
        if kwargs or len(args) != 1 or not isinstance(args[0], bytes):
            raise self._refusal('its payload is "bytes": give one value of the type bytes')
        data = bytes(args[0])
        return data, payloads.of_call([payloads.as_base64(data)], {})

    def _refusal(self, remedy: str) -> InvalidArguments:
        return InvalidArguments(
            f"remote task {self.wire_name} cannot be called with these arguments: {remedy}", path=""
        )


def _rebuilt(values: dict[str, Any]) -> RemoteTask:
    return RemoteTask(**values)


def remote(
    wire_name: str,
    /,
    *,
    queue_name: str,
    backend: str = compat.DEFAULT_TASK_BACKEND_ALIAS,
    payload: PayloadKind = "json",
    max_attempts: int | None = None,
    timeout: Duration | None = None,
    **options: Any,
) -> RemoteTask:
    """Return a task that only another program runs, such as a Go server with asynq.

    wire_name: the type that it handles, such as "email:deliver". queue_name: the queue that it serves.
    payload: "json": `enqueue(**kwargs)` sends an object, `enqueue(value)` that value; "bytes": `enqueue(data)`.
    max_attempts, timeout: go with the message; the other program keeps to them. Its backoff is its own.
    options: others that `using` has, such as gate, unique, expires, headers; group, for a server with an aggregator;
    and typed_arguments, whose forms that program reads.
    Raises: InvalidOption; TypeError for an unknown option; the framework's InvalidTask.
    """
    task = RemoteTask(
        # Django 6.0 has no default for it.
        priority=0,
        func=runs_elsewhere,
        wire_name=wire_name,
        queue_name=queue_name,
        backend=backend,
        payload=payload,
        max_attempts=max_attempts,
        timeout=seconds_of(timeout),
        run_after=None,
    )
    refuse_unknown("remote()", options, OPTIONS)
    return replace(task, **options) if options else task


# What `using` can change for one call, except what needs a worker of ours; and what is said of the arguments.
OPTIONS = (
    "gate",
    "queue_limit",
    "expected_seconds",
    "on_full",
    "max_waiting",
    "ordered",
    "expires",
    "unique",
    "unique_until",
    "on_duplicate",
    "headers",
    "group",
    "typed_arguments",
)
