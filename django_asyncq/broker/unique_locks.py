"""asynq's locks of unique tasks, as a program takes them that enqueues one. Knows no rows.

The scripts that push a task extend its lock, and those that finish or remove it release the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import replies, scripts
from .access import Access
from .entries import id_bytes

IDS_PER_CALL = 200


def acquire(
    access: Access, locks: Sequence[tuple[str, str]], *, seconds: int, over: Sequence[str] | None = None
) -> list[str]:
    """Take locks of one queue; return for each "" when its id holds it now, or the id that does.

    locks: key and id. over: for each, the id of a holder whose task is over, whose lock is taken.
    Raises: BrokerUnavailable.
    """
    holders: list[str] = []
    for start in range(0, len(locks), IDS_PER_CALL):
        part = locks[start : start + IDS_PER_CALL]
        dead = over[start : start + IDS_PER_CALL] if over is not None else [""] * len(part)
        words = [word for (_, id), holder in zip(part, dead, strict=True) for word in (id_bytes(id), id_bytes(holder))]
        reply = scripts.run("unique_acquire", access.client, [key for key, _ in part], [seconds, *words])
        holders += replies.texts(reply)
    return holders


def release(access: Access, locks: Sequence[tuple[str, str]]) -> None:
    """Release locks of one queue, each if its id holds it. locks: key and id. Raises: BrokerUnavailable."""
    for start in range(0, len(locks), IDS_PER_CALL):
        part = locks[start : start + IDS_PER_CALL]
        scripts.run("unique_release", access.client, [key for key, _ in part], [id_bytes(id) for _, id in part])
