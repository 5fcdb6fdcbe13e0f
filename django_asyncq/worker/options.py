"""The options that a supervisor passes to its worker processes. Imports nothing that needs Django to be set up."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..core.names import ALONE, ISOLATED, runs_isolated

# The messages of a worker process to its supervisor: it is about to fetch.
READY = "ready"
# It has given a task to a process that is to be started: with the `Alone` of that.
START = "start"
# With the reason and the remedy of a DatabaseNotSetUp.
NOT_SET_UP = "not set up"
# With its exit code, as its last word: where that of a dead process cannot be known otherwise.
EXITS = "exits"
# The messages of a supervisor to its worker processes: with the ids of tasks, that these are cancelled; with a bool,
# whether to take no more tasks; to stop, where a task may keep SIGTERM from being handled; that a process that stops is
# to do so at once; and with a worker id, that the process which START has asked for is over.
CANCEL, DRAIN, STOP, HURRY, OVER = "cancel", "drain", "stop", "hurry", "over"


class Alone(NamedTuple):
    """What a process knows that is started for one task, which is claimed for it. queue: that of the task."""

    worker_id: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of one worker process.

    queues: name → weight; empty for all of the alias. queue_slots: name → how many of its slots may run tasks of that
    queue, for those that have a limit. name: first part of its id. supervisor_pid, token: make the
    id unique, also against a process of the same host name and pid. alone: given to a process only that runs one task:
    a suspect, or an isolated one.
    """

    backend: str = "default"
    queues: dict[str, int] = field(default_factory=dict)
    queue_slots: dict[str, int] = field(default_factory=dict)
    strict: bool = False
    concurrency: int = 8
    max_tasks: int = 0
    max_memory_mb: int = 0
    name: str = field(default_factory=socket.gethostname)
    supervisor_pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    alone: Alone | None = None

    @property
    def process_name(self) -> str:
        """What the process is in its log lines."""
        return "isolated task" if self.alone is not None and runs_isolated(self.alone.worker_id) else "worker"

    def for_one(self, alone: Alone) -> WorkerOptions:
        """Return the options of a process that runs one task."""
        queues = {alone.queue: 1}
        return replace(self, queues=queues, queue_slots={}, concurrency=1, max_tasks=0, max_memory_mb=0, alone=alone)

    def worker_id_of(self, pid: int) -> str:
        """Return the worker id of the process of this pid.

        Of one that runs one task it is given: the task is claimed before there is a pid.
        """
        return self.alone.worker_id if self.alone is not None else self._id(pid)

    def alone_id(self, number: int) -> str:
        """Return the worker id of the supervisor's quarantine process of this number."""
        return self._id(number) + ALONE

    def isolated_id(self, pid: int, number: int) -> str:
        """Return the worker id of the process of an isolated task. number: among those of the worker of this pid."""
        return self._id(f"{pid}.{number}") + ISOLATED

    def _id(self, part: int | str) -> str:
        return f"{self.name}:{self.supervisor_pid}:{part}:{self.token}"
