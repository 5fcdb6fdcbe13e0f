"""Which calls a task's function takes, and which gate a call goes through. Calls nothing but a gate's callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..exceptions import InvalidArguments, InvalidOption
from . import payload
from .names import check_gate_name


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


def check_binding(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the task's function cannot be called with. Raises: InvalidArguments."""
    context = (None,) if passes_context(task) else ()
    signature = accepted_signature(called(task))
    try:
        signature.bind(*context, *args, **kwargs)
    except TypeError as error:
        raise InvalidArguments(
            f"task {task.module_path} cannot be called with these arguments: {error}; "
            f"it takes {without_context(task, signature)}",
            path="",
        ) from error


def check_call(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the task's function cannot be called with, or that JSON cannot carry.

    Raises: InvalidArguments; InvalidOption when they are not a list and a mapping.
    """
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise InvalidOption(f"task {task.module_path}: arguments are a list and a mapping, not {args!r} and {kwargs!r}")
    payload.of_call(tuple(args), dict(kwargs))
    check_binding(task, args, kwargs)


def gate_name(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
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
        name = filled(task, "gate", task.gate, args, kwargs)
    check_gate_name(name)
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
