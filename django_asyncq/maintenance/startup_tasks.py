"""Start-up tasks: what one process of the fleet does when it starts.

The function runs in a process of its own, for a supervisor runs no user code and must be able to end what hangs. Who
holds the lock of its name starts it; a row tells those who come later that it was run, and what came of it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import time
from datetime import timedelta
from typing import Any

from django.db.models import Value

from .. import conf, failpoints
from ..definitions.schedules import StartupTask, startup_tasks
from ..exceptions import LockLost
from ..leadership.coordinator import StartupTaskCoordinator
from ..lifecycle import describe_exit
from ..models import StartupRun
from ..scheduling.scheduler import DatabaseNow
from ..worker.bootstrap import run_startup_task

logger = logging.getLogger("django_asyncq.maintenance.startup_tasks")

# While a process runs, and while another holds the lock.
LOOK_SECONDS = 0.2


class StartupRunner:
    """Runs the start-up tasks of this process's code, one after another, as far as the fleet has not done so.

    Driven by `step`; has no thread. single_instance: see the coordinator.
    """

    def __init__(self, *, single_instance: bool | None) -> None:
        self.coordinator = StartupTaskCoordinator(single_instance=single_instance)
        self.waiting = startup_tasks()
        self._started_at = time.monotonic()
        self._run: Run | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to run or to wait for."""
        return not self.waiting

    def step(self) -> float:
        """Do what can be done now; return in how many seconds to look again.

        Raises: BrokerUnavailable, django.db.Error, LockLost; what was not settled is looked at again.
        """
        self.coordinator.tick()
        if self._run is not None:
            self._look_after(self._run)
        elif self.waiting:
            self._begin(self.waiting[0])
        return LOOK_SECONDS

    def stop(self, grace_seconds: float) -> None:
        """End the process that runs, if need be by force, and give its lock back; the task is not over then."""
        if self._run is not None:
            self._run.end(grace_seconds)
            self.coordinator.release(lock_name(self._run.task))
            self._run = None

    def _begin(self, task: StartupTask) -> None:
        lock = lock_name(task)
        if not self.coordinator.acquire(lock, task.ttl_seconds):
            return
        if self._was_run(task):
            self.coordinator.release(lock)
            self.waiting.remove(task)
            return
        term = self.coordinator.term(lock)
        holder = f"{socket.gethostname()} {os.getpid()}"
        with self.coordinator.fenced(lock):
            record = StartupRun.objects.create(name=task.name, holder=holder, term=term, begun_at=DatabaseNow())
        failpoints.reach("start_up.row_written")
        logger.info("start-up task %s begins", task.name)
        self._run = Run(task, record.pk)

    def _was_run(self, task: StartupTask) -> bool:
        """Whether a run ended since this process started, or so shortly before that it belongs to the same start."""
        if task.every_start:
            return False
        seconds = time.monotonic() - self._started_at + task.ttl_seconds
        since = DatabaseNow() - Value(timedelta(seconds=seconds))
        return StartupRun.objects.filter(name=task.name, finished_at__gt=since).exists()

    def _look_after(self, run: Run) -> None:
        """See whether the process has ended; end it when the lock is lost, for another may run it by now."""
        lock = lock_name(run.task)
        if not self.coordinator.is_held(lock):
            logger.error("start-up task %s is ended: its lock is lost", run.task.name)
            run.end(0)
            self._run = None
            return
        outcome = run.outcome()
        if outcome is None:
            return
        try:
            with self.coordinator.fenced(lock):
                StartupRun.objects.filter(pk=run.record_id).update(finished_at=DatabaseNow(), error=outcome)
        except LockLost:
            self._run = None
            raise
        if outcome:
            logger.error("start-up task %s failed:\n%s", run.task.name, outcome)
        else:
            logger.info("start-up task %s is done", run.task.name)
        run.close()
        self._run = None
        self.waiting.remove(run.task)
        self.coordinator.release(lock)


class Run:
    """A start-up task in its own process. record_id: of its row."""

    def __init__(self, task: StartupTask, record_id: int) -> None:
        self.task = task
        self.record_id = record_id
        spawn: Any = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=run_startup_task, args=(task.name, theirs), name="asyncq-startup")
        self._process.start()
        theirs.close()

    def outcome(self) -> str | None:
        """Return "" when it ended well, else what went wrong; None while it runs."""
        if self._process.exitcode is None:
            return None
        try:
            if self._pipe.poll():
                return str(self._pipe.recv())
        except EOFError:
            pass
        return describe_exit(self._process.exitcode)

    def end(self, grace_seconds: float) -> None:
        """Ask the process to end, then make it."""
        self._process.terminate()
        self._process.join(grace_seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(5)
        self.close()

    def close(self) -> None:
        """Let go of the process that has ended."""
        self._pipe.close()
        self._process.close()


def lock_name(task: StartupTask) -> str:
    """Return the name of a start-up task's lock; projects that share a Redis each have their own."""
    return f"{conf.current().key_prefix}.startup.{task.name}"
