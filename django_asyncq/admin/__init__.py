"""Register the models with the default admin site.

The classes name no site, so a custom admin site can register them too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin

from ..core.late import Late
from ..models import BulkAction, Gate, Pause, Rate, Schedule, StartupRun, TaskRecord
from .addresses import LateAdmin

if TYPE_CHECKING:
    from .bulk import BulkActionAdmin
    from .gates import GateAdmin
    from .queues import PauseAdmin
    from .rates import RateAdmin
    from .schedules import ScheduleAdmin, StartupRunAdmin
    from .tasks import TaskRecordAdmin

__all__ = [
    "BulkActionAdmin",
    "GateAdmin",
    "PauseAdmin",
    "RateAdmin",
    "ScheduleAdmin",
    "StartupRunAdmin",
    "TaskRecordAdmin",
]

CLASSES = {
    TaskRecord: Late("admin.tasks.TaskRecordAdmin"),
    Gate: Late("admin.gates.GateAdmin"),
    Rate: Late("admin.rates.RateAdmin"),
    Pause: Late("admin.queues.PauseAdmin"),
    Schedule: Late("admin.schedules.ScheduleAdmin"),
    StartupRun: Late("admin.schedules.StartupRunAdmin"),
    BulkAction: Late("admin.bulk.BulkActionAdmin"),
}

for model, late in CLASSES.items():
    admin.site.register(model, partial(LateAdmin, late))  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return next(late.target for late in CLASSES.values() if late.name.endswith(f".{name}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
