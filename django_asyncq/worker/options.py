"""What a supervisor passes to its worker processes. Imports nothing that needs Django to be set up."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from ..definitions.names import ALONE

# The only message of a worker process to its supervisor: it is about to fetch.
READY = "ready"
# With the reason and the remedy of a DatabaseNotSetUp.
NOT_SET_UP = "not set up"
# With its exit code, as its last word: where that of a dead process cannot be known otherwise.
EXITS = "exits"
# The messages of a supervisor to its worker processes: with the ids of tasks, that these are cancelled; with a bool,
# whether to take no more tasks; and that a process that stops is to do so at once.
CANCEL, DRAIN, HURRY = "cancel", "drain", "hurry"


class QuarantineOptions(NamedTuple):
    """The options that a quarantine process has of its own.

    number: of the process among the quarantine processes of its supervisor. queue: that of its first task, which the
    supervisor has claimed for it.
    """

    number: int
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of one worker process.

    queues: name → weight; empty for all of the alias. name: first part of its id. supervisor_pid, token: make the
    id unique, also against a process of the same host name and pid. quarantine: given to a quarantine process
    only, which runs suspects one at a time.
    """

    backend: str = "default"
    queues: dict[str, int] = field(default_factory=dict)
    strict: bool = False
    concurrency: int = 8
    max_tasks: int = 0
    max_memory_mb: int = 0
    name: str = field(default_factory=socket.gethostname)
    supervisor_pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    quarantine: QuarantineOptions | None = None

    def worker_id_of(self, pid: int) -> str:
        """Return the worker id of the process of this pid.

        That of a quarantine process has a number in its place: its first task is claimed before there is a pid.
        """
        if self.quarantine is not None:
            return self.alone_id(self.quarantine.number)
        return f"{self.name}:{self.supervisor_pid}:{pid}:{self.token}"

    def alone_id(self, number: int) -> str:
        """Return the worker id of the quarantine process of this number."""
        return f"{self.name}:{self.supervisor_pid}:{number}:{self.token}{ALONE}"
