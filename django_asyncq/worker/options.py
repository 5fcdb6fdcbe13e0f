"""What a supervisor passes to its worker processes. Imports nothing that needs Django to be set up."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field

# The only message of a worker process to its supervisor: it is about to fetch.
READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of one worker process.

    queues: name → weight; empty for all queues that exist. name: first part of its id. supervisor_pid, token: make the
    id unique, also against a process of the same host name and pid.
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

    def worker_id_of(self, pid: int) -> str:
        """Return the worker id of the process of this pid."""
        return f"{self.name}:{self.supervisor_pid}:{pid}:{self.token}"
