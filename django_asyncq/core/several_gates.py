"""The gates of a task: the options that name them, and how a row keeps those after the first.

A task may need a slot of several gates. The row's `gate` and `queue_limit` are those of one gate, at which the task
waits while it waits. `other_gates` has the others with their limits, as "\\nNAME\\tLIMIT\\nNAME\\t\\n": each name has a
line feed before and a tab behind it, and no name has either. Reads no store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from .names import GATE_NAME

MOST_GATES = 4
# Of a whole number in the databases' columns. A larger one would fail in the caller's transaction.
MOST_LIMIT = 2**31 - 1
# Of the text of the gates after the first: names of 200 characters, with limits of 11.
OTHER_GATES_CHARACTERS = (MOST_GATES - 1) * (200 + 11 + 2) + 1
_LINE = re.compile(rf"\n({GATE_NAME.pattern})\t(-?[0-9]{{1,10}})?(?=\n)")

# What `@task(gate=…)` and `@task(queue_limit=…)` take.
GateSource = str | tuple[str, ...] | Callable[..., str | tuple[str, ...]]
QueueLimit = int | tuple[int | None, ...]


class GateLimit(NamedTuple):
    """A gate of a task, and the limit that the task brings along; None for none."""

    name: str
    limit: int | None


def marked(name: str) -> str:
    """Return what a text of other gates holds of a gate, and of no other one."""
    return f"\n{name}\t"


@lru_cache(maxsize=1024)
def read_others(text: str) -> tuple[GateLimit, ...]:
    """Return the gates in the text of a row; a line that is none is skipped."""
    return tuple(GateLimit(name, int(limit) if limit else None) for name, limit in _LINE.findall(text))


def columns_of(gates: Sequence[GateLimit]) -> dict[str, Any]:
    """Return the columns of a row for its gates; it waits at the first one."""
    first, *others = gates
    found: dict[str, Any] = {"gate": first.name, "queue_limit": first.limit}
    if others:
        lines = (f"{marked(name)}{'' if limit is None else limit}" for name, limit in sorted(others))
        found["other_gates"] = "".join(lines) + "\n"
    return found


def stricter(one: int | None, other: int | None) -> int | None:
    """Return the limit that admits less; 0 or less admits everything, None leaves it to the other."""
    limits = [each for each in (one, other) if each is not None]
    return min((each for each in limits if each > 0), default=max(limits, default=None))


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple; return any other value unchanged."""
    return tuple(value) if isinstance(value, list) else value


def check_gates(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse names and limits of gates that can never be right."""
    gate, limit = task.gate, task.queue_limit
    if isinstance(gate, tuple):
        if not 2 <= len(gate) <= MOST_GATES or not all(isinstance(each, str) for each in gate):
            refuse("gate", f"give one name, or a tuple of two to {MOST_GATES} names or formats")
    elif gate is not None and not isinstance(gate, str) and not callable(gate):
        refuse("gate", "give a name, a format such as '{model}', a tuple of these, or a callable of the arguments")
    if isinstance(limit, tuple):
        if isinstance(gate, str):
            refuse("queue_limit", "the task has one gate: give one number, or a tuple of gates")
        if isinstance(gate, tuple) and len(limit) != len(gate):
            refuse("queue_limit", f"the task has {len(gate)} gates: give one limit for each, or one number for all")
        _check_limits(limit, refuse, "give whole numbers, and None where the row of the gate has the limit; each at")
    elif limit is not None:
        _check_limits((limit,), refuse, "give a whole number, at")


def _check_limits(limits: Iterable[Any], refuse: Callable[[str, str], NoReturn], what: str) -> None:
    if any(each is not None and (type(each) is not int or abs(each) > MOST_LIMIT) for each in limits):
        refuse("queue_limit", f"{what} most {MOST_LIMIT:,}; 0 or less means no limit")
