"""Whose an entry in Redis is. One decision for everything that takes, forwards, repairs or recovers entries.

| kind      | what it is                                                        | what we do with it              |
|-----------|-------------------------------------------------------------------|---------------------------------|
| ours      | it has a row                                                      | the row decides                 |
| adoptable | no row, but a task of the alias runs its type (`wire_name`)       | it gets a row, and runs         |
| foreign   | neither                                                           | it goes back, for other workers |

An entry is that of a row when the row has its queue and its id. The id is that of the row, except for a message that
another program has enqueued: its id may be any text, and come again when the first task has finished. So the hash of
such a task names its row in the field `row`, which is read only for ids that no row has.
What has no row is never removed by us.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..broker import Broker
from ..broker.decoding import UndecodableMessage, decode_message
from ..broker.message import TaskMessage
from ..broker.row_fields import LARGEST_MESSAGE_BYTES, StoredMessage, read_messages, read_row_fields
from ..definitions import wire_names
from ..definitions.names import QUEUE_NAME, ROW_ID
from ..models import TaskRecord
from ..storage.batches import read_rows
from ..storage.isolation import is_set_aside, usable_rows
from ..storage.routing import writing_database

# MySQL's TEXT holds 65,535 bytes.
LONGEST_ID = 16_000


def load_rows(ids: Iterable[str]) -> dict[str, TaskRecord]:
    """Load rows by their ids; a text that is not a UUID has no row.

    A row that cannot be read is missing too, and `is_set_aside` says so.
    """
    wanted = [id for id in ids if ROW_ID.fullmatch(id)]
    if not wanted:
        return {}
    database = writing_database(TaskRecord)
    return {str(row.id): row for row in usable_rows(wanted, lambda part: read_rows(part, database), database=database)}


def rows_of_entries(broker: Broker, queue: str, ids: Iterable[str]) -> dict[str, TaskRecord]:
    """Load the rows of entries of one queue, by the ids that the entries have in Redis.

    Plain tasks cost one SELECT. For ids that no row has, their hashes are asked, with one script; and for those of
    finished rows, since the entry may be that of another program, which has chosen the id of a row for it.
    Raises: BrokerUnavailable, django.db.Error.
    """
    return _look_up(broker, queue, list(ids)).rows


class _Found(NamedTuple):
    """rows: of entries, by their ids. named: the rows that other entries name, which need not be theirs."""

    rows: dict[str, TaskRecord]
    named: dict[str, str]


def _look_up(broker: Broker, queue: str, wanted: Sequence[str]) -> _Found:
    rows = {id: row for id, row in load_rows(wanted).items() if is_entry_of(row, queue, id)}
    if finished := [id for id, row in rows.items() if row.is_final and row.wire_id is None]:
        for id in _of_others(broker, queue, {id: rows[id] for id in finished}):
            del rows[id]
    unknown = [id for id in wanted if id not in rows and not is_set_aside(id)]
    named = read_row_fields(broker, queue, unknown) if unknown else {}
    found = load_rows(named.values())
    for id, row_id in named.items():
        if row_id in found and is_entry_of(found[row_id], queue, id):
            rows[id] = found[row_id]
    return _Found(rows, named)


def _of_others(broker: Broker, queue: str, rows: dict[str, TaskRecord]) -> list[str]:
    """Return the ids whose entry is not that of the row: it names another one, or its type is no task of ours."""
    return [
        id
        for id, stored in read_messages(broker, queue, list(rows)).items()
        if stored.row or (stored.data and _type_of(stored.data) not in (None, rows[id].name))
    ]


def _type_of(data: bytes) -> str | None:
    try:
        return decode_message(data).type
    except UndecodableMessage:
        return None


def is_entry_of(row: TaskRecord, queue: str, id: str) -> bool:
    """Return whether an entry is that of a row. Another program may choose the id of any row for its own entry."""
    return row.queue_name == queue and row.redis_id == id


class Rowless(NamedTuple):
    """An entry without a row.

    row: what its hash names as its row, "" for none. message: None when it is none of asynq's, or too large to be read.
    task: the declared task that runs it; with one it is adoptable, else foreign. reason: why it can be no task at all;
    "" for one that others may run. data: the message's bytes, b"" when there are too many. size_bytes: how many.
    """

    id: str
    row: str
    data: bytes
    message: TaskMessage | None
    task: Any | None
    reason: str
    size_bytes: int = 0

    @property
    def text(self) -> str:
        """The error with which it is archived: when nobody has taken it for long, or it is too large to be rejected."""
        if self.reason:
            return f"it can be no task: {self.reason}"
        if self.message is None:
            return f"its message is larger than {LARGEST_MESSAGE_BYTES:,} bytes, so no worker of django_asyncq reads it"
        return (
            f"no row in the database, and no worker takes tasks of the type {self.message.type[:200]!r} from this "
            f"queue: declare one with @task(wire_name=…), or start the program that runs them"
        )


class Sorted(NamedTuple):
    """Entries of one queue. rows: of those that are ours. unusable: ids of those whose row cannot be read."""

    rows: dict[str, TaskRecord]
    unusable: set[str]
    rowless: list[Rowless]


def sort_entries(broker: Broker, queue: str, ids: Iterable[str], alias: str) -> Sorted:
    """Say whose the entries of one queue are; only what has no row costs more than a SELECT.

    alias: that of the worker, whose tasks may run what has no row. Raises: BrokerUnavailable, django.db.Error.
    """
    wanted = list(ids)
    rows, named = _look_up(broker, queue, wanted)
    missing = [id for id in wanted if id not in rows]
    if not missing:
        return Sorted(rows, set(), [])
    unusable = {id for id in missing if is_set_aside(id) or is_set_aside(named.get(id, ""))}
    asked = [id for id in missing if id not in unusable]
    stored = read_messages(broker, queue, asked)
    rowless = [_judge(id, queue, stored[id], alias) for id in asked if id in stored]
    return Sorted(rows, unusable, rowless)


def _judge(id: str, queue: str, stored: StoredMessage, alias: str) -> Rowless:
    """Decide what an entry without a row is: adoptable, foreign, or no task at all."""
    row, data, size = stored.row, stored.data, stored.size_bytes or 0
    if size and not data:
        return Rowless(id, row, data, None, None, "" if _is_text(id) else "its id is not UTF-8", size)
    try:
        message = decode_message(data)
    except UndecodableMessage as error:
        return Rowless(id, row, data, None, None, f"it is no message of asynq: {error}", size)
    reason = _why_no_task(id, queue, message)
    # A column holds a queue's name of ours only; nothing declares others.
    can_have_row = not reason and QUEUE_NAME.fullmatch(queue) is not None
    task = wire_names.task_of(message.type, alias) if can_have_row else None
    return Rowless(id, row, data, message, task, reason, size)


def _why_no_task(id: str, queue: str, message: TaskMessage) -> str:
    if not _is_text(id):
        return "its id is not UTF-8"
    if not id or "\x00" in id:
        return "its id is empty, or holds a NUL character"
    if len(id) > LONGEST_ID:
        return f"its id has more than {LONGEST_ID:,} characters"
    if message.id != id:
        return "the id in its message is not that of its key"
    if message.queue != queue:
        return "the queue in its message is not that of its key"
    return ""


def _is_text(id: str) -> bool:
    try:
        id.encode()
    except UnicodeEncodeError:
        return False
    return True
