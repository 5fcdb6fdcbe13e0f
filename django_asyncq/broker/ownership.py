"""The owner of a prefix: the identity of its database in Redis, and which of its supervisors are alive.

Only supervisors and `asyncq adopt` write it; producers read it. Where a prefix is an argument, "" means KEY_PREFIX.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple
from uuid import UUID, uuid4

from . import clients, entries, redis_clock, scripts
from .clients import broker_errors
from .keys import key_check_key, owner_key, supervisors_key
from .reading import WITH_SCORES, Command, Reader, read, side_by_side

Replaces = Literal["never", "unused", "always"]

# How long a supervisor counts as alive: three checks, since one may come late.
ALIVE_MS = 15_000
# A score may be infinite.
LATEST_MS = 2.0**53
# Seconds of Redis's clock, the process id, what makes it unique, the host; see `token_of`.
TOKEN = re.compile(r"([0-9]{1,12}\.[0-9]{3}):([0-9]{1,10}):[0-9a-f]{32}:(.{1,200})", re.DOTALL)


class Ownership(NamedTuple):
    """What is known of a prefix. owner: of now. former: before the call. supervisors: how many of the former's live."""

    owner: UUID | None
    former: UUID | None
    supervisors: int


class Supervisor(NamedTuple):
    """A supervisor that is noted. started_at, reported_at: Unix seconds of Redis's clock. is_alive: as far as noted."""

    host: str
    pid: int
    started_at: float
    reported_at: float
    is_alive: bool

    def is_replaced_by(self, other: Supervisor) -> bool:
        """Whether it has died, and the other one has begun on its host since then."""
        is_later = other.started_at >= self.reported_at
        # Itself is not: it may have died in the moment in which it began.
        return not self.is_alive and is_later and other.host == self.host and other != self


def read_owner(prefix: str = "") -> UUID | None:
    """Return the identity of the database that owns a prefix, with a producer's timeouts; None when none does.

    Raises: BrokerUnavailable.
    """
    return _identity(scripts.send(clients.client("producer"), "get", owner_key(prefix)))


def has_supervisor(prefix: str = "") -> bool:
    """Return whether any supervisor of the owner is alive, with a producer's timeouts. Raises: BrokerUnavailable."""
    now_ms = round(redis_clock.seconds("producer") * 1000)
    key = supervisors_key(prefix)
    found = scripts.send(clients.client("producer"), "zrange", key, now_ms, "+inf", byscore=True, offset=0, num=1)
    return bool(found)


def reading_last_report(prefix: str = "") -> Reader[tuple[int, float | None]]:
    """Read how many supervisors of the owner are alive, and until when the last of them counts so, in Unix seconds.

    None when none is known: they stopped cleanly, or Redis lost its memory.
    """
    now, noted = yield from side_by_side(redis_clock.reading_seconds(), _reading_noted(prefix))
    until = [score for _, score in noted]
    return sum(score > now * 1000 for score in until), max(until) / 1000 if until else None


def supervisors(prefix: str = "") -> list[Supervisor]:
    """Return the supervisors of the owner: those that live, and those that died in the last hour without a word.

    Raises: BrokerUnavailable.
    """
    return [each for token, until in _noted(prefix) if (each := _supervisor(token, until))]


def _noted(prefix: str) -> list[tuple[bytes, float]]:
    return read("producer", _reading_noted(prefix))


def _reading_noted(prefix: str) -> Reader[list[tuple[bytes, float]]]:
    (found,) = yield [Command("zrange", [supervisors_key(prefix)], (0, -1), WITH_SCORES)]
    return [(token, score) for token, score in found if 0 < score < LATEST_MS]


def _supervisor(token: bytes, until_ms: float) -> Supervisor | None:
    match = TOKEN.fullmatch(entries.text(token))
    if match is None:
        return None
    started_at, pid, host = match.groups()
    is_alive = until_ms > redis_clock.seconds("producer") * 1000
    return Supervisor(host, int(pid), float(started_at), (until_ms - ALIVE_MS) / 1000, is_alive)


def token_of(host: str, pid: int, started_at: float) -> str:
    """Return the token by which a supervisor is noted. started_at: Unix seconds of Redis's clock."""
    return f"{started_at:.3f}:{pid}:{uuid4().hex}:{host[:200]}"


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
    return Ownership(_identity(owner), _identity(former), entries.count(alive))


def forget_supervisor(token: str, prefix: str = "") -> None:
    """Note that a supervisor has stopped, and forget those that had died on its host before it began.

    It had taken their place, so nobody is to miss them now. Raises: BrokerUnavailable.
    """
    own = _supervisor(token.encode(), 0.0)
    replaced = [
        noted
        for noted, until in _noted(prefix)
        if own and (each := _supervisor(noted, until)) and each.is_replaced_by(own)
    ]
    scripts.send(clients.client("worker"), "zrem", supervisors_key(prefix), token, *replaced)


def _identity(reply: Any) -> UUID | None:
    try:
        return UUID(entries.text(reply or b""))
    except ValueError:
        return None


# --- One string in Redis, by which processes notice that they do not share the SECRET_KEY (`maintenance/key_check.py`).

# What the leader signs, and for what.
PURPOSE, MESSAGE = "key-check", b"key-check"


def read_key_check(largest_bytes: int) -> bytes:
    """Return what the leader has written, at most `largest_bytes` of it; b"" for nothing.

    Raises: BrokerUnavailable.
    """
    return bytes(scripts.send(clients.client("worker"), "getrange", key_check_key(), 0, largest_bytes - 1))


def write_key_check(value: bytes) -> None:
    """Replace what is there, of whatever type. Raises: BrokerUnavailable."""
    client = clients.client("worker")
    with broker_errors(client):
        client.set(key_check_key(), value)
