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


def without_context(task: Any, signature: inspect.Signature) -> inspect.Signature:
    """Return the signature as callers of a task see it: they do not pass the context."""
    parameters = list(signature.parameters.values())
    has_own = task.takes_context and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return signature.replace(parameters=parameters[1:]) if has_own else signature


def check_binding(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the task's function cannot be called with. Raises: InvalidArguments."""
    context = (None,) if task.takes_context else ()
    signature = accepted_signature(task.func)
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
        context = [None] if task.takes_context else []
        try:
            bound = shown_signature(task.func).bind(*context, *args, **kwargs)
            bound.apply_defaults()
            named = dict(bound.arguments)
            named |= named.get("kwargs", {}) if isinstance(named.get("kwargs"), dict) else {}
            name = task.gate.format(*args, **{**named, **kwargs})
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise InvalidOption(
                f"task {task.module_path}: gate={task.gate!r} cannot be filled from the arguments: {error!r}"
            ) from error
    check_gate_name(name)
    return str(name)
