"""One run of an isolated task, seen from its slot: start a process for it, look after it, report its outcome.

The thread of the slot does nothing else meanwhile. It asks the function to stop in time, and kills the process when
that does not help. The worker process and its other tasks notice nothing of it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from ... import lifecycle
from ...definitions.payload import json_bytes
from ...exceptions import LeaseLost, TaskFailed
from ...guard import get_logger
from ...logs import log_extra
from ...run_log import Line
from ...stderr_log import stderr_verbosity
from ...storage import database_clock
from .. import bootstrap, inherited_settings
from ..child_process import DEATH_SECONDS, ChildProcess
from ..crash_stack import STACKS_SIGNAL, CrashStack
from ..process_groups import start_of_child
from .isolated_messages import (
    COMPLETED,
    CUT,
    FINISHED,
    LEAVE_ROW,
    LOG_LINE,
    PROGRESS,
    READY,
    UNCONNECTED,
    Work,
)
from .job import Crash, Cut, Job, JobPhase, NotStarted, Outcome, StopReason, Unconnected
from .marking import is_marked_first
from .steps import check_may_begin, lines_to_keep

if TYPE_CHECKING:
    from .run import JobRunner

logger = get_logger("django_asyncq.worker")

POLL_SECONDS = 0.05
# To set Django up and import the tasks.
START_SECONDS = 60.0
START_AGAIN_SECONDS = 5
# To exit after the outcome. Threads that the function has left behind do not end by themselves.
EXIT_SECONDS = 5.0
# For the stacks of a process that is about to be killed.
STACK_SECONDS = 0.2
# Until a killed process is dead.
OUTCOMES: Final = {CUT: Cut, UNCONNECTED: Unconnected}


class ProcessNotStarted(Exception):
    """The process could not be started, or exited before it had loaded the project's code."""


class IsolatedRun:
    """Takes one job through its run in a process of its own."""

    def __init__(self, runner: JobRunner, job: Job) -> None:
        self.runner = runner
        self.job = job
        self.record = job.run.record
        self._asked: set[StopReason] = set()
        self._kill_at = math.inf
        # Why the process was killed.
        self._killed_for: StopReason | None = None

    def run(self) -> None:
        """Run it, and report its outcome."""
        self.crash_stack = CrashStack()
        try:
            self._start()
            try:
                self._follow()
            finally:
                self._end()
        except ProcessNotStarted as error:
            self._note_no_start(error)
        finally:
            self.crash_stack.close()

    def _start(self) -> None:
        """Start the process. Raises: ProcessNotStarted when the system allows no more of them."""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        # As long as nothing has begun, the clock of the start runs.
        self._kill_at = time.monotonic() + START_SECONDS
        arguments = (
            inherited_settings.applied(),
            stderr_verbosity(),
            self.record.name,
            self.runner.worker_id,
            theirs,
            self.crash_stack.path,
        )
        process = spawn.Process(target=bootstrap.run_isolated, args=arguments, name="asyncq-isolated")
        try:
            with start_of_child(signal.SIGTERM):
                process.start()
        except OSError as error:
            self.pipe.close()
            raise ProcessNotStarted(str(error)) from error
        finally:
            theirs.close()
        self.process = ChildProcess(process)

    # --- what the process says

    def _follow(self) -> None:
        """Do what the process says, until it has finished or is dead."""
        while (message := self._receive()) is not None:
            try:
                if self._obey(message):
                    return
            except (KeyError, TypeError, ValueError):
                text = "task %s: its process sent what cannot be read"
                logger.exception(text, self.record.id, extra=log_extra(self.record))
                break
            except OSError:
                break  # it died between two messages
        self._conclude_dead()

    def _receive(self) -> Mapping[str, Any] | None:
        """Wait for a message, and look at the clock meanwhile; return None when none can follow."""
        while True:
            wait([self.pipe, self.process.sentinel], POLL_SECONDS)
            try:
                if self.pipe.poll():
                    message = json.loads(self.pipe.recv_bytes())
                    return message if isinstance(message, dict) else {}
            except (EOFError, OSError, ValueError):
                return None
            # What it has sent last is read first.
            if self.process.has_exited() and not self.pipe.poll():
                return None
            self._check_clock(time.monotonic())

    def _obey(self, message: Mapping[str, Any]) -> bool:
        """Do what a message says; return whether the function has finished."""
        kind = message["kind"]
        if kind == READY:
            return self._begin()
        if kind == LEAVE_ROW:
            self.pipe.send_bytes(json_bytes(self._leave_row()))
        elif kind == PROGRESS:
            self.job.run.record.progress = message["value"]
        elif kind == LOG_LINE:
            if self.job.log is not None:
                self.job.log.add_line(Line(*message["line"]))
        elif kind == COMPLETED:
            self._complete(message)
        elif kind == FINISHED:
            self._finish(message)
            return True
        return False

    def _begin(self) -> bool:
        """Count the attempt, and have the function called; return whether the run is over already."""
        job = self.job
        self._kill_at = math.inf
        self.runner.count(job)
        assert job.begun_at is not None  # noqa: S101 - set by `count`
        if most := lines_to_keep(job):
            job.log = self.runner.open_log(job, most)
        try:
            check_may_begin(job)  # it may have been cancelled while its process started
            if is_marked_first(job):
                self.runner.mark_first(job)
        except Exception as error:  # noqa: BLE001 - it is the outcome, and must not end the slot
            self._give_up(error)
            return True
        work = Work(self.record, job.run.lease, job.run.written, job.begun_at, job.seconds_to_deadline)
        self.pipe.send(work)
        return False

    def _give_up(self, error: Exception) -> None:
        """Report a run whose function is not called: cancelled, expired, or its row cannot say RUNNING as it must."""
        self.process.signal(signal.SIGKILL)
        if outcome := self.runner.finish(self.job, None, error):
            self.runner.report(outcome)

    def _leave(self) -> None:
        """Note that the function has finished."""
        if self.job.log is not None:
            self.job.log.close()
        self.runner.leave(self.job)
        if self.job.phase is JobPhase.COMPLETED and self.job.log is not None:
            self.runner.report_log(self.job)

    def _leave_row(self) -> bool:
        try:
            self.runner.reporter.leave_row(self.job)
        except LeaseLost:
            return False
        return True

    def _complete(self, message: Mapping[str, Any]) -> None:
        """Report a success that is committed; the function goes on."""
        job = self.job
        job.run = lifecycle.completed_run(job.run, message["changes"])
        job.phase = JobPhase.COMPLETED
        at = datetime.fromisoformat(message["finished_at"])
        self.runner.report(Outcome(job, at, job.run.record.return_value))

    def _finish(self, message: Mapping[str, Any]) -> None:
        """Report the outcome, if the task has not completed itself."""
        job = self.job
        if job.phase is JobPhase.COMPLETED:
            self._leave()
            return
        changes = message["changes"]
        # The row in memory is changed by the reporter, which may be writing it at this moment.
        finished = lifecycle.completed_run(job.run, changes)
        at = datetime.fromisoformat(message["finished_at"])
        if message["uncertain"]:
            job.uncertain = lifecycle.completed_run(job.run, message["uncertain"])
        kind = OUTCOMES.get(message["outcome"], Outcome)
        job.phase = JobPhase.REPORTED
        self._leave()
        self.runner.report(kind(job, at, finished.record.return_value, _error_of(finished), changes))

    # --- the clock

    def _check_clock(self, now: float) -> None:
        """Ask the function to stop when it is time to, and kill its process when that has not helped."""
        if now >= self._kill_at:
            self._kill()
        elif self.job.begun_at is not None:
            reason = self.job.stop_reason()
            if reason is not None and reason not in self._asked:
                self._asked.add(reason)
                self._ask(reason, now)

    def _ask(self, reason: StopReason, now: float) -> None:
        with suppress(OSError):
            self.pipe.send_bytes(json_bytes(reason.name))
        if reason in (StopReason.TIMEOUT, StopReason.CANCELLED) and self._kill_at == math.inf:
            self._kill_at = now + self.runner.timeout_grace_seconds
            self._killed_for = reason

    def _kill(self) -> None:
        """Kill the process, after it has written its stacks."""
        if self.job.begun_at is not None and self.crash_stack.path:
            self.process.signal(STACKS_SIGNAL)
            deadline = time.monotonic() + STACK_SECONDS
            while not self.crash_stack.peek() and time.monotonic() < deadline:
                time.sleep(STACK_SECONDS / 20)
        self._kill_at = math.inf
        self.process.signal(signal.SIGKILL)

    # --- the end of the process

    def _conclude_dead(self) -> None:
        """Report what becomes of a run whose process has said nothing of its end."""
        self.process.wait_for_exit(EXIT_SECONDS)
        if not self.process.has_exited():
            # It closed its pipe, so nothing can be known of it.
            self.process.signal(signal.SIGKILL)
            self.process.wait_for_exit(DEATH_SECONDS)
        job, stack = self.job, self.crash_stack.peek()
        code = self.process.reap()
        reason = lifecycle.describe_exit(code)
        if job.begun_at is None:
            raise ProcessNotStarted(f"{reason} before it was ready")
        self._leave()
        if job.phase is JobPhase.COMPLETED:
            text = "task %s: failed after its completion; it has succeeded: %s"
            logger.error(text, self.record.id, reason, extra=log_extra(self.record))
            return
        now = database_clock.estimate()
        if job.phase is JobPhase.COMPLETING:
            # It may have died after its commit, so the reporter looks the row up.
            job.uncertain = lifecycle.perhaps_completed(job.run, now)
        job.phase = JobPhase.REPORTED
        # By this thread, or by the SIGTERM that asks it to stop: a function may have removed the handler.
        was_killed = self._killed_for is not None and code in (None, -signal.SIGKILL, -signal.SIGTERM)
        if was_killed or job.is_cancelled:
            # A cancelled task is not queued again because its process crashed.
            ignored = was_killed and code != -signal.SIGTERM
            how = "did not stop when asked; its process was killed" if ignored else reason
            self.runner.report(Outcome(job, now, None, self._error_of_stopped(how, stack)))
            return
        text = f"{reason}, before it had reported an outcome; the task is isolated, so no other task was in it"
        self.runner.report(Crash(job, now, None, RuntimeError(reason), reason=text, stack=stack))

    def _error_of_stopped(self, how: str, stack: str) -> BaseException:
        stopped = self.job.stopped()
        error = type(stopped)(f"{stopped} and {how}")
        if stack:
            error.add_note(stack)
        return error

    def _note_no_start(self, error: ProcessNotStarted) -> None:
        """Have the task run later, without using an attempt: nothing of its function was called."""
        text = "task %s: its process did not start; it runs again in %d s, without using an attempt: %s"
        logger.error(text, self.record.id, START_AGAIN_SECONDS, error, extra=log_extra(self.record))
        self.job.run.pause_seconds = START_AGAIN_SECONDS
        self.job.phase = JobPhase.REPORTED
        self.runner.report(NotStarted(self.job, database_clock.estimate(), None, error))

    def _end(self) -> None:
        """Wait until the process has exited, and leave nothing of it."""
        self.process.wait_for_exit(EXIT_SECONDS)
        if not self.process.has_exited():
            text = "task %s: its process did not exit after its function had finished, and is killed"
            logger.warning(text, self.record.id, extra=log_extra(self.record))
            self.process.signal(signal.SIGKILL)
            self.process.wait_for_exit(DEATH_SECONDS)
        self.pipe.close()
        if self.process.reap() is not None:
            self.process.close()


def _error_of(run: lifecycle.Run) -> BaseException | None:
    """Return an error that stands for that of another process; None for a success."""
    record = run.record
    if not record.reason and record.finished_at and not record.retry_at:
        return None
    last = record.errors[-1] if record.errors else {"exception": "", "message": "", "traceback": ""}
    error = TaskFailed(str(record.id), reason=record.reason, exception=last["exception"], text=last["message"])
    if last["traceback"]:
        error.add_note(last["traceback"])
    return error
