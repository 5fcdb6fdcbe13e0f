"""Take tasks out of a queue, and ask the workers of running ones to stop.

A request to stop is asynq's own: the id of a task on its channel of cancellations. The field `cancel` in the hash of
the task outlives a lost message; a new run of the task begins without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import replies, scripts
from .access import Access
from .entries import id_bytes
from .keys import cancel_channel

# Removing an id from a pending list of 100,000 ids takes about 1 ms: 50 of them, 50 ms.
TAKEN_OUT_PER_CALL = 50
ASKED_PER_CALL = 200


def take_out(
    broker: Access, queue: str, tasks: Sequence[tuple[str, int]], rows: Mapping[str, str] | None = None
) -> list[str]:
    """Remove tasks that wait, wherever they do; ask the workers of running ones to stop.

    tasks: id, and the fence that the row had when it was closed or replaced. rows: as of `Broker.remove`.
    Returns, for each: "removed"; "active": a worker has claimed it, and its entry and its lease stay; "missing"; or
    "overtaken": it was pushed or claimed with a later fence since, after a retry say, and stays as it is.
    Raises: BrokerUnavailable; the call may be repeated.
    """
    keys = broker.keys(queue)
    places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.archived, keys.completed]
    places += [keys.lease, keys.groups, keys.due, keys.suspects]
    head = [keys.task_prefix, keys.group_prefix, cancel_channel(broker.alias)]
    words: list[str] = []
    flat = [[id_bytes(id), fence, (rows or {}).get(id, "")] for id, fence in tasks]
    for start in range(0, len(tasks), TAKEN_OUT_PER_CALL):
        part = [word for task in flat[start : start + TAKEN_OUT_PER_CALL] for word in task]
        words += replies.texts(scripts.run("take_out", broker.client, places, [*head, *part]))
    return words


def ask_to_stop(broker: Access, queue: str, ids: Sequence[str]) -> list[str]:
    """Ask the workers that run these tasks to stop. Returns, for each: "asked", or "missing" (Redis does not know it).

    Raises: BrokerUnavailable; the call may be repeated.
    """
    keys = broker.keys(queue)
    head = [keys.task_prefix, cancel_channel(broker.alias)]
    words: list[str] = []
    for start in range(0, len(ids), ASKED_PER_CALL):
        part = map(id_bytes, ids[start : start + ASKED_PER_CALL])
        words += replies.texts(scripts.run("ask_to_stop", broker.client, [keys.lease], [*head, *part]))
    return words
