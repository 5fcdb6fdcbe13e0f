"""Whether a tool has put itself around functions, to trace their calls or to change what they do."""

from __future__ import annotations

from collections.abc import Container, Iterable
from types import FunctionType
from typing import Any


def are_unwrapped(functions: Iterable[Any], homes: Container[str]) -> bool:
    """Whether each of these is the very function that one of its home modules defines. homes: their names.

    By its globals, for wrappers take on names; by its type, for proxies take on all else.
    """
    for function in functions:
        if type(function) is not FunctionType or function.__globals__["__name__"] not in homes:
            return False
    return True
