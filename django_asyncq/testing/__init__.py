"""For the tests of projects. Nothing here belongs into production.

Settings modules import from here, so each name is imported at its first use: most of them need a Django that is set up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .asserting import assert_enqueued, assert_enqueues, assert_not_enqueued, enqueued
    from .crashes import arm_from_environment, crash_at
    from .redis_server import EmbeddedRedis

__all__ = [
    "EmbeddedRedis",
    "arm_from_environment",
    "assert_enqueued",
    "assert_enqueues",
    "assert_not_enqueued",
    "crash_at",
    "enqueued",
]

# The module in this folder that defines each name.
IMPORTED_AT_FIRST_USE = {
    "EmbeddedRedis": "redis_server",
    "arm_from_environment": "crashes",
    "assert_enqueued": "asserting",
    "assert_enqueues": "asserting",
    "assert_not_enqueued": "asserting",
    "crash_at": "crashes",
    "enqueued": "asserting",
}


def __getattr__(name: str) -> Any:
    if name in IMPORTED_AT_FIRST_USE:
        return getattr(import_module(f"{__name__}.{IMPORTED_AT_FIRST_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *IMPORTED_AT_FIRST_USE]
