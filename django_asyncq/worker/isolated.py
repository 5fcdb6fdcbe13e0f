"""Isolated tasks: the worker that has claimed one gives it to a process of its own, which the supervisor starts.

That process is a worker process of one slot, which exits after the run. Its main thread is the slot, so that a signal
can interrupt the function; what is the main thread of other worker processes is a thread there.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import conf, lifecycle
from ..broker import Broker
from ..broker.task_entries import isolate
from ..core.guard import get_logger
from ..exceptions import BrokerUnavailable
from .call import await_in_own_loop
from .complete import Completion
from .job import Job, JobPhase, StopReason
from .options import START, Alone, WorkerOptions
from .run import JobRunner

logger = get_logger("django_asyncq.worker")

# --- In the worker process that has claimed the task.

AGAIN_SECONDS = 1.0


class Isolator:
    """Gives jobs to processes of their own. The slot of a job is occupied until its process is over.

    supervisor: the pipe to it.
    """

    def __init__(self, broker: Broker, options: WorkerOptions, supervisor: Any) -> None:
        self.broker = broker
        self.options = options
        self.supervisor = supervisor
        self._numbers = itertools.count(1)
        # The processes that are not over, by their worker ids.
        self._running: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def run(self, job: Job) -> None:
        """Have a process run a job; return when it is over. Called by the slot."""
        alone = Alone(self.options.isolated_id(os.getpid(), next(self._numbers)), job.run.record.queue_name)
        is_over = self._running[alone.worker_id] = threading.Event()
        # A slot with a long task, which no prefetched one waits for.
        job.begun_at = job.clock()
        # First: what another process may hold is no longer requeued by this one.
        job.phase = JobPhase.ISOLATED
        if self._give(job, alone):
            # Without a supervisor the main thread ends this process.
            with self._lock, suppress(OSError):
                self.supervisor.send((START, alone))
            is_over.wait()
        del self._running[alone.worker_id]

    def note_over(self, worker_id: str) -> None:
        """Free the slot of a process that is over. Called by the main thread."""
        self._running[worker_id].set()

    def _give(self, job: Job, alone: Alone) -> bool:
        """Give the process the task's lease, and try again while Redis is unreachable; return whether it was ours."""
        worker_id, seconds = self.options.worker_id_of(os.getpid()), conf.current().lease_seconds
        while True:
            try:
                return isolate(self.broker, alone.queue, job.run.lease, worker_id, alone.worker_id, seconds)
            except BrokerUnavailable:
                time.sleep(AGAIN_SECONDS)


# --- In the process of the task.

# Its default is to be ignored, and Go's runtime interrupts with it for that reason.
INTERRUPT_SIGNAL = signal.SIGURG
# "An error occurred while doing I/O on some file", as in `sysexits.h`.
EX_NO_PIPE = 74


class Interruption:
    """Interrupts the function of a run with an exception in the main thread, when it must stop.

    The control thread asks again and again; the handler of a signal in the main thread decides. What is awaited is
    interrupted by `call` instead: an exception in the handler would end the event loop.
    """

    def __init__(self, supervisor: Any) -> None:
        # The job whose function may be interrupted now.
        self.job: Job | None = None
        self._supervisor_fd: int = supervisor.fileno()
        self._identity = self._identify()

    def install(self) -> None:
        """Handle the signal. Called by the main thread."""
        signal.signal(INTERRUPT_SIGNAL, self._on_signal)

    def ask(self) -> None:
        """Have the function interrupted if it must stop. Called by the control thread."""
        job = self.job
        if job is None or job.had_stop or job.interrupt is not None:
            return
        reason = job.stop_reason()
        if reason in (StopReason.CANCELLED, StopReason.TIMEOUT) or (
            reason is StopReason.SOFT_TIMEOUT and not job.had_soft_timeout
        ):
            # It ends what the main thread waits for, such as a sleep.
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT_SIGNAL)

    def check(self) -> None:
        """Raise the error of a stop, unless the function has met it, and may be cleaning up."""
        if (job := self.job) is not None and job.interrupt is None and not job.had_stop:
            job.check()

    def exit_if_cut_off(self) -> None:
        """Exit if the pipe to the supervisor is closed: the function has closed all files, or opened others instead.

        Nothing may be written to any connection then, nor be read and unpickled: it may be a file of the function's.
        """
        try:
            if self._identify() == self._identity:
                return
        except OSError as error:
            logger.debug("the pipe to the supervisor: %s", error)
        self._exit()

    def _exit(self) -> NoReturn:
        logger.error("an isolated task cannot report its outcome, since it has closed the files of its process")
        os._exit(EX_NO_PIPE)

    def _identify(self) -> tuple[int, int]:
        found = os.fstat(self._supervisor_fd)
        return found.st_dev, found.st_ino

    def _on_signal(self, number: int, frame: Any) -> None:
        self.check()


class InterruptibleCompletion(Completion):
    """A completion that nothing interrupts while it writes RUNNING, nor between its last write and its end."""

    def __init__(self, runner: IsolatedRunner, job: Job) -> None:
        super().__init__(job, runner.reporter.leave_row, runner.reporter.report)
        self.interruption = runner.interruption

    def _prepare(self, connection: BaseDatabaseWrapper) -> None:
        self.interruption.job = None
        try:
            super()._prepare(connection)
        finally:
            self.interruption.job = self.job

    def _write(self, ending: Any) -> lifecycle.Run:
        self.interruption.job = None
        return super()._write(ending)

    def _conclude(self, completed: lifecycle.Run | None, ending: Any) -> None:
        super()._conclude(completed, ending)
        self.interruption.job = self.job if self.job.phase is not JobPhase.COMPLETED else None


class IsolatedRunner(JobRunner):
    """Runs the job of a process that was started for it. A suspect that is not isolated is not interrupted."""

    interruption: Interruption

    def call(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function in the main thread, and let it be interrupted."""
        if not job.task.isolated:
            return super().call(job, args, kwargs)
        if not job.task.atomic:
            # No thread of this process may be able to mark it later: the function may hold the interpreter.
            self.mark_first(job)
        self.interruption.job = job
        try:
            self.interruption.check()  # it was asked for before
            return super().call(job, args, kwargs)
        finally:
            self.interruption.job = None
            self.interruption.exit_if_cut_off()

    def await_value(self, job: Job, value: Any) -> tuple[Any, BaseException | None]:
        """Await it; for an isolated task in an event loop of its own, in the main thread."""
        return await_in_own_loop(job, value) if job.task.isolated else super().await_value(job, value)

    def completion(self, job: Job) -> Completion:
        """Return the transaction that completes the run."""
        return InterruptibleCompletion(self, job) if job.task.isolated else super().completion(job)
