"""The values that an `Inspector` returns. All are frozen; times are aware datetimes, and units are in the names."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as a list shows it.

    state: "queued", "running", "succeeded", "failed" or "retrying". reason: why it failed, as "exception" or
    "cancelled"; "" where it has not. error: the class path of the last error. wire_id: what another program calls it.
    gate: of which it needs a slot; of several the one at which it waits, if it waits; other_gates: the others.
    is_suspect: it runs alone next, because its worker process died twice in a row, or named it. workflow: the id of
    that which it belongs to. waits_for: how many tasks must finish before it.
    """

    id: UUID
    name: str
    state: str
    reason: str
    error: str
    backend: str
    queue: str
    gate: str
    other_gates: tuple[str, ...]
    priority: int
    attempt: int
    max_attempts: int
    crash_count: int
    is_suspect: bool
    is_remote: bool
    wire_id: str | None
    enqueued_at: datetime
    run_after: datetime | None
    retry_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    workflow: UUID | None
    waits_for: int


@dataclass(frozen=True, slots=True)
class TaskDetails(TaskInfo):
    """A task with all that its row holds, and where Redis has it.

    args, kwargs, headers, return_value, progress, checkpoint, errors: as stored, secrets included. errors: dictionaries
    with "exception", "message", "traceback", "attempt" and "at"; the oldest first. redis_state: asynq's word, "" for
    none; None when Redis is unreachable.
    """

    group: str
    args: list[Any]
    kwargs: dict[str, Any]
    headers: dict[str, str] | None
    return_value: Any
    progress: Any
    checkpoint: Any
    errors: list[dict[str, Any]]
    worker_ids: list[str]
    expires_at: datetime | None
    deadline: datetime | None
    timeout_seconds: float | None
    cancel_requested_at: datetime | None
    cancelled_by: str
    redis_state: str | None


@dataclass(frozen=True, slots=True)
class TaskPage:
    """Some tasks, the newest first. next: what to give as `before` for those that follow; None at the end."""

    tasks: list[TaskInfo]
    next: UUID | None


@dataclass(frozen=True, slots=True)
class WorkflowInfo:
    """A workflow as a list shows it: tasks that wait for each other.

    name: that of its first task, "" when that was deleted. state: "running" while a task of it has not finished, then
    "failed" or "succeeded". counts: how many tasks are in each state of `TaskInfo.state`. finished_at: when the last of
    them did; None while it is running.
    """

    id: UUID
    name: str
    backend: str
    state: str
    total: int
    finished: int
    counts: dict[str, int]
    began_at: datetime
    finished_at: datetime | None

    @property
    def progress(self) -> float:
        """The share of its tasks that have finished, 0 to 1."""
        return self.finished / self.total


@dataclass(frozen=True, slots=True)
class WorkflowTask:
    """The tasks of one name in a workflow. counts: as those of `WorkflowInfo`."""

    name: str
    total: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class WorkflowDetails(WorkflowInfo):
    """A workflow, and what holds it up.

    tasks: its counts by the names of its tasks, that which began first at the beginning. failed: the first tasks that
    have failed themselves, and not for another one. open: the first tasks that have not finished and wait for no other
    one: all else waits for these.
    """

    tasks: list[WorkflowTask]
    failed: list[TaskInfo]
    open: list[TaskInfo]


@dataclass(frozen=True, slots=True)
class WorkflowPage:
    """Some workflows, the newest first. next: what to give as `before` for those that follow; None at the end.

    With a filter, a page may be empty, and others follow all the same: each looks at 500 workflows at most.
    """

    workflows: list[WorkflowInfo]
    next: UUID | None


@dataclass(frozen=True, slots=True)
class WorkflowNode:
    """A task in the graph of a workflow. depth: how many tasks stand one behind the other before it, at most."""

    id: UUID
    name: str
    state: str
    reason: str
    waits_for: int
    depth: int


@dataclass(frozen=True, slots=True)
class WorkflowEdge:
    """That one task waits for another. name: the argument that gets the value of the parent; "" for none.

    runs_anyway: whether the child also runs when the parent has failed.
    """

    parent: UUID
    child: UUID
    name: str
    runs_anyway: bool


@dataclass(frozen=True, slots=True)
class WorkflowGraph:
    """All tasks of a workflow, by their ids, and all edges between them."""

    nodes: list[WorkflowNode]
    edges: list[WorkflowEdge]


@dataclass(frozen=True, slots=True)
class UnknownInfo:
    """How many tasks of a name wait for code that has it. version: of the arguments. since: None when not known."""

    backend: str
    queue: str
    name: str
    version: int
    total: int
    since: datetime | None


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Tasks of one name that failed for good with one class of error. latest: the newest of them."""

    name: str
    error: str
    count: int
    latest: UUID


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of tasks. done: those that were changed. refused: the others, with the reason of each."""

    done: list[UUID] = field(default_factory=list)
    refused: dict[UUID, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CancelCounts:
    """How many tasks were cancelled, how many may run and were asked to stop, and how many had finished before."""

    cancelled: int
    asked: int
    over: int


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue of an alias. `queued` and `running` count rows; the numbers after them count what Redis holds.

    waiting: what a worker of ours could take now: due rows, messages without a row, and documents of the inbox.
    pending: with priority and suspects, which are also given apart. completed: tasks that another program finished.
    rejected: messages and documents that can be no task. processed: asynq's counter since Redis remembers, failed
    attempts included. processed_today, failed_today: its counters of the UTC day. oldest_waiting_seconds: how long the
    oldest task has been due; None when none is. paused_at, paused_by: of the row that pauses it; is_paused: whether
    workers take nothing from it.
    """

    backend: str
    queue: str
    waiting: int
    queued: int
    running: int
    pending: int
    priority: int
    suspects: int
    active: int
    scheduled: int
    retry: int
    archived: int
    completed: int
    groups: int
    inbox: int
    rejected: int
    processed: int
    processed_today: int
    failed_today: int
    oldest_waiting_seconds: float | None
    is_paused: bool
    paused_at: datetime | None
    paused_by: str


@dataclass(frozen=True, slots=True)
class DayInfo:
    """asynq's counters of a queue on a UTC day. day: YYYY-MM-DD."""

    day: str
    processed: int
    failed: int


@dataclass(frozen=True, slots=True)
class MinuteInfo:
    """What a queue did in one minute, failed attempts included in both; None for both: Redis has lost it."""

    at: datetime
    processed: int | None
    failed: int | None


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """An entry of a queue in Redis. state: asynq's word, or "priority" or "suspects", which asynq's tools do not show.

    type: the name that its message has for the task; None when the message cannot be read. row: the id of the task's
    row; None for a message of another program that no worker of ours has taken. at: when it is due; of "archived", when
    it failed; of "completed", when it is removed. error: of its last attempt. payload: the first 64 KiB of what its
    message holds for the function, secrets included.
    """

    id: str
    state: str
    type: str | None
    row: UUID | None
    at: datetime | None
    retried: int
    error: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class EntryDetails(EntryInfo):
    """An entry, where it is, and what its message says.

    state: also "aggregating", and "" when it cannot be read. What a message would say that cannot be read is empty.
    """

    backend: str
    queue: str
    max_retries: int
    timeout_seconds: int
    deadline: datetime | None
    last_failed_at: datetime | None
    completed_at: datetime | None
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class RejectedInfo:
    """A message or a document that can be no task. source: "queue" or "inbox". data: its first 64 KiB."""

    at: datetime
    source: str
    id: str | None
    reason: str
    data: bytes


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group of asynq: messages that wait to be aggregated."""

    backend: str
    queue: str
    group: str
    size: int


@dataclass(frozen=True, slots=True)
class FairKeyInfo:
    """A fair key of a queue. waiting: about how many of its tasks wait for a worker."""

    key: str
    waiting: int


@dataclass(frozen=True, slots=True)
class GateInfo:
    """A gate. limit: None when unknown, because no row and no unfinished task sets it; 0 or less means no limit.

    occupancy: slots that Redis holds. live: tasks whose rows say that they hold one. waiting: tasks that wait for one.
    """

    gate: str
    limit: int | None
    expected_seconds: float | None
    occupancy: int
    live: int
    waiting: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class GateDetails(GateInfo):
    """A gate with who holds its slots: id and end of each, and the ids of the tasks that wait, the next one first."""

    slots: list[tuple[str, datetime]]
    waiters: list[str]


@dataclass(frozen=True, slots=True)
class RateInfo:
    """A rate: a start per `interval_seconds`, and `burst` at once; None where neither a row nor this code says it.

    has_row: whether a row overrides what tasks declare. waiting: tasks that wait for it. refused: how often one had to
    wait, since Redis knows the rate. next_start_at: when a start is free again; None for now.
    """

    rate: str
    interval_seconds: float | None
    burst: int | None
    has_row: bool
    waiting: int
    refused: int
    next_start_at: datetime | None


@dataclass(frozen=True, slots=True)
class GateDrift:
    """What an audit of a gate repaired. added: tasks without a slot; removed: slots without a task."""

    added: int
    removed: int


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule. timing: as "*/5 * * * *" or "Every minute". latest: the time of its latest queued occurrence."""

    id: UUID
    name: str
    task: str
    timing: str
    zone: str
    enabled: bool
    is_declared: bool
    is_retired: bool
    next_occurrence_at: datetime | None
    latest: datetime | None


@dataclass(frozen=True, slots=True)
class ForeignScheduleInfo:
    """A schedule of another program, as it lists it in Redis: it can only be looked at.

    id: chosen by that program; "" when what it has written cannot be read, as all that follows then. task: the type of
    the messages. timing: as "*/5 * * * *" or "@every 30s". options: as `Queue("mail")`. scheduler: its process. latest:
    when it fired last.
    """

    id: str
    task: str
    timing: str
    options: list[str]
    next_occurrence_at: datetime | None
    latest: datetime | None
    scheduler: str
    backend: str
    is_readable: bool


@dataclass(frozen=True, slots=True)
class OccurrenceInfo:
    """One firing of a schedule. outcome: "queued", "skipped", "missed" or "refused". task: None for no task."""

    occurs_at: datetime
    outcome: str
    by_person: bool
    task: UUID | None


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task that a worker runs."""

    id: str
    name: str
    queue: str
    started_at: datetime


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A process that runs tasks. queues: name → weight. status: "active", or "stopped" when it takes no more.

    is_ours: False for a server of another program, which has no values for what follows. beat_at: when it last showed
    itself; None when it does not say. finished: how many runs have finished there. app_version: `APP_VERSION` of its
    project. tasks: the names by which its code knows tasks, former ones too. versions: of the arguments of those where
    that is not 1. is_quarantined: it runs suspects only. queue_slots: how many of its slots may run tasks of a queue,
    for those with a limit.
    """

    id: str
    backend: str
    host: str
    pid: int
    queues: dict[str, int]
    status: str
    slots: int
    busy: int
    started_at: datetime
    running: list[RunningTask]
    is_ours: bool
    version: str
    finished: int
    rss_bytes: int
    beat_at: datetime | None
    is_draining: bool
    is_leader: bool
    is_quarantined: bool
    tasks: list[str]
    versions: dict[str, int]
    app_version: str
    queue_slots: dict[str, int]

    def knows(self, name: str, version: int = 1) -> bool:
        """Whether its code has a task of this name, and this version of its arguments."""
        return name in self.tasks and version <= self.versions.get(name, 1)

    @property
    def queues_text(self) -> str:
        """Its queues with their limits of slots, such as "default,reports:2"."""
        limits = {name: f":{slots}" for name, slots in self.queue_slots.items()}
        return ",".join(name + limits.get(name, "") for name in sorted(self.queues))

    def slots_for(self, queue: str) -> int:
        """Return how many of its slots may run tasks of a queue."""
        return max(min(self.queue_slots.get(queue, self.slots), self.slots), 0)

    def busy_for(self, queue: str) -> int:
        """Return how many of those slots cannot take another task of the queue now."""
        of_queue = sum(task.queue == queue for task in self.running)
        slots = self.slots_for(queue)
        return slots - max(min(slots - of_queue, self.slots - self.busy), 0)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether tasks are being run. problems: a sentence for each; none when healthy. Numbers are None when unknown.

    waiting: as of `QueueInfo`, of all queues. silence_seconds: since a supervisor last reported; None: none is known.
    """

    is_healthy: bool
    problems: list[str]
    waiting: int | None
    oldest_waiting_seconds: float | None
    supervisors: int | None
    silence_seconds: float | None
    clock_difference_seconds: float | None
