"""How long an ended task is kept: what a task declares, and which of several rules holds for it.

Knows no rows: `retention` asks which are over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Literal

from .. import conf
from ..exceptions import InvalidOption


class Inherit(Enum):
    """The type of INHERIT, which stands for "not said here: the next rule holds"."""

    INHERIT = "the next rule"

    def __repr__(self) -> str:
        return self.name


INHERIT = Inherit.INHERIT
Keep = float | timedelta | Inherit | None
"""Seconds or a timedelta, None for ever, INHERIT."""
Outcome = Literal["succeeded", "failed"]

# So that no time of day minus it leaves the years a datetime can hold.
LONGEST = timedelta(days=36_525)
KEEP_HINT = "seconds or a timedelta from 0 to 100 years, or None to keep for ever"
KINDS = ("queues", "tasks")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long tasks are kept after they have succeeded or failed for good. Raises: InvalidOption."""

    succeeded: Keep = INHERIT
    failed: Keep = INHERIT

    def __post_init__(self) -> None:
        for outcome in ("succeeded", "failed"):
            value = getattr(self, outcome)
            if value is not INHERIT and not is_keep(value):
                raise InvalidOption(f"Retention({outcome}={value!r}) is not valid: {KEEP_HINT}")

    def or_else(self, other: Retention) -> Retention:
        """Return this one with what it does not say taken from another."""
        return Retention(
            other.succeeded if self.succeeded is INHERIT else self.succeeded,
            other.failed if self.failed is INHERIT else self.failed,
        )


def is_keep(value: object) -> bool:
    """Whether the value says how long: `Keep` without INHERIT."""
    if value is None:
        return True
    if isinstance(value, timedelta):
        return timedelta(0) <= value <= LONGEST
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LONGEST.total_seconds()


@dataclass(frozen=True, slots=True)
class Rule:
    """For how long tasks of some names are kept after one outcome. field: `name` or `queue_name`; "": all others."""

    field: Literal["name", "queue_name", ""]
    names: tuple[str, ...]
    keep: timedelta | None


@dataclass(frozen=True, slots=True)
class Rules:
    """What is kept how long. tasks, queues: by name."""

    tasks: Mapping[str, Retention]
    queues: Mapping[str, Retention]
    default: Retention

    def of(self, outcome: Outcome) -> Iterator[Rule]:
        """Yield the rules for an outcome, the first that fits holds: tasks, then queues, then the default."""
        for field, retentions in (("name", self.tasks), ("queue_name", self.queues)):
            names: dict[timedelta | None, list[str]] = {}
            for name, retention in retentions.items():
                value: Keep = getattr(retention, outcome)
                if not isinstance(value, Inherit):
                    names.setdefault(_timedelta(value), []).append(name)
            for keep, group in names.items():
                yield Rule("name" if field == "name" else "queue_name", tuple(group), keep)
        yield Rule("", (), self.default_for(outcome))

    def default_for(self, outcome: Outcome) -> timedelta | None:
        """Return how long a task is kept for which nothing else is said."""
        value: Keep = getattr(self.default, outcome)
        return None if isinstance(value, Inherit) else _timedelta(value)

    def shortest(self) -> timedelta | None:
        """Return the shortest time anything is kept; None when all is kept for ever."""
        found = [rule.keep for outcome in ("succeeded", "failed") for rule in self.of(outcome) if rule.keep is not None]
        return min(found, default=None)


def current_rules(in_code: Mapping[str, Retention]) -> Rules:
    """Return the rules in force. in_code: what tasks declare, by task name; the settings win over it."""
    settings = conf.current()
    written = {
        kind: {name: Retention(**said) for name, said in settings.retention.get(kind, {}).items()} for kind in KINDS
    }
    tasks = {
        **in_code,
        **{name: said.or_else(in_code.get(name, Retention())) for name, said in written["tasks"].items()},
    }
    default = Retention(settings.succeeded_retention_seconds, settings.failed_retention_seconds)
    return Rules(tasks, written["queues"], default)


def faults(written: Any) -> Iterator[str]:
    """Yield what is wrong with `ASYNCQ["RETENTION"]`, each fault with its place."""
    if not isinstance(written, dict):
        yield f" = {written!r} is no dictionary"
        return
    for kind, entries in written.items():
        place = f"[{kind!r}]"
        if kind not in KINDS:
            yield f"{place}: unknown key, known are 'queues' and 'tasks'"
        elif not isinstance(entries, dict):
            yield f"{place} = {entries!r} is no dictionary of names"
        else:
            for name, said in entries.items():
                yield from _faults_of_entry(f"{place}[{name!r}]", name, said)


def _faults_of_entry(place: str, name: Any, said: Any) -> Iterator[str]:
    if not isinstance(name, str):
        yield f"{place}: the name is no text"
    if not isinstance(said, dict):
        yield f"{place} = {said!r} is no dictionary"
        return
    for outcome, value in said.items():
        if outcome not in ("succeeded", "failed"):
            yield f"{place}[{outcome!r}]: unknown key, known are 'succeeded' and 'failed'"
        elif not is_keep(value):
            yield f"{place}[{outcome!r}] = {value!r} is not valid"


def _timedelta(value: float | timedelta | None) -> timedelta | None:
    return timedelta(seconds=value) if isinstance(value, int | float) else value
