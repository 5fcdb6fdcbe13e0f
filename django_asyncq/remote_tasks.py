"""Declare tasks that another program runs: `remote("email:deliver", queue_name="go")`.

Such a task has a row like any other. Its message is written as that program expects it, no worker of ours runs it, and
the leader has the row show what the other program has done with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from . import compat, registry
from .definitions import payload as payloads
from .definitions.task_options import check_options
from .definitions.wire_names import PREFIX_MARK, PayloadKind, is_wire_name
from .durations import Duration, seconds_of
from .exceptions import InvalidArguments, InvalidOption, TaskNotRunnable
from .tasks import Task

if TYPE_CHECKING:
    from .asyncq_result import AsyncqResult

__all__ = ["RemoteTask", "remote"]

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
        shown = payloads.of_call(args, kwargs)
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
    options: others that `using` has, such as gate, unique, expires, headers; and group, for a server with
    an aggregator.
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
    return replace(task, **_known(options)) if options else task


# What `using` can change for one call, except what needs a worker of ours.
OPTIONS = (
    "gate",
    "queue_limit",
    "expected_seconds",
    "expires",
    "unique",
    "unique_until",
    "on_duplicate",
    "headers",
    "group",
)


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise TypeError(f"remote() has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}")
    return options
