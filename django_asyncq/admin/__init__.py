"""The app in the Django admin. A site of one's own registers the two classes itself; they name no site."""

from __future__ import annotations

from django.contrib import admin

from ..models import Gate, TaskRecord
from .gates import GateAdmin
from .tasks import TaskRecordAdmin

admin.site.register(TaskRecord, TaskRecordAdmin)
admin.site.register(Gate, GateAdmin)

__all__ = ["GateAdmin", "TaskRecordAdmin"]
