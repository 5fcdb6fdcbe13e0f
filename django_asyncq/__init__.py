"""Tasks outside the request for Django: a row for every task, strict queue limits, asynq on the wire."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .exceptions import (
    AsyncqError,
    BrokerMisconfigured,
    BrokerUnavailable,
    GateUnavailable,
    InvalidArguments,
    QueueFull,
    TaskTimeout,
    WorkerLost,
)

if TYPE_CHECKING:
    from .context import TaskContext
    from .definitions.retention_policy import Retention
    from .definitions.schedules import cron, every, startup_task
    from .tasks import Arguments, task

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "AsyncqError",
    "BrokerMisconfigured",
    "BrokerUnavailable",
    "GateUnavailable",
    "InvalidArguments",
    "QueueFull",
    "Retention",
    "TaskContext",
    "TaskTimeout",
    "WorkerLost",
    "cron",
    "every",
    "startup_task",
    "task",
]

# Imported at first use, because Django imports this package before the settings are ready.
IMPORTED_AT_FIRST_USE = {
    "Arguments": "tasks",
    "Retention": "definitions.retention_policy",
    "TaskContext": "context",
    "cron": "definitions.schedules",
    "every": "definitions.schedules",
    "startup_task": "definitions.schedules",
    "task": "tasks",
}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in IMPORTED_AT_FIRST_USE:
        return getattr(import_module(f"{__name__}.{IMPORTED_AT_FIRST_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
