"""Decisions of people while tasks run: pauses, and actions on many tasks at once."""

from __future__ import annotations

import uuid
from datetime import UTC

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..core.fields import DatabaseNow, ExactCharField
from ..core.names import check_gate_name, uuid7
from ..core.rates import LONGEST_SECONDS, MOST_BURST, MOST_STARTS, StartRate, interval_of, why_not_burst
from ..exceptions import InvalidOption


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
    """The states of an action on many tasks. The leader works off one that is RUNNING; the others are final."""

    RUNNING = "running", pgettext_lazy("action on many tasks", "Running")
    STOPPED = "stopped", pgettext_lazy("action on many tasks", "Stopped")
    FINISHED = "finished", pgettext_lazy("action on many tasks", "Finished")


class BulkAction(models.Model):
    """One action on all tasks that match a filter, worked off by the leader page by page, from the last id on.

    matching: the filter, as `storage.matching` reads it. total: how many matched when it was made. done, refused: how
    many were changed, and could not be. newest_id: of the newest task when it was made; it touches none that is newer.
    positions: pairs of a gate, "" for all other tasks, and of the last task there that was looked at; see `fleet.bulk`.
    progressed_at: when it last changed a task, or looked at one for the first time.
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
    newest_id = models.UUIDField(_("newest task"), null=True, blank=True)
    positions = models.JSONField(_("positions"), default=list, blank=True)
    progressed_at = models.DateTimeField(_("last progress"), null=True, blank=True)
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

    @property
    def left(self) -> int:
        """How many it has not looked at yet, or wait at a full gate; 0 when it is over.

        Too many where somebody else has changed tasks since it was started.
        """
        return max(self.total - self.done - self.refused, 0) if self.state == BulkState.RUNNING else 0

    @property
    def full_gates(self) -> list[str]:
        """The gates whose tasks wait, or waited when it ended."""
        return [gate for gate, _ in self.positions if gate]


# --- Gates: admission limits.


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
        permissions = [("release_slot", _("Can release a slot of a gate"))]
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


# --- Rates: how many tasks may start in a time.


class Rate(models.Model):
    """A rate of starts: at most `starts` in each `seconds`, and `burst` of them at once."""

    # Names the row had before its last save. They count by what the tasks declare again.
    former_names: frozenset[str] | set[str] = frozenset()

    name = ExactCharField(_("name"), max_length=200)
    starts = models.PositiveIntegerField(
        _("starts"), validators=[MinValueValidator(1), MaxValueValidator(MOST_STARTS)], help_text=_("Maximum starts.")
    )
    seconds = models.PositiveIntegerField(
        _("seconds"),
        default=60,
        validators=[MinValueValidator(1), MaxValueValidator(LONGEST_SECONDS)],
        help_text=_("In so many seconds."),
    )
    burst = models.PositiveIntegerField(
        _("burst"),
        default=1,
        validators=[MinValueValidator(1), MaxValueValidator(MOST_BURST)],
        help_text=_("How many may start at once, after a time without any."),
    )

    class Meta:
        verbose_name = _("rate")
        verbose_name_plural = _("rates")
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["name"], name="asyncq_one_rate")]

    def __str__(self) -> str:
        return self.name

    @property
    def start_rate(self) -> StartRate:
        """What Redis counts by. A row that was written past the checks allows at least something."""
        return StartRate(interval_of(max(self.starts, 1), max(self.seconds, 1)), max(self.burst, 1))

    def clean(self) -> None:
        """Refuse a name that cannot be part of a Redis key, and a burst that nobody could wait for."""
        try:
            check_gate_name(self.name, "rate")
        except InvalidOption as error:
            raise ValidationError({"name": str(error)}) from error
        # What is no number, or less than one, is refused at its own field.
        is_number = all(isinstance(each, int) and each > 0 for each in (self.starts, self.seconds, self.burst))
        if is_number and (remedy := why_not_burst(self.starts, self.seconds, self.burst)):
            raise ValidationError({"burst": remedy})


# --- What the processes of a fleet share: start-up runs, leadership terms, the identity of the database.


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
    """The one row by which this database differs from others that use the same Redis.

    schedules_paused_at: since when no schedule fires, neither of the code nor of the admin; null: they do.
    """

    id = models.PositiveSmallIntegerField(_("id"), primary_key=True, default=1, editable=False)
    value = models.UUIDField(_("identity"), default=uuid.uuid4, editable=False)
    schedules_paused_at = models.DateTimeField(_("schedules paused at"), null=True, blank=True, editable=False)

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


# --- Alerts: the problems of the fleet that were told and are not over.


class AlertKind(models.TextChoices):
    """What is wrong."""

    FAILURE_RATIO = "failure_ratio", _("Attempts fail")
    OLDEST_WAITING = "oldest_waiting", _("Tasks wait")
    SILENT_WORKERS = "silent_workers", _("Workers are silent")
    OVERDUE_SCHEDULES = "overdue_schedules", _("Schedules are overdue")
    STORE = "store", _("A store is unreachable")
    MISMATCH = "mismatch", _("Hosts or stores do not match")
    UNKNOWN_TASKS = "unknown_tasks", _("Tasks wait for code that has them")


class Alert(models.Model):
    """A problem that was reported. The process that inserts the row reports it; the one that deletes it, its end.

    backend, subject: an alias in TASKS and its queue; or the name of a schedule, a supervisor, a store.
    title: in a few words, without numbers. seen_at: when a look last found it.
    """

    kind = models.CharField(_("kind"), max_length=20, choices=AlertKind)
    backend = ExactCharField(_("backend"), max_length=64, blank=True, default="")
    subject = ExactCharField(_("subject"), max_length=200, blank=True, default="")
    title = models.TextField(_("title"), blank=True, default="")
    seen_at = models.DateTimeField(_("last seen at"))

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        ordering = ["id"]
        # No person changes it, so nobody needs a right to.
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["kind", "backend", "subject"], name="asyncq_one_alert")]

    def __str__(self) -> str:
        return self.title

    @property
    def key(self) -> tuple[str, str, str]:
        """By which it is known again."""
        return self.kind, self.backend, self.subject
