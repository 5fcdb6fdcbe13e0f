"""Tasks with a rate, for the tests; each writes down when its body began."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from django_asyncq import Batch, BatchItem, task
from django_asyncq.models import TaskRecord, TaskRecordQuerySet


def note_start(**more: Any) -> None:
    """Append a line with the moment, by the host's monotonic clock, and the process."""
    if path := os.environ.get("ASYNCQ_TEST_HISTORY"):
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **more}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


@task(rate="10/h", rate_per="api-{api}", burst=2)
def call_api(api: str) -> str:
    """A name for each api."""
    return api


@task(rate="50/s", rate_per="fast", burst=5)
def fast(number: int) -> int:
    """One of many."""
    note_start(number=number)
    return number


@task(rate="50/s", rate_per="fast", burst=5)
async def fast_async(number: int) -> int:
    """It shares the rate of `fast`."""
    note_start(number=number)
    return number


@task(rate="5/s", rate_per="slow", burst=2)
def slow(number: int) -> None:
    """Of a rate that a test raises."""
    note_start(number=number)


@task(rate="1/h", rate_per="hourly", burst=2, max_attempts=2, backoff=0)
def hourly(fails: bool = False) -> None:
    """Two at once, then one each hour."""
    note_start(kind="def")
    if fails:
        raise ValueError("as asked")


@task(rate="1/h", rate_per="hourly", burst=2)
async def hourly_async() -> None:
    """It shares the rate of `hourly`."""
    note_start(kind="async")


@task(rate="1/h", rate_per="hourly", burst=2, isolated=True)
def hourly_isolated() -> None:
    """It shares the rate of `hourly`, in a process of its own."""
    note_start(kind="isolated")


@task(rate="1/h", rate_per="hourly", burst=2, batch=Batch(size=3, within=0.1))
def hourly_batch(items: list[BatchItem]) -> Any:
    """One start for all its calls."""
    note_start(kind="batch", calls=len(items))


def rows() -> TaskRecordQuerySet:
    """Return all rows."""
    return TaskRecord.objects.all()
