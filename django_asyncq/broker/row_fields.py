"""What the hashes of other programs' tasks hold: the field `row`, written when a task is first taken by us; `msg`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import replies, scripts
from .access import Access
from .entries import id_bytes

IDS_PER_CALL = 200
# A message may have megabytes.
MESSAGES_PER_CALL = 20
LARGEST_MESSAGE_BYTES = 4 * 1024 * 1024


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
    found = _read(broker, queue, ids, "", IDS_PER_CALL)
    return {id: each.row for id, each in found.items() if each.row}


def read_messages(broker: Access, queue: str, ids: Sequence[str]) -> dict[str, StoredMessage]:
    """Return the messages of entries, by id; one without a message is missing. Raises: BrokerUnavailable."""
    found = _read(broker, queue, ids, LARGEST_MESSAGE_BYTES, MESSAGES_PER_CALL)
    return {id: each for id, each in found.items() if each.size_bytes is not None}


def _read(broker: Access, queue: str, ids: Sequence[str], largest: int | str, size: int) -> dict[str, StoredMessage]:
    keys = broker.keys(queue)
    found: dict[str, StoredMessage] = {}
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        arguments = [keys.task_prefix, largest, *map(id_bytes, part)]
        flat = scripts.run("row_fields", broker.client, [keys.pending], arguments)
        for id, row, data, of_bytes in zip(part, flat[::3], flat[1::3], flat[2::3], strict=True):
            found[id] = StoredMessage(replies.text(row), bytes(data), replies.whole(of_bytes, 0))
    return found
