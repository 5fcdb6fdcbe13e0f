"""Note that Redis has the entries of tasks that only another program runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..broker import redis_clock
from ..models import TaskRecord
from ..storage.routing import rows_of
from ..storage.row_conditions import as_check


def note_seen(rows: Sequence[TaskRecord]) -> None:
    """Write into remote rows, as their fence, since when Redis has their entries."""
    if not rows:
        return
    since = int(redis_clock.seconds())
    unseen = rows_of(TaskRecord).filter(as_check(finished_at__isnull=True), id__in=[row.id for row in rows])
    unseen.update(fence=since)
    for row in rows:
        row.fence = since


def note_grouped(rows: Sequence[TaskRecord]) -> None:
    """Note that members were pushed to groups of another program.

    It may aggregate and delete them before the leader looks; without the note they would seem never to have been
    pushed, and would be aggregated twice. Rows of our own groups are left alone.
    """
    note_seen([row for row in rows if row.is_remote])
