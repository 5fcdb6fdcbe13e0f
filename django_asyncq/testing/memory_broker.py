"""The broker of `TestBackend`, in memory: it answers as a Redis does that accepts everything and has nothing.

It stands at the door through which all scripts and commands go, in the place of a Redis client. The rows decide what
runs, so a test needs nothing that Redis would keep. Its gates have no slots of their own: a task that is QUEUED or
RUNNING holds one, nothing is released, and a rollback frees what its rows held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """The ids that hold a slot of a gate after a call, and those that this and earlier calls have let wait there."""

    holders: Collection[str] = ()
    joined: Sequence[str] = ()


class GateState(NamedTuple):
    """A gate as a call finds it. places: id → its place before the free slots."""

    name: str
    number: int
    limit: int
    expected: bytes
    is_paused: bool
    holders: set[str]
    places: dict[str, int]
    waiting: int
    free: int
    before: Asked


class MemoryClient:
    """A Redis client without a server. Used by the thread of a test, and by those that it starts."""

    def __init__(self) -> None:
        # By digest, which depends on the settings.
        self._names: dict[str, str] = {}
        # What the last call left, when it was one of several for the same tasks.
        self._last: dict[str, Asked] = {}

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
        before, self._last = self._last, {}
        if digest not in self._names:
            self._names |= {digest: ""} | {scripts.script(name).digest: name for name in REPLIES}
        name = self._names[digest]
        if name == "gate_acquire":
            names = [_text(key).removeprefix(conf.current().gate_prefix) for key in keys[::5]]
            return self._admit(names, arguments, before)
        return REPLIES[name](keys, arguments) if name else []

    @staticmethod
    def _check() -> None:
        if not _is_reachable:
            raise redis_py.ConnectionError(REDIS_IS_LOST)

    def _admit(self, names: Sequence[str], arguments: Sequence[Any], before: Mapping[str, Asked]) -> list[Any]:
        """Do what `gate_acquire.lua` does, with slots that are counted from the rows."""
        mode, most, tasks = _text(arguments[1]), int(_text(arguments[4]) or 0), arguments[6 + 2 * len(names) :]
        asking = [_text(id) for id in tasks[::4]]
        states: list[GateState] = []
        for number, name in enumerate(names, 1):
            own_limit, expected = arguments[4 + 2 * number], arguments[5 + 2 * number]
            row, is_paused = rows_of(Gate).filter(name=name).first(), gates.is_paused(name)
            limit = row.limit if row else None if own_limit in ("", b"") else int(own_limit)
            expected = str(row.expected_seconds if row else expected).encode()
            if limit is None and not is_paused:
                return [b"undefined", number, 0, 0, expected, 0]
            if is_paused or (limit or 0) > 0:
                of_gate = before.get(name, Asked())
                states.append(_state(name, number, limit or 0, expected, is_paused, of_gate, asking, mode))
        if not states:
            return [b"open", 1, limit or 0, 0, expected, 0]
        refused, refusing, joined = _decide(states, asking, mode, most)
        first = states[0]
        if refusing and mode == "all":
            word = b"paused" if refusing.is_paused else b"full"
            numbers = refusing.limit, len(refusing.holders), refusing.expected, refusing.waiting
            return [word, refusing.number, *numbers]
        for state in states:
            state.holders.update(set(asking).difference(refused))
        if len(asking) == members.IDS_PER_CALL:
            self._last = {
                state.name: Asked(state.holders, [*state.before.joined, *joined[state.name]]) for state in states
            }
        without: list[Any] = []
        for id, state in refused.items():
            without += [id.encode(), state.number, b"1" if id in joined[state.name] else b"0"]
        return [b"admitted", first.number, first.limit, len(first.holders), first.expected, first.waiting, *without]


def _state(
    name: str,
    number: int,
    limit: int,
    expected: bytes,
    is_paused: bool,
    before: Asked,
    asking: Sequence[str],
    mode: str,
) -> GateState:
    # What this call's earlier parts hold has no rows yet.
    holders = {*map(str, rows_of(TaskRecord).holding_slot(name).values_list("id", flat=True)), *before.holders}
    # Those of several gates, which may wait for another one, keep nobody out.
    waiters = [*_waiting_at(name, with_several=mode != "wait"), *before.joined]
    places = {id: place for place, id in enumerate(waiters)}
    for id in asking:
        if id not in holders:
            places.setdefault(id, len(places))
    free = 0 if is_paused else limit - len(holders)
    return GateState(name, number, limit, expected, is_paused, holders, places, len(waiters), free, before)


def _decide(
    states: Sequence[GateState], asking: Sequence[str], mode: str, most: int
) -> tuple[dict[str, GateState], GateState | None, dict[str, list[str]]]:
    """Return who is refused by which gate, the first gate that lets one of them not even wait, and who waits where."""
    refused: dict[str, GateState] = {}
    refusing: GateState | None = None
    joined: dict[str, list[str]] = {state.name: [] for state in states}
    left = {state.name: state.free for state in states}
    for id in asking:
        lacking = [state for state in states if id not in state.holders]
        full = [state for state in lacking if left[state.name] < 1 or state.places[id] >= state.free]
        if not full:
            for state in lacking:
                left[state.name] -= 1
            continue
        by = refused[id] = min(full, key=lambda state: 0 if state.is_paused else state.limit)
        if mode == "wait" or len(joined[by.name]) < most - by.waiting:
            joined[by.name].append(id)
        else:
            refusing = refusing or by
    return refused, refusing, joined


def _waiting_at(gate: str, *, with_several: bool = True) -> list[str]:
    """Return the ids of the tasks that wait at a gate, those that are next first, as their rows say.

    with_several: also those that need slots of other gates too.
    """
    rows = rows_of(TaskRecord).waiting_at_gate(gate).order_by("-priority", "id")
    return list(map(str, (rows if with_several else rows.filter(other_gates="")).values_list("id", flat=True)))


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
