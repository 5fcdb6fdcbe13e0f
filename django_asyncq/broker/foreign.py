"""What is done with entries of other programs: a row is named, the entry goes back, is rejected, or is completed.

Nothing here removes one that has no row, except into the list of the rejected. Every function raises BrokerUnavailable
when Redis is unreachable, and may be repeated.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

from .. import conf
from . import entries, redis_clock, scripts
from .access import Access
from .clients import broker_errors
from .entries import Lease, lease_arguments
from .groups import Taken
from .keys import QueueKeys, due_channel, keys_of
from .message import TaskMessage, UndecodableMessage, decode_message, error_field
from .reading import Command, Reader, asking, read

# --- What other programs have sent and what can be no task: kept for people to look at, with the reason.
#
# A list of JSON documents, the newest first: `{"at", "from", "id", "reason", "data"}`. at: Unix seconds. from:
# "queue" or "inbox". id: of the task, null for none. data: the bytes, in base64.

MOST_KEPT = 1_000
KEPT_SECONDS = 7 * 86_400
# A larger one is cut: the list has a thousand of them.
MOST_BYTES = 65_536

Source = Literal["queue", "inbox"]


class Rejected(NamedTuple):
    """One rejected message or document. at: Unix seconds. data: its first 64 KiB."""

    at: float
    source: str
    id: str | None
    reason: str
    data: bytes


def rejected_document(source: Source, id: str | None, data: bytes, reason: str, at: float) -> bytes:
    """Return what a script pushes to the list."""
    text = None if id is None else id.encode("utf-8", "replace").decode()
    encoded = base64.b64encode(data[:MOST_BYTES]).decode()
    return json.dumps({"at": at, "from": source, "id": text, "reason": reason, "data": encoded}).encode()


def read_rejected(broker: Access, queue: str, most: int = MOST_KEPT) -> list[Rejected]:
    """Return what `reading_rejected` finds. Raises: BrokerUnavailable."""
    return read(broker.role, reading_rejected(queue, broker.alias, most))


def reading_rejected(queue: str, alias: str, most: int = MOST_KEPT) -> Reader[list[Rejected]]:
    """Read what was rejected, the newest first; skip what others have put there."""
    (found,) = yield [Command("lrange", [keys_of(queue, alias).rejected], (0, most - 1), alias=alias)]
    return [each for document in found if (each := _read(document)) is not None]


def forget_rejected(broker: Access, queue: str) -> int:
    """Remove what was rejected; return how many there were. Raises: BrokerUnavailable."""
    key = broker.keys(queue).rejected
    count = entries.count(scripts.send(broker.client, "llen", key))
    with broker_errors(broker.client):
        broker.client.delete(key)
    return count


def _read(document: bytes) -> Rejected | None:
    try:
        value: Any = json.loads(document)
        data = base64.b64decode(value["data"])
        id = value["id"]
        return Rejected(float(value["at"]), str(value["from"]), None if id is None else str(id), value["reason"], data)
    except (ValueError, TypeError, KeyError):
        return None


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

    fence: of the caller's lease; "": it waits in retry. retried: as its message says. text: of the error with which
    it is archived when nobody has taken it for long; "" if it never is.
    """

    id: str
    fence: int | Literal[""]
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
    rows = [[*lease_arguments(task.lease), task.row, task.wrong] for task in tasks]
    head = [keys.task_prefix, worker_id]
    flat = scripts.run_in_parts("adopt", broker.client, [keys.held(worker_id)], head, rows, PER_CALL)
    answers = zip(tasks, flat[::2], flat[1::2], strict=True)
    found = [(task.lease.id, entries.whole(fence, 1), entries.text(row)) for task, row, fence in answers]
    return [Adopted(Lease(id, fence), row) for id, fence, row in found if fence is not None]


def adopt_members(broker: Access, queue: str, taken: Taken, tasks: Sequence[ToAdopt]) -> list[Adopted]:
    """Name the rows of members that were taken of a group; return those that are still in the set."""
    keys = broker.keys(queue)
    places = [f"{keys.group(taken.group)}:{taken.set}"]
    rows = [[task.lease.id, task.row, task.wrong] for task in tasks]
    found = scripts.run_in_parts("adopt_members", broker.client, places, [keys.task_prefix], rows, PER_CALL)
    return [Adopted(task.lease, row) for task, row in zip(tasks, entries.texts(found), strict=True) if row]


def restore(
    broker: Access,
    queue: str,
    worker_id: str,
    tasks: Sequence[ToRestore],
    *,
    delay_seconds: int = 0,
    patience_seconds: int = 0,
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
    rows = [(*task[:3], error_field(task.text) if task.text else "") for task in tasks]
    return entries.texts(scripts.run_in_parts("restore", broker.client, places, head, rows, PER_CALL))


def reject(broker: Access, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes]]) -> list[str]:
    """Move what can be no task into the list of the rejected. items: lease, and the document to keep.

    Returns, for each: "rejected", "stale" or "missing".
    """
    keys = broker.keys(queue)
    places = [keys.active, keys.lease, keys.held(worker_id), keys.rejected]
    head = [keys.task_prefix, MOST_KEPT, KEPT_SECONDS]
    rows = [[*lease_arguments(lease), document] for lease, document in items]
    return entries.texts(scripts.run_in_parts("reject", broker.client, places, head, rows, LARGE_PER_CALL))


def complete(broker: Access, queue: str, worker_id: str, tasks: Sequence[ToComplete]) -> list[str]:
    """Move succeeded tasks to `completed`, and count them. Returns, for each: "completed", "stale" or "missing"."""
    keys = broker.keys(queue)
    now = redis_clock.now(broker.alias)
    places = [keys.active, keys.lease, keys.held(worker_id), keys.completed, *redis_clock.successes(keys, now)]
    head = [keys.task_prefix, *redis_clock.limits(now)]
    rows = [[*lease_arguments(task.lease), task.message, task.seconds, task.result] for task in tasks]
    return entries.texts(scripts.run_in_parts("complete", broker.client, places, head, rows, LARGE_PER_CALL))


def completed_at() -> int:
    """Return the Unix seconds to write into a message that is completed now, by Redis's clock."""
    return int(redis_clock.seconds())


# --- What entries say of their tasks after another program may have changed them: asynq's states, messages and results.
#
# The hash field `settled` is the state in which our own reporter left a failed task, so that a state without it, or
# with another one, is another program's doing. A new push removes it.

# A result may take a megabyte.
IDS_PER_CALL = 20
SETTLED_PER_CALL = 100
VALUES_PER_ID = 9
LARGEST_MESSAGE_BYTES = 4 * 1024 * 1024
# Clocks of other programs may differ by some seconds, and a pass may begin late.
OVERLAP_SECONDS = 15
FUTURE_SECONDS = 60
# How long another program that has run one of our tasks keeps its result in Redis: the row gets it from there within
# seconds. A day outlasts every stop of a fleet that is not noticed, and ends before such results fill a Redis.
WIRE_RETENTION_SECONDS = 86_400
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
    flat = scripts.run_in_parts("entry_evidence", broker.client, places, head, [[id] for id in ids], IDS_PER_CALL)
    return [_evidence(id, flat[at : at + VALUES_PER_ID]) for id, at in zip(ids, count(step=VALUES_PER_ID))]


def _evidence(id: str, values: Sequence[Any]) -> Evidence:
    state, fence, settled, worker, score, message, result, size, row = values
    return Evidence(
        id=id,
        state=entries.text(state),
        fence=entries.whole(fence, 0, entries.LARGEST_FENCE) or 0,
        seen_fence=entries.text(fence),
        settled=entries.text(settled),
        worker=entries.text(worker),
        score=entries.number(score) if score else None,
        message=_decoded(message),
        result=result or None,
        result_bytes=entries.count(size),
        row=entries.text(row),
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
    places = [keys.completed, keys.retry]
    rows = [[evidence.id, evidence.seen_fence, evidence.state, fence] for evidence, fence in seen]
    words = scripts.run_in_parts("settle_entries", broker.client, places, [keys.task_prefix], rows, SETTLED_PER_CALL)
    return entries.texts(words)


def note_unhandled(broker: Access, queue: str, ids: Sequence[str]) -> list[int]:
    """Return for how many seconds other programs have given these tasks up because they have no handler for them.

    -1: Redis does not know the task. Raises: BrokerUnavailable.
    """
    keys = broker.keys(queue)
    items = [[id] for id in ids]
    places, head = [keys.archived], [keys.task_prefix]
    ages = scripts.run_in_parts("note_unhandled", broker.client, places, head, items, SETTLED_PER_CALL)
    return [entries.whole(age) or 0 for age in ages]


def new_members(
    broker: Access, queue: str, place: Literal["completed", "archived"], since: int
) -> tuple[list[str], int]:
    """Return the ids that came into a zset since a time, at most MEMBERS_PER_PASS, and the time for the next call.

    since: Unix seconds of Redis. The score of a completed task is the time at which its retention is over: tasks with
    another retention than ours may be missing, and are found by the sweep. Raises: BrokerUnavailable.
    """
    # The score of an archived task is the time at which it was archived.
    later = WIRE_RETENTION_SECONDS if place == "completed" else 0
    now = int(redis_clock.seconds())
    low, high = since + later - OVERLAP_SECONDS, now + later + FUTURE_SECONDS
    key = getattr(broker.keys(queue), place)
    found = scripts.send(broker.client, "zrangebyscore", key, low, high, start=0, num=MEMBERS_PER_PASS, withscores=True)
    ids = entries.texts(id for id, _ in found)
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
    return entries.texts(
        scripts.run("changed_retries", broker.client, [keys.retry], [keys.task_prefix, RETRIES_PER_PASS])
    )


# --- What the hashes of other programs' tasks hold: the field `row`, written when a task is first taken by us; `msg`.

READ_PER_CALL = 200
# A message may have megabytes.
MESSAGES_PER_CALL = 20


class StoredMessage(NamedTuple):
    """What a hash holds.

    row: what it names as its row, "" for none. data: the message, b"" where it is too large. size_bytes: None where
    there is no message, or none was asked for.
    """

    row: str
    data: bytes
    size_bytes: int | None


def read_row_fields(broker: Access, queue: str, ids: Sequence[str]) -> dict[str, str]:
    """Return the row ids that the hashes of these entries name; an entry without one is missing.

    Raises: BrokerUnavailable.
    """
    found = _read_stored(broker, queue, ids, "", READ_PER_CALL)
    return {id: each.row for id, each in found.items() if each.row}


def read_messages(broker: Access, queue: str, ids: Sequence[str]) -> dict[str, StoredMessage]:
    """Return the messages of entries, by id; one without a message is missing. Raises: BrokerUnavailable."""
    found = _read_stored(broker, queue, ids, LARGEST_MESSAGE_BYTES, MESSAGES_PER_CALL)
    return {id: each for id, each in found.items() if each.size_bytes is not None}


def _read_stored(
    broker: Access, queue: str, ids: Sequence[str], largest: int | str, size: int
) -> dict[str, StoredMessage]:
    keys = broker.keys(queue)
    head, items = [keys.task_prefix, largest], [[id] for id in ids]
    flat = scripts.run_in_parts("row_fields", broker.client, [keys.pending], head, items, size)
    answers = zip(ids, flat[::3], flat[1::3], flat[2::3], strict=True)
    return {
        id: StoredMessage(entries.text(row), bytes(data), entries.whole(size, 0)) for id, row, data, size in answers
    }


# --- The inbox of a queue: a list to which any program pushes documents, and what of it is taken and not settled yet.
#
# A document is moved, not popped: it stays in Redis, under an id, until it is a task or is rejected. One that is
# not settled within TAKEN_SECONDS is taken again, by any process. Only `interop.inbox` knows what
# it holds.

# Until a document is taken again: its reader has died, or its gate was full.
TAKEN_SECONDS = 5.0
# A reply is full when it has this many bytes; one more document may follow.
REPLY_BYTES = 4 * 1_048_576
# A document in the list of the rejected has up to 90 KB.
DOCUMENTS_PER_CALL = 20


class Documents(NamedTuple):
    """Some documents of an inbox. documents: (id, bytes), the oldest first. left: how many are in the inbox still."""

    documents: list[tuple[str, bytes]]
    left: int


def _taken_of(keys: QueueKeys, from_list: str) -> tuple[str, str]:
    """Return where documents are that were taken and are not settled, and when to take them again."""
    own = f":{from_list}" if from_list else ""
    return keys.inbox_taken + own, keys.inbox_due + own


def reading_waiting(names: Sequence[str], alias: str) -> Reader[int]:
    """Read how many values wait in lists of other programs; none in what is no list, or may not be read."""
    found = yield from asking(*(Command("llen", [name], alias=alias, may_fail=True) for name in names))
    return sum(count or 0 for count in found)


class Inbox(Access):
    """Take and settle the documents of inboxes. Every method raises BrokerUnavailable when Redis is unreachable."""

    def take(
        self, queue: str, ids: Sequence[str], *, largest_bytes: int, most_again: int, from_list: str = ""
    ) -> Documents:
        """Take documents, at most one new one for each id, and at most `most_again` that were taken before.

        ids: at most 200, never used before. largest_bytes: a larger document comes cut, with one byte more.
        from_list: the name of a list that is read instead of the queue's own; what is taken of it stays with the queue.
        Raises: redis.ResponseError when that is no list.
        """
        keys = self.keys(queue)
        is_foreign = "1" if from_list else ""
        arguments = [largest_bytes, REPLY_BYTES, int(TAKEN_SECONDS * 1000), most_again, is_foreign, *ids]
        places = [from_list or keys.inbox, *_taken_of(keys, from_list)]
        left, *flat = scripts.run("take_inbox", self.client, places, arguments)
        return Documents([(entries.text(id), data) for id, data in zip(flat[::2], flat[1::2], strict=True)], left)

    def settle(
        self,
        queue: str,
        enqueued: Sequence[str],
        rejected: Sequence[tuple[str, bytes, str]] = (),
        *,
        from_list: str = "",
    ) -> list[str]:
        """Forget the documents that are tasks now, and keep the rejected ones in the list of the queue.

        enqueued: ids. rejected: (id, the document, the reason). from_list: as of `take`. Returns, for each, in this
        order: "enqueued", "rejected" or "missing".
        """
        keys, now = self.keys(queue), redis_clock.seconds()
        items = [(id, b"") for id in enqueued]
        items += [(id, rejected_document("inbox", id, data, reason, now)) for id, data, reason in rejected]
        places, head = [*_taken_of(keys, from_list), keys.rejected], [MOST_KEPT, KEPT_SECONDS]
        return entries.texts(scripts.run_in_parts("settle_inbox", self.client, places, head, items, DOCUMENTS_PER_CALL))
