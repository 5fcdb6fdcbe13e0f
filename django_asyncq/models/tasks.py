"""Tasks, their states, and their log lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from functools import cache
from types import MappingProxyType
from typing import Any, Self

from django.apps import apps
from django.db import models
from django.db.models import Q
from django.db.models.base import ModelState
from django.db.models.signals import post_init, pre_init
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..core.after import ALONE, Edge
from ..core.fields import (
    BeginningIndex,
    DatabaseNow,
    ExactCharField,
    ExactTextField,
    OtherGatesField,
    PartialIndex,
    StoredJSONEncoder,
    UniqueUnlessNull,
)
from ..core.names import lowest_uuid7_at, uuid7
from ..core.several_gates import OTHER_GATES_CHARACTERS, GateLimit, columns_of, read_others
from ..core.time import Delay


class TaskState(models.IntegerChoices):
    """The four states of a task.

    | state     | number | finished_at | retry_at | meaning |
    |-----------|--------|-------------|----------|---------|
    | QUEUED    | 0      | null        | any      | waits for a worker, until `run_after`, at its gate, or for tasks |
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
    """Why a task is FAILED or RETRYING; NONE in every other state, except GATE_FULL of a task that waits at its gate.

    The constraint `asyncq_reason_of_failure` enforces that.
    """

    NONE = 0, pgettext_lazy("reason of failure", "None")
    EXCEPTION = 1, _("The function raised an error")
    TIMEOUT = 2, _("It took longer than its timeout")
    WORKER_LOST = 3, _("Its worker was lost")
    CANCELLED = 4, _("It was cancelled")
    EXPIRED = 5, _("It had not begun in time")
    PARENT_FAILED = 6, _("A task that it waited for failed")
    NOT_REGISTERED = 7, _("The code has no such task")
    DISCARDED = 8, _("It was discarded")
    GATE_FULL = 9, _("Its gate was full")
    UPGRADE_FAILED = 10, _("Its arguments could not be upgraded")


class Suspicion(IntEnum):
    """How far a task is suspected of taking its worker process down; a run that ends while its process lives clears it.

    LOST: it was lost with its process once, which is nobody's fault. SUSPECT: twice in a row, or the process named it;
    it runs alone next.
    """

    NONE = 0
    LOST = 1
    SUSPECT = 2


# Which tasks wait for no other one.
IS_READY = Q(waits_for=None) | Q(waits_for=0)
# Which tasks of a gate hold a slot of it; `TaskRecord.holds_slot` says it of one.
HOLDS_SLOT = Q(IS_READY, state__in=(TaskState.QUEUED, TaskState.RUNNING), reason=FailureReason.NONE) | Q(
    state=TaskState.FAILED, retry_at__isnull=False, is_ordered=True
)


def of_gates(names: Iterable[str]) -> Q:
    """Return the condition of the tasks that need a slot of one of these gates; without names none meets it."""
    wanted = list(names)
    return Q(gate__in=wanted) | Q(other_gates__has_gate=wanted) if wanted else Q(gate__in=[])


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
        """Return the tasks that need a slot of a gate, without a name those of all gates.

        The index holds no row without a gate. A database uses it only for a query that repeats this condition.
        """
        rows = self.exclude(gate="")
        return rows.filter(of_gates([name])) if name else rows

    def holding_slot(self, name: str = "") -> TaskRecordQuerySet:
        """Return the tasks that hold a slot of a gate; without a name those of all gates."""
        return self.at_gate(name).filter(HOLDS_SLOT)

    def in_two_parts_at(self, name: str) -> tuple[TaskRecordQuerySet, TaskRecordQuerySet]:
        """Return the tasks that need a slot of a gate as two queries: those that stand there, and the others.

        An index serves each of them. SQLite has none for both in one query, and would read all tasks that are live.
        """
        return self.exclude(gate="").filter(gate=name), self.filter(other_gates__has_gate=[name])

    def waiting_at_gate(self, name: str = "") -> TaskRecordQuerySet:
        """Return the tasks that stand in the line of a gate; without a name those of all gates.

        They get a slot of it when one is free. One that needs slots of several gates stands in the line of one of them.
        A delayed one waits from its time on.
        """
        rows = self.exclude(gate="")
        waiting = Q(state=TaskState.QUEUED, retry_at=None) | Q(state=TaskState.FAILED, retry_at__isnull=False)
        return (rows.filter(gate=name) if name else rows).filter(waiting, reason=FailureReason.GATE_FULL)

    def enqueued_since(self, moment: datetime) -> TaskRecordQuerySet:
        """Return the tasks enqueued at a time or later, by the millisecond in their ids: no index is on times."""
        return self.filter(id__gte=lowest_uuid7_at(moment))

    def cancel(self, *, by: Any = "", reason: str = "", wait: Any = None) -> Any:
        """Cancel these tasks: those that wait fail as cancelled, those that a worker may have are asked to stop.

        Works in the caller's transaction, 500 rows at a time, and locks them in the order of their ids. After a
        rollback it never happened.
        by: a user, or a text, for the row. reason: for the task's error. wait: seconds or a timedelta for which to wait
        until those that were asked to stop have finished; not in a transaction.
        Returns: how many were `cancelled`, how many were `asked` to stop and may run, how many were `over` already.
        """
        # What changes a state is `lifecycle`, which imports this module.
        return apps.get_app_config("django_asyncq").cancel_tasks(self, by=by, reason=reason, wait=wait)  # type: ignore[attr-defined]


class TaskRecord(models.Model):
    """One task: what to run, its state, and its outcome.

    attempt: number of counted runs so far; a run that a worker crash cut short is counted in `crash_count` instead.
    fence: rises with each claim; a worker may write only with the fence of its own claim.
    version: of the task's arguments, as of the code that enqueued it, or that has upgraded them. has_typed_arguments:
    whether forms among them stand for dates, instances of models and the like (`core.typed`).
    errors: one entry per failed attempt, oldest first. worker_ids: the workers that claimed it, oldest first.
    expires_at: when it can no longer begin. deadline: when a run must have finished; a time after which none begins.
    unique_key: digest of what it is unique by, "" for none. unique_slot: the digest while this row holds it, or that of
    the place of its follower; null after. unique_until: when a throttled task's slot is freed; null: when it finishes,
    or with unique_until_start when a worker begins it. after_id: the task that this one follows; it waits until then.
    cancel_requested_at, cancelled_by: when and by whom it was cancelled, or asked to stop.
    reason, last_exception: why it is FAILED, and the class path of the last error; for filters, which never read JSON.
    gate, queue_limit: the gate of which it needs a slot, and the limit for a gate without a row; of several gates the
    one at which it waits, if it waits. other_gates: the others, see `several_gates`; `gates` has all of them.
    max_waiting: how many tasks may wait at its gate when it is enqueued; null: at a full gate it is refused.
    is_ordered: it keeps its slot between two attempts.
    A QUEUED task with the reason GATE_FULL has no slot and no entry among those that workers take: it waits at its
    gate, or until `retry_at` to ask it.
    suspicion: how far it is suspected of taking its worker process down, until a run of it ends; see `Suspicion`.
    wire_id: what another program calls the task in Redis; null for a task that was enqueued here. wire_message: the
    message as that program wrote it, or as it is sent to one; null for a task of our own. is_remote: only another
    program runs it. group: the calls with which it may run together; "" for a task that runs by itself. batch_id: the
    row of the batch in which it runs, or ran last; while it is set and the task is QUEUED or RUNNING, the task has no
    entry in Redis. batch_size: in the row of a batch, how many members it began with; null in every other row.
    waits_for: how many tasks must finish before it (`TaskEdge`), null for a task that was enqueued after none; while
    it is more than 0, the task has no slot of its gate and no entry in Redis. delay_seconds: its `run_after`, from then
    on.
    workflow_id: the same for all tasks that hang together so; null for those that wait for none, and none for them.
    checkpoint: where its next run goes on (`context.checkpoint`); null before, and after a success.
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
    version = models.SmallIntegerField(_("version of the arguments"), default=1, db_default=1)
    has_typed_arguments = models.BooleanField(_("has typed arguments"), default=False, db_default=False)
    headers = models.JSONField(_("headers"), encoder=StoredJSONEncoder, null=True, blank=True, default=None)
    priority = models.SmallIntegerField(_("priority"), default=0, db_default=0)
    run_after = models.DateTimeField(_("run after"), null=True, blank=True)
    expires_at = models.DateTimeField(_("expires at"), null=True, blank=True)
    deadline = models.DateTimeField(_("deadline"), null=True, blank=True)
    retry_at = models.DateTimeField(_("retry at"), null=True, blank=True)
    attempt = models.PositiveIntegerField(_("attempt"), default=0, db_default=0)
    max_attempts = models.PositiveIntegerField(_("maximum attempts"), default=1, db_default=1)
    crash_count = models.PositiveIntegerField(_("worker crashes"), default=0, db_default=0)
    suspicion = models.SmallIntegerField(_("suspicion"), default=Suspicion.NONE, db_default=Suspicion.NONE.value)
    fence = models.BigIntegerField(_("fence"), default=0, db_default=0)
    timeout_seconds = models.FloatField(_("timeout in seconds"), null=True, blank=True)
    soft_timeout_seconds = models.FloatField(_("soft timeout in seconds"), null=True, blank=True)
    keep_logs = models.PositiveSmallIntegerField(_("log lines kept"), null=True, blank=True)
    gate = ExactCharField(_("gate"), max_length=200, blank=True, default="", db_default="")
    queue_limit = models.IntegerField(_("gate limit set by the task"), null=True, blank=True)
    other_gates = OtherGatesField(
        _("other gates"), max_length=OTHER_GATES_CHARACTERS, blank=True, default="", db_default=""
    )
    expected_seconds = models.FloatField(_("expected seconds"), null=True, blank=True)
    max_waiting = models.PositiveIntegerField(_("tasks that may wait at the gate"), null=True, blank=True)
    is_ordered = models.BooleanField(_("keeps its slot between attempts"), default=False, db_default=False)
    # Digests, because MySQL ignores case in unique columns.
    unique_key = models.CharField(_("unique key"), max_length=64, blank=True, default="", db_default="")
    unique_slot = models.CharField(_("unique slot"), max_length=64, null=True, blank=True)  # noqa: DJ001 - see its index
    unique_until = models.DateTimeField(_("unique until"), null=True, blank=True)
    unique_until_start = models.BooleanField(_("unique until it starts"), default=False, db_default=False)
    group = ExactCharField(_("group"), max_length=200, blank=True, default="", db_default="")
    # No foreign keys between tasks: a row may be pruned before those that name it.
    parent_id = models.UUIDField(_("enqueued by"), null=True, blank=True)
    after_id = models.UUIDField(_("runs after the task"), null=True, blank=True)
    retried_from = models.UUIDField(_("copy of the task"), null=True, blank=True)
    workflow_id = models.UUIDField(_("workflow"), null=True, blank=True)
    waits_for = models.PositiveIntegerField(_("tasks it waits for"), null=True, blank=True)
    delay_seconds = models.FloatField(_("delay in seconds, once it waits for no task"), null=True, blank=True)
    # Chosen by a foreign program: any text, unique per queue at most, so it is not the key. MySQL gives no TextField a
    # default.
    wire_id = ExactTextField(_("id of the foreign message"), null=True, blank=True)
    wire_message = models.BinaryField(_("foreign message"), null=True, blank=True)
    is_remote = models.BooleanField(_("run by another program"), default=False, db_default=False)
    batch_id = models.UUIDField(_("runs in the batch"), null=True, blank=True)
    batch_size = models.PositiveIntegerField(_("calls in the batch"), null=True, blank=True)
    cancel_requested_at = models.DateTimeField(_("cancel requested at"), null=True, blank=True)
    cancelled_by = models.CharField(_("cancelled by"), max_length=150, blank=True, default="", db_default="")
    return_value = models.JSONField(_("return value"), encoder=StoredJSONEncoder, null=True, blank=True, default=None)
    progress = models.JSONField(_("progress"), encoder=StoredJSONEncoder, null=True, blank=True, default=None)
    checkpoint = models.JSONField(_("checkpoint"), encoder=StoredJSONEncoder, null=True, blank=True, default=None)
    errors = models.JSONField(_("errors"), default=list, db_default=[], blank=True)
    last_exception = ExactCharField(_("last error"), max_length=200, blank=True, default="", db_default="")
    worker_ids = models.JSONField(_("workers"), default=list, db_default=[], blank=True)
    enqueued_at = models.DateTimeField(_("enqueued at"), default=timezone.now, db_default=DatabaseNow())
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    last_attempted_at = models.DateTimeField(_("last attempted at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)

    # Of a new task: the times that its INSERT, or the UPDATE that replaces another task's call by it, adds to its own
    # moment. The columns hold what is expected until then.
    delays: Mapping[str, Delay] = MappingProxyType({})
    # Of a new task: what it waits for. Afterwards rows of `TaskEdge` say that.
    edges: Sequence[Edge] = ()
    # Whether a run has made new arguments of those in the row, which get there with its outcome (`core.versions`).
    is_upgraded = False
    # Whether it stands at another of its gates than its row says.
    is_moved = False

    objects = TaskRecordQuerySet.as_manager()

    class Meta:
        verbose_name = _("task")
        verbose_name_plural = _("tasks")
        ordering = ["-id"]
        # A worker process has no model, so the right to drain one is here too.
        permissions = [
            ("retry_task", _("Can retry a task")),
            ("cancel_task", _("Can cancel a task")),
            ("enqueue_task", _("Can enqueue a task")),
            ("view_payload", _("Can see the arguments and the result of a task")),
            ("drain_worker", _("Can drain a worker")),
        ]
        indexes = [
            # An update of state makes PostgreSQL write each index, so plain tasks are in as few as the queries allow.
            models.Index(fields=["state", "id"], name="asyncq_state_id"),
            PartialIndex(fields=["gate", "state", "reason"], where=~Q(gate=""), name="asyncq_gate_state"),
            PartialIndex(
                fields=["state", "reason", "other_gates"], where=~Q(other_gates=""), name="asyncq_other_gates"
            ),
            models.Index(fields=["name", "id"], name="asyncq_name_id"),
            PartialIndex(
                fields=["name", "last_exception"], where=Q(state=TaskState.FAILED.value), name="asyncq_name_exception"
            ),
            # Failures are looked for by these alone, too.
            PartialIndex(fields=["reason", "id"], where=Q(state=TaskState.FAILED.value), name="asyncq_reason_id"),
            PartialIndex(
                fields=["last_exception", "id"], where=Q(state=TaskState.FAILED.value), name="asyncq_exception_id"
            ),
            # What the reconciler looks for in each pass; hardly any row is in them.
            PartialIndex(
                fields=["expires_at"],
                where=Q(expires_at__isnull=False, finished_at__isnull=True),
                name="asyncq_expires_at",
            ),
            PartialIndex(
                fields=["cancel_requested_at"],
                where=Q(cancel_requested_at__isnull=False, finished_at__isnull=True),
                name="asyncq_cancel_requested",
            ),
            PartialIndex(
                fields=["retry_at", "id"],
                where=Q(retry_at__isnull=False),
                name="asyncq_retry_at",
            ),
            PartialIndex(fields=["after_id"], where=Q(after_id__isnull=False), name="asyncq_after_id"),
            PartialIndex(fields=["batch_id"], where=Q(batch_id__isnull=False), name="asyncq_batch_id"),
            # By their ends: what is pruned asks whether one is live, or has finished later. A list of workflows counts
            # them by their states, from the index alone.
            PartialIndex(
                fields=["workflow_id", "finished_at", "state"],
                where=Q(workflow_id__isnull=False),
                name="asyncq_workflow",
            ),
            PartialIndex(
                fields=["is_remote", "id"],
                where=Q(is_remote=True, finished_at__isnull=True),
                name="asyncq_remote",
            ),
            # People ask for a task by what another program calls it.
            BeginningIndex(fields=["wire_id"], where=Q(wire_id__isnull=False), name="asyncq_wire_id"),
        ]
        constraints = [
            UniqueUnlessNull(field="unique_slot", name="asyncq_unique_slot"),
            models.CheckConstraint(name="asyncq_state_known", condition=Q(state__gte=0, state__lte=3)),
            models.CheckConstraint(name="asyncq_priority_range", condition=Q(priority__gte=-100, priority__lte=100)),
            models.CheckConstraint(
                name="asyncq_reason_of_failure",
                condition=(
                    Q(state__lte=2, reason=0)
                    | Q(state=3, reason__gt=0)
                    | Q(state=0, reason=FailureReason.GATE_FULL.value) & ~Q(gate="")
                ),
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

    @classmethod
    def of_columns(cls, rows: Iterable[dict[str, Any]], database: str | None = None) -> list[Self]:
        """Return rows; columns that are not given have their defaults. rows: of each the columns, by attribute.

        database: where the rows were read; None for unsaved ones. The constructor does the same with a call for each
        of fifty columns.
        """
        has_listeners = (pre_init.receivers and pre_init.has_listeners(cls)) or (
            post_init.receivers and post_init.has_listeners(cls)
        )
        defaults, records = _defaults(), []
        for columns in rows:
            if has_listeners:
                record = cls(**columns)
            else:
                record = cls.__new__(cls)
                record.__dict__ = defaults | {"args": [], "kwargs": {}, "errors": [], "worker_ids": []} | columns
                record._state = ModelState()
            if database is not None:
                record._state.adding, record._state.db = False, database
            records.append(record)
        return records

    @property
    def short_name(self) -> str:
        """The function's name without its module."""
        return self.name.rpartition(".")[2]

    @property
    def short_id(self) -> str:
        """The last eight characters of the id; the first ones encode the time and are alike for tasks of one minute."""
        return f"…{str(self.id)[-8:]}"

    @property
    def redis_id(self) -> str:
        """The id of the task's entry in Redis: that of the row, or what another program calls the task."""
        return str(self.id) if self.wire_id is None else self.wire_id

    @property
    def waited_seconds(self) -> float | None:
        """How long the task had been due when its latest attempt began; None before, and after a run that was lost.

        Since when it is due again after a loss, the row does not say.
        """
        if self.last_attempted_at is None or self.crash_count:
            return None
        return (self.last_attempted_at - (self.run_after or self.enqueued_at)).total_seconds()

    @property
    def is_suspect(self) -> bool:
        """Whether it runs alone next, in quarantine."""
        return self.suspicion == Suspicion.SUSPECT

    @property
    def is_batch(self) -> bool:
        """Whether the row is that of a batch: its members are the rows with its id as their `batch_id`."""
        return self.batch_size is not None

    @property
    def waits_for_tasks(self) -> bool:
        """Whether the task is QUEUED and other tasks must finish before it: it has no entry in Redis."""
        return bool(self.waits_for) and self.state == TaskState.QUEUED

    @property
    def is_in_batch(self) -> bool:
        """Whether the task waits or runs as a member of a batch, so that it has no entry in Redis."""
        return self.batch_id is not None and self.state in (TaskState.QUEUED, TaskState.RUNNING)

    @property
    def is_final(self) -> bool:
        """Whether the task has succeeded, or has failed and no attempt follows."""
        return self.state == TaskState.SUCCEEDED or (self.state == TaskState.FAILED and self.retry_at is None)

    @property
    def waits_for_slot(self) -> bool:
        """Whether the task is QUEUED without a slot of its gate: no run of it begins before its row has changed."""
        return self.state == TaskState.QUEUED and self.reason == FailureReason.GATE_FULL

    @property
    def holds_slot(self) -> bool:
        """Whether the task, if it has a gate, holds a slot of it."""
        if self.state in (TaskState.QUEUED, TaskState.RUNNING):
            return not (self.reason or self.waits_for)
        return self.state == TaskState.FAILED and self.retry_at is not None and self.is_ordered

    @property
    def gates(self) -> tuple[GateLimit, ...]:
        """The gates of which the task needs a slot each, by name, with the limits for those that have no row."""
        if not self.other_gates:
            return (GateLimit(self.gate, self.queue_limit),) if self.gate else ()
        return tuple(sorted({GateLimit(self.gate, self.queue_limit), *read_others(self.other_gates)}))

    def stand_at(self, gate: str) -> None:
        """Have the task stand in the line of this one of its gates, in memory."""
        first = [each for each in self.gates if each.name == gate]
        if gate != self.gate and first:
            others = [each for each in self.gates if each.name != gate]
            for name, value in columns_of([*first, *others]).items():
                setattr(self, name, value)
            self.is_moved = True

    @property
    def is_discarded(self) -> bool:
        """Whether its function has said that there was nothing to do any more: no failure for anybody who counts."""
        return self.reason == FailureReason.DISCARDED

    @property
    def upgraded_args(self) -> list[Any] | None:
        """What the row gets in place of its positional arguments; None when it keeps them."""
        return self.args if self.is_upgraded else None

    @property
    def upgraded_kwargs(self) -> dict[str, Any] | None:
        """What the row gets in place of its keyword arguments; None when it keeps them."""
        return self.kwargs if self.is_upgraded else None

    @property
    def upgraded_version(self) -> int | None:
        """What the row gets in place of the version of its arguments; None when it keeps that."""
        return self.version if self.is_upgraded else None

    @property
    def upgraded_has_typed_arguments(self) -> bool | None:
        """What the row gets in place of whether it has typed arguments; None when it keeps that."""
        return self.has_typed_arguments if self.is_upgraded else None

    @property
    def frees_slot(self) -> bool:
        """Whether a unique task in this state holds its slot no longer; the write of the state frees it.

        A throttled task keeps it until `unique_until`.
        """
        if not self.unique_key or self.unique_until is not None:
            return False
        return self.is_final or (self.unique_until_start and self.state == TaskState.RUNNING)


@cache
def _defaults() -> dict[str, Any]:
    """Return the default of each column by its attribute; those that can be changed in place are replaced."""
    row = TaskRecord()
    return {field.attname: getattr(row, field.attname) for field in TaskRecord._meta.concrete_fields}


class TaskLogLine(models.Model):
    """A line that a task logged while it ran; kept for tasks with `keep_logs`, and deleted with the task's row.

    task_id: no foreign key, as between tasks. fence: of the run: after a lost one, the next is of the same attempt.
    number: of the line within its run, from 1; those before the first one kept were dropped.
    """

    task_id = models.UUIDField(_("task"))
    fence = models.BigIntegerField(_("fence"))
    attempt = models.PositiveIntegerField(_("attempt"))
    number = models.PositiveIntegerField(_("number"))
    logged_at = models.DateTimeField(_("logged at"))
    level = models.PositiveSmallIntegerField(_("level"))
    logger = models.CharField(_("logger"), max_length=200)
    text = models.TextField(_("text"))

    class Meta:
        verbose_name = _("log line")
        verbose_name_plural = _("log lines")
        ordering = ["task_id", "fence", "number"]
        # Nobody adds or changes one.
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["task_id", "fence", "number"], name="asyncq_one_log_line"),
        ]

    def __str__(self) -> str:
        return f"{self.task_id} {self.attempt}.{self.number}"


class TaskEdge(models.Model):
    """One task waits for another one: the child begins when the parent has finished.

    No foreign keys, as between tasks. name: the keyword argument of the child that gets the parent's return value; ""
    when it gets none. position: the place of that value in a list; ALONE: it is the value itself.
    runs_anyway: whether the child also runs when the parent has failed.
    """

    parent_id = models.UUIDField(_("task before"))
    child_id = models.UUIDField(_("task after"))
    name = ExactCharField(_("keyword argument"), max_length=200, blank=True, default="")
    position = models.IntegerField(_("place in the list"), default=ALONE)
    runs_anyway = models.BooleanField(_("runs also after a failure"), default=False)

    class Meta:
        verbose_name = _("edge between tasks")
        verbose_name_plural = _("edges between tasks")
        ordering = ["id"]
        # Nobody adds or changes one.
        default_permissions = ("view",)
        indexes = [models.Index(fields=["parent_id"], name="asyncq_edge_parent")]
        constraints = [
            models.UniqueConstraint(fields=["child_id", "parent_id", "name", "position"], name="asyncq_one_edge"),
        ]

    def __str__(self) -> str:
        return f"{self.parent_id} {self.child_id}"
