"""What Django's refusal of a blocking call in a coroutine says of this package: which method to await instead."""

from __future__ import annotations

from django.core.exceptions import SynchronousOnlyOperation


def in_coroutine(error: SynchronousOnlyOperation, called: str, instead: str) -> SynchronousOnlyOperation:
    """Return Django's error with what to await. called, instead: as they are written, such as `enqueue`."""
    return type(error)(
        f"{called}() blocks, and was called in a coroutine: use `await {instead}(…)`. Django says: {error}"
    )
