"""The broker of `TestBackend`, in memory: it answers as a Redis does that accepts everything and has nothing.

It stands at the door through which all scripts and commands go, in the place of a Redis client. The rows decide what
runs, so a test needs nothing that Redis would keep. Its gates have no slots of their own: a task that is QUEUED or
RUNNING holds one, nothing is released, and a rollback frees what its rows held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .. import conf, gates
from ..broker import redis_py, scripts
from ..gates import members
from ..models import Gate, TaskRecord
from ..storage import database_clock
from ..storage.routing import rows_of
from .quiet import REDIS_IS_LOST

_is_reachable = True


@contextmanager
def unreachable() -> Iterator[None]:
    """Answer in the block as an unreachable Redis does."""
    global _is_reachable
    before, _is_reachable = _is_reachable, False
    try:
        yield
    finally:
        _is_reachable = before


def is_reachable() -> bool:
    """Return whether it answers: not within `unreachable`."""
    return _is_reachable


# The commands that read, and what they find. All others change something, and return how much: 0.
READS: dict[str, Callable[..., Any]] = {
    "get": lambda key: None,
    "hget": lambda key, field: None,
    "hmget": lambda key, *fields: [None] * len(fields),
    "hgetall": lambda key: {},
    "smembers": lambda key: set(),
    "lrange": lambda key, *range: [],
    "zrange": lambda key, *range, **more: [],
    "zrangebyscore": lambda key, *range, **more: [],
    "zrank": lambda key, member: _rank(key, member),
}


class Asked(NamedTuple):
    """A gate, the ids that hold a slot of it after a call, and those that this call and earlier ones have let wait."""

    gate: str = ""
    holders: Collection[str] = ()
    joined: Sequence[str] = ()


class MemoryClient:
    """A Redis client without a server. Used by the thread of a test, and by those that it starts."""

    def __init__(self) -> None:
        # By digest, which depends on the settings.
        self._names: dict[str, str] = {}
        # What the last call left, when it was one of several for the same tasks.
        self._last = Asked()

    def __getattr__(self, command: str) -> Callable[..., Any]:
        """Return what stands for a command. redis-py has a method for each."""

        def answer(*arguments: Any, **more: Any) -> Any:
            self._check()
            return READS[command](*arguments, **more) if command in READS else 0

        return answer

    def evalsha(self, digest: str, count: int, *words: Any) -> Any:
        """Return the reply of a script. Most replies have a word for each task, and none says that all is well."""
        self._check()
        keys, arguments = words[:count], words[count:]
        before, self._last = self._last, Asked()
        if digest not in self._names:
            self._names |= {digest: ""} | {scripts.script(name).digest: name for name in REPLIES}
        name = self._names[digest]
        if name == "gate_acquire":
            return self._admit(_text(keys[0]).removeprefix(conf.current().gate_prefix), arguments, before)
        return REPLIES[name](keys, arguments) if name else []

    @staticmethod
    def _check() -> None:
        if not _is_reachable:
            raise redis_py.ConnectionError(REDIS_IS_LOST)

    def _admit(self, gate: str, arguments: Sequence[Any], before: Asked) -> list[Any]:
        """Do what `gate_acquire.lua` does, with slots that are counted from the rows."""
        own_limit, expected, mode, ids = arguments[1], arguments[2], _text(arguments[3]), arguments[7::3]
        most = _text(arguments[6])
        asking = [_text(id) for id in ids]
        row, is_paused = rows_of(Gate).filter(name=gate).first(), gates.is_paused(gate)
        limit = row.limit if row else None if own_limit in ("", b"") else int(own_limit)
        expected = str(row.expected_seconds if row else expected).encode()
        if not is_paused and (limit is None or limit <= 0):
            return [b"undefined" if limit is None else b"open", limit or 0, 0, expected, 0, 0]
        holders = set(map(str, rows_of(TaskRecord).holding_slot(gate).values_list("id", flat=True)))
        if before.gate == gate:
            # Of the tasks of this call, which have no rows yet.
            holders.update(before.holders)
        waiters = [*_waiting_at(gate), *(before.joined if before.gate == gate else ())]
        places = {id: place for place, id in enumerate(waiters)}
        waiting = len(places)
        for id in asking:
            if id not in holders:
                places.setdefault(id, len(places))
        free = 0 if is_paused else (limit or 0) - len(holders)
        refused = [id for id in asking if id not in holders and places[id] >= free]
        joining = len(refused) if mode == "wait" else min(max(int(most or 0) - waiting, 0), len(refused))
        if len(refused) > joining and mode == "all":
            return [b"paused" if is_paused else b"full", limit or 0, len(holders), expected, waiting, 0]
        holders.update(set(asking).difference(refused))
        if len(asking) == members.IDS_PER_CALL:
            earlier = before.joined if before.gate == gate else []
            self._last = Asked(gate, holders, [*earlier, *refused[:joining]])
        return [b"admitted", limit or 0, len(holders), expected, waiting, joining, *(id.encode() for id in refused)]


def _waiting_at(gate: str) -> list[str]:
    """Return the ids of the tasks that wait at a gate, those that are next first, as their rows say."""
    rows = rows_of(TaskRecord).waiting_at_gate(gate).order_by("-priority", "id")
    return list(map(str, rows.values_list("id", flat=True)))


def _rank(key: str, id: str) -> int | None:
    """Return how many tasks wait at a gate before one; None when it does not wait there."""
    prefix = f"{{{conf.current().gate_prefix}"
    line = _waiting_at(key.removeprefix(prefix).removesuffix("}:waiters")) if key.startswith(prefix) else []
    return line.index(id) if id in line else None


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


# What a script replies. Those that are not here reply with nothing: a word for a task is missed by nobody.
REPLIES: dict[str, Callable[[Sequence[Any], Sequence[Any]], Any]] = {
    "gate_acquire": lambda keys, arguments: [],
    "gate_release": lambda keys, arguments: 0,
    "remove": lambda keys, arguments: 0,
    "progress": lambda keys, arguments: 0,
    "time": lambda keys, arguments: [b"%d" % database_clock.of_host().timestamp(), b"0"],
    # Of each task three words or two: of its entry, if there were one, nobody else knows anything.
    "take_out": lambda keys, arguments: [b"removed"] * len(arguments[5::3]),
    "hold": lambda keys, arguments: [b"1"] * len(arguments[5::2]),
    "row_fields": lambda keys, arguments: [b"", b"", b"none"] * len(arguments[2:]),
    "entry_evidence": lambda keys, arguments: [b"", b"", b"", b"", b"", b"", b"", 0, b""] * len(arguments[3:]),
    "entry_states": lambda keys, arguments: [b"", b"", b""] * len(arguments[1:]),
    # The lengths of lists and sets, then four texts.
    "queue_numbers": lambda keys, arguments: [0] * 11 + [None] * 4 + [0, None],
    "done": lambda keys, arguments: [b"done"] * len(arguments[3::2]),
}

_client: MemoryClient | None = None


def client(role: str) -> MemoryClient:
    """Return the client of this process, for every role."""
    global _client
    _client = _client or MemoryClient()
    return _client
