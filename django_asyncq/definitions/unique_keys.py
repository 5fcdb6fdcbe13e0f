"""What makes two calls of a unique task the same: its key, and the digest of it that the row keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..exceptions import InvalidOption
from ..guard import attempt
from . import payload
from .calls import accepted_signature, called, filled, passes_context, shown_signature

TEXT = "the key must be a text that is not empty; for a call that need not be unique, write using(unique=False)"


def unique_digest(task: Any, alias: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the digest of a call's key, 64 hexadecimal digits; "" when the task is not unique.

    alias: in TASKS. args, kwargs: as the row keeps them. Calls have the same digest when alias, name of the task and
    key are the same.
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
    given = {name: value for name, value in arguments.items() if not _is_same(parameters[name].default, value)}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def _drop_first(arguments: dict[str, Any]) -> None:
    """Drop the context, which is no argument of the call."""
    name, value = next(iter(arguments.items()))
    if isinstance(value, tuple):
        arguments[name] = value[1:]
    else:
        del arguments[name]


def _is_same(default: Any, value: Any) -> bool:
    """Whether an argument is what the function has anyway. A default that JSON cannot hold is equal to no argument."""
    # The error in no variable: it would keep its frame, and with it all callers, until Python collects cycles. Among
    # these may be the commit hook whose end says that a transaction was rolled back.
    return attempt(payload.is_same, default, value) == (True, None)
