"""What other programs have sent and what can be no task: kept for people to look at, with the reason.

A list of JSON documents, the newest first: `{"at", "from", "id", "reason", "data"}`. at: Unix seconds. from: "queue" or
"inbox". id: of the task, null for none. data: the bytes, in base64.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Literal, NamedTuple

from . import commands, replies
from .access import Access
from .clients import broker_errors

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
    """Return what was rejected, the newest first; skip what others have put there. Raises: BrokerUnavailable."""
    found: list[bytes] = commands.send(broker.client, "lrange", broker.keys(queue).rejected, 0, most - 1)
    return [each for document in found if (each := _read(document)) is not None]


def forget_rejected(broker: Access, queue: str) -> int:
    """Remove what was rejected; return how many there were. Raises: BrokerUnavailable."""
    key = broker.keys(queue).rejected
    count = replies.count(commands.send(broker.client, "llen", key))
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
