"""What ASYNCQ["ALERTS"] says: who is to know, from which limits on, and how often. Sends nothing.

An address of a webhook has a secret in it. So no text here repeats one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from .. import conf
from ..durations import MORE_THAN_ZERO, is_duration, seconds_of

LONGEST_ADDRESS = 2_000
# What no address has as it is: such a character would end a header of the request.
UNSAFE = re.compile(r"[^\x21-\x7e]")
# The leader looks at most once in this time, and at least once.
LEAST_EVERY, MOST_EVERY = 1, 3_600
# A supervisor reports every five seconds, and counts as alive for three reports.
LEAST_SILENCE = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """ASYNCQ["ALERTS"] with its defaults. A limit of None is none.

    failure_ratio: of the attempts of a queue in the last 15 minutes, when there were at least 20. oldest_waiting: how
    long a task may be due. silent_workers: how long nobody may have reported. overdue_schedules: how late one may be.
    again: between two messages about the same alert. every: between two looks. All times in seconds.
    """

    mail: tuple[str, ...] = ()
    webhook: str = ""
    failure_ratio: float | None = 0.2
    oldest_waiting: float | None = 600
    silent_workers: float | None = 120
    overdue_schedules: float | None = 300
    again: float = 4 * 3_600
    every: float = 60


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


def _is_between(value: Any, least: float, most: float) -> bool:
    return is_duration(value) and least <= seconds_of(value) <= most


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


OR_NONE = "or None for no limit."
RULES = {
    "failure_ratio": _Rule(_or_none(_is_ratio), f"Give a number more than 0 and at most 1, such as 0.2, {OR_NONE}"),
    "oldest_waiting": _Rule(_or_none(is_duration), f"Give {MORE_THAN_ZERO}, {OR_NONE}"),
    "silent_workers": _Rule(
        _or_none(lambda value: is_duration(value) and seconds_of(value) >= LEAST_SILENCE),
        f"Give seconds or a timedelta, at least {LEAST_SILENCE} s: a supervisor reports every 5 s; {OR_NONE}",
    ),
    "overdue_schedules": _Rule(_or_none(is_duration), f"Give {MORE_THAN_ZERO}, {OR_NONE}"),
    "again": _Rule(is_duration, f"Give {MORE_THAN_ZERO}."),
    "every": _Rule(
        lambda value: _is_between(value, LEAST_EVERY, MOST_EVERY),
        f"Give seconds or a timedelta from {LEAST_EVERY} s to {MOST_EVERY // 3_600} h.",
    ),
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
