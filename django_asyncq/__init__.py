"""Tasks outside the request for Django: a row for every task, strict queue limits, asynq on the wire."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .exceptions import (
    AsyncqError,
    BrokerMisconfigured,
    BrokerUnavailable,
    Discard,
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
    from .context import TaskContext
    from .core.after import previous
    from .core.batches import Batch, BatchItem
    from .core.logs import TaskLogFilter
    from .core.masking import MaskingFormatter
    from .core.policies import Retention
    from .core.schedules import cron, every, startup_task
    from .results import AsyncqResult, LogLine, await_all, wait_all
    from .tasks import Arguments, Step, remote, task
    from .workflows import Workflow, chain, group

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "AsyncqError",
    "AsyncqResult",
    "Batch",
    "BatchItem",
    "BrokerMisconfigured",
    "BrokerUnavailable",
    "Discard",
    "DuplicateTask",
    "GateUnavailable",
    "InvalidArguments",
    "LogLine",
    "MaskingFormatter",
    "QueueFull",
    "Retention",
    "SoftTimeout",
    "Step",
    "TaskCancelled",
    "TaskContext",
    "TaskFailed",
    "TaskLogFilter",
    "TaskTimeout",
    "WaitTimeout",
    "WorkerLost",
    "Workflow",
    "await_all",
    "chain",
    "cron",
    "every",
    "group",
    "previous",
    "remote",
    "startup_task",
    "task",
    "wait_all",
]

# Imported at first use, because Django imports this package before the settings are ready.
IMPORTED_AT_FIRST_USE = {
    "Arguments": "tasks",
    "AsyncqResult": "results",
    "Batch": "core.batches",
    "BatchItem": "core.batches",
    "LogLine": "results",
    "MaskingFormatter": "core.masking",
    "Retention": "core.policies",
    "Step": "tasks",
    "TaskContext": "context",
    "TaskLogFilter": "core.logs",
    "Workflow": "workflows",
    "await_all": "results",
    "chain": "workflows",
    "cron": "core.schedules",
    "every": "core.schedules",
    "group": "workflows",
    "previous": "core.after",
    "remote": "tasks",
    "startup_task": "core.schedules",
    "task": "tasks",
    "wait_all": "results",
}

# Modules that others of the package import by `from . import conf`; such an import asks here first. They and names with
# an underscore in front, which Python and tools ask for, need no table of the words of other task queues.
ASKED_BY_IMPORTS = {"conf", "gates", "interop", "lifecycle", "rates"}


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in IMPORTED_AT_FIRST_USE:
        return getattr(import_module(f"{__name__}.{IMPORTED_AT_FIRST_USE[name]}"), name)
    if name.startswith("_") or name in ASKED_BY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise import_module(f"{__name__}.core.foreign_imports").no_name(__name__, name)
