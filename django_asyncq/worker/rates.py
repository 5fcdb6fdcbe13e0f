"""Ask the rates of tasks: when they were claimed, and again when a run begins.

A start is taken where the run begins, in its slot, not at the claim: between the two a job may wait for a slot, or its
process may stand still, and starts that were taken early would then come closer together than the rate allows. What
was claimed is asked about together all the same, so that what must wait leaves at once and costs two calls for up to
200 tasks. So a start is one small call, which only tasks with a rate make. No attempt is used by waiting.

A task comes back a little before its turn. It takes some way until it is claimed, and whatever comes too late at a rate
without a burst is lost. The main thread holds it until its turn, without a slot, so that the rate is reached.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import UUID

from .. import lifecycle, rates
from ..broker import Broker
from ..core.calls import rate_name
from ..core.guard import attempt, get_logger
from ..core.logs import log_extra
from ..core.names import runs_alone, runs_isolated
from ..core.rates import StartRate, is_of_arguments, rate_of
from ..core.registry import every_task
from ..core.versions import seen_by_options
from ..models import TaskRecord
from ..storage.errors import STORE_ERRORS, one_line
from .job import Job, Jobs

logger = get_logger("django_asyncq.worker")

# With a later answer the process stood still: others may have started since.
FRESH_SECONDS = 0.25
# A task that may start so soon, or within so many intervals, is held here. Any way back takes longer, and one that was
# early or came in vain would meet the next one there, of which again one comes in vain: of 300 at 10 starts a second,
# each was claimed 2.0 times instead of 3.0. Never longer than this, since a process may hold tasks of many rates.
HOLD_SECONDS, HOLD_INTERVALS, LONGEST_HOLD_SECONDS = 0.1, 2.5, 0.5
# Two that come nearly together: the later one waits in its slot, a few times.
SHORT_SECONDS, MOST_SHORT = 0.02, 3


def name_of(task: Any, record: TaskRecord) -> str:
    """Return the name of the rate at which a row starts. task: of the row, with a `rate`.

    What cannot be named, since the code has changed since it was enqueued, is limited by the rate of its task.
    """
    if not is_of_arguments(task.rate_per):
        return rate_name(task, (), {})
    found, error = attempt(_named, task, record)
    if error is None and isinstance(found, str):
        return found
    text = "task %s: its rate has no name, so it has that of its task: %s"
    logger.error(text, record.id, one_line(error) if error is not None else found, extra=log_extra(record))
    return str(task.module_path)


def _named(task: Any, record: TaskRecord) -> str:
    if record.wire_id is not None and (sent := lifecycle.wire_call_of(record, task)) is not None:
        return rate_name(task, sent.args, sent.kwargs)
    return rate_name(task, *seen_by_options(task, record))


def declared_rates() -> dict[str, StartRate]:
    """Return the rates of this code whose name does not depend on arguments, by name."""
    rated = [task for task in every_task() if task.rate is not None and not is_of_arguments(task.rate_per)]
    return {rate_name(task, (), {}): rate_of(task) for task in rated}


def declared_rate(name: str) -> StartRate | None:
    """Return a rate as this code declares it; None when several do, or none.

    The tasks whose names depend on arguments count too, if all of them declare the same.
    """
    if (found := declared_rates().get(name)) is not None:
        return found
    others = {rate_of(task) for task in every_task() if task.rate is not None and is_of_arguments(task.rate_per)}
    return others.pop() if len(others) == 1 else None


def waiter_of(record: TaskRecord) -> rates.Waiter:
    """Return as what a row waits for a rate."""
    return rates.Waiter(record.backend, record.queue_name, record.redis_id)


class Wait(NamedTuple):
    """How long a task has to wait, and when it comes back from the schedule, in Unix milliseconds by Redis's clock.

    is_short: it does not leave its process for so short a time.
    """

    seconds: float
    due_ms: int
    is_short: bool

    @classmethod
    def of(cls, answer: rates.Answer, waiter: rates.Waiter) -> Wait:
        """Return the wait of a task that may not start, as a rate has answered."""
        at = answer.waits[waiter]
        seconds = (at - answer.now_us) / 1e6
        hold = min(max(HOLD_SECONDS, HOLD_INTERVALS * answer.interval_us / 1e6), LONGEST_HOLD_SECONDS)
        return cls(seconds, -(-(at - rates.EARLY_US) // 1000), seconds <= hold)


NO_WAIT = Wait(0.0, 0, is_short=True)


class RateKeeper:
    """Asks for the jobs of one worker process, in its main thread and in its slots.

    jobs: of the process. What cannot be asked about waits there, and is requeued by the main thread.
    """

    def __init__(self, broker: Broker, worker_id: str, jobs: Jobs) -> None:
        self.broker = broker
        self.worker_id = worker_id
        self.jobs = jobs
        # The slot of the worker that waits for this process has taken the start.
        self.is_asked = not runs_isolated(worker_id)
        # A process in quarantine exits when it finds no more to run.
        self.holds = not runs_alone(worker_id)

    def admit(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that may begin as far as is known now; the others are scheduled for their next look.

        jobs: of tasks with a rate. Raises: BrokerUnavailable, django.db.Error; then none may begin.
        """
        if not self.is_asked:
            return list(jobs)
        groups: dict[tuple[str, StartRate], list[Job]] = {}
        for job in jobs:
            job.rate = name_of(job.task, job.run.record)
            groups.setdefault((job.rate, rate_of(job.task)), []).append(job)
        waits: dict[UUID, Wait] = {}
        for (name, rate), group in groups.items():
            for start in range(0, len(group), rates.IDS_PER_CALL):
                waits |= self._ask(name, rate, group[start : start + rates.IDS_PER_CALL])
        later = {id: wait.due_ms for id, wait in waits.items() if not (self.holds and wait.is_short)}
        self._postpone([job for job in jobs if job.run.record.id in later], later)
        starting, now = [], time.monotonic()
        for job in jobs:
            if (wait := waits.get(job.run.record.id)) is None:
                starting.append(job)
            elif job.run.record.id not in later:
                self.jobs.hold(job, now + wait.seconds)
        return starting

    def released(self) -> list[Job]:
        """Return the held jobs whose turn has come. Called by the main thread."""
        return self.jobs.take_held(time.monotonic())

    def until_release(self) -> float:
        """Return the seconds until the first held job is released."""
        return max(min(self.jobs.held.values()) - time.monotonic(), 0.0)

    def may_start(self, job: Job) -> bool:
        """Take a start for a job in its slot; without one, schedule it, and return False: it must not begin.

        A cancelled one needs none: nothing of it is called. While Redis cannot be asked, nothing starts.
        """
        if job.is_cancelled:
            return True
        name = job.rate
        try:
            if (wait := self._take(job)) is None:
                return True
            self._postpone([job], {job.run.record.id: wait.due_ms})
        except STORE_ERRORS as error:
            record = job.run.record
            text = "task %s is requeued, since its rate %s cannot be asked: %s"
            logger.warning(text, record.id, name, one_line(error), extra=log_extra(record))
            self.jobs.add([job])
        return False

    def _take(self, job: Job) -> Wait | None:
        """Take a start; return how long the job has to wait, None when it has it. Raises: BrokerUnavailable."""
        name, rate, waiter = job.rate, rate_of(job.task), waiter_of(job.run.record)
        for left in reversed(range(MOST_SHORT)):
            asked_at = time.monotonic()
            answer = rates.ask(self.broker, name, rate, [waiter], "start")
            if answer is None:
                break  # it is built at the next claim, where the database may be asked
            if not answer.waits:
                if time.monotonic() - asked_at <= FRESH_SECONDS:
                    return None
                rates.give_back(self.broker, name, rate, answer.now_us)
                break
            wait = Wait.of(answer, waiter)
            if not left or wait.seconds > SHORT_SECONDS:
                return wait
            time.sleep(wait.seconds)
        return NO_WAIT

    async def may_start_async(self, job: Job) -> bool:
        """Do the same without holding up the event loop. A coroutine that is cancelled meanwhile has not begun."""
        loop = asyncio.get_running_loop()
        asking = loop.run_in_executor(None, contextvars.Context().run, self.may_start, job)
        while not asking.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asking)
        return asking.result()

    def _ask(self, name: str, rate: StartRate, jobs: Sequence[Job]) -> dict[UUID, Wait]:
        """Return how long each of the jobs that must wait has to."""
        ids = {waiter_of(job.run.record): job.run.record.id for job in jobs}
        while (answer := rates.ask(self.broker, name, rate, list(ids), "claim")) is None:
            rates.build(name)
        return {ids[waiter]: Wait.of(answer, waiter) for waiter in answer.waits}

    def _postpone(self, jobs: Iterable[Job], due_ms: Mapping[UUID, int]) -> None:
        if runs := [job.run for job in jobs]:
            lifecycle.postpone(self.broker, self.worker_id, runs, 0, due_ms=due_ms)
