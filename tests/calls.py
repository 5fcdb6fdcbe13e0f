"""What a plain task costs in calls of Python and C functions: `python -m tests.calls` prints it, `--write` keeps it.

Calls, unlike times, are the same on every machine. The kept figures are the budget of `test_budget`, and the functions
that were called say, when it is exceeded, which ones came.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core.registry import find
from django_asyncq.worker.capacity import Capacity
from django_asyncq.worker.job import Job, Jobs
from django_asyncq.worker.report import Reporter
from django_asyncq.worker.run import JobRunner
from django_asyncq.worker.slot_table import SlotTable
from django_asyncq.worker.wakeup import Wakeup

from . import tasks

KEPT = Path(__file__).with_name("calls.json")
TASKS = 100
OWN = "/django_asyncq/"
# What they call depends on how they were installed: with hiredis, or with psycopg's C parts.
DRIVERS = ("/redis/", "/psycopg")


class Calls:
    """Counted calls. total: of all functions, but not within drivers. own: of the package's, by file and name."""

    def __init__(self) -> None:
        self.total = 0
        self.own: Counter[str] = Counter()
        # How many frames of drivers are open, each within the one before.
        self._in_drivers = 0

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count one call; for `sys.setprofile`."""
        if event in ("call", "return") and any(part in frame.f_code.co_filename for part in DRIVERS):
            self._in_drivers += 1 if event == "call" else -1
            self.total += event == "call" and self._in_drivers == 1
        elif event in ("call", "c_call") and not self._in_drivers:
            self.total += 1
        if event == "call" and OWN in frame.f_code.co_filename:
            self.own[f"{frame.f_code.co_filename.split(OWN)[-1]} {frame.f_code.co_qualname}"] += 1

    def each(self) -> dict[str, Any]:
        """Return what one task costs: its calls, and the package's functions that most tasks call."""
        often = sorted(name for name, count in self.own.items() if count >= TASKS / 2)
        return {"calls": round(self.total / TASKS, 1), "functions": often}


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls of this thread in the block."""
    calls = Calls()
    # As in production: pytest keeps every line, whatever its level.
    logging.disable(logging.INFO)
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        logging.disable(logging.NOTSET)


Figures = TypeVar("Figures")
Within = Callable[[], AbstractContextManager[Figures]]


def enqueued(within: Within[Figures]) -> Figures:
    """Enqueue tasks one after the other, without a transaction; each is pushed by its caller. within: what measures."""
    tasks.noop.enqueue(a=0, b="x")
    with within() as figures:
        for number in range(TASKS):
            tasks.noop.enqueue(a=number, b="x")
    return figures


def ran(within: Within[Figures]) -> Figures:
    """Claim, run and report waiting tasks as a group, with the parts of a worker process in one thread."""
    broker, jobs, wakeup = Broker("worker"), Jobs(), Wakeup()
    quiet = threading.Event()
    quiet.set()
    reporter = Reporter(broker, "here:1", wakeup, quiet)
    loop = asyncio.new_event_loop()
    runner = JobRunner("here:1", SlotTable(1), reporter, Capacity(jobs, 1, wakeup), loop)
    with within() as figures:
        claimed = lifecycle.claim(broker, "default", "here:1", TASKS, "default")
        for run in claimed.runs:
            job = Job(run, find(run.record.name), time.monotonic())
            job.slot = 0
            runner.run(job, refresh=False)
        reporter.events.put(None)
        reporter.report_until_closed()
    loop.close()
    assert len(claimed.runs) == TASKS
    return figures


def measured() -> dict[str, Any]:
    """Return the figures of an `enqueue` and of a run."""
    # What is made once for each process is made now.
    enqueued(counted)
    ran(counted)
    return {"enqueue": enqueued(counted).each(), "run": ran(counted).each()}


def kept(vendor: str) -> dict[str, Any]:
    """Return the kept figures of a database."""
    found: dict[str, Any] = json.loads(KEPT.read_text())[vendor]
    return found
