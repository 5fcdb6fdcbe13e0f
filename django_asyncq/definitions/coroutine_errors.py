"""What Django's refusal of a blocking call in a coroutine says of this package: which method to await instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from django.core.exceptions import SynchronousOnlyOperation

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
