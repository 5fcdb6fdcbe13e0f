"""Archive the entries of tasks that have no row, so that nothing is lost silently: the archive shows why.

Their rows were deleted, are newer than a backup that was restored, or are in another database.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import replies, scripts
from .access import Access
from .entries import Lease, lease_arguments
from .message import error_field

TEXT = "no row in the database"
ERROR = error_field(TEXT)
PER_CALL = 100


def archive_claimed(broker: Access, queue: str, worker_id: str, leases: Sequence[Lease]) -> list[str]:
    """Archive tasks that a worker has claimed. Returns, for each: "archived", "stale" or "missing".

    Raises: BrokerUnavailable.
    """
    return _archive(broker, queue, worker_id, [lease_arguments(lease) for lease in leases])


def archive_retrying(broker: Access, queue: str, ids: Sequence[str]) -> list[str]:
    """Archive tasks that wait in retry. Returns, for each: "archived", "stale" or "missing".

    Raises: BrokerUnavailable.
    """
    return _archive(broker, queue, "", [(id, "") for id in ids])


def _archive(broker: Access, queue: str, worker_id: str, items: Sequence[Sequence[bytes | str | int]]) -> list[str]:
    keys = broker.keys(queue)
    places = [keys.active, keys.lease, keys.held(worker_id), keys.retry, keys.archived]
    words: list[str] = []
    for start in range(0, len(items), PER_CALL):
        part = [argument for item in items[start : start + PER_CALL] for argument in item]
        words += replies.texts(
            scripts.run("archive_without_row", broker.client, places, [keys.task_prefix, ERROR, *part])
        )
    return words
