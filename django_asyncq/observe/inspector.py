"""Look at what both stores hold, and operate it: what `manage.py asyncq` and the admin show, for Python code.

Every change goes through the parts that make it anyway; nothing here changes a row or a key by itself. Reading changes
nothing. Rows are read from the database that is written to.
"""

from __future__ import annotations

from ..core.aliases import uses_redis, written_aliases
from ..exceptions import InvalidOption
from .of_entries import Entries
from .of_queues import Gates, Queues, Workers
from .of_rates import Rates
from .of_schedules import Schedules
from .of_tasks import TaskFilter, Tasks
from .of_workflows import WorkflowFilter, Workflows
from .soundness import check
from .values import (
    CancelCounts,
    DayInfo,
    EntryDetails,
    EntryInfo,
    FailureGroup,
    FairKeyInfo,
    ForeignScheduleInfo,
    GateDetails,
    GateDrift,
    GateInfo,
    GroupInfo,
    Health,
    MinuteInfo,
    OccurrenceInfo,
    Outcome,
    QueueInfo,
    RateInfo,
    RejectedInfo,
    RunningTask,
    ScheduleInfo,
    TaskDetails,
    TaskInfo,
    TaskPage,
    WorkerInfo,
    WorkflowDetails,
    WorkflowEdge,
    WorkflowGraph,
    WorkflowInfo,
    WorkflowNode,
    WorkflowPage,
    WorkflowTask,
)

__all__ = [
    "CancelCounts",
    "DayInfo",
    "Entries",
    "EntryDetails",
    "EntryInfo",
    "FailureGroup",
    "FairKeyInfo",
    "ForeignScheduleInfo",
    "GateDetails",
    "GateDrift",
    "GateInfo",
    "Gates",
    "GroupInfo",
    "Health",
    "Inspector",
    "MinuteInfo",
    "OccurrenceInfo",
    "Outcome",
    "QueueInfo",
    "Queues",
    "RateInfo",
    "Rates",
    "RejectedInfo",
    "RunningTask",
    "ScheduleInfo",
    "Schedules",
    "TaskDetails",
    "TaskFilter",
    "TaskInfo",
    "TaskPage",
    "Tasks",
    "WorkerInfo",
    "Workers",
    "WorkflowDetails",
    "WorkflowEdge",
    "WorkflowFilter",
    "WorkflowGraph",
    "WorkflowInfo",
    "WorkflowNode",
    "WorkflowPage",
    "WorkflowTask",
    "Workflows",
]


class Inspector:
    """What an operator asks of a project's tasks, grouped by noun.

    backend: the alias in TASKS whose tasks and queues are meant; None for all of them. Gates, rates and schedules
    belong to none, so they are the same for each. Holds no connection.
    Raises: InvalidOption for an alias that TASKS does not name, or whose tasks are not in Redis. The methods raise
    BrokerUnavailable and django.db.Error while a store is unreachable.
    """

    def __init__(self, backend: str | None = None) -> None:
        if backend is not None and (backend not in written_aliases() or not uses_redis(backend)):
            usable = [alias for alias in written_aliases() if uses_redis(alias)]
            raise InvalidOption(
                f"TASKS has no alias {backend!r} whose tasks are in Redis; give one of "
                f"{', '.join(map(repr, usable)) or '(none: TASKS names none)'}"
            )
        self.backend = backend
        self.tasks = Tasks(backend)
        self.workflows = Workflows(backend)
        self.entries = Entries(backend)
        self.queues = Queues(backend)
        self.workers = Workers(backend)
        self.schedules = Schedules()
        self.gates = Gates()
        self.rates = Rates()

    def health(
        self,
        *,
        max_age_seconds: float | None = None,
        max_waiting: int | None = None,
        max_silence_seconds: float | None = None,
    ) -> Health:
        """Return whether tasks are being run. Raises nothing for a store that is unreachable: that is a problem.

        Always a problem: a store is unreachable, the clocks of both differ by more than 5 s, a prefix belongs to
        another database, or this process cannot verify what the leader has signed.
        max_age_seconds: a problem is a task that has been due for longer. max_waiting: more tasks that are due.
        max_silence_seconds: no supervisor has reported for longer, or none is known.
        Where no alias in TASKS uses Redis, as with the `TestBackend`, Redis is not asked and no supervisor expected.
        """
        return check(
            only=self.backend,
            max_age_seconds=max_age_seconds,
            max_waiting=max_waiting,
            max_silence_seconds=max_silence_seconds,
        )
