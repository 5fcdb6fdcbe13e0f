"""What a look can find wrong, and what it knows to be over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from ..definitions.printable import visible_line
from ..models import AlertKind

DATABASE, REDIS = "database", "Redis"
# What explains the others stands before them.
ORDER = (
    AlertKind.STORE,
    AlertKind.SILENT_WORKERS,
    AlertKind.MISMATCH,
    AlertKind.OLDEST_WAITING,
    AlertKind.OVERDUE_SCHEDULES,
    AlertKind.FAILURE_RATIO,
)


class Key(NamedTuple):
    """What an alert is about: there is one for each."""

    kind: str
    backend: str
    subject: str


def key_of(kind: AlertKind, subject: str, backend: str = "") -> Key:
    """Return a key that each database can hold, whatever the names are."""
    return Key(kind.value, visible_line(backend)[:64], visible_line(subject)[:200])


THE_DATABASE = key_of(AlertKind.STORE, DATABASE)


@dataclass(frozen=True)
class Finding:
    """Something wrong. title: in a few words, without numbers. text: a clause with the value and the limit.

    value, limit: numbers, of times in seconds; None where there is none. since: when it began; None when only the looks
    know. is_beyond: whether it is above its limit; if not, it only continues an alert that was sent. hold_seconds: how
    long looks must have found it before it is sent. command: shows more.
    """

    key: Key
    title: str
    text: str
    command: str
    value: float | None = None
    limit: float | None = None
    since: datetime | None = None
    is_beyond: bool = True
    hold_seconds: float = 0.0


@dataclass(frozen=True)
class Findings:
    """What a look has found. kinds: those of which it has found all there is. living_hosts: with a supervisor."""

    found: Mapping[Key, Finding] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    living_hosts: frozenset[str] = frozenset()

    @property
    def is_database_reachable(self) -> bool:
        """Whether the database has answered."""
        return THE_DATABASE not in self.found

    def alerts(self) -> list[Finding]:
        """Return what is above its limit, the most important first."""
        return in_order(each for each in self.found.values() if each.is_beyond)

    def is_over(self, key: Key) -> bool:
        """Whether the look knows that something is not wrong any more.

        Of a supervisor that has vanished only a later one on its host shows that: its own trace is lost with time.
        """
        if key in self.found or key.kind not in self.kinds:
            return False
        return key.kind != AlertKind.SILENT_WORKERS or not key.subject or host_of(key.subject) in self.living_hosts


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by kind, and of a kind the worst first."""
    return sorted(findings, key=lambda each: (ORDER.index(AlertKind(each.key.kind)), -(each.value or 0.0), each.key))


def host_of(subject: str) -> str:
    """Return the host in the subject of a supervisor, `host:pid`."""
    return subject.rpartition(":")[0]
