"""Executors of tasks: a thread for each `def`, one event loop for every `async def`."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from .. import conf
from ..core import compat
from ..core.guard import EX_SOFTWARE, LongLivedThread, exit_process, get_logger
from ..core.logs import log_extra
from ..storage.connections import IDLE_SECONDS, close_connections
from .job import Job, JobQueue, Jobs, is_coroutine_function
from .run import JobRunner

# --- What a worker process does when one of its threads dies: it exits at once, and says what it was running.
#
# It does not drain: without the reporter no outcome can be written, without the event loop no `async def` task
# finishes. The supervisor recovers what had begun, and starts another process.

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


def load_backends() -> None:
    """Make the backends of `TASKS` in this context, so that they are not made anew in each copy of it."""
    for alias in compat.task_backends:
        compat.task_backends[alias]


class Executor:
    """Slots of one kind, and the queue of jobs for them, first in, first out."""

    def __init__(self, runner: JobRunner, jobs: Jobs) -> None:
        self.runner = runner
        self.on_death = ThreadDeath(runner.worker_id, jobs)
        self.jobs = jobs
        self.queue: JobQueue[Job] = JobQueue()
        # Sooner than a lease can run out, even if nobody renews it.
        self.begin_within_seconds = conf.current().lease_seconds / 2

    def put(self, jobs: Sequence[Job]) -> None:
        """Queue jobs for the slots."""
        self.jobs.add(jobs)
        self.queue.extend(jobs)

    def enter_slot(self, job: Job) -> bool:
        """Take a job from the queue into a slot; return False if it is not to be run here.

        A job that was taken too long ago goes on waiting, and is requeued: this process stood still, so another worker
        may have the task by now.
        """
        return time.monotonic() - job.taken_at <= self.begin_within_seconds and self.jobs.enter_slot(job)


class ThreadExecutor(Executor):
    """`count` threads, each a slot; without any, the thread that calls `work` is the only one."""

    def __init__(self, runner: JobRunner, jobs: Jobs, count: int) -> None:
        super().__init__(runner, jobs)
        for slot in range(count):
            work = partial(self.work, slot)
            LongLivedThread(f"slot-{slot}", work, on_death=self.on_death, is_endless=True).start()

    def work(self, slot: int = 0) -> NoReturn:
        """Run what is in the queue, in this thread."""
        load_backends()
        while True:
            job = self.queue.take_now()
            has_waited = job is None
            if job is None:
                job = self.queue.take_within(IDLE_SECONDS)
            if job is None:
                # CONN_MAX_AGE may have kept that of the last task; no task of this slot comes to close it.
                close_connections()
                job = self.queue.take()
            if self.enter_slot(job):
                job.slot = slot
                contextvars.copy_context().run(self.runner.run, job, refresh=has_waited)
                self.runner.capacity.leave_slot(job)


class AsyncExecutor(Executor):
    """One event loop in its own thread, with `count` slots for coroutines. first_slot: number of the first of them."""

    def __init__(self, runner: JobRunner, jobs: Jobs, first_slot: int, count: int) -> None:
        super().__init__(runner, jobs)
        self._free_slots = deque(range(first_slot, first_slot + count))
        self._coroutines: dict[asyncio.Task[None], Job] = {}
        self.loop = runner.loop
        # Each coroutine begins with a copy of it: what starts one is often another one that has finished.
        self._context = contextvars.Context()
        self._context.run(load_backends)
        # Since when put jobs wait for the event loop to look at them; 0 for none.
        self.waiting_since = 0.0
        self.thread = LongLivedThread("loop", self.loop.run_forever, on_death=self.on_death, is_endless=True)
        self.thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether coroutines run."""
        return bool(self._coroutines)

    def put(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, and have the event loop look at them."""
        super().put(jobs)
        self.waiting_since = self.waiting_since or time.monotonic()
        self.loop.call_soon_threadsafe(self._start_waiting, context=contextvars.Context())

    def _start_waiting(self) -> None:
        """Start jobs while slots are free. Runs in the loop."""
        self.waiting_since = 0.0
        while self._free_slots:
            job = self.queue.take_now()
            if job is None:
                return
            if self.enter_slot(job):
                job.slot = self._free_slots.popleft()
                self._start(job)

    def _start(self, job: Job) -> None:
        coroutine = self.loop.create_task(self._work(job), context=self._context.copy())
        self._coroutines[coroutine] = job
        coroutine.add_done_callback(self._finished, context=contextvars.Context())

    def _finished(self, coroutine: asyncio.Task[None]) -> None:
        job = self._coroutines.pop(coroutine)
        if coroutine.cancelled():
            # Before its first step it has not run; later the run takes a cancellation as its failure. So a task that
            # cancels all others of the event loop takes no slot with it.
            if job.begun_at is None:
                self._start(job)
        elif error := coroutine.exception():
            record = job.run.record
            logger.critical("task %s: its slot has failed", record.id, exc_info=error, extra=log_extra(record))
            self.on_death("loop")

    async def _work(self, job: Job) -> None:
        await self.runner.arun(job)
        self._free_slots.append(job.slot)
        self.runner.capacity.leave_slot(job)
        self._start_waiting()


class Executors:
    """Both kinds of slots of one worker process; gives each job to its kind.

    is_alone: whether the process runs one task. Then the main thread is the slot for a function.
    """

    def __init__(self, runner: JobRunner, jobs: Jobs, concurrency: int, *, is_alone: bool = False) -> None:
        self.threads = ThreadExecutor(runner, jobs, 0 if is_alone else concurrency)
        self.loop = AsyncExecutor(runner, jobs, concurrency, concurrency)

    def put(self, jobs: Sequence[Job]) -> None:
        """Queue jobs for the slots."""
        # An isolated one occupies a thread: one that waits for its process, or the main thread of that.
        coroutines = [job for job in jobs if is_coroutine_function(job.task.func) and not job.task.isolated]
        functions = [job for job in jobs if job not in coroutines] if coroutines else jobs
        if functions:
            self.threads.put(functions)
        if coroutines:
            self.loop.put(coroutines)


# --- Notices an event loop that a coroutine blocks: it does blocking work, and no other `async def` task goes on.

WARN_SECONDS = 5.0
# With a longer gap between two checks something held the interpreter, and the event loop could not answer either.
LONGEST_GAP_SECONDS = 3.0


class LoopBlock:
    """Asks the event loop for an answer from time to time while it runs tasks. Called by the heartbeat thread."""

    def __init__(self, executor: AsyncExecutor) -> None:
        self.executor = executor
        # When the question was put that is not answered yet; 0 for none.
        self._asked_at = 0.0
        self._checked_at = 0.0
        self._is_warned = False

    def check(self, now: float) -> float:
        """Warn once of each block; return since when tasks wait for the event loop, 0 if none do.

        now: monotonic seconds.
        """
        had_gap, self._checked_at = now - self._checked_at > LONGEST_GAP_SECONDS, now
        if had_gap and self._asked_at:
            self._asked_at = now
        if not self._asked_at and self.executor.is_busy:
            self._asked_at = now
            self.executor.loop.call_soon_threadsafe(self._answer, context=contextvars.Context())
        if self._asked_at and now - self._asked_at >= WARN_SECONDS and not self._is_warned:
            self._is_warned = True
            self._warn(now - self._asked_at)
        waiting_since = self.executor.waiting_since
        return waiting_since if waiting_since and now - waiting_since >= WARN_SECONDS else 0.0

    def _answer(self) -> None:
        self._asked_at, self._is_warned = 0.0, False

    def _warn(self, seconds: float) -> None:
        frame = sys._current_frames().get(self.executor.thread.ident or 0)
        logger.warning(
            "a coroutine has blocked the event loop for %.0f s; all async tasks of this process wait. Use "
            "`asyncio.to_thread` for blocking work, or make the task a `def`. It is at:\n%s",
            seconds,
            "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)",
        )
