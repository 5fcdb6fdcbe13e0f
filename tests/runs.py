"""Tasks that a worker has taken and begun, made with the verbs themselves."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker

from . import tasks


def claimed(worker_id: str = "w", **options: Any) -> lifecycle.Run:
    """A new task that a worker has taken and whose row says so. options: as of `using`."""
    tasks.add.using(**options).enqueue(1)
    return taken_by(worker_id)


def taken_by(worker_id: str) -> lifecycle.Run:
    """The next task, which a worker has taken and whose row says so."""
    (run,) = lifecycle.claim(Broker(), "default", worker_id, 1, "default").runs
    lifecycle.begin(run, worker_id, timezone.now())
    lifecycle.mark_running([run])
    return run
