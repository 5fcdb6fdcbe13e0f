"""Whether Redis stores the hash of a task in its compact form, which takes about half of the memory.

It does so while no field is longer than a limit of the server's configuration. The message of a task is longer than the
limit's default of 64 bytes. Source: redis.conf, "hash-max-listpack-value".
"""

from __future__ import annotations

from typing import NamedTuple

from . import redis_py, replies
from .clients import broker_errors, client

# The message of most tasks is shorter.
ADVISED_BYTES = 512
# The name that servers have since Redis 7, and the one of Redis 6.2, which newer servers take too.
NAMES = ("hash-max-listpack-value", "hash-max-ziplist-value")


class Limit(NamedTuple):
    """The longest field of a compact hash, as the server is configured."""

    name: str
    bytes: int


def too_low_limit() -> Limit | None:
    """Return the limit when it is below ADVISED_BYTES.

    None when it is not, and when the server does not say it: managed ones refuse CONFIG, and so do the rights of a
    careful user. Raises: BrokerUnavailable.
    """
    connection = client("worker")
    with broker_errors(connection):
        try:
            found = connection.config_get("hash-max-*-value")
        except redis_py.ResponseError:
            return None
    for name in NAMES:
        limit = replies.whole(str(found.get(name, "")).encode(), 0)
        if limit is not None:
            return Limit(name, limit) if limit < ADVISED_BYTES else None
    return None
