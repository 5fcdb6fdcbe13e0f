"""How long a finished task is kept: what a task declares, and which of several rules applies to it.

Reads no rows: the pruner asks which rows may be deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Literal

from .. import conf
from ..durations import AT_LEAST_ZERO, Duration, is_duration
from ..exceptions import InvalidOption


class Inherit(Enum):
    """The type of INHERIT, which means "nothing is set here: the next rule applies"."""

    INHERIT = "the next rule"

    def __repr__(self) -> str:
        return self.name


INHERIT = Inherit.INHERIT
RetentionTime = Duration | Inherit | None
"""Seconds or a timedelta, None for ever, INHERIT."""
Outcome = Literal["succeeded", "failed"]

RETENTION_TIME_HINT = f"{AT_LEAST_ZERO}, or None to keep for ever"
SETTING_KEYS = ("queues", "tasks")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long tasks are kept after they have succeeded or failed for good. Raises: InvalidOption."""

    succeeded: RetentionTime = INHERIT
    failed: RetentionTime = INHERIT

    def __post_init__(self) -> None:
        for outcome in ("succeeded", "failed"):
            value = getattr(self, outcome)
            if value is not INHERIT and not is_retention_time(value):
                raise InvalidOption(f"Retention({outcome}={value!r}) is not valid: {RETENTION_TIME_HINT}")

    def or_else(self, other: Retention) -> Retention:
        """Return a copy in which the values that are not set come from `other`."""
        return Retention(
            other.succeeded if self.succeeded is INHERIT else self.succeeded,
            other.failed if self.failed is INHERIT else self.failed,
        )


def is_retention_time(value: object) -> bool:
    """Return whether the value is a valid `RetentionTime` other than INHERIT."""
    if value is None:
        return True
    return is_duration(value, or_zero=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """How long tasks are kept after one outcome. keep_for: None keeps for ever.

    field: `name` or `queue_name`, whose value must be one of `names`; "" matches all tasks.
    """

    field: Literal["name", "queue_name", ""]
    names: tuple[str, ...]
    keep_for: timedelta | None


@dataclass(frozen=True, slots=True)
class Rules:
    """Every retention in force. tasks, queues: by name."""

    tasks: Mapping[str, Retention]
    queues: Mapping[str, Retention]
    default: Retention

    def rules_for(self, outcome: Outcome) -> Iterator[Rule]:
        """Yield the rules for an outcome: tasks, then queues, then the default. The first that matches applies."""
        for field, retentions in (("name", self.tasks), ("queue_name", self.queues)):
            names: dict[timedelta | None, list[str]] = {}
            for name, retention in retentions.items():
                value: RetentionTime = getattr(retention, outcome)
                if not isinstance(value, Inherit):
                    names.setdefault(_timedelta(value), []).append(name)
            for keep_for, group in names.items():
                yield Rule("name" if field == "name" else "queue_name", tuple(group), keep_for)
        yield Rule("", (), self.default_for(outcome))

    def default_for(self, outcome: Outcome) -> timedelta | None:
        """Return how long tasks are kept that no other rule matches; None for ever."""
        value: RetentionTime = getattr(self.default, outcome)
        return None if isinstance(value, Inherit) else _timedelta(value)

    def shortest(self) -> timedelta | None:
        """Return the shortest time that any rule keeps a task; None when all tasks are kept for ever."""
        times = [rule.keep_for for outcome in ("succeeded", "failed") for rule in self.rules_for(outcome)]
        return min((keep_for for keep_for in times if keep_for is not None), default=None)


def current_rules(in_code: Mapping[str, Retention]) -> Rules:
    """Return the rules in force. in_code: what tasks declare, by task name; settings take precedence."""
    settings = conf.current()
    configured = {
        key: {name: Retention(**values) for name, values in settings.retention.get(key, {}).items()}
        for key in SETTING_KEYS
    }
    tasks = {
        **in_code,
        **{name: values.or_else(in_code.get(name, Retention())) for name, values in configured["tasks"].items()},
    }
    default = Retention(settings.succeeded_retention_seconds, settings.failed_retention_seconds)
    return Rules(tasks, configured["queues"], default)


def setting_errors(value: Any) -> Iterator[str]:
    """Yield every error of `ASYNCQ["RETENTION"]`, each with the path to it."""
    if not isinstance(value, dict):
        yield f" = {value!r} is not a dictionary"
        return
    for key, retentions in value.items():
        path = f"[{key!r}]"
        if key not in SETTING_KEYS:
            yield f"{path}: unknown key; the known keys are 'queues' and 'tasks'"
        elif not isinstance(retentions, dict):
            yield f"{path} = {retentions!r} is not a dictionary of names"
        else:
            for name, retention in retentions.items():
                yield from _retention_errors(f"{path}[{name!r}]", name, retention)


def _retention_errors(path: str, name: Any, retention: Any) -> Iterator[str]:
    if not isinstance(name, str):
        yield f"{path}: the name is not text"
    if not isinstance(retention, dict):
        yield f"{path} = {retention!r} is not a dictionary"
        return
    for outcome, value in retention.items():
        if outcome not in ("succeeded", "failed"):
            yield f"{path}[{outcome!r}]: unknown key; the known keys are 'succeeded' and 'failed'"
        elif not is_retention_time(value):
            yield f"{path}[{outcome!r}] = {value!r} is not valid"


def _timedelta(value: Duration | None) -> timedelta | None:
    return timedelta(seconds=value) if isinstance(value, int | float) else value
