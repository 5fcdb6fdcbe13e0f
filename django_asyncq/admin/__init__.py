"""Register the models with the default admin site.

The classes name no site, so a custom admin site can register them too.
"""

from __future__ import annotations

from django.contrib import admin

from ..models import BulkAction, Gate, Pause, Schedule, StartupRun, TaskRecord
from .bulk_admin import BulkActionAdmin
from .gate_admin import GateAdmin
from .pause_admin import PauseAdmin
from .schedule_admin import ScheduleAdmin
from .startup_run_admin import StartupRunAdmin
from .task_admin import TaskRecordAdmin

admin.site.register(TaskRecord, TaskRecordAdmin)
admin.site.register(Gate, GateAdmin)
admin.site.register(Pause, PauseAdmin)
admin.site.register(Schedule, ScheduleAdmin)
admin.site.register(StartupRun, StartupRunAdmin)
admin.site.register(BulkAction, BulkActionAdmin)

__all__ = ["BulkActionAdmin", "GateAdmin", "PauseAdmin", "ScheduleAdmin", "StartupRunAdmin", "TaskRecordAdmin"]
