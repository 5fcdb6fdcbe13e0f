"""What a worker process does when one of its threads dies: it exits at once, and says what it was running.

It does not drain: without the reporter no outcome can be written, without the event loop no `async def` task finishes.
The supervisor recovers what had begun, and starts another process.
"""

from __future__ import annotations

from typing import NoReturn

from ..guard import get_logger
from ..threads import EX_SOFTWARE, exit_process
from .execute.jobs import Jobs

logger = get_logger("django_asyncq.worker")


class ThreadDeath:
    """Called by a dying thread of a worker process. Ends the process."""

    def __init__(self, worker_id: str, jobs: Jobs) -> None:
        self.worker_id = worker_id
        self.jobs = jobs

    def __call__(self, thread: str) -> NoReturn:
        """End the process because of a thread of this name."""
        exit_process(lambda: self._say(thread))

    def _say(self, thread: str) -> None:
        records = [job.run.record for job in self.jobs.running]
        logger.critical(
            "worker %s exits with code %d, since its thread %s has died; running: %s",
            self.worker_id,
            EX_SOFTWARE,
            thread,
            ", ".join(f"{record.id} {record.name}" for record in records) or "nothing",
        )
