"""Read the arguments of a call from the payload of a message that another program wrote. Uses no store."""

from __future__ import annotations

from typing import Any

from .. import conf
from ..exceptions import InvalidArguments
from . import payload
from .calls import check_binding
from .payload import Payload
from .untrusted_json import UNREADABLE, loads_untrusted

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
    # The settings' depth is that of one argument; the arguments lie in an object, and in a list of it.
    value = loads_untrusted(data, max_bytes=largest, max_depth=conf.current().max_depth + 2)
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
