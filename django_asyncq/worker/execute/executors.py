"""Where tasks run: a thread for each `def`, one event loop for every `async def`."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from ... import compat, conf
from ...guard import get_logger
from ...logs import log_extra
from ...threads import LongLivedThread
from ..thread_death import ThreadDeath
from .job import Job
from .job_queue import JobQueue
from .jobs import Jobs
from .run import JobRunner

logger = get_logger("django_asyncq.worker")


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

    def leave_slot(self, job: Job) -> None:
        """Free the slot of a job that has finished."""
        self.jobs.leave_slot(job)
        self.runner.capacity.slot_freed()


class ThreadExecutor(Executor):
    """`count` threads, each a slot."""

    def __init__(self, runner: JobRunner, jobs: Jobs, count: int) -> None:
        super().__init__(runner, jobs)
        for slot in range(count):
            work = partial(self._work, slot)
            LongLivedThread(f"slot-{slot}", work, on_death=self.on_death, is_endless=True).start()

    def _work(self, slot: int) -> None:
        for alias in compat.task_backends:
            compat.task_backends[alias]  # made once per thread, not once per context
        while True:
            job = self.queue.take_now()
            has_waited = job is None
            if job is None:
                job = self.queue.take()
            if self.enter_slot(job):
                job.slot = slot
                contextvars.copy_context().run(self.runner.run, job, refresh=has_waited)
                self.leave_slot(job)


class AsyncExecutor(Executor):
    """One event loop in its own thread, with `count` slots for coroutines. first_slot: number of the first of them."""

    def __init__(self, runner: JobRunner, jobs: Jobs, first_slot: int, count: int) -> None:
        super().__init__(runner, jobs)
        self._free_slots = deque(range(first_slot, first_slot + count))
        self._coroutines: dict[asyncio.Task[None], Job] = {}
        self.loop = runner.loop
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
        self.loop.call_soon_threadsafe(self._start_waiting)

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
        coroutine = self.loop.create_task(self._work(job))
        self._coroutines[coroutine] = job
        coroutine.add_done_callback(self._finished)

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
        self.leave_slot(job)
        self._start_waiting()


class Executors:
    """Both kinds of slots of one worker process; gives each job to its kind."""

    def __init__(self, runner: JobRunner, jobs: Jobs, concurrency: int) -> None:
        self.threads = ThreadExecutor(runner, jobs, concurrency)
        self.loop = AsyncExecutor(runner, jobs, concurrency, concurrency)

    def put(self, jobs: Sequence[Job]) -> None:
        """Queue jobs for the slots."""
        coroutines = [job for job in jobs if job.runs_in_loop]
        functions = [job for job in jobs if not job.runs_in_loop] if coroutines else jobs
        if functions:
            self.threads.put(functions)
        if coroutines:
            self.loop.put(coroutines)
