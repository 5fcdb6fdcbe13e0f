"""Schedules and their occurrences."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from django.conf import settings
from django.db import models
from django.db.models import Exists, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core.fields import ExactCharField, StoredJSONEncoder
from ..core.timing import Cron, Interval, Timing
from .operating import DatabaseIdentity
from .tasks import TaskRecord


class Overlap(models.TextChoices):
    """What to do with an occurrence when the task of an earlier one is queued, running or retrying."""

    ALLOW = "allow", _("Run anyway")
    SKIP = "skip", _("Skip it")


class Missed(models.TextChoices):
    """What to do with occurrences that passed while no worker was running."""

    SKIP = "skip", _("Skip them")
    ONCE = "once", _("Queue one task for all of them")
    ALL = "all", _("Queue one task for each, up to the maximum")


def default_timezone() -> str:
    """Return the name of the project's time zone."""
    return str(settings.TIME_ZONE or "UTC")


def all_paused() -> Exists:
    """Return the condition that all schedules of the database are paused, as those of a copy are at first."""
    # Part of another query, which names the database.
    return Exists(models.QuerySet(DatabaseIdentity).filter(schedules_paused_at__isnull=False))


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """Filters for the schedules that fire."""

    def planned(self) -> ScheduleQuerySet:
        """Return the schedules that are enabled, have a next occurrence, and are not removed from the code."""
        return self.filter(enabled=True, retired_at=None, next_occurrence_at__isnull=False)

    def firing(self) -> ScheduleQuerySet:
        """Return the planned schedules; none while all schedules are paused."""
        return self.planned().filter(~all_paused())


class Schedule(models.Model):
    """A rule that queues a task at the times of a cron expression or at an interval.

    It is declared in code (`is_declared`) or made in the admin. next_occurrence_at: None when no occurrence is left.
    Call `plan_next` before you save a change to one of `TIMING_FIELDS`.
    """

    TIMING_FIELDS = ("cron", "interval_seconds", "zone", "starts_at", "ends_at")

    # asynq's tools show it as the id of the scheduler entry.
    id = models.UUIDField(_("id"), primary_key=True, default=uuid.uuid4, editable=False)
    name = ExactCharField(_("name"), max_length=200)
    task = ExactCharField(_("task"), max_length=200)
    args = models.JSONField(_("positional arguments"), encoder=StoredJSONEncoder, default=list, blank=True)
    kwargs = models.JSONField(_("keyword arguments"), encoder=StoredJSONEncoder, default=dict, blank=True)
    # Of the arguments, as of the code with which they were entered.
    version = models.SmallIntegerField(_("version of the arguments"), default=1, db_default=1)
    cron = models.CharField(_("cron expression"), max_length=200, blank=True, default="")
    interval_seconds = models.PositiveIntegerField(_("interval in seconds"), null=True, blank=True)
    zone = models.CharField(_("time zone"), max_length=64, default=default_timezone)
    starts_at = models.DateTimeField(_("starts at"), null=True, blank=True)
    ends_at = models.DateTimeField(_("ends at"), null=True, blank=True)
    enabled = models.BooleanField(_("enabled"), default=True)
    overlap = models.CharField(_("overlap"), max_length=8, choices=Overlap, default=Overlap.ALLOW)
    missed = models.CharField(_("missed occurrences"), max_length=8, choices=Missed, default=Missed.SKIP)
    missed_cap = models.PositiveIntegerField(_("maximum missed occurrences"), default=10)
    jitter_seconds = models.PositiveIntegerField(_("jitter in seconds"), default=0)
    is_declared = models.BooleanField(_("declared in code"), default=False, editable=False)
    retired_at = models.DateTimeField(_("removed from code since"), null=True, blank=True, editable=False)
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
            # As for gates.
            models.UniqueConstraint(fields=["name"], name="asyncq_one_schedule"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def timing(self) -> Timing:
        """When it fires. Raises: InvalidOption when the row's values do not make a valid timing."""
        if self.cron:
            return Cron(self.cron, self.zone, self.starts_at, self.ends_at)
        # Without fractions of a second, so that every occurrence falls on a whole second.
        anchor = (self.starts_at or self.created_at).replace(microsecond=0)
        return Interval(self.interval_seconds or 0, anchor, self.starts_at, self.ends_at)

    def plan_next(self, now: datetime) -> None:
        """Set `next_occurrence_at` to the first occurrence after `now`. Raises: InvalidOption."""
        self.next_occurrence_at = self.timing.after(now)


class OccurrenceOutcome(models.TextChoices):
    """The result of an occurrence."""

    QUEUED = "queued", _("Queued")
    SKIPPED = "skipped", _("Skipped: an earlier task had not finished")
    MISSED = "missed", _("Missed")
    REFUSED = "refused", _("Refused")


class Occurrence(models.Model):
    """One firing of a schedule. It is written once, in the same transaction as its task.

    occurs_at: the time the schedule was due. task: the id stays after the task's row is pruned or deleted.
    by_person: whether a person pressed "Run now".
    """

    # The index of `asyncq_one_occurrence` begins with it.
    schedule = models.ForeignKey(
        Schedule, models.CASCADE, verbose_name=_("schedule"), related_name="occurrences", db_index=False
    )
    occurs_at = models.DateTimeField(_("occurs at"))
    outcome = models.CharField(_("outcome"), max_length=8, choices=OccurrenceOutcome, default=OccurrenceOutcome.QUEUED)
    # No database constraint, so that deleting tasks costs nothing here.
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
    by_person = models.BooleanField(_("run by a person"), default=False)
    created_at = models.DateTimeField(_("created at"), default=timezone.now)

    class Meta:
        verbose_name = _("occurrence")
        verbose_name_plural = _("occurrences")
        ordering = ["-occurs_at"]
        constraints = [models.UniqueConstraint(fields=["schedule", "occurs_at"], name="asyncq_one_occurrence")]

    def __str__(self) -> str:
        return f"{self.schedule_id} {self.occurs_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
