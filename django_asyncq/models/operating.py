"""What people decide while tasks run: pauses, and actions on many tasks at once."""

from __future__ import annotations

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..definitions.database_now import DatabaseNow
from ..definitions.exact_text import ExactCharField
from ..definitions.names import uuid7


class PauseKind(models.TextChoices):
    """What is paused: a queue of an alias, every call of a task, or a gate."""

    QUEUE = "queue", _("Queue")
    TASK = "task", _("Task")
    GATE = "gate", _("Gate")


class Pause(models.Model):
    """A queue, a task or a gate that is paused while this row exists.

    backend: the alias in TASKS of a queue; empty for a task or a gate. paused_by: a user's name, or the program that
    set asynq's key.
    """

    kind = models.CharField(_("kind"), max_length=8, choices=PauseKind)
    backend = ExactCharField(_("backend"), max_length=64, blank=True, default="")
    name = ExactCharField(_("name"), max_length=200)
    paused_at = models.DateTimeField(_("paused at"), default=timezone.now, db_default=DatabaseNow())
    paused_by = models.CharField(_("paused by"), max_length=150, blank=True, default="")
    note = models.CharField(_("note"), max_length=500, blank=True, default="")

    class Meta:
        verbose_name = _("pause")
        verbose_name_plural = _("pauses")
        ordering = ["kind", "backend", "name"]
        permissions = [("pause_queue", _("Can pause and resume queues, tasks and gates"))]
        constraints = [models.UniqueConstraint(fields=["kind", "backend", "name"], name="asyncq_one_pause")]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class BulkKind(models.TextChoices):
    """What is done to every task that matches."""

    RETRY = "retry", _("Retry")
    CANCEL = "cancel", _("Cancel")
    # Without the context it would replace the word on the buttons of Django's own pages.
    DELETE = "delete", pgettext_lazy("action on many tasks", "Delete")


class BulkState(models.TextChoices):
    """The states of an action on many tasks. RUNNING is worked off by the leader; the last two are final."""

    RUNNING = "running", pgettext_lazy("action on many tasks", "Running")
    PAUSED = "paused", pgettext_lazy("action on many tasks", "Paused")
    STOPPED = "stopped", pgettext_lazy("action on many tasks", "Stopped")
    FINISHED = "finished", pgettext_lazy("action on many tasks", "Finished")


class BulkAction(models.Model):
    """One action on all tasks that match a filter, worked off by the leader page by page, from the last id on.

    matching: the filter, as `bulk_actions` reads it. rows_per_second: the pace. total: how many matched when it was
    made. done, refused, left: how many were changed, could not be, and wait at a full gate. last_id: how far it has
    come. newest_id: of the newest task when it was made; it touches none that is newer.
    waiting_at: gate → the last task that was looked at, and how many of the gate's tasks wait behind it.
    waiting_since: when all tasks had been looked at, and none was admitted by a full gate since; null before.
    key: of the running action with this filter, so that a double click makes one; null when it is over.
    """

    id = models.UUIDField(_("id"), primary_key=True, default=uuid7, editable=False)
    kind = models.CharField(_("kind"), max_length=8, choices=BulkKind)
    matching = models.JSONField(_("matching"), default=dict)
    state = models.CharField(_("state"), max_length=8, choices=BulkState, default=BulkState.RUNNING)
    rows_per_second = models.PositiveIntegerField(_("rows per second"), default=200)
    total = models.PositiveIntegerField(_("tasks"), default=0)
    done = models.PositiveIntegerField(_("done"), default=0)
    refused = models.PositiveIntegerField(_("refused"), default=0)
    left = models.PositiveIntegerField(_("waiting at a full gate"), default=0)
    last_id = models.UUIDField(_("last task"), null=True, blank=True)
    newest_id = models.UUIDField(_("newest task"), null=True, blank=True)
    waiting_at = models.JSONField(_("full gates"), default=dict, blank=True)
    waiting_since = models.DateTimeField(_("waiting since"), null=True, blank=True)
    key = models.CharField(_("key"), max_length=64, null=True, blank=True)  # noqa: DJ001 - unique unless null
    created_by = models.CharField(_("created by"), max_length=150, blank=True, default="")
    created_at = models.DateTimeField(_("created at"), default=timezone.now, db_default=DatabaseNow())
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    error = models.TextField(_("error"), blank=True, default="")

    class Meta:
        verbose_name = _("action on many tasks")
        verbose_name_plural = _("actions on many tasks")
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["key"], name="asyncq_one_bulk_action")]

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"
