"""Retention of finished tasks: what a task declares, and which of several rules applies to it.

Reads no rows: the pruner asks which rows may be deleted.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from .. import conf
from ..exceptions import InvalidOption
from .time import AT_LEAST_ZERO, MORE_THAN_ZERO, Duration, is_duration, seconds_of


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


# --- How long to wait before the next attempt.

Backoff = Duration | Callable[[BaseException, Any], Duration | None]
"""A duration, or a callable of the exception and the result that returns one, or None for no retry."""


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Wait a random time of up to base * 2^n seconds after the n-th failure (from 0), never more than the cap.

    Full jitter spreads the retries of tasks that failed together over the whole time.
    Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    base_seconds: float = 5
    cap_seconds: float = 3600

    def __call__(self, exception: BaseException, result: Any) -> float:
        """Return the seconds to wait after `result.attempts` attempts."""
        exponent = min(max(result.attempts - 1, 0), 32)
        return random.uniform(0, min(self.cap_seconds, self.base_seconds * 2**exponent))  # noqa: S311


# --- What ASYNCQ["ALERTS"] says: who is to know, and from which limits on. Sends nothing.
#
# An address of a webhook has a secret in it. So no text here repeats one.

LONGEST_ADDRESS = 2_000
# What no address has as it is: such a character would end a header of the request.
UNSAFE = re.compile(r"[^\x21-\x7e]")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """ASYNCQ["ALERTS"] with its defaults. A limit of None is none.

    failure_ratio: of the attempts of a queue in the last 15 minutes, when there were at least 20. oldest_waiting: how
    many seconds a task may be due.
    """

    mail: tuple[str, ...] = ()
    webhook: str = ""
    failure_ratio: float | None = 0.2
    oldest_waiting: float | None = 600


class Fault(NamedTuple):
    """What is wrong with ASYNCQ["ALERTS"]. kind: "ALERTS", "mail" or "webhook". text: follows the setting's name."""

    kind: str
    text: str
    hint: str


def alert_settings() -> AlertSettings:
    """Return the settings in force. They are not validated: `setting_faults` does."""
    written = {key: seconds_of(value) for key, value in conf.current().alerts.items() if key in KEYS}
    if "mail" in written:
        written["mail"] = tuple(written["mail"])
    return AlertSettings(**written)


def setting_faults(value: Any) -> Iterator[Fault]:
    """Yield everything that is wrong with ASYNCQ["ALERTS"]."""
    if not isinstance(value, dict):
        text = f" is a {type(value).__qualname__}, not a dictionary"
        yield Fault("ALERTS", text, "Give a dictionary such as {'mail': ['ops@example.com']}, or {} for no alerts.")
        return
    for key, each in value.items():
        if key == "mail":
            yield from _mail_faults(each)
        elif key == "webhook":
            if text := _webhook_fault(each):
                yield Fault("webhook", f"['webhook']: {text}", "Give an address such as https://hooks.example/T0/B0.")
        elif key not in RULES:
            yield Fault("ALERTS", f" has the unknown key {key!r}", f"Known keys: {', '.join(KEYS)}.")
        elif not RULES[key].holds(each):
            yield Fault("ALERTS", f"[{key!r}] = {each!r} is not valid", RULES[key].hint)


class _Rule(NamedTuple):
    holds: Callable[[Any], bool]
    hint: str


def _is_ratio(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


OR_NONE = "or None for no limit."
RULES = {
    "failure_ratio": _Rule(_or_none(_is_ratio), f"Give a number more than 0 and at most 1, such as 0.2, {OR_NONE}"),
    "oldest_waiting": _Rule(_or_none(is_duration), f"Give {MORE_THAN_ZERO}, {OR_NONE}"),
}
KEYS = ("mail", "webhook", *RULES)


def _mail_faults(value: Any) -> Iterator[Fault]:
    hint = 'Give a list of addresses, such as ["ops@example.com"], or [].'
    if not isinstance(value, list | tuple):
        yield Fault("mail", f"['mail'] is a {type(value).__qualname__}", hint)
        return
    for each in value:
        if not isinstance(each, str) or not re.fullmatch(r"[^\s@][^\r\n]*@[^\s@]+", each):
            yield Fault("mail", f"['mail'] has {each!r}, which is no address", hint)


def _webhook_fault(value: Any) -> str:
    """Return what is wrong with an address, without the address; "" for nothing."""
    if not isinstance(value, str):
        return f"it is a {type(value).__qualname__}, not a text"
    if not value:
        return ""
    try:
        parts = urlsplit(value)
        # Reading it raises for what is no port.
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        return "it cannot be read as an address"
    if len(value) > LONGEST_ADDRESS or UNSAFE.search(value):
        return f"it has a space or another character that no address has, or more than {LONGEST_ADDRESS:,}"
    return _fault_of_parts(parts) if is_port else "its port is 0"


def _fault_of_parts(parts: SplitResult) -> str:
    if parts.scheme not in ("http", "https"):
        return "its scheme is neither https nor http"
    if not parts.hostname:
        return "it names no host"
    if "@" in parts.netloc:
        return "it has a user name or a password in it"
    return "it has a '#', behind which nothing is sent" if parts.fragment else ""
