"""Which database owns a prefix: its identity in Redis, and which of its supervisors are alive.

Only supervisors and `asyncq adopt` write it; producers read it. Where a prefix is an argument, "" means KEY_PREFIX.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple
from uuid import UUID

from . import clients, commands, redis_clock, replies, scripts
from .keys import owner_key, supervisors_key

Replaces = Literal["never", "unused", "always"]

# How long a supervisor counts as alive: three checks, since one may come late.
ALIVE_MS = 15_000
# A score may be infinite.
LATEST_MS = 2.0**53


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


def has_supervisor(prefix: str = "") -> bool:
    """Return whether any supervisor of the owner is alive, with a producer's timeouts. Raises: BrokerUnavailable."""
    now_ms = round(redis_clock.seconds("producer") * 1000)
    key = supervisors_key(prefix)
    found = commands.send(clients.client("producer"), "zrange", key, now_ms, "+inf", byscore=True, offset=0, num=1)
    return bool(found)


def last_report(prefix: str = "") -> tuple[int, float | None]:
    """Return how many supervisors of the owner are alive, and until when the last of them counts so, in Unix seconds.

    None when none is known: they stopped cleanly, or Redis lost its memory. Raises: BrokerUnavailable.
    """
    now_ms = redis_clock.seconds("producer") * 1000
    found = commands.send(clients.client("producer"), "zrange", supervisors_key(prefix), 0, -1, withscores=True)
    until = [score for _, score in found if score < LATEST_MS]
    return sum(score > now_ms for score in until), max(until) / 1000 if until else None


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
