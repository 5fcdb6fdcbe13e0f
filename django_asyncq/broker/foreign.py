"""What is done with entries of other programs: a row is named, the entry goes back, is rejected, or is completed.

Nothing here removes one that has no row, except into the list of the rejected. Every function raises BrokerUnavailable
when Redis is unreachable, and may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import counting, redis_clock, replies, scripts
from .access import Access
from .entries import Lease, id_bytes, lease_arguments
from .keys import due_channel
from .message import error_field
from .rejected import KEPT_SECONDS, MOST_KEPT

PER_CALL = 100
# A rejected document has up to 90 KB, a completed message megabytes.
LARGE_PER_CALL = 20


class ToAdopt(NamedTuple):
    """A leased task that gets a row. row: a new id. wrong: a content of its field `row` that is no row of it."""

    lease: Lease
    row: str
    wrong: str = ""


class Adopted(NamedTuple):
    """A task whose row is named. lease: with a fence above all that were handed out."""

    lease: Lease
    row: str


class ToRestore(NamedTuple):
    """A task without a row, to be restored.

    fence: of the caller's lease; None: it waits in retry. retried: as its message says. text: of the error with which
    it is archived when nobody has taken it for long; "" if it never is.
    """

    id: str
    fence: int | None
    retried: int = 0
    text: str = ""


class ToComplete(NamedTuple):
    """A task that has succeeded here and stays in `completed`. message: as it is stored. result: b"" for none."""

    lease: Lease
    message: bytes
    seconds: int
    result: bytes


def adopt(broker: Access, queue: str, worker_id: str, tasks: Sequence[ToAdopt]) -> list[Adopted]:
    """Name the rows of leased tasks; return those that the worker still holds, with their new leases."""
    keys = broker.keys(queue)
    found: list[Adopted] = []
    for part in _parts(tasks, PER_CALL):
        rows = [[*lease_arguments(task.lease), task.row, task.wrong] for task in part]
        arguments = [keys.task_prefix, worker_id, *_flat(rows)]
        flat = scripts.run("adopt", broker.client, [keys.held(worker_id)], arguments)
        for task, row, fence in zip(part, flat[::2], flat[1::2], strict=True):
            raised = replies.whole(fence, 1)
            if raised is not None:
                found.append(Adopted(Lease(task.lease.id, raised), replies.text(row)))
    return found


def restore(
    broker: Access,
    queue: str,
    worker_id: str,
    tasks: Sequence[ToRestore],
    *,
    delay_seconds: int,
    patience_seconds: int,
    left_seconds: int = 0,
) -> list[str]:
    """Restore tasks for their own workers, to be due again after a delay.

    left_seconds: how long our workers pass over a task that is due again. Without it, one of ours that waits would
    always take it first: it is notified of a push, while a server of asynq asks once a second.
    patience_seconds: a task with a text that was restored first that long ago, and was not run since, is archived.
    Returns, for each: "restored", "archived", "stale" or "missing".
    """
    keys = broker.keys(queue)
    places = [keys.active, keys.lease, keys.held(worker_id), keys.retry, keys.scheduled, keys.archived, keys.due]
    head = [keys.task_prefix, delay_seconds, due_channel(), patience_seconds, left_seconds]
    words: list[str] = []
    for part in _parts(tasks, PER_CALL):
        rows = [
            [
                id_bytes(task.id),
                "" if task.fence is None else task.fence,
                task.retried,
                error_field(task.text) if task.text else "",
            ]
            for task in part
        ]
        words += replies.texts(scripts.run("restore", broker.client, places, [*head, *_flat(rows)]))
    return words


def reject(broker: Access, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes]]) -> list[str]:
    """Move what can be no task into the list of the rejected. items: lease, and the document to keep.

    Returns, for each: "rejected", "stale" or "missing".
    """
    keys = broker.keys(queue)
    places = [keys.active, keys.lease, keys.held(worker_id), keys.rejected]
    words: list[str] = []
    for part in _parts(items, LARGE_PER_CALL):
        rows = [[*lease_arguments(lease), document] for lease, document in part]
        arguments = [keys.task_prefix, MOST_KEPT, KEPT_SECONDS, *_flat(rows)]
        words += replies.texts(scripts.run("reject", broker.client, places, arguments))
    return words


def complete(broker: Access, queue: str, worker_id: str, tasks: Sequence[ToComplete]) -> list[str]:
    """Move succeeded tasks to `completed`, and count them. Returns, for each: "completed", "stale" or "missing"."""
    keys = broker.keys(queue)
    now = counting.now()
    head = [keys.task_prefix, *counting.limits(now)]
    words: list[str] = []
    for part in _parts(tasks, LARGE_PER_CALL):
        rows = [[*lease_arguments(task.lease), task.message, task.seconds, task.result] for task in part]
        all_keys = [keys.active, keys.lease, keys.held(worker_id), keys.completed, *counting.successes(keys, now)]
        words += replies.texts(scripts.run("complete", broker.client, all_keys, [*head, *_flat(rows)]))
    return words


def completed_at() -> int:
    """Return the Unix seconds to write into a message that is completed now, by Redis's clock."""
    return int(redis_clock.seconds())


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _flat(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for row in rows for value in row]
