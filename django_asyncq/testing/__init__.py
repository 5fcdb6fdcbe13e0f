"""For the tests of projects. Nothing here belongs into production.

Settings modules import from here, so each name is imported at its first use: most of them need a Django that is set up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .crashes import arm_from_environment, crash_at
    from .redis_server import EmbeddedRedis

__all__ = [
    "EmbeddedRedis",
    "arm_from_environment",
    "crash_at",
]

# The module in this folder that defines each name.
IMPORTED_AT_FIRST_USE = {
    "EmbeddedRedis": "redis_server",
    "arm_from_environment": "crashes",
    "crash_at": "crashes",
}


def __getattr__(name: str) -> Any:
    if name in IMPORTED_AT_FIRST_USE:
        return getattr(import_module(f"{__name__}.{IMPORTED_AT_FIRST_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *IMPORTED_AT_FIRST_USE]
