"""The application of procrastinate's measures."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import kinds
import procrastinate

CONNINFO = os.environ["BENCH_POSTGRES_CONNINFO"]
app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=CONNINFO, max_size=18), import_paths=["procrastinate_app"]
)
TASKS: dict[str, Any] = {kind: app.task(name=kind)(body) for kind, body in kinds.ASYNC.items()}
TASKS["nap"] = app.task(name="nap")(kinds.nap)
TASKS["fail_once"] = app.task(name="fail_once", retry=1)(kinds.afail_once)
_producing: Any = None


def open() -> None:
    """Connect without an event loop."""
    global _producing
    _producing = app.replace_connector(procrastinate.SyncPsycopgConnector(conninfo=CONNINFO))
    _producing.__enter__().open()


def enqueue(kind: str, number: int) -> None:
    """One task."""
    TASKS[kind].defer(**kinds.arguments(kind, number))


def enqueue_many(kind: str, numbers: Iterable[int]) -> None:
    """Many tasks by one statement."""
    TASKS[kind].batch_defer(*(kinds.arguments(kind, number) for number in numbers))


def fill(kind: str, numbers: Iterable[int]) -> None:
    """By thousands."""
    listed = list(numbers)
    for begin in range(0, len(listed), 1000):
        enqueue_many(kind, listed[begin : begin + 1000])
