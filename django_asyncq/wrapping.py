"""Whether a tool has put itself around a function, to trace its calls or to change what they do."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any


def is_unwrapped(function: Any, home: Mapping[str, Any]) -> bool:
    """Whether this is the very function that a module defines. home: the module's `vars`.

    By its globals, for wrappers take on names; by its type, for proxies take on all else.
    """
    return type(function) is FunctionType and function.__globals__ is home
