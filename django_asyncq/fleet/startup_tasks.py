"""Start-up tasks: functions that one process of the fleet runs when the fleet starts.

Each runs in a process of its own, because a supervisor runs no user code and must be able to kill what hangs. The
process that holds the lock of the task's name starts it. A row shows processes that start later that the task has run,
and with what result.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

from .. import conf
from ..core.guard import get_logger
from ..core.masking import stderr_verbosity
from ..core.schedules import StartupTask, startup_tasks
from ..exceptions import LockLost
from ..leadership.coordinator import StartupTaskCoordinator
from ..lifecycle import describe_exit
from ..models import StartupRun
from ..storage import database_clock
from ..storage.routing import rows_of
from ..worker import entry_points
from ..worker.child_process import ChildProcess, start_of_child
from ..worker.entry_points import run_startup_task

logger = get_logger("django_asyncq.fleet.startup_tasks")

# While a process runs, and while another process holds the lock.
POLL_SECONDS = 0.2


class StartupRunner:
    """Run the start-up tasks of this process's code, one after another, unless the fleet has run them already.

    Driven by `tick`; has no thread. single_instance: see the coordinator.
    """

    def __init__(self, *, single_instance: bool | None) -> None:
        self.coordinator = StartupTaskCoordinator(single_instance=single_instance)
        self.waiting = startup_tasks()
        self._started_at = time.monotonic()
        self._run: Run | None = None

    @property
    def is_finished(self) -> bool:
        """Whether no task is left to run or to wait for."""
        return not self.waiting

    def tick(self) -> float:
        """Do what can be done now; return the seconds until the next call.

        Raises: BrokerUnavailable, django.db.Error, LockLost; what was not settled is checked again.
        """
        self.coordinator.tick()
        if self._run is not None:
            self._check(self._run)
        elif self.waiting:
            self._begin(self.waiting[0])
        return POLL_SECONDS

    def stop(self, grace_seconds: float) -> None:
        """Stop the running process, by force if necessary, and release its lock; the task does not count as run."""
        if self._run is not None:
            self._run.stop(grace_seconds)
            self.coordinator.release(lock_name(self._run.task))
            self._run = None

    def _begin(self, task: StartupTask) -> None:
        lock = lock_name(task)
        if not self.coordinator.acquire(lock, task.ttl_seconds):
            return
        if self._has_run(task):
            self.coordinator.release(lock)
            self.waiting.remove(task)
            return
        term = self.coordinator.term(lock)
        holder = f"{socket.gethostname()} {os.getpid()}"
        with self.coordinator.fenced(lock):
            now = database_clock.now()
            row = rows_of(StartupRun).create(name=task.name, holder=holder, term=term, begun_at=now)
        logger.info("start-up task %s started", task.name)
        self._run = Run(task, row.pk)

    def _has_run(self, task: StartupTask) -> bool:
        """Return whether a run finished since this process started, or so shortly before that it was the same start."""
        if task.every_start:
            return False
        seconds = time.monotonic() - self._started_at + task.ttl_seconds
        since = database_clock.now() - timedelta(seconds=seconds)
        return rows_of(StartupRun).filter(name=task.name, finished_at__gt=since).exists()

    def _check(self, run: Run) -> None:
        """Record the outcome of a finished process; kill the process when the lock is lost, as another may run now."""
        lock = lock_name(run.task)
        if not self.coordinator.is_held(lock):
            logger.error("start-up task %s was killed: its lock was lost", run.task.name)
            run.stop(0)
            self._run = None
            return
        error = run.error()
        if error is None:
            return
        try:
            with self.coordinator.fenced(lock):
                rows_of(StartupRun).filter(pk=run.row_id).update(finished_at=database_clock.now(), error=error)
        except LockLost:
            self._run = None
            raise
        if error:
            logger.error("start-up task %s failed:\n%s", run.task.name, error)
        else:
            logger.info("start-up task %s succeeded", run.task.name)
        run.close()
        self._run = None
        self.waiting.remove(run.task)
        self.coordinator.release(lock)


class Run:
    """A start-up task in its own process. row_id: of its `StartupRun`."""

    def __init__(self, task: StartupTask, row_id: int) -> None:
        self.task = task
        self.row_id = row_id
        spawn: Any = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        arguments = (entry_points.pack(), stderr_verbosity(), task.name, theirs)
        process = spawn.Process(target=run_startup_task, args=arguments, name="asyncq-startup")
        with start_of_child():
            process.start()
        theirs.close()
        self._process = ChildProcess(process)

    def error(self) -> str | None:
        """Return "" when the task succeeded, else what went wrong; None while it runs."""
        if not self._process.has_exited():
            return None
        self._process.kill_group()
        code = self._process.exit_code
        if code is None:
            return None  # another thread reaps it at this moment
        try:
            if self._pipe.poll():
                return str(self._pipe.recv())
        except EOFError:
            pass
        return describe_exit(code)

    def stop(self, grace_seconds: float) -> None:
        """Ask the process to stop; kill it after the grace period, and what it has started."""
        self._process.signal(signal.SIGTERM)
        self._process.wait_for_exit(grace_seconds)
        self._process.kill_group()
        self.close()

    def close(self) -> None:
        """Release the resources of the finished process."""
        self._pipe.close()
        self._process.close()


def lock_name(task: StartupTask) -> str:
    """Return the name of a start-up task's lock; projects that share a Redis each have their own."""
    return f"{conf.current().key_prefix}.startup.{task.name}"
