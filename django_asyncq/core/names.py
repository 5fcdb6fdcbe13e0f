"""Check the names that become part of Redis keys, read worker ids, and make task ids. Uses no store."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, Literal
from unicodedata import category

from ..exceptions import InvalidOption

QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GATE_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,200}")
TASK_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
# The id of a row as text. Redis may hold any other text as the id of a task.
ROW_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# How the id of a worker process ends that runs one task and exits: a suspect, or an isolated task.
ALONE = "-alone"
ISOLATED = "-isolated"

_lock = threading.Lock()
_last_instant = 0


def check_queue_name(name: object) -> None:
    """Refuse a queue name that would break keys. A brace would move the queue to another cluster slot.

    Raises: InvalidOption.
    """
    if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name):
        raise InvalidOption(
            f"queue name {name!r} is not valid: use 1 to 64 letters, digits, '_', '.' and '-' (no spaces or braces)"
        )


def check_gate_name(name: object, kind: str = "gate") -> None:
    """Refuse the name of a gate, or of a rate, that would break keys. kind: what the error says it is.

    Raises: InvalidOption.
    """
    if not isinstance(name, str) or not GATE_NAME.fullmatch(name):
        raise InvalidOption(
            f"{kind} name {name!r} is not valid: use 1 to 200 letters, digits, '_', '.', ':', '/' and '-' "
            f"(no spaces or braces)"
        )


def runs_alone(worker_id: str) -> bool:
    """Return whether a worker of this id runs one suspect, in quarantine."""
    return worker_id.endswith(ALONE)


def runs_isolated(worker_id: str) -> bool:
    """Return whether a worker of this id runs one isolated task."""
    return worker_id.endswith(ISOLATED)


def uuid7() -> uuid.UUID:
    """Return a new UUIDv7, within a process always greater than the previous one.

    48 bits of Unix milliseconds, 12 bits of the fraction of the millisecond, 62 random bits.
    Source: RFC 9562, section 5.7 and method 3 of section 6.2.
    """
    global _last_instant
    nanoseconds = time.time_ns()
    instant = (nanoseconds // 1_000_000) << 12 | (nanoseconds % 1_000_000) * 4096 // 1_000_000
    with _lock:
        # Two ids within a quarter of a microsecond, or after the clock was set back, would not rise.
        instant = _last_instant = max(instant, _last_instant + 1)
    random_bits = int.from_bytes(os.urandom(8)) & (1 << 62) - 1
    value = (instant >> 12) << 80 | 0x7 << 76 | (instant & 0xFFF) << 64 | 0b10 << 62 | random_bits
    return uuid.UUID(int=value)


def lowest_uuid7_at(moment: datetime) -> uuid.UUID:
    """Return the lowest UUIDv7 of a millisecond; of times that none can name, of the nearest one."""
    milliseconds = min(max(int(moment.timestamp() * 1000), 0), 2**48 - 1)
    return uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | 0b10 << 62)


def time_of_uuid7(id: uuid.UUID) -> datetime:
    """Return the millisecond in which a UUIDv7 was made, in UTC."""
    return datetime.fromtimestamp((id.int >> 80) / 1000, UTC)


# --- Which declared tasks run messages of other programs, by the type that such a program writes.
#
# A name in a message is only ever looked up here: what is not declared with a wire name cannot be reached by a
# message.

PayloadKind = Literal["json", "bytes"]
PAYLOAD_KINDS = ("json", "bytes")
LONGEST = 200
PREFIX_MARK = "*"

# (alias, exact name, or a prefix with its mark) → task.
_declared: dict[tuple[str, str], Any] = {}
# Name of a Redis list → the task that gets its values; a list is read for one.
_lists: dict[str, Any] = {}


def is_wire_name(name: object) -> bool:
    """Return whether a text can be the type of a message: printable, not blank, at most 200 characters."""
    return isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable() and bool(name.strip())


def declare(task: Any) -> None:
    """Have messages with the wire name of a task, and the values of its list, run by it.

    One that is declared again replaces the former.
    Raises: InvalidOption, when another task has the list, or one of the alias the name.
    """
    if task.wire_name is not None:
        _declare(_declared, (task.backend, task.wire_name), task, "wire_name")
    if isinstance(task.inbox, str):
        _declare(_lists, task.inbox, task, "inbox")


def _declare(places: dict[Any, Any], key: Any, task: Any, option: str) -> None:
    former = places.get(key)
    if former is not None and former.module_path != task.module_path:
        raise InvalidOption(
            f"task {task.module_path}: {option}={getattr(task, option)!r} is not valid: {former.module_path} has it "
            f"already"
        )
    places[key] = task


def task_of(wire_type: str, alias: str) -> Any | None:
    """Return the task of an alias that runs messages of this type: by the exact name, else by the longest prefix."""
    exact = _declared.get((alias, wire_type))
    if exact is not None:
        return exact
    prefixes = [
        name
        for backend, name in _declared
        if backend == alias and name.endswith(PREFIX_MARK) and wire_type.startswith(name.removesuffix(PREFIX_MARK))
    ]
    return _declared[alias, max(prefixes, key=len)] if prefixes else None


def tasks_of(alias: str) -> list[Any]:
    """Return the tasks of an alias that run messages of other programs."""
    return [task for (backend, _), task in _declared.items() if backend == alias]


# --- Say which name a person may have meant by one that does not exist. Uses no store.

# A sentence with more of them is no hint.
MOST_NAMES = 3


def did_you_mean(name: str, known: Iterable[str], *, most: int = MOST_NAMES) -> str:
    """Return a question to put before the next sentence: "Did you mean 'QUEUES'? "; "" when nothing known is close.

    Case does not matter. most: how many names it may have.
    """
    by_lower: dict[str, str] = {}
    for each in known:
        by_lower.setdefault(each.lower(), each)
    found = get_close_matches(name.lower(), by_lower, n=most)
    return f"Did you mean {' or '.join(repr(by_lower[each]) for each in found)}? " if found else ""


def did_you_mean_path(name: str, known: Iterable[str]) -> str:
    """Return the same question for the dotted path of a task. Of a name without dots, the last parts are compared."""
    paths = sorted(known)
    if "." in name:
        return did_you_mean(name, paths)
    by_last: dict[str, list[str]] = {}
    for path in paths:
        by_last.setdefault(path.rpartition(".")[2], []).append(path)
    found = [path for last in get_close_matches(name, by_last, n=MOST_NAMES) for path in by_last[last]]
    shown = by_last.get(name, found)[:MOST_NAMES]
    return f"Did you mean {' or '.join(map(repr, shown))}? " if shown else ""


# --- Show what a terminal, or a mail program, would obey instead of showing it. Names come from other programs too.


def visible(text: str) -> str:
    """Return a text that a terminal shows and does not obey: escapes for all that moves, colours or reorders.

    Names, arguments and errors come from other programs too. Ends of lines and tabs stay.
    """
    return "".join(each if each in "\n\t" or each.isprintable() else _escape(each) for each in text)


def visible_line(text: str) -> str:
    """Return a text as `visible` does, on one line."""
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    # Wide and unbreakable spaces are ordinary text.
    return character if category(character) == "Zs" else character.encode("unicode_escape").decode()
