"""Bind the arguments of a call to a task's function, and find its gates and its rate.

Calls nothing but the callables that name these.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

from django.core.exceptions import SynchronousOnlyOperation

from .. import conf
from ..exceptions import InvalidArguments, InvalidOption
from . import payload
from .foreign_words import about_arguments
from .guard import attempt
from .names import check_gate_name
from .payload import MAX_DEPTH, UNREADABLE, Payload, loads_untrusted
from .several_gates import MOST_GATES, GateLimit, columns_of, stricter
from .typed import carry_of


@lru_cache(maxsize=1024)
def shown_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that a reader of the code sees: that of the function within its decorators."""
    return inspect.signature(function)


@lru_cache(maxsize=1024)
def accepted_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return what a call may pass: the parameters of the outermost decorator, which may add or remove arguments.

    `functools.wraps` copies the name and the text of a function, and does not change what its wrapper takes.
    """
    return inspect.signature(function, follow_wrapped=False)


def any_arguments(*args: Any, **kwargs: Any) -> None:
    """Take anything: the calls of a batch whose declaration does not say what one takes."""


def called(task: Any) -> Callable[..., Any]:
    """Return the function that takes what a call of the task takes; that of a batch gets a list of calls itself."""
    batch = getattr(task, "batch", None)
    if batch is None:
        function: Callable[..., Any] = task.func
        return function
    return batch.call or any_arguments


def passes_context(task: Any) -> bool:
    """Whether `called` takes the context before what callers pass."""
    return bool(task.takes_context) and getattr(task, "batch", None) is None


def without_context(task: Any, signature: inspect.Signature) -> inspect.Signature:
    """Return the signature as callers of a task see it: they do not pass the context."""
    parameters = list(signature.parameters.values())
    has_own = passes_context(task) and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return signature.replace(parameters=parameters[1:]) if has_own else signature


class Shape(NamedTuple):
    """What a function takes, where that is seen at a glance.

    names, required: of the arguments that may be, and must be, given by name. least, most: how many may be given by
    position alone.
    """

    names: frozenset[str]
    required: frozenset[str]
    least: int
    most: int


@lru_cache(maxsize=1024)
def shape_of(function: Callable[..., Any], *, has_context: bool) -> Shape | None:
    """Return the shape of a function's calls; None for one that only `bind` can judge. has_context: it gets one."""
    kinds = inspect.Parameter
    parameters = list(accepted_signature(function).parameters.values())[has_context:]
    by_name = [each for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    if len(by_name) < len(parameters):
        return None
    required = frozenset(each.name for each in by_name if each.default is kinds.empty)
    positional = [each.name for each in by_name if each.kind is kinds.POSITIONAL_OR_KEYWORD]
    # A keyword that must be given leaves no call by position alone.
    least = len(required) if required.issubset(positional) else len(positional) + 1
    return Shape(frozenset(each.name for each in by_name), required, least, len(positional))


def takes(shape: Shape | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call certainly fits; most give all their arguments by name, or all by position."""
    if shape is None:
        return False
    if not args:
        return shape.required <= kwargs.keys() <= shape.names
    return not kwargs and shape.least <= len(args) <= shape.most


def check_binding(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the task's function cannot be called with. Raises: InvalidArguments."""
    context = (None,) if passes_context(task) else ()
    signature = accepted_signature(called(task))
    try:
        signature.bind(*context, *args, **kwargs)
    except TypeError as error:
        raise InvalidArguments(
            f"task {task.module_path} cannot be called with these arguments: {error}; "
            f"it takes {without_context(task, signature)}"
            f"{about_arguments(task, [name for name in kwargs if name not in signature.parameters])}",
            path="",
        ) from error


def check_call(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the task's function cannot be called with, or that JSON cannot carry.

    Raises: InvalidArguments; InvalidOption when they are not a list and a mapping.
    """
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise InvalidOption(f"task {task.module_path}: arguments are a list and a mapping, not {args!r} and {kwargs!r}")
    payload.of_call(tuple(args), dict(kwargs), carry=carry_of(task))
    check_binding(task, args, kwargs)


def gate_columns(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that say which gates admit a call.

    Raises: InvalidOption when the formats or the callable give no valid names for these arguments.
    """
    if task.gate is None:
        return {"gate": ""}
    names = _gate_names(task, args, kwargs)
    limit = task.queue_limit
    limits = limit if isinstance(limit, tuple) else (limit,) * len(names)
    if len(limits) != len(names):
        raise InvalidOption(
            f"task {task.module_path}: queue_limit={limit!r} has {len(limits)} limits, and the task has {len(names)} "
            f"gates for these arguments: give one limit for each gate, or one number for all"
        )
    if len(names) == 1:
        return {"gate": names[0], "queue_limit": limits[0]}
    found: dict[str, int | None] = {}
    for name, own in zip(names, limits, strict=True):
        # Two formats may give one name; it is one gate then.
        found[name] = stricter(found[name], own) if name in found else own
    return columns_of([GateLimit(*each) for each in found.items()])


def _gate_names(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[str]:
    source = task.gate
    if isinstance(source, str):
        return (named(task, "gate", source, args, kwargs),)
    if isinstance(source, tuple):
        return [named(task, "gate", each, args, kwargs) for each in source]
    given = source(*args, **kwargs)
    names = given if isinstance(given, tuple | list) else (given,)
    if not 1 <= len(names) <= MOST_GATES:
        raise InvalidOption(
            f"task {task.module_path}: gate={source!r} gives {len(names)} gates for these arguments: have it return a "
            f"name, or a tuple of at most {MOST_GATES}"
        )
    for name in names:
        check_gate_name(name)
    return names


def rate_name(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the rate that a call starts at; "" when the task has no rate.

    Raises: InvalidOption when the format or the callable gives no valid name for these arguments, or what it raises.
    """
    if task.rate is None:
        return ""
    if task.rate_per is None:
        return str(task.module_path)
    return named(task, "rate_per", task.rate_per, args, kwargs)


def named(
    task: Any,
    option: Literal["gate", "rate_per"],
    source: str | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """Return what an option names for a call. source: a name, a format over the arguments, or a callable of them.

    Raises: InvalidOption when that is no valid name, or what the callable raises.
    """
    if callable(source):
        name = source(*args, **kwargs)
    elif "{" not in source:
        name = source
    else:
        name = filled(task, option, source, args, kwargs)
    check_gate_name(name, "gate" if option == "gate" else "rate")
    return str(name)


def filled(task: Any, option: str, template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an option's format, such as '{user_id}', filled from the arguments of a call and their defaults.

    Raises: InvalidOption when it names what the call does not have.
    """
    context = [None] if passes_context(task) else []
    try:
        bound = shown_signature(called(task)).bind(*context, *args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        named |= named.get("kwargs", {}) if isinstance(named.get("kwargs"), dict) else {}
        return template.format(*args, **{**named, **kwargs})
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        raise InvalidOption(
            f"task {task.module_path}: {option}={template!r} cannot be filled from the arguments: {error!r}; "
            f"it may name those of {without_context(task, shown_signature(called(task)))}"
        ) from error


def parameter_names(task: Any) -> list[str]:
    """Return the names of a task's positional parameters in order; an empty list when task is None."""
    if task is None:
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = shown_signature(called(task)).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    return names[1:] if passes_context(task) else names


# --- Read the arguments of a call from the payload of a message that another program wrote. Uses no store.

# An object with exactly these keys names positional and keyword arguments; it is what our own messages hold.
ARGUMENTS = {"args", "kwargs"}


def call_of(task: Any, data: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with which a task is called for a payload, by the task's `payload`.

    "bytes": the payload is the only argument. "json": an object gives keyword arguments, a list positional ones, any
    other value is the only argument, and no bytes are no arguments; `{"args": […], "kwargs": {…}}` gives both.
    Raises: InvalidArguments when it is not such JSON, is too large, or the function does not take it.
    """
    largest = conf.current().max_arguments_bytes
    if len(data) > largest:
        raise InvalidArguments(
            f"the payload has {len(data):,} bytes, more than ASYNCQ['MAX_ARGUMENTS_BYTES'] = {largest:,}: "
            f"send the key of stored data",
            path="",
        )
    if task.payload == "bytes":
        check_binding(task, [data], {})
        return [data], {}
    args, kwargs = _of_json(data, largest)
    found: Payload = payload.of_call(args, kwargs)
    check_binding(task, found.args, found.kwargs)
    return found.args, found.kwargs


def _of_json(data: bytes, largest: int) -> tuple[list[Any], dict[str, Any]]:
    if not data:
        return [], {}
    # MAX_DEPTH is that of one argument; the arguments lie in an object, and in a list of it.
    value = loads_untrusted(data, max_bytes=largest, max_depth=MAX_DEPTH + 2)
    if value is UNREADABLE:
        raise InvalidArguments(
            'the payload is not JSON in UTF-8, or is nested too deeply: send JSON, or declare payload="bytes"', path=""
        )
    if isinstance(value, list):
        return value, {}
    if not isinstance(value, dict):
        return [value], {}
    if set(value) == ARGUMENTS and isinstance(value["args"], list) and isinstance(value["kwargs"], dict):
        return value["args"], value["kwargs"]
    return [], value


# --- What makes two calls of a unique task the same: its key, and the digest of it that the row keeps.

TEXT = "the key must be a text that is not empty; for a call that need not be unique, write using(unique=False)"


def unique_digest(task: Any, alias: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the digest of a call's key, 64 hexadecimal digits; "" when the task is not unique.

    alias: in TASKS. args, kwargs: as the row keeps them with `unique=True`, else as options see them. Calls have the
    same digest when alias, name of the task and key are the same.
    Raises: InvalidOption when the format or the callable gives no text for these arguments.
    """
    if not task.unique:
        return ""
    return digest_of(alias, task.module_path, _key(task, args, kwargs))


def digest_of(*parts: str) -> str:
    """Return the SHA-256 of texts, with their lengths, so that no other texts have the same."""
    # A key of the project's code may hold surrogates.
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in encoded)).hexdigest()


def _key(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if task.unique is True:
        # A format cannot have the same text as arguments and mean something else: a task has one or the other.
        return canonical_arguments(task, args, kwargs)
    if isinstance(task.unique, str):
        key, error = filled(task, "unique", task.unique, args, kwargs), None
    else:
        # Copies: a callable that changes what it gets must not change what the task is run with.
        key, error = attempt(task.unique, *payload.copied(list(args)), **payload.copied(dict(kwargs)))
    if error is not None or not isinstance(key, str) or not key:
        reason = f"it raised {error!r}" if error is not None else f"it gave {key!r}"
        raise InvalidOption(
            f"task {task.module_path}: unique={task.unique!r} gives no key for these arguments: {reason}; {TEXT}"
        ) from error
    return key


def canonical_arguments(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return arguments as one JSON text: the same for f(1), f(a=1), and f(1, b=2) where 2 is the default of b.

    Defaults are skipped, so a parameter that is added with one changes no key. args, kwargs: from `payload.of_call`.
    """
    context = [None] if passes_context(task) else []
    bound, error = attempt(shown_signature(called(task)).bind, *context, *args, **kwargs)
    if error is not None:
        # A decorator has added or removed arguments.
        bound = accepted_signature(called(task)).bind(*context, *args, **kwargs)
    arguments = dict(bound.arguments)
    if context:
        _drop_first(arguments)
    parameters = bound.signature.parameters
    given = {name: value for name, value in arguments.items() if not _is_same(task, parameters[name].default, value)}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def _drop_first(arguments: dict[str, Any]) -> None:
    """Drop the context, which is no argument of the call."""
    name, value = next(iter(arguments.items()))
    if isinstance(value, tuple):
        arguments[name] = value[1:]
    else:
        del arguments[name]


def _is_same(task: Any, default: Any, value: Any) -> bool:
    """Whether an argument is what the function has anyway. A default that JSON cannot hold is equal to no argument."""
    # The error in no variable: it would keep its frame, and with it all callers, until Python collects cycles. Among
    # these may be the commit hook whose end says that a transaction was rolled back.
    found = attempt(payload.is_same, default, value)
    if found.error is not None and (carry := carry_of(task)) is not None:
        found = attempt(payload.is_same, attempt(payload.plain, default, "", MAX_DEPTH, carry).value, value)
    return found == (True, None)


# --- What Django's refusal of a blocking call in a coroutine says of this package: which method to await instead.

F = TypeVar("F", bound=Callable[..., Any])


def blocking(instead: str) -> Callable[[F], F]:
    """Have Django's error name what to await. instead: as it is written, such as `task.aenqueue`."""

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except SynchronousOnlyOperation as error:
                text = f"{function.__name__}() blocks, and was called in a coroutine: use `await {instead}(…)`."
                raise type(error)(f"{text} Django says: {error}") from error

        return cast("F", call)

    return decorate
