"""For the tests of projects. Nothing here belongs into production.

Settings modules import from here, so each name is imported at its first use: most of them need a Django that is set up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .asserting import assert_enqueued, assert_enqueues, assert_not_enqueued, enqueued
    from .backend import TestBackend
    from .contexts import make_context, travel
    from .crashes import arm_from_environment, crash_at
    from .faults import ProcessDied, fail_at, lose_lease, lose_redis
    from .redis_server import EmbeddedRedis
    from .running import run_schedules, run_tasks
    from .workers import run_command

__all__ = [
    "EmbeddedRedis",
    "ProcessDied",
    "TestBackend",
    "arm_from_environment",
    "assert_enqueued",
    "assert_enqueues",
    "assert_not_enqueued",
    "crash_at",
    "enqueued",
    "fail_at",
    "lose_lease",
    "lose_redis",
    "make_context",
    "run_command",
    "run_schedules",
    "run_tasks",
    "travel",
]

# The module in this folder that defines each name.
IMPORTED_AT_FIRST_USE = {
    "EmbeddedRedis": "redis_server",
    "ProcessDied": "faults",
    "TestBackend": "backend",
    "arm_from_environment": "crashes",
    "assert_enqueued": "asserting",
    "assert_enqueues": "asserting",
    "assert_not_enqueued": "asserting",
    "crash_at": "crashes",
    "enqueued": "asserting",
    "fail_at": "faults",
    "lose_lease": "faults",
    "lose_redis": "faults",
    "make_context": "contexts",
    "run_command": "workers",
    "run_schedules": "running",
    "run_tasks": "running",
    "travel": "contexts",
}


def __getattr__(name: str) -> Any:
    if name in IMPORTED_AT_FIRST_USE:
        return getattr(import_module(f"{__name__}.{IMPORTED_AT_FIRST_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *IMPORTED_AT_FIRST_USE]
