"""Which calls the test kit runs together, and when, by the clock of the test. Workers ask Redis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from ..definitions.batches import batch_of
from ..models import TaskRecord


def groups_of(records: Sequence[TaskRecord]) -> list[tuple[list[TaskRecord], datetime | None]]:
    """Return the next members of each group that run together, and when they are ripe; None: at once, they are enough.

    records: in the order in which they joined.
    """
    groups: dict[tuple[str, str, str], list[TaskRecord]] = {}
    for record in records:
        groups.setdefault((record.name, record.queue_name, record.group), []).append(record)
    found: list[tuple[list[TaskRecord], datetime | None]] = []
    for (name, _, _), members in groups.items():
        batch = batch_of(name)
        assert batch is not None  # noqa: S101 - or it would be in no group
        joined = [max(filter(None, (record.enqueued_at, record.run_after))) for record in members]
        times = [joined[0] + timedelta(seconds=batch.within_seconds)]
        if batch.quiet_seconds is not None:
            times.append(joined[-1] + timedelta(seconds=batch.quiet_seconds))
        found.append((members[: batch.size], None if len(members) >= batch.size else min(times)))
    return found
