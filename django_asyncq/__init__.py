"""Tasks outside the request for Django: a row for every task, strict queue limits, asynq on the wire."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .exceptions import (
    AsyncqError,
    BrokerMisconfigured,
    BrokerUnavailable,
    DuplicateTask,
    GateUnavailable,
    InvalidArguments,
    QueueFull,
    SoftTimeout,
    TaskCancelled,
    TaskFailed,
    TaskTimeout,
    WaitTimeout,
    WorkerLost,
)

if TYPE_CHECKING:
    from .asyncq_result import AsyncqResult, LogLine, await_all, wait_all
    from .context import TaskContext
    from .definitions.batches import Batch, BatchItem
    from .definitions.retention_policy import Retention
    from .definitions.schedules import cron, every, startup_task
    from .remote_tasks import remote
    from .tasks import Arguments, task

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "AsyncqError",
    "AsyncqResult",
    "Batch",
    "BatchItem",
    "BrokerMisconfigured",
    "BrokerUnavailable",
    "DuplicateTask",
    "GateUnavailable",
    "InvalidArguments",
    "LogLine",
    "QueueFull",
    "Retention",
    "SoftTimeout",
    "TaskCancelled",
    "TaskContext",
    "TaskFailed",
    "TaskTimeout",
    "WaitTimeout",
    "WorkerLost",
    "await_all",
    "cron",
    "every",
    "remote",
    "startup_task",
    "task",
    "wait_all",
]

# Imported at first use, because Django imports this package before the settings are ready.
IMPORTED_AT_FIRST_USE = {
    "Arguments": "tasks",
    "AsyncqResult": "asyncq_result",
    "Batch": "definitions.batches",
    "BatchItem": "definitions.batches",
    "LogLine": "asyncq_result",
    "Retention": "definitions.retention_policy",
    "TaskContext": "context",
    "await_all": "asyncq_result",
    "cron": "definitions.schedules",
    "every": "definitions.schedules",
    "remote": "remote_tasks",
    "startup_task": "definitions.schedules",
    "task": "tasks",
    "wait_all": "asyncq_result",
}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in IMPORTED_AT_FIRST_USE:
        return getattr(import_module(f"{__name__}.{IMPORTED_AT_FIRST_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
