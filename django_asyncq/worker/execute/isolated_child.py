"""The process of one run of an isolated task: its function runs in the main thread, and its outcome goes to the worker.

The worker has claimed the task and counted the attempt. It writes the row, and renews the lease. This process does what
needs the function: it announces the start, calls it, and decides with its exception whether the task is retried.
Nothing that it sends is unpickled: the worker reads plain JSON.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ... import lifecycle
from ...definitions.payload import json_bytes
from ...exceptions import LeaseLost
from ...guard import attempt, get_logger, own_process
from ...models import TaskRecord, TaskState
from ...registry import registered
from ...run_log import Line, RunLog
from ...threads import EX_SOFTWARE, LongLivedThread
from .calling import call_in_main_thread
from .completion import Completion
from .connections import begin_connections
from .isolated_messages import (
    COMPLETED,
    CUT,
    EX_NO_PIPE,
    FINISHED,
    LEAVE_ROW,
    LOG_LINE,
    PLAIN,
    PROGRESS,
    READY,
    UNCONNECTED,
    Work,
)
from .job import Cut, Job, JobPhase, Outcome, StopReason, Unconnected
from .outcomes import apply
from .steps import RunSteps

logger = get_logger("django_asyncq.worker")

# How often it looks for new progress, which the worker writes once a second.
LOOK_SECONDS = 0.2


class Interruption:
    """Interrupts the function of a run with an exception in the main thread, when it must stop.

    The listener thread asks; the handler of SIGTERM in the main thread decides. Any other SIGTERM does nothing. What is
    awaited is interrupted by `interrupting` instead: an exception in the handler would end the event loop.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._is_open = False
        self._reason: StopReason | None = None

    def ask(self, reason: StopReason) -> None:
        """Have the function interrupted. Called by the listener thread."""
        if reason in (StopReason.CANCELLED, StopReason.SHUTDOWN):
            self.job.ask_to_stop(reason)
        if reason is not StopReason.SHUTDOWN:
            self._reason = reason
            # To the main thread: it ends what that waits for, such as a sleep.
            self.ask_again()

    def open(self) -> None:
        """Allow it from now on. Raises: the error of a stop that was asked for before."""
        self._is_open = True
        self._on_signal(signal.SIGTERM, None)

    def close(self) -> None:
        """Allow it no longer."""
        self._is_open = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Allow it again only after the block, which must not be cut in two."""
        was_open, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = was_open

    def ask_again(self) -> None:
        """Interrupt what could not be interrupted when it was asked. Called by the listener thread."""
        if self._reason is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def install(self) -> None:
        """Handle SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        job, reason = self.job, self._reason
        if reason is None or not self._is_open or job.interrupt is not None:
            return
        self._reason = None
        # `check` may have been first, and the function may be cleaning up.
        if reason is not StopReason.SOFT_TIMEOUT:
            if job.had_stop:
                return
            job.had_stop = True
            raise job.stopped()
        if not job.had_soft_timeout:
            job.had_soft_timeout = True
            raise job.soft_timed_out()


class WorkerPipe:
    """The pipe to the worker process. A body may have closed its descriptor, and opened another file in its place."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self.pipe = pipe
        self._lock = threading.Lock()
        self._identity = self._identify()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message. Ends this process if the pipe is closed: it has no other way to say what has happened."""
        encoded = json_bytes({"kind": kind, **values})
        with self._lock:
            try:
                if self._identify() != self._identity:
                    raise OSError("its descriptor is that of another file")
                self.pipe.send_bytes(encoded)
            except OSError as error:
                text = "an isolated task cannot report its outcome, since its pipe to the worker is closed: %s"
                logger.error(text, error)
                os._exit(EX_NO_PIPE)

    def receive(self, seconds: float) -> StopReason | bool | None:
        """Return what the worker has sent, or None after so many seconds.

        Raises: EOFError or OSError when nothing can follow; ValueError or KeyError when another file has been read.
        """
        if not self.pipe.poll(seconds):
            return None
        if self._identify() != self._identity:
            raise EOFError
        message = json.loads(self.pipe.recv_bytes())
        return message if isinstance(message, bool) else StopReason[message]

    def _identify(self) -> tuple[int, int]:
        found = os.fstat(self.pipe.fileno())
        return found.st_dev, found.st_ino


class ChildCompletion(Completion):
    """A completion whose row another process would write; nothing interrupts it between its last write and its end."""

    def __init__(self, child: IsolatedChild, job: Job) -> None:
        super().__init__(job, child.claim_row, child.report)
        self.interruption = child.interruption

    def _prepare(self, connection: BaseDatabaseWrapper) -> None:
        with self.interruption.held():
            super()._prepare(connection)

    def _write(self, ending: Any) -> lifecycle.Run:
        self.interruption.close()
        return super()._write(ending)

    def _conclude(self, completed: lifecycle.Run | None, ending: Any) -> None:
        super()._conclude(completed, ending)
        if self.job.phase is not JobPhase.COMPLETED:
            self.interruption.open()


class IsolatedChild(RunSteps):
    """Runs one task, and exits. Raises on creation: TaskNotRegistered, when this code is newer than the worker's."""

    def __init__(self, pipe: Connection[Any, Any], name: str, worker_id: str) -> None:
        super().__init__(worker_id)
        self.task = registered(name)
        self.pipe = pipe
        self.worker = WorkerPipe(pipe)
        self.worker_pid = os.getppid()
        self.answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(self) -> None:
        """Say that the function can be called now; call it when the worker has counted the attempt."""
        own_process()
        self.worker.send(READY)
        try:
            work = self.pipe.recv()
        except (EOFError, OSError):
            return  # the worker is dead, or has stopped this run before it began
        job = self._job_of(work)
        self.interruption = Interruption(job)
        self.interruption.install()
        listen = partial(self._listen, job.run.record)
        LongLivedThread("worker", listen, on_death=lambda name: os._exit(EX_SOFTWARE), is_endless=True).start()
        value, exception = None, None
        try:
            args, kwargs = self.introduce(job)
            try:
                self.interruption.open()
                value = self.call(job, args, kwargs)
            finally:
                self.interruption.close()
        except BaseException as error:  # noqa: BLE001 - all of it is the task's outcome
            exception = error
        if outcome := self.finish(job, value, exception):
            self._send_outcome(outcome)
        else:
            self.worker.send(FINISHED)
        connections.close_all()
        self._flush()

    def _job_of(self, work: Work) -> Job:
        run = lifecycle.Run(work.record, work.lease, begun=True, written=work.written)
        job = Job(run, self.task, work.begun_at, begun_at=work.begun_at, phase=JobPhase.RUNNING)
        job.seconds_to_deadline = work.seconds_to_deadline
        begin_connections(job)
        return job

    def _send_outcome(self, outcome: Outcome) -> None:
        apply(outcome)
        kind = CUT if isinstance(outcome, Cut) else UNCONNECTED if isinstance(outcome, Unconnected) else PLAIN
        uncertain = outcome.job.uncertain
        self.worker.send(
            FINISHED,
            outcome=kind,
            finished_at=outcome.finished_at.isoformat(),
            changes=lifecycle.changes_of(outcome.job.run),
            uncertain=lifecycle.changes_of(uncertain) if uncertain else None,
        )

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            attempt(stream.flush)

    # --- what surrounds a run

    def enter(self, job: Job) -> None:
        """Do nothing: the worker shows the run."""

    def leave(self, job: Job) -> None:
        """Do nothing, as `enter`."""

    def completion(self, job: Job) -> Completion:
        """Return the transaction that completes the run; the worker leaves the row to it."""
        return ChildCompletion(self, job)

    def call_plainly(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function in this thread, the main thread."""
        return call_in_main_thread(job, args, kwargs)

    def mark_first(self, job: Job) -> None:
        """Do nothing: the worker has done it."""

    def open_log(self, job: Job, most: int) -> RunLog:
        """Return what sends each line to the worker, which keeps them."""
        return RunLog(job.run.record.attempt, most, self._send_line)

    def _send_line(self, line: Line) -> None:
        with self.interruption.held():
            self.worker.send(LOG_LINE, line=line)

    def claim_row(self, job: Job) -> None:
        """Have the worker leave the row to this process. Raises: LeaseLost if the task is being requeued."""
        self.worker.send(LEAVE_ROW)
        if not self.answers.get():
            raise LeaseLost(f"task {job.run.record.id}: it is being requeued")
        job.phase = JobPhase.COMPLETING

    def report(self, outcome: Outcome) -> None:
        """Send the worker a success that is committed, while the function goes on."""
        self.worker.send(
            COMPLETED,
            finished_at=outcome.finished_at.isoformat(),
            changes=lifecycle.changes_of(outcome.job.run),
        )

    # --- the listener thread

    def _listen(self, record: TaskRecord) -> NoReturn:
        progress = record.progress
        while True:
            try:
                message = self.worker.receive(LOOK_SECONDS)
                if record.progress is not progress and record.state == TaskState.RUNNING:
                    progress = record.progress
                    self.worker.send(PROGRESS, value=progress)
            except (EOFError, OSError, ValueError, LookupError, TypeError):
                self._exit_with_worker()
            if message is None:
                self.interruption.ask_again()
            elif isinstance(message, StopReason):
                self.interruption.ask(message)
            else:
                self.answers.put(message)

    def _exit_with_worker(self) -> NoReturn:
        """Exit without an outcome; with a worker that is dead, all of its group exits, which is this group."""
        if os.getppid() != self.worker_pid and os.getpgrp() == self.worker_pid:
            os.killpg(0, signal.SIGKILL)
        os._exit(EX_NO_PIPE)
