"""What a worker does, done in the test's own process: tasks claimed and begun, and a worker whose main thread it is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core.names import runs_alone
from django_asyncq.worker.options import WorkerOptions
from django_asyncq.worker.process import WorkerProcess
from django_asyncq.worker.slot_table import SlotTable

from . import tasks


def claimed(worker_id: str = "w", **options: Any) -> lifecycle.Run:
    """Return a new task that a worker has claimed and written as RUNNING. options: as of `using`."""
    tasks.add.using(**options).enqueue(1)
    return taken_by(worker_id)


def taken_by(worker_id: str) -> lifecycle.Run:
    """Return the next task, the next suspect for a worker in quarantine, claimed and written as RUNNING."""
    if runs_alone(worker_id):
        (run,) = lifecycle.claim_suspect(Broker(), "default", worker_id, "default").runs
    else:
        (run,) = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
    lifecycle.begin(run, worker_id, timezone.now())
    lifecycle.mark_running([run])
    return run


@contextmanager
def worker_process(*, concurrency: int = 2, **options: Any) -> Iterator[WorkerProcess]:
    """A worker of the queue `default` in this process, whose main thread is the test's; its reporter is not started.

    options: others of `WorkerOptions`.
    """
    ours, theirs = multiprocessing.Pipe()
    given = WorkerOptions(**{"queues": {"default": 1}, **options}, concurrency=concurrency)
    process = WorkerProcess(given, SlotTable(2 * concurrency), theirs)
    try:
        yield process
    finally:
        process.fetcher.stop()
        ours.close()
        theirs.close()
