"""Where tasks run: a thread for each `def`, one event loop for every `async def`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import connections
from django.utils import timezone

from ... import compat, conf, failpoints, lifecycle
from ...context import Ending, TaskContext
from ...exceptions import TaskNotRunnable, TaskTimeout
from ...results import result_of, sender_of
from ..slot_table import SlotTable
from .completion import Completion
from .connections import after_task, before_task
from .job import Job, Outcome
from .job_queue import JobQueue

logger = logging.getLogger("django_asyncq.worker")

Report = Callable[[Outcome], None]
OnJob = Callable[[Job], None]
EndBlock = Callable[[Any], AbstractContextManager[Ending]]


class Runner:
    """What both kinds of slots do around a task's function."""

    def __init__(
        self, worker_id: str, board: SlotTable, on_ended: Report, on_free: Callable[[], None], withhold: OnJob
    ) -> None:
        """on_free: called when a slot is free again. withhold: called before a slot itself writes the row of a job."""
        self.worker_id = worker_id
        self.board = board
        self.on_ended = on_ended
        self.on_free = on_free
        self.withhold = withhold
        self.grace_seconds = conf.current().timeout_grace_seconds
        # Sooner than a lease can run out, whoever renews it or does not.
        self.begin_within_seconds = conf.current().lease_seconds / 2

    def begin(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        """Count the attempt, show the run on the board, tell who listens; return the function's arguments."""
        record = job.run.record
        job.stop = threading.Event() if job.task.takes_context else None
        job.begun_at = time.monotonic()
        deadline = job.begun_at + job.timeout_seconds + self.grace_seconds if job.timeout_seconds else 0.0
        self.board.enter(job.slot, record.id, deadline)
        lifecycle.begin(job.run, self.worker_id, timezone.now())
        failpoints.reach("begin.counted")
        if not isinstance(record.args, list) or not isinstance(record.kwargs, dict):
            raise TaskNotRunnable("the row's arguments are not a list and an object")
        result = result_of(record)
        compat.task_started.send_robust(sender_of(job.task.backend), task_result=result)
        arguments = list(record.args)
        if job.task.takes_context:
            completion = Completion(job, self.withhold, self.on_ended)
            end: EndBlock = completion.refuse if job.task.atomic else completion.block
            arguments.insert(0, TaskContext(task_result=result, record=record, stop=job.stop, completion=end))
        return arguments, dict(record.kwargs)

    def call(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a `def` task's function; of one that is atomic, in the transaction that ends it."""
        if not job.task.atomic:
            return job.task.func(*args, **kwargs)
        with Completion(job, self.withhold, self.on_ended).block() as ending:
            ending.result = job.task.func(*args, **kwargs)
        return None

    def end(self, job: Job, value: Any, exception: BaseException | None) -> None:
        """Take the run off the board and report it. A run that ended after its timeout has failed."""
        if job.is_completed:
            self.board.leave(job.slot)
            if exception is not None:
                logger.error("task %s: failed after its end; it has succeeded", job.run.record.id, exc_info=exception)
            return
        job.is_over = True
        if job.is_overdue(time.monotonic()) and not isinstance(exception, TaskTimeout):
            late = TaskTimeout(f"the task took longer than its timeout of {job.timeout_seconds:g} s")
            late.__cause__ = exception
            exception = late
        failpoints.reach("run.function_returned")
        self.board.leave(job.slot)
        self.on_ended(Outcome(job, timezone.now(), value, exception))


class Executor:
    """A waiting line, first come first served, and what is being run.

    waiting: who removes a job from it has the job: a slot, or who gives it back to its queue. So no lock is needed.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.waiting: dict[Job, None] = {}
        self.busy: set[Job] = set()
        self._line: JobQueue[Job] = JobQueue()

    def put(self, jobs: Sequence[Job]) -> None:
        """Add jobs to the line."""
        self.waiting.update(dict.fromkeys(jobs))
        self._line.extend(jobs)

    def take_back(self, came_before: float) -> list[Job]:
        """Remove the jobs that have not begun and came before a monotonic time; the line is in order of that."""
        older = []
        for job in self.waiting.copy():
            if job.came_at > came_before:
                break
            if self._leaves_line(job):
                older.append(job)
        return older

    def _leaves_line(self, job: Job) -> bool:
        return self.waiting.pop(job, job) is None

    def _enters_slot(self, job: Job) -> bool:
        """Take a job from the line; busy before it leaves it, so that it is always in one of them.

        One that was taken too long ago stays in line, to be handed back: the process stood still, another may have it.
        """
        if time.monotonic() - job.taken_at > self.runner.begin_within_seconds:
            return False
        self.busy.add(job)
        if self._leaves_line(job):
            return True
        self.busy.discard(job)
        return False

    def _leaves_slot(self, job: Job) -> None:
        self.busy.discard(job)
        self.runner.on_free()


class ThreadExecutor(Executor):
    """N threads that take jobs from the line."""

    def __init__(self, runner: Runner, count: int) -> None:
        super().__init__(runner)
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"slot-{slot}", daemon=True) for slot in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, slot: int) -> None:
        for alias in compat.task_backends:
            compat.task_backends[alias]  # made once per thread, not once per context
        while True:
            job, has_rested = self._next()
            if self._enters_slot(job):
                job.slot = slot
                contextvars.copy_context().run(self._run, job, has_rested)
                self._leaves_slot(job)

    def _next(self) -> tuple[Job, bool]:
        """Return the next job, and whether the thread had to wait for it."""
        job = self._line.take_now()
        return (self._line.take(), True) if job is None else (job, False)

    def _run(self, job: Job, has_rested: bool) -> None:
        value, failure = None, None
        try:
            if has_rested:
                before_task()
            args, kwargs = self.runner.begin(job)
            value = self.runner.call(job, args, kwargs)
        except BaseException as exception:  # noqa: BLE001 - SystemExit of a task must not end the slot
            failure = exception
        try:
            after_task()
        except Exception:
            logger.exception("task %s: its database connection could not be tidied", job.run.record.id)
        self.runner.end(job, value, failure)


class AsyncExecutor(Executor):
    """One event loop in a thread of its own; `count` coroutines in it at once, the others wait in line."""

    def __init__(self, runner: Runner, first_slot: int, count: int) -> None:
        super().__init__(runner)
        self._free_slots = deque(range(first_slot, first_slot + count))
        self._coroutines: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def put(self, jobs: Sequence[Job]) -> None:
        """Add jobs to the line."""
        super().put(jobs)
        if self.waiting:
            self._loop.call_soon_threadsafe(self._start_waiting)

    def _start_waiting(self) -> None:
        """Start jobs while there is room. Runs in the loop."""
        while self._free_slots:
            job = self._line.take_now()
            if job is None:
                return
            if self._enters_slot(job):
                job.slot = self._free_slots.popleft()
                coroutine = self._loop.create_task(self._run(job))
                self._coroutines.add(coroutine)
                coroutine.add_done_callback(self._coroutines.discard)

    async def _run(self, job: Job) -> None:
        value, failure = None, None
        try:
            async with ThreadSensitiveContext() as context:
                try:
                    value = await self._call(job)
                finally:
                    # Only a task that used the database synchronously has a thread of its own to tidy.
                    if context in SyncToAsync.context_to_thread_executor:
                        await sync_to_async(connections.close_all)()
        except BaseException as exception:  # noqa: BLE001 - see ThreadExecutor._run
            failure = exception
        self.runner.end(job, value, failure)
        self._free_slots.append(job.slot)
        self._leaves_slot(job)
        self._start_waiting()

    async def _call(self, job: Job) -> Any:
        args, kwargs = self.runner.begin(job)
        try:
            async with asyncio.timeout(job.timeout_seconds) as scope:
                return await job.task.func(*args, **kwargs)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise TaskTimeout(f"the task took longer than its timeout of {job.timeout_seconds:g} s") from error
