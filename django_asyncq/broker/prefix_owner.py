"""Which database owns a prefix: its identity in Redis, and which of its supervisors are alive.

Only supervisors and `asyncq adopt` write it; producers read it. Where a prefix is an argument, "" means KEY_PREFIX.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from uuid import UUID

from . import clients, commands, replies, scripts
from .keys import owner_key, supervisors_key

Replaces = Literal["never", "unused", "always"]


class Ownership(NamedTuple):
    """What is known of a prefix. owner: of now. former: before the call. supervisors: how many of the former's live."""

    owner: UUID | None
    former: UUID | None
    supervisors: int


def read_owner(prefix: str = "") -> UUID | None:
    """Return the identity of the database that owns a prefix, with a producer's timeouts; None when none does.

    Raises: BrokerUnavailable.
    """
    return _identity(commands.send(clients.client("producer"), "get", owner_key(prefix)))


def note_supervisor(
    identity: UUID,
    token: str = "",
    *,
    prefix: str = "",
    alive_ms: int = 0,
    may_take: bool = False,
    replaces: Replaces = "never",
) -> Ownership:
    """Note a supervisor of a database, if the database owns the prefix; first give the prefix to it, if it may have it.

    token: of the supervisor; "" notes none. may_take: a prefix without an owner. replaces: when that of another
    database: "unused" means if none of its supervisors is alive. Raises: BrokerUnavailable.
    """
    arguments = [str(identity), token, alive_ms, "1" if may_take else "", replaces]
    client = clients.client("worker")
    owner, former, alive = scripts.run("own_prefix", client, [owner_key(prefix), supervisors_key(prefix)], arguments)
    return Ownership(_identity(owner), _identity(former), replies.count(alive))


def forget_supervisor(token: str, prefix: str = "") -> None:
    """Note that a supervisor has stopped. Raises: BrokerUnavailable."""
    commands.send(clients.client("worker"), "zrem", supervisors_key(prefix), token)


def _identity(reply: Any) -> UUID | None:
    try:
        return UUID(replies.text(reply or b""))
    except ValueError:
        return None
