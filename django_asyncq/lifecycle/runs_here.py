"""Runs in this process that no worker has: those of the test kit. What stops a run elsewhere finds them here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from uuid import UUID

from ..models import TaskRecord

_here: dict[UUID, Callable[[], object]] = {}


@contextmanager
def shown_here(id: UUID, ask_to_stop: Callable[[], object]) -> Iterator[None]:
    """Show a run while the block lasts. ask_to_stop: called when its task is cancelled, from any thread."""
    _here[id] = ask_to_stop
    try:
        yield
    finally:
        del _here[id]


def ask_runs_here(records: Iterable[TaskRecord]) -> None:
    """Ask the runs of these tasks to stop, if they are in this process."""
    for record in records:
        if ask_to_stop := _here.get(record.id):
            ask_to_stop()
