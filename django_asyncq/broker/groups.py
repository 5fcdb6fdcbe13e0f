"""The groups of a queue: tasks that wait until enough of them can run together.

In asynq's layout: a zset per group, the set of their names, and one zset for each set of members that was taken. Own
are `group_due` (when each group of ours is ripe) and `group_rules` (its size and times, so that taking it needs none of
the project's code). A group without rules is another program's, and is never taken.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from . import entries as replies
from . import scripts
from .access import Access
from .entries import Entry, arguments_of, id_bytes
from .keys import due_channel

IDS_PER_CALL = 200
# How long a set may be taken: between two statements of the database. asynq gives its own sets 120 s.
TAKEN_SECONDS = 30
# How many groups one look sees; the next one sees others.
LOOKED_AT = 100


class Taken(NamedTuple):
    """Members that were taken of one group. set: id of their set. ids: in the order in which they joined.

    group: "" when no group was ripe. next_seconds: until the nearest one is; None when there is none.
    """

    group: str
    set: str
    ids: list[str]
    next_seconds: float | None


class Groups(Access):
    """Work with the groups of the queues of one alias. Every method raises BrokerUnavailable."""

    def add(self, queue: str, group: str, entries: Sequence[Entry], *, rules: str, again: bool = False) -> list[str]:
        """Add tasks to a group. rules: from `Batch.rules`, "" for the group of another program.

        again: also move an id that waits in retry, archived, completed or scheduled.
        Returns, for each: "grouped", "exists" or "duplicate".
        """
        keys = self.keys(queue)
        places = [keys.scheduled, keys.retry, keys.archived, keys.completed, keys.due]
        places += [keys.groups, keys.group_due, keys.group_rules]
        head = [keys.task_prefix, keys.group_prefix, group, rules, "again" if again else "", due_channel()]
        items = [arguments_of(entry) for entry in entries]
        return replies.texts(scripts.run_in_parts("add_to_group", self.client, places, head, items, IDS_PER_CALL))

    def take(self, queue: str) -> Taken:
        """Take the members of one ripe group of ours. After TAKEN_SECONDS without `drop` they go back."""
        keys, set_id = self.keys(queue), str(uuid.uuid4())
        places = [keys.group_due, keys.group_rules, keys.groups, keys.aggregation_sets]
        arguments = [keys.group_prefix, set_id, TAKEN_SECONDS, keys.task_prefix]
        found = replies.texts(scripts.run("take_group", self.client, places, arguments))
        if found[0]:
            return Taken(found[0], set_id, found[1:], 0.0)
        milliseconds = replies.whole(id_bytes(found[1]))
        return Taken("", "", [], None if milliseconds is None else milliseconds / 1000)

    def drop(self, queue: str, taken: Taken, ids: Sequence[str]) -> int:
        """Drop the entries of taken members; the others go back to their group. Returns: how many were dropped."""
        keys = self.keys(queue)
        group = keys.group(taken.group)
        places = [f"{group}:{taken.set}", keys.aggregation_sets, group, keys.group_rules]
        dropped = 0
        for start in range(0, max(len(ids), 1), IDS_PER_CALL):
            is_last = int(start + IDS_PER_CALL >= len(ids))
            part = [id_bytes(id) for id in ids[start : start + IDS_PER_CALL]]
            arguments = [keys.task_prefix, taken.group, is_last, *part]
            dropped += int(scripts.run("drop_members", self.client, places, arguments))
        if dropped < len(taken.ids):
            self.reclaim(queue)
        return dropped

    def look(self, queue: str) -> dict[str, list[str]]:
        """Return groups without rules, each with the ids of one or two members; keep the times of all others."""
        keys = self.keys(queue)
        places = [keys.groups, keys.group_due, keys.group_rules]
        found = replies.texts(scripts.run("look_at_groups", self.client, places, [keys.group_prefix, LOOKED_AT]))
        return {found[at]: [id for id in found[at + 1 : at + 3] if id] for at in range(0, len(found), 3)}

    def postpone(self, queue: str, group: str, seconds: float, behind: Sequence[str] = ()) -> None:
        """Have a group taken later. behind: ids of members that go behind the others."""
        keys = self.keys(queue)
        arguments = [group, round(seconds * 1000), *map(id_bytes, behind)]
        scripts.run("postpone_group", self.client, [keys.group(group), keys.group_due], arguments)

    def reclaim(self, queue: str) -> int:
        """Return members to their groups that were taken and never dropped, by any program; return how many."""
        keys = self.keys(queue)
        places = [keys.aggregation_sets, keys.groups, keys.group_due, keys.group_rules]
        return int(scripts.run("reclaim_groups", self.client, places, [keys.group_prefix]))

    def ensure(self, queue: str, rules: dict[str, str]) -> int:
        """Have groups known whose names were forgotten; return how many. rules: by the group's name, "" as in `add`."""
        keys = self.keys(queue)
        count, names = 0, sorted(rules)
        for start in range(0, len(names), IDS_PER_CALL):
            items = [text for name in names[start : start + IDS_PER_CALL] for text in (name, rules[name])]
            places = [keys.groups, keys.group_due, keys.group_rules]
            arguments = [keys.group_prefix, due_channel(), *items]
            count += int(scripts.run("ensure_groups", self.client, places, arguments))
        return count
