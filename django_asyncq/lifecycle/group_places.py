"""Which tasks wait in a group, in the place of pending, and under which rules the group is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..definitions.batches import batch_of
from ..models import TaskRecord


class GroupPlace(NamedTuple):
    """A group of a queue. rules: from `Batch.rules`; "" for a group that only another program takes."""

    name: str
    rules: str


NO_GROUP = GroupPlace("", "")


def place_of(record: TaskRecord) -> GroupPlace | None:
    """Return the group in which a task waits; None for pending.

    Where the code of the task has no batch, or this process lacks it, the task runs by itself.
    """
    if not record.group or record.is_batch:
        return None
    if record.is_remote:
        return GroupPlace(record.group, "")
    batch = batch_of(record.name)
    return None if batch is None else GroupPlace(record.group, batch.rules)


def by_group(records: list[TaskRecord]) -> tuple[list[TaskRecord], dict[GroupPlace, list[TaskRecord]]]:
    """Return the tasks of no group, and the others by their groups. Most have none."""
    if not any(record.group for record in records):
        return records, {}
    plain: list[TaskRecord] = []
    grouped: dict[GroupPlace, list[TaskRecord]] = {}
    for record in records:
        place = place_of(record)
        if place is None:
            plain.append(record)
        else:
            grouped.setdefault(place, []).append(record)
    return plain, grouped


def rules_of_groups(records: Sequence[TaskRecord]) -> dict[str, str]:
    """Return the rules of the groups in which these tasks wait, by the name of the group; "" as in `GroupPlace`."""
    places = [place_of(record) for record in records]
    return {place.name: place.rules for place in sorted(filter(None, places))}
