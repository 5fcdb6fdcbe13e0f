"""Tasks outside the request for Django: a row for every task, strict queue limits, asynq on the wire.

`task` is imported when first asked for, so that this package can be loaded before Django's settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .exceptions import (
    AsyncqError,
    BrokerUnavailable,
    GateUnavailable,
    InvalidArguments,
    QueueFull,
    TaskTimeout,
    WorkerLost,
)

if TYPE_CHECKING:
    from .tasks import Arguments, TaskContext, task

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "AsyncqError",
    "BrokerUnavailable",
    "GateUnavailable",
    "InvalidArguments",
    "QueueFull",
    "TaskContext",
    "TaskTimeout",
    "WorkerLost",
    "task",
]


def __getattr__(name: str) -> Any:
    if name in ("Arguments", "TaskContext", "task"):
        from . import tasks

        return getattr(tasks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
