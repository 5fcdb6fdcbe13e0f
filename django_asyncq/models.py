"""The rows: tasks, gates, schedules and their occurrences, start-up runs, terms of locks.

What is written here is what is true; Redis only dispatches.

Only `lifecycle` changes a task's state, so no method here does.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .definitions.names import check_gate_name, uuid7
from .definitions.timing import Cron, Interval, Timing
from .exceptions import InvalidOption


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


class Overlap(models.TextChoices):
    """What becomes of an occurrence while a task of an earlier one is queued, running, or waits for a retry."""

    ALLOW = "allow", _("Queue it all the same")
    SKIP = "skip", _("Leave it out")


class Missed(models.TextChoices):
    """What becomes of occurrences that nobody was there to fire."""

    SKIP = "skip", _("Leave them out")
    ONCE = "once", _("Queue one task for all of them")
    ALL = "all", _("Queue a task for each, up to the cap")


def default_timezone() -> str:
    """Return the name of the project's time zone."""
    return str(settings.TIME_ZONE or "UTC")


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """The schedules that fire."""

    def firing(self) -> ScheduleQuerySet:
        """Schedules that are enabled, still have occurrences to come, and are not gone from the code."""
        return self.filter(enabled=True, retired_at=None, next_occurrence_at__isnull=False)


class Schedule(models.Model):
    """When a task is queued by itself: at the times of a cron expression, or at an interval.

    Declared in code (`is_declared`) or made in the admin. next_occurrence_at: the occurrence to come; None when there is none.
    Who saves other values of `TIMING_FIELDS` calls `plan_next`, for the next occurrence is theirs.
    """

    TIMING_FIELDS = ("cron", "interval_seconds", "zone", "starts_at", "ends_at")

    # Also the entry's id for asynq's tools.
    id = models.UUIDField(_("id"), primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(_("name"), max_length=200, unique=True)
    task = models.CharField(_("task"), max_length=200)
    args = models.JSONField(_("positional arguments"), default=list, blank=True)
    kwargs = models.JSONField(_("keyword arguments"), default=dict, blank=True)
    cron = models.CharField(_("cron expression"), max_length=200, blank=True, default="")
    interval_seconds = models.PositiveIntegerField(_("interval in seconds"), null=True, blank=True)
    zone = models.CharField(_("time zone"), max_length=64, default=default_timezone)
    starts_at = models.DateTimeField(_("starts at"), null=True, blank=True)
    ends_at = models.DateTimeField(_("ends at"), null=True, blank=True)
    enabled = models.BooleanField(_("enabled"), default=True)
    overlap = models.CharField(_("overlap"), max_length=8, choices=Overlap, default=Overlap.ALLOW)
    missed = models.CharField(_("missed occurrences"), max_length=8, choices=Missed, default=Missed.SKIP)
    missed_cap = models.PositiveIntegerField(_("cap of missed occurrences"), default=10)
    jitter_seconds = models.PositiveIntegerField(_("jitter in seconds"), default=0)
    is_declared = models.BooleanField(_("declared in code"), default=False, editable=False)
    retired_at = models.DateTimeField(_("gone from the code since"), null=True, blank=True, editable=False)
    next_occurrence_at = models.DateTimeField(
        _("next occurrence"), null=True, blank=True, editable=False, db_index=True
    )
    created_at = models.DateTimeField(_("created at"), default=timezone.now, editable=False)

    objects = ScheduleQuerySet.as_manager()

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering = ["name"]
        permissions = [("run_schedule", _("Can run a schedule now"))]
        constraints = [
            models.CheckConstraint(
                name="asyncq_cron_or_interval",
                condition=Q(cron="", interval_seconds__gte=1) | (~Q(cron="") & Q(interval_seconds__isnull=True)),
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def timing(self) -> Timing:
        """When it fires. Raises: InvalidOption when the row's values are no timing."""
        if self.cron:
            return Cron(self.cron, self.zone, self.starts_at, self.ends_at)
        # Whole seconds, so that every occurrence is one.
        anchor = (self.starts_at or self.created_at).replace(microsecond=0)
        return Interval(self.interval_seconds or 0, anchor, self.starts_at, self.ends_at)

    def plan_next(self, now: datetime) -> None:
        """Set `next_occurrence_at` to the first occurrence after `now`. Raises: InvalidOption."""
        self.next_occurrence_at = self.timing.after(now)


class OccurrenceOutcome(models.TextChoices):
    """What became of an occurrence."""

    QUEUED = "queued", _("Queued")
    SKIPPED = "skipped", _("Skipped: an earlier one was not over")
    MISSED = "missed", _("Missed")
    REFUSED = "refused", _("Refused")


class Occurrence(models.Model):
    """One time at which a schedule was due; written in one transaction with its task, and only once.

    occurs_at: the time it was for. task: kept as a number after its row was pruned. by_person: "run now".
    """

    schedule = models.ForeignKey(Schedule, models.CASCADE, verbose_name=_("schedule"), related_name="occurrences")
    occurs_at = models.DateTimeField(_("occurrence"))
    outcome = models.CharField(_("outcome"), max_length=8, choices=OccurrenceOutcome, default=OccurrenceOutcome.QUEUED)
    # No constraint: deleting tasks must cost nothing here.
    task = models.ForeignKey(
        TaskRecord,
        models.DO_NOTHING,
        verbose_name=_("task"),
        related_name="+",
        null=True,
        blank=True,
        db_constraint=False,
    )
    note = models.TextField(_("note"), blank=True, default="")
    by_person = models.BooleanField(_("by a person"), default=False)
    created_at = models.DateTimeField(_("created at"), default=timezone.now)

    class Meta:
        verbose_name = _("occurrence")
        verbose_name_plural = _("occurrences")
        ordering = ["-occurs_at"]
        constraints = [models.UniqueConstraint(fields=["schedule", "occurs_at"], name="asyncq_one_occurrence")]

    def __str__(self) -> str:
        return f"{self.schedule_id} {self.occurs_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


class StartupRun(models.Model):
    """One run of a start-up task. finished_at: None while it runs, or when its process died. term: of its lock."""

    name = models.CharField(_("name"), max_length=200, db_index=True)
    holder = models.CharField(_("holder"), max_length=200)
    term = models.BigIntegerField(_("term"))
    begun_at = models.DateTimeField(_("begun at"))
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    error = models.TextField(_("error"), blank=True, default="")

    class Meta:
        verbose_name = _("start-up run")
        verbose_name_plural = _("start-up runs")
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.name} {self.begun_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


class LockTerm(models.Model):
    """The number of a lock's latest term: it rises with each holder, so what an older one writes can be refused."""

    name = models.CharField(_("name"), max_length=200, primary_key=True)
    number = models.BigIntegerField(_("number"), default=0)
    holder = models.CharField(_("holder"), max_length=200, default="")
    begun_at = models.DateTimeField(_("begun at"), default=timezone.now)

    class Meta:
        verbose_name = _("term of a lock")
        verbose_name_plural = _("terms of locks")

    def __str__(self) -> str:
        return f"{self.name} {self.number}"
