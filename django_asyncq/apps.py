"""The Django app. It connects receivers and registers checks when the models are ready."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.signals import setting_changed
from django.db.models.signals import post_delete, post_migrate, post_save, pre_save
from django.utils.translation import gettext_lazy as _

from .core import stop_requests
from .core.late import Late

# Here, because Django loads this module before the models of any app, which may take long to import.
stop_requests.install_for("runworkers")

# A web process checks nothing, and not each enqueues a task, saves a gate or deletes something.
CHECK = Late("checks.check_project")
GIVE_IDENTITY = Late("storage.identity.give_identity")
FORGET_DELETED_TASK = Late("lifecycle.deletion.forget_deleted_task")
PUBLISH_SCHEDULE = Late("scheduling.receivers.publish_schedule")
FORGET_SCHEDULE = Late("scheduling.receivers.forget_schedule")
ACQUIRE_GATE_SLOTS = Late("gates.receivers.acquire_gate_slots")
RELEASE_GATE_SLOTS = Late("gates.receivers.release_gate_slots")
REMEMBER_NAME = Late("storage.publishing.remember_name")
PUBLISH_GATE = Late("gates.receivers.publish_gate")
PUBLISH_RATE = Late("rates.placing.publish_rate")
NOTE_CHANGED_SETTING = Late("core.test_run.note_changed_setting")


class AsyncqConfig(AppConfig):
    """Configuration of django_asyncq."""

    name = "django_asyncq"
    verbose_name = _("Asyncq tasks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect the receivers of signals and register the system checks, none of which is imported yet."""
        # compat is imported because Django registers its check of TASKS only when django.tasks is imported.
        from .core import compat  # noqa: F401
        from .models import Gate, Rate, Schedule, TaskRecord
        from .signals import task_state_changed, task_state_changing

        checks.register(CHECK)
        post_migrate.connect(GIVE_IDENTITY, sender=self, weak=False, dispatch_uid=GIVE_IDENTITY.name)
        setting_changed.connect(NOTE_CHANGED_SETTING, weak=False, dispatch_uid=NOTE_CHANGED_SETTING.name)
        task_state_changing.connect(ACQUIRE_GATE_SLOTS, weak=False, dispatch_uid=ACQUIRE_GATE_SLOTS.name)
        task_state_changed.connect(RELEASE_GATE_SLOTS, weak=False, dispatch_uid=RELEASE_GATE_SLOTS.name)
        for model, signal, receiver in (
            (TaskRecord, post_delete, FORGET_DELETED_TASK),
            (Schedule, post_save, PUBLISH_SCHEDULE),
            (Schedule, post_delete, PUBLISH_SCHEDULE),
            (Schedule, post_delete, FORGET_SCHEDULE),
            (Gate, pre_save, REMEMBER_NAME),
            (Gate, post_save, PUBLISH_GATE),
            (Gate, post_delete, PUBLISH_GATE),
            (Rate, pre_save, REMEMBER_NAME),
            (Rate, post_save, PUBLISH_RATE),
            (Rate, post_delete, PUBLISH_RATE),
        ):
            signal.connect(receiver, sender=model, weak=False, dispatch_uid=receiver.name)

    @staticmethod
    def cancel_tasks(rows: Any, *, by: Any, reason: str, wait: Any) -> Any:
        """Do what `TaskRecord.objects.cancel` does: models cannot import what changes their states."""
        from . import lifecycle

        return lifecycle.cancel_rows(rows, by=by, reason=reason, wait=wait)
