"""Evidence of life: who is alive, what is paused, and which running tasks nobody runs.

What else a page needs from Redis is read in the same round trips. While Redis is unreachable nothing is known of
workers; then no task is said to be stuck because of its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Any
from uuid import UUID

from .. import conf
from ..broker.reading import Reader, read, side_by_side
from ..core.aliases import is_redis_used, one_alias_per_prefix, prefix_of, uses_redis
from ..exceptions import BrokerUnavailable
from ..models import Pause, PauseKind, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.errors import one_line
from ..storage.routing import rows_of
from .backlog import reading_names
from .of_queues import reading_worker_infos
from .soundness import reading_silence
from .values import WorkerInfo

# RUNNING rows are as many as there are slots. More were left by a fleet that has died.
MOST_RUNNING = 10_000
# For the queues that nobody serves the oldest tasks are looked at, along the index of states.
MOST_WAITING = 1_000
# A run may end this much later than its timeout: it is asked to stop, then its outcome is written.
GRACE_SECONDS = 15


@dataclass(frozen=True)
class Fleet:
    """What is known of the workers and the pauses.

    workers: the living processes, also of other programs. error: why Redis gave no answer; "" when it did.
    silence_seconds: since a supervisor last reported; None when none is known. pauses: all of them. queues: the names
    that Redis knows. needs_redis: whether any alias uses Redis; without, workers are not known at all.
    """

    now: datetime
    workers: list[WorkerInfo] = field(default_factory=list)
    error: str = ""
    silence_seconds: float | None = None
    pauses: list[Pause] = field(default_factory=list)
    queues: set[str] = field(default_factory=set)
    needs_redis: bool = True

    @property
    def is_known(self) -> bool:
        """Whether it is known who is alive."""
        return self.needs_redis and not self.error

    @property
    def own_workers(self) -> list[WorkerInfo]:
        """The living processes of ours."""
        return [each for each in self.workers if each.is_ours]

    def is_alive(self, worker_id: str) -> bool:
        """Whether a worker process is alive. worker_id: as in `TaskRecord.worker_ids`."""
        return any(each.id == worker_id for each in self.workers)

    def serving(self, alias: str, queue: str) -> list[WorkerInfo]:
        """Return the living processes that take tasks from a queue of an alias, those that are drained included.

        Aliases may share a prefix, and so their queues.
        """
        prefix = prefix_of(alias)
        return [each for each in self.workers if prefix_of(each.backend) == prefix and queue in each.queues]

    def queue_pause(self, alias: str, queue: str) -> Pause | None:
        """Return the pause of a queue of an alias."""
        return self._pause(PauseKind.QUEUE, alias, queue)

    def task_pause(self, name: str) -> Pause | None:
        """Return the pause of a task."""
        return self._pause(PauseKind.TASK, "", name)

    def gate_pause(self, name: str) -> Pause | None:
        """Return the pause of a gate."""
        return self._pause(PauseKind.GATE, "", name)

    def _pause(self, kind: str, alias: str, name: str) -> Pause | None:
        found = (each for each in self.pauses if (each.kind, each.backend, each.name) == (kind, alias, name))
        return next(found, None)

    def why_stuck(self, record: TaskRecord) -> str:
        """Return why a RUNNING task is stuck: "timeout", "worker", or "" when it is not.

        "timeout": it is older than its timeout. "worker": the process that ran it is not alive.
        """
        began_at = record.last_attempted_at
        if record.state != TaskState.RUNNING or began_at is None:
            return ""
        age = self.now - began_at
        if record.timeout_seconds is not None and age > timedelta(seconds=record.timeout_seconds + GRACE_SECONDS):
            return "timeout"
        # A process shows itself with its next beat, and no longer two beats after its death.
        is_settled = age > timedelta(seconds=2 * conf.current().beat_seconds)
        if not self.is_known or record.is_remote or not is_settled or not uses_redis(record.backend):
            return ""
        last = record.worker_ids[-1] if isinstance(record.worker_ids, list) and record.worker_ids else None
        return "worker" if isinstance(last, str) and not self.is_alive(last) else ""

    @cached_property
    def _due(self) -> set[tuple[str, str, str, int]]:
        """Alias, queue, name and version of due tasks, while it is known who is alive.

        Of the oldest and the newest `MOST_WAITING` QUEUED rows: a large backlog lies between them.
        """
        found: set[tuple[str, str, str, int]] = set()
        if not self.is_known:
            return found
        queued = rows_of(TaskRecord).filter(state=TaskState.QUEUED)
        own = ("backend", "queue_name", "name", "version")
        columns = (*own, "run_after", "after_id", "batch_id", "is_remote", "waits_for")
        for order in (("state", "id"), ("-state", "-id")):
            # Sliced before it is judged, so that what waits for other tasks is not passed over row by row.
            for row in queued.order_by(*order).values_list(*columns)[:MOST_WAITING]:
                run_after, *others = row[len(own) :]
                if uses_redis(row[0]) and not any(others) and (run_after is None or run_after <= self.now):
                    found.add(row[: len(own)])
        return found

    def unserved(self) -> list[str]:
        """Return the queues in which due tasks wait that no living process serves."""
        return sorted({queue for alias, queue, *_ in self._due if not self.serving(alias, queue)})

    def unknown(self) -> list[str]:
        """Return the names of due tasks whose code none of the processes has that serve their queue."""
        found = set()
        for alias, queue, name, version in self._due:
            serving = self.serving(alias, queue)
            if serving and not any(each.knows(name, version) for each in serving):
                found.add(name)
        return sorted(found)

    def stuck(self) -> Mapping[UUID, str]:
        """Return the RUNNING tasks that are stuck, with the reason of each; at most `MOST_RUNNING` are looked at."""
        columns = ("state", "backend", "is_remote", "worker_ids", "last_attempted_at", "timeout_seconds")
        rows = rows_of(TaskRecord).filter(state=TaskState.RUNNING).order_by("-id").only("id", *columns)
        found = {row.id: self.why_stuck(row) for row in rows[:MOST_RUNNING]}
        return {id: why for id, why in found.items() if why}


def read_fleet(*readers: Reader[Any], ask: Callable[[Reader[Any]], Any] | None = None) -> tuple[Fleet, list[Any]]:
    """Return the fleet, and what some readers find; None for each when the fleet's `error` says why.

    ask: returns what a reader finds, or raises BrokerUnavailable; by default a producer asks. Raises: django.db.Error.
    """
    now, pauses = database_clock.now(), list(rows_of(Pause).order_by("kind", "backend", "name"))
    fleet, found = Fleet(now, pauses=pauses, needs_redis=is_redis_used()), [None] * len(readers)
    aliases = one_alias_per_prefix()
    own = [reading_worker_infos(aliases), reading_silence(), reading_names(aliases)] if fleet.needs_redis else []
    try:
        both = (ask or partial(read, "producer"))(side_by_side(*own, *readers))
    except BrokerUnavailable as error:
        return Fleet(now, error=one_line(error), pauses=pauses), found
    if own:
        workers, (_, silence), names = both[: len(own)]
        queues = set().union(*names.values())
        fleet = Fleet(now, workers=workers, silence_seconds=silence, pauses=pauses, queues=queues)
    return fleet, both[len(own) :]
