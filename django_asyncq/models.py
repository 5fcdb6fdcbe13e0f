"""The rows: a task, and a gate. What is written here is what is true; Redis only dispatches.

Only `lifecycle` changes a task's state, so no method here does.
"""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .exceptions import InvalidOption
from .names import check_gate_name, uuid7


class TaskState(models.IntegerChoices):
    """The four states of a task; nothing else is a state."""

    QUEUED = 0, _("Queued")
    RUNNING = 1, _("Running")
    SUCCEEDED = 2, _("Succeeded")
    FAILED = 3, _("Failed")


class TaskRecordQuerySet(models.QuerySet["TaskRecord"]):
    """The states by name."""

    def queued(self) -> TaskRecordQuerySet:
        """Tasks that wait: now, until `run_after`, or handed back by a worker."""
        return self.filter(state=TaskState.QUEUED)

    def running(self) -> TaskRecordQuerySet:
        """Tasks a worker has taken."""
        return self.filter(state=TaskState.RUNNING)

    def succeeded(self) -> TaskRecordQuerySet:
        """Tasks that ended well."""
        return self.filter(state=TaskState.SUCCEEDED)

    def failed(self) -> TaskRecordQuerySet:
        """Tasks that failed and will not be tried again by themselves."""
        return self.filter(state=TaskState.FAILED, retry_at=None)

    def retrying(self) -> TaskRecordQuerySet:
        """Tasks that failed and will be tried again at `retry_at`."""
        return self.filter(state=TaskState.FAILED, retry_at__isnull=False)


class TaskRecord(models.Model):
    """One task: what to run, in which state it is, and all that came of it."""

    id = models.UUIDField(_("id"), primary_key=True, default=uuid7, editable=False)
    name = models.CharField(_("task"), max_length=200)
    backend = models.CharField(_("backend"), max_length=64, default="default")
    queue_name = models.CharField(_("queue"), max_length=64, default="default")
    state = models.SmallIntegerField(_("state"), choices=TaskState, default=TaskState.QUEUED)
    args = models.JSONField(_("positional arguments"), default=list, blank=True)
    kwargs = models.JSONField(_("keyword arguments"), default=dict, blank=True)
    priority = models.SmallIntegerField(_("priority"), default=0)
    run_after = models.DateTimeField(_("run after"), null=True, blank=True)
    retry_at = models.DateTimeField(_("retry at"), null=True, blank=True)
    attempt = models.PositiveIntegerField(_("attempt"), default=0)
    max_attempts = models.PositiveIntegerField(_("most attempts"), default=1)
    crash_count = models.PositiveIntegerField(_("lost workers"), default=0)
    fence = models.BigIntegerField(_("fence"), default=0)
    timeout_seconds = models.FloatField(_("timeout in seconds"), null=True, blank=True)
    gate = models.CharField(_("gate"), max_length=200, blank=True, default="")
    queue_limit = models.IntegerField(_("the task's own limit for the gate"), null=True, blank=True)
    expected_seconds = models.FloatField(_("expected seconds"), null=True, blank=True)
    unique_key = models.CharField(_("unique key"), max_length=250, blank=True, default="")
    group = models.CharField(_("group"), max_length=200, blank=True, default="")
    return_value = models.JSONField(_("return value"), null=True, blank=True, default=None)
    progress = models.JSONField(_("progress"), null=True, blank=True, default=None)
    errors = models.JSONField(_("errors"), default=list, blank=True)
    worker_ids = models.JSONField(_("workers"), default=list, blank=True)
    enqueued_at = models.DateTimeField(_("enqueued at"), default=timezone.now)
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    last_attempted_at = models.DateTimeField(_("last attempted at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)

    objects = TaskRecordQuerySet.as_manager()

    class Meta:
        verbose_name = _("task")
        verbose_name_plural = _("tasks")
        ordering = ["-id"]
        permissions = [("retry_task", _("Can retry a task"))]
        indexes = [
            models.Index(fields=["state", "queue_name"], name="asyncq_state_queue"),
            models.Index(fields=["gate", "state"], name="asyncq_gate_state"),
            models.Index(fields=["enqueued_at"], name="asyncq_enqueued_at"),
        ]
        constraints = [
            models.CheckConstraint(name="asyncq_state_known", condition=Q(state__gte=0, state__lte=3)),
            models.CheckConstraint(name="asyncq_priority_range", condition=Q(priority__gte=-100, priority__lte=100)),
            models.CheckConstraint(
                name="asyncq_final_has_finished_at",
                condition=(
                    Q(state__lte=1, finished_at__isnull=True)
                    | Q(state=2, finished_at__isnull=False)
                    | Q(state=3, retry_at__isnull=True, finished_at__isnull=False)
                    | Q(state=3, retry_at__isnull=False, finished_at__isnull=True)
                ),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.short_name} {self.short_id}"

    @property
    def short_name(self) -> str:
        """The function's own name, without its module."""
        return self.name.rpartition(".")[2]

    @property
    def short_id(self) -> str:
        """The end of the id: its beginning is the time, the same for all tasks of a minute."""
        return f"…{str(self.id)[-8:]}"

    @property
    def is_final(self) -> bool:
        """Whether the task has ended for good: succeeded, or failed without another try to come."""
        return self.state == TaskState.SUCCEEDED or (self.state == TaskState.FAILED and self.retry_at is None)


class Gate(models.Model):
    """A strict limit: at most `limit` tasks of this gate are queued or running at once."""

    # Names the row had before it was saved last; whose limits must be read anew.
    former_names: frozenset[str] | set[str] = frozenset()

    name = models.CharField(_("name"), max_length=200, unique=True)
    limit = models.IntegerField(_("limit"), help_text=_("Most tasks queued or running; 0 or less means no limit."))
    expected_seconds = models.FloatField(
        _("expected seconds"),
        default=60,
        validators=[MinValueValidator(0.001)],
        help_text=_("How long a task of this gate usually takes; used to estimate when a slot is free."),
    )

    class Meta:
        verbose_name = _("gate")
        verbose_name_plural = _("gates")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Refuse a name that would break the gate's key."""
        try:
            check_gate_name(self.name)
        except InvalidOption as error:
            raise ValidationError({"name": str(error)}) from error
