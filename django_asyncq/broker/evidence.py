"""What entries say of their tasks after another program may have changed them: asynq's states, messages and results.

The hash field `settled` is the state in which our own reporter left a failed task, so that a state without it, or with
another one, is another program's doing. A new push removes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from .. import conf
from . import commands, redis_clock, replies, scripts
from .access import Access
from .decoding import UndecodableMessage, decode_message
from .entries import id_bytes
from .message import TaskMessage

# A result may take a megabyte.
IDS_PER_CALL = 20
SETTLED_PER_CALL = 100
VALUES_PER_ID = 9
LARGEST_MESSAGE_BYTES = 4 * 1024 * 1024
# Clocks of other programs may differ by some seconds, and a pass may begin late.
OVERLAP_SECONDS = 15
FUTURE_SECONDS = 60
# How many new members of a zset one pass looks at.
MEMBERS_PER_PASS = 1000
# Those that are due next: a retry is settled before a worker can take it.
RETRIES_PER_PASS = 500


class Evidence(NamedTuple):
    """What Redis holds of a task.

    state: asynq's word, "" without a message. fence: 0 for none; seen_fence: as it was written. settled: see above.
    worker: ours that has claimed it, "" for none. score: of the zset that its state names, else None. message: None
    when it cannot be read. result: None when there is none, or one of more than MAX_RESULT_BYTES. result_bytes: its
    size. row: the row that it names; "" for none, as for tasks of ours.
    """

    id: str
    state: str
    fence: int
    seen_fence: str
    settled: str
    worker: str
    score: float | None
    message: TaskMessage | None
    result: bytes | None
    result_bytes: int
    row: str = ""


def read_evidence(broker: Access, queue: str, ids: Sequence[str]) -> list[Evidence]:
    """Return what entries say, in the order given. Raises: BrokerUnavailable."""
    keys = broker.keys(queue)
    places = [keys.scheduled, keys.retry, keys.archived, keys.completed]
    head = [keys.task_prefix, conf.current().max_result_bytes, LARGEST_MESSAGE_BYTES]
    found: list[Evidence] = []
    for part in _parts(ids, IDS_PER_CALL):
        flat = scripts.run("entry_evidence", broker.client, places, [*head, *map(id_bytes, part)])
        for index, id in enumerate(part):
            found.append(_evidence(id, flat[index * VALUES_PER_ID : (index + 1) * VALUES_PER_ID]))
    return found


def _evidence(id: str, values: Sequence[Any]) -> Evidence:
    state, fence, settled, worker, score, message, result, size, row = values
    return Evidence(
        id=id,
        state=replies.text(state),
        fence=replies.whole(fence, 0, replies.LARGEST_FENCE) or 0,
        seen_fence=replies.text(fence),
        settled=replies.text(settled),
        worker=replies.text(worker),
        score=replies.number(score) if score else None,
        message=_decoded(message),
        result=result or None,
        result_bytes=replies.count(size),
        row=replies.text(row),
    )


def _decoded(message: bytes) -> TaskMessage | None:
    try:
        return decode_message(message) if message else None
    except UndecodableMessage:
        return None


def settle_entries(broker: Access, queue: str, seen: Sequence[tuple[Evidence, int]]) -> list[str]:
    """Remove the entries of tasks that have succeeded, and mark the others. seen: with the fence of the row, 0: none.

    Returns, for each: "removed", "settled", or "stale" (it has changed since it was seen, and nothing changes now).
    Raises: BrokerUnavailable; the call may be repeated.
    """
    keys = broker.keys(queue)
    words: list[str] = []
    for part in _parts(seen, SETTLED_PER_CALL):
        items: list[Any] = []
        for evidence, fence in part:
            items += [id_bytes(evidence.id), id_bytes(evidence.seen_fence), evidence.state, fence]
        words += replies.texts(
            scripts.run("settle_entries", broker.client, [keys.completed, keys.retry], [keys.task_prefix, *items])
        )
    return words


def note_unhandled(broker: Access, queue: str, ids: Sequence[str]) -> list[int]:
    """Return for how many seconds other programs have given these tasks up because they have no handler for them.

    -1: Redis does not know the task. Raises: BrokerUnavailable.
    """
    keys = broker.keys(queue)
    ages: list[int] = []
    for part in _parts(ids, SETTLED_PER_CALL):
        found = scripts.run("note_unhandled", broker.client, [keys.archived], [keys.task_prefix, *map(id_bytes, part)])
        ages += [replies.whole(age) or 0 for age in found]
    return ages


def new_members(
    broker: Access, queue: str, place: Literal["completed", "archived"], since: int
) -> tuple[list[str], int]:
    """Return the ids that came into a zset since a time, at most MEMBERS_PER_PASS, and the time for the next call.

    since: Unix seconds of Redis. The score of a completed task is the time at which its retention is over: tasks with
    another retention than ours may be missing, and are found by the sweep. Raises: BrokerUnavailable.
    """
    # The score of an archived task is the time at which it was archived.
    later = conf.current().wire_retention_seconds if place == "completed" else 0
    now = int(redis_clock.seconds())
    low, high = since + later - OVERLAP_SECONDS, now + later + FUTURE_SECONDS
    key = getattr(broker.keys(queue), place)
    found = commands.send(
        broker.client, "zrangebyscore", key, low, high, start=0, num=MEMBERS_PER_PASS, withscores=True
    )
    ids = replies.texts(id for id, _ in found)
    if len(found) < MEMBERS_PER_PASS:
        return ids, now
    # All of one second may be more than one pass reads: then the next one goes on behind it.
    last = int(found[-1][1]) - later + OVERLAP_SECONDS
    return ids, last if last > since else since + 1


def changed_retries(broker: Access, queue: str) -> list[str]:
    """Return the ids of the nearest retries that another program has written, of RETRIES_PER_PASS that are looked at.

    Raises: BrokerUnavailable.
    """
    keys = broker.keys(queue)
    return replies.texts(
        scripts.run("changed_retries", broker.client, [keys.retry], [keys.task_prefix, RETRIES_PER_PASS])
    )


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
