"""The models: tasks, gates, schedules and their occurrences, start-up runs, leadership terms, the identity.

The database is the source of truth; Redis only dispatches. Only `lifecycle` changes a task's state, so no method here
does.
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

from .definitions.database_now import DatabaseNow
from .definitions.exact_text import ExactCharField
from .definitions.names import check_gate_name, lowest_uuid7_at, uuid7
from .definitions.partial_indexes import PartialIndex, UniqueUnlessNull
from .definitions.stored_json import StoredJSONEncoder
from .definitions.timing import Cron, Interval, Timing
from .exceptions import InvalidOption


class TaskState(models.IntegerChoices):
    """The four states of a task.

    | state     | number | finished_at | retry_at | meaning |
    |-----------|--------|-------------|----------|---------|
    | QUEUED    | 0      | null        | any      | waits for a worker, or until `run_after` |
    | RUNNING   | 1      | null        | any      | a worker runs it |
    | SUCCEEDED | 2      | set         | any      | final |
    | FAILED    | 3      | set         | null     | final: it is not queued again by itself |
    | RETRYING  | 3      | null        | set      | the name of FAILED with `retry_at`: queued again at `retry_at` |

    The constraint `asyncq_final_has_finished_at` enforces the table.
    """

    QUEUED = 0, _("Queued")
    RUNNING = 1, _("Running")
    SUCCEEDED = 2, _("Succeeded")
    FAILED = 3, _("Failed")


class FailureReason(models.IntegerChoices):
    """Why a task is FAILED or RETRYING; NONE in every other state.

    The constraint `asyncq_reason_of_failure` enforces that.
    """

    NONE = 0, _("None")
    EXCEPTION = 1, _("The function raised an error")
    TIMEOUT = 2, _("It took longer than its timeout")
    WORKER_LOST = 3, _("Its worker was lost")
    CANCELLED = 4, _("It was cancelled")
    EXPIRED = 5, _("It had not begun in time")
    PARENT_FAILED = 6, _("A task that it waited for failed")
    NOT_REGISTERED = 7, _("The code has no such task")
    SUPERSEDED = 8, _("A newer task replaced it")
    GATE_FULL = 9, _("Its gate was full")


class TaskRecordQuerySet(models.QuerySet["TaskRecord"]):
    """Filters that name the states, and filters that an index serves."""

    def queued(self) -> TaskRecordQuerySet:
        """Return the tasks that wait for a worker or until `run_after`."""
        return self.filter(state=TaskState.QUEUED)

    def running(self) -> TaskRecordQuerySet:
        """Return the tasks that a worker has claimed."""
        return self.filter(state=TaskState.RUNNING)

    def succeeded(self) -> TaskRecordQuerySet:
        """Return the tasks that succeeded."""
        return self.filter(state=TaskState.SUCCEEDED)

    def failed(self) -> TaskRecordQuerySet:
        """Return the tasks that failed and are not queued again by themselves."""
        return self.filter(state=TaskState.FAILED, retry_at=None)

    def retrying(self) -> TaskRecordQuerySet:
        """Return the FAILED tasks that are queued again at `retry_at`."""
        return self.filter(state=TaskState.FAILED, retry_at__isnull=False)

    def at_gate(self, name: str = "") -> TaskRecordQuerySet:
        """Return the tasks of a gate, without a name those of all gates.

        The index holds no row without a gate. A database uses it only for a query that repeats this condition.
        """
        rows = self.exclude(gate="")
        return rows.filter(gate=name) if name else rows

    def waiting_at_gate(self, name: str = "") -> TaskRecordQuerySet:
        """Return the tasks that are retried when a gate has a free slot for them; without a name those of all gates."""
        return self.at_gate(name).retrying().filter(reason=FailureReason.GATE_FULL)

    def enqueued_since(self, moment: datetime) -> TaskRecordQuerySet:
        """Return the tasks enqueued at a time or later, by the millisecond in their ids: no index is on times."""
        return self.filter(id__gte=lowest_uuid7_at(moment))


class TaskRecord(models.Model):
    """One task: what to run, its state, and its outcome.

    attempt: number of counted runs so far; a run that a worker crash cut short is counted in `crash_count` instead.
    fence: rises with each claim; a worker may write only with the fence of its own claim.
    errors: one entry per failed attempt, oldest first. worker_ids: the workers that claimed it, oldest first.
    reason, last_exception: why it is FAILED, and the class path of the last error; for filters, which never read JSON.
    is_suspect: it was running when its worker process died together with others; it runs alone next.
    Times are those of the database's clock (`storage.database_clock`).

    Every column has a default of the database, so that the INSERT of a plain task names only those with another value.
    """

    id = models.UUIDField(_("id"), primary_key=True, default=uuid7, editable=False)
    name = ExactCharField(_("task"), max_length=200)
    backend = ExactCharField(_("backend"), max_length=64, default="default", db_default="default")
    queue_name = ExactCharField(_("queue"), max_length=64, default="default", db_default="default")
    state = models.SmallIntegerField(
        _("state"), choices=TaskState, default=TaskState.QUEUED, db_default=TaskState.QUEUED.value
    )
    reason = models.SmallIntegerField(
        _("reason"), choices=FailureReason, default=FailureReason.NONE, db_default=FailureReason.NONE.value
    )
    args = models.JSONField(
        _("positional arguments"), encoder=StoredJSONEncoder, default=list, db_default=[], blank=True
    )
    kwargs = models.JSONField(
        _("keyword arguments"), encoder=StoredJSONEncoder, default=dict, db_default={}, blank=True
    )
    headers = models.JSONField(_("headers"), encoder=StoredJSONEncoder, null=True, blank=True, default=None)
    priority = models.SmallIntegerField(_("priority"), default=0, db_default=0)
    run_after = models.DateTimeField(_("run after"), null=True, blank=True)
    expires_at = models.DateTimeField(_("expires at"), null=True, blank=True)
    retry_at = models.DateTimeField(_("retry at"), null=True, blank=True)
    attempt = models.PositiveIntegerField(_("attempt"), default=0, db_default=0)
    max_attempts = models.PositiveIntegerField(_("maximum attempts"), default=1, db_default=1)
    crash_count = models.PositiveIntegerField(_("worker crashes"), default=0, db_default=0)
    is_suspect = models.BooleanField(_("runs alone next"), default=False, db_default=False)
    fence = models.BigIntegerField(_("fence"), default=0, db_default=0)
    timeout_seconds = models.FloatField(_("timeout in seconds"), null=True, blank=True)
    soft_timeout_seconds = models.FloatField(_("soft timeout in seconds"), null=True, blank=True)
    gate = ExactCharField(_("gate"), max_length=200, blank=True, default="", db_default="")
    queue_limit = models.IntegerField(_("gate limit set by the task"), null=True, blank=True)
    expected_seconds = models.FloatField(_("expected seconds"), null=True, blank=True)
    # A digest, because MySQL ignores case in unique columns.
    unique_slot = models.CharField(_("unique slot"), max_length=64, null=True, blank=True)  # noqa: DJ001 - see its index
    unique_until = models.DateTimeField(_("unique until"), null=True, blank=True)
    group = ExactCharField(_("group"), max_length=200, blank=True, default="", db_default="")
    # No foreign keys between tasks: a row may be pruned before those that name it.
    parent_id = models.UUIDField(_("enqueued by"), null=True, blank=True)
    after_id = models.UUIDField(_("runs after the task"), null=True, blank=True)
    retried_from = models.UUIDField(_("copy of the task"), null=True, blank=True)
    flow_id = models.UUIDField(_("flow"), null=True, blank=True)
    waits_for = models.PositiveIntegerField(_("tasks it waits for"), null=True, blank=True)
    # Chosen by a foreign program: any text, unique per queue at most, so it is not the key. MySQL gives no TextField a
    # default.
    wire_id = models.TextField(_("id of the foreign message"), null=True, blank=True)  # noqa: DJ001
    is_remote = models.BooleanField(_("run by another program"), default=False, db_default=False)
    cancel_requested_at = models.DateTimeField(_("cancel requested at"), null=True, blank=True)
    cancelled_by = models.CharField(_("cancelled by"), max_length=150, blank=True, default="", db_default="")
    return_value = models.JSONField(_("return value"), encoder=StoredJSONEncoder, null=True, blank=True, default=None)
    progress = models.JSONField(_("progress"), encoder=StoredJSONEncoder, null=True, blank=True, default=None)
    errors = models.JSONField(_("errors"), default=list, db_default=[], blank=True)
    last_exception = ExactCharField(_("last error"), max_length=200, blank=True, default="", db_default="")
    worker_ids = models.JSONField(_("workers"), default=list, db_default=[], blank=True)
    enqueued_at = models.DateTimeField(_("enqueued at"), default=timezone.now, db_default=DatabaseNow())
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
            # An update of state makes PostgreSQL write each index, so plain tasks are in as few as the queries allow.
            models.Index(fields=["state", "id"], name="asyncq_state_id"),
            PartialIndex(fields=["gate", "state", "reason"], where=~Q(gate=""), name="asyncq_gate_state"),
            models.Index(fields=["name", "id"], name="asyncq_name_id"),
            PartialIndex(
                fields=["name", "last_exception"], where=Q(state=TaskState.FAILED.value), name="asyncq_name_exception"
            ),
        ]
        constraints = [
            UniqueUnlessNull(field="unique_slot", name="asyncq_unique_slot"),
            models.CheckConstraint(name="asyncq_state_known", condition=Q(state__gte=0, state__lte=3)),
            models.CheckConstraint(name="asyncq_priority_range", condition=Q(priority__gte=-100, priority__lte=100)),
            models.CheckConstraint(
                name="asyncq_reason_of_failure",
                condition=Q(state__lte=2, reason=0) | Q(state=3, reason__gt=0),
            ),
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
        """The function's name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def short_id(self) -> str:
        """The last eight characters of the id; the first ones encode the time and are alike for tasks of one minute."""
        return f"…{str(self.id)[-8:]}"

    @property
    def is_final(self) -> bool:
        """Whether the task has succeeded, or has failed and no attempt follows."""
        return self.state == TaskState.SUCCEEDED or (self.state == TaskState.FAILED and self.retry_at is None)


class Gate(models.Model):
    """A strict admission limit: at most `limit` tasks of this gate are queued or running at once."""

    # Names the row had before its last save. Their cached limits are dropped too.
    former_names: frozenset[str] | set[str] = frozenset()

    name = ExactCharField(_("name"), max_length=200)
    limit = models.IntegerField(_("limit"), help_text=_("Maximum tasks queued or running; 0 or less means no limit."))
    expected_seconds = models.FloatField(
        _("expected seconds"),
        default=60,
        validators=[MinValueValidator(0.001)],
        help_text=_("How long a task of this gate usually takes. It is used to estimate when a slot becomes free."),
    )

    class Meta:
        verbose_name = _("gate")
        verbose_name_plural = _("gates")
        ordering = ["name"]
        # Forms check a constraint in the database that is written to, but `unique=True` in one that is read.
        constraints = [models.UniqueConstraint(fields=["name"], name="asyncq_one_gate")]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Refuse a name that cannot be part of a Redis key."""
        try:
            check_gate_name(self.name)
        except InvalidOption as error:
            raise ValidationError({"name": str(error)}) from error


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


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """A filter for the schedules that fire."""

    def firing(self) -> ScheduleQuerySet:
        """Return the schedules that are enabled, have a next occurrence, and are not removed from the code."""
        return self.filter(enabled=True, retired_at=None, next_occurrence_at__isnull=False)


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

    schedule = models.ForeignKey(Schedule, models.CASCADE, verbose_name=_("schedule"), related_name="occurrences")
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


class StartupRun(models.Model):
    """One run of a start-up task.

    finished_at: None while it runs, and when its process died. term: fencing token of its lock.
    """

    name = ExactCharField(_("name"), max_length=200, db_index=True)
    holder = models.CharField(_("lock holder"), max_length=200)
    term = models.BigIntegerField(_("fencing token"))
    begun_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    error = models.TextField(_("error"), blank=True, default="")

    class Meta:
        verbose_name = _("start-up run")
        verbose_name_plural = _("start-up runs")
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.name} {self.begun_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


class DatabaseIdentity(models.Model):
    """The one row by which this database differs from others that use the same Redis."""

    id = models.PositiveSmallIntegerField(_("id"), primary_key=True, default=1, editable=False)
    value = models.UUIDField(_("identity"), default=uuid.uuid4, editable=False)

    class Meta:
        verbose_name = _("identity of the database")
        verbose_name_plural = _("identities of the database")
        # No person changes it, so nobody needs a right to.
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.value)


class LockTerm(models.Model):
    """The latest leadership term of a lock.

    number: the fencing token. It rises with each new holder, so a write of an older holder can be refused.
    """

    name = ExactCharField(_("name"), max_length=200, primary_key=True)
    number = models.BigIntegerField(_("fencing token"), default=0)
    holder = models.CharField(_("lock holder"), max_length=200, default="")
    begun_at = models.DateTimeField(_("started at"), default=timezone.now)

    class Meta:
        verbose_name = _("leadership term")
        verbose_name_plural = _("leadership terms")

    def __str__(self) -> str:
        return f"{self.name} {self.number}"
