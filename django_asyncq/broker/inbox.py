"""The inbox of a queue: a list to which any program pushes documents, and what of it is taken and not settled yet.

A document is moved, not popped: it stays in Redis, under an id, until it is a task or is rejected. One that is not
settled within TAKEN_SECONDS is taken again, by any process. Only `definitions.inbox_documents` knows what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import redis_clock, replies, scripts
from .access import Access
from .entries import id_bytes
from .rejected import KEPT_SECONDS, MOST_KEPT, rejected_document

# Until a document is taken again: its reader has died, or its gate was full.
TAKEN_SECONDS = 5.0
# A reply is full when it has this many bytes; one more document may follow.
REPLY_BYTES = 4 * 1_048_576
# A document in the list of the rejected has up to 90 KB.
SETTLED_PER_CALL = 20


class Taken(NamedTuple):
    """Some documents. documents: (id, bytes), the oldest first. left: how many are in the inbox still."""

    documents: list[tuple[str, bytes]]
    left: int


class Inbox(Access):
    """Take and settle the documents of inboxes. Every method raises BrokerUnavailable when Redis is unreachable."""

    def take(self, queue: str, ids: Sequence[str], *, largest_bytes: int, most_again: int) -> Taken:
        """Take documents, at most one new one for each id, and at most `most_again` that were taken before.

        ids: at most 200, never used before. largest_bytes: a larger document comes cut, with one byte more.
        """
        keys = self.keys(queue)
        arguments = [largest_bytes, REPLY_BYTES, int(TAKEN_SECONDS * 1000), most_again, *ids]
        places = [keys.inbox, keys.inbox_taken, keys.inbox_due]
        left, *flat = scripts.run("take_inbox", self.client, places, arguments)
        return Taken([(replies.text(id), data) for id, data in zip(flat[::2], flat[1::2], strict=True)], left)

    def settle(self, queue: str, enqueued: Sequence[str], rejected: Sequence[tuple[str, bytes, str]] = ()) -> list[str]:
        """Forget the documents that are tasks now, and keep the rejected ones in the list of the queue.

        enqueued: ids. rejected: (id, the document, the reason). Returns, for each, in this order: "enqueued",
        "rejected" or "missing".
        """
        keys, now = self.keys(queue), redis_clock.seconds()
        items = [(id_bytes(id), b"") for id in enqueued]
        items += [(id_bytes(id), rejected_document("inbox", id, data, reason, now)) for id, data, reason in rejected]
        words: list[str] = []
        for start in range(0, len(items), SETTLED_PER_CALL):
            part = [argument for item in items[start : start + SETTLED_PER_CALL] for argument in item]
            places = [keys.inbox_taken, keys.inbox_due, keys.rejected]
            words += replies.texts(scripts.run("settle_inbox", self.client, places, [MOST_KEPT, KEPT_SECONDS, *part]))
        return words
