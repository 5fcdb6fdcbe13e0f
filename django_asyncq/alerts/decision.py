"""Decide what is to be said, of what a look has found and what earlier looks have noted. Pure: knows no store.

An alert is sent when looks have found it for half the time between two of them, so at two looks in a row: what a single
look sees, as in a restart of Redis, is none. It is sent again after the pause that the settings give. It is over when
no look has found it for one and a half times the time between two looks, and that is said once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from ..definitions.alert_settings import AlertSettings
from .findings import Finding, Findings, Key

# In parts of the time between two looks.
HOLDS_FOR, OVER_AFTER = 0.5, 1.5
# A note that no look has confirmed for this long says nothing any more, not even that it is over.
FORGOTTEN_AFTER = timedelta(days=1)


@dataclass(frozen=True)
class Note:
    """What looks have found. sent_at: when a message about it was last sent; None for never."""

    key: Key
    title: str
    first_seen_at: datetime
    seen_at: datetime
    sent_at: datetime | None = None


class Alerting(NamedTuple):
    """An alert to be sent. since: when it began. is_repeated: whether it was sent before."""

    finding: Finding
    since: datetime
    is_repeated: bool


class Over(NamedTuple):
    """An alert that was sent and is over. lasted_seconds: as far as looks have seen."""

    key: Key
    title: str
    since: datetime
    lasted_seconds: float


@dataclass(frozen=True)
class Decision:
    """What a look changes. new: to be noted. seen: found again. dropped: notes to be deleted without a word."""

    new: list[Note] = field(default_factory=list)
    seen: list[Key] = field(default_factory=list)
    dropped: list[Key] = field(default_factory=list)
    alerts: list[Alerting] = field(default_factory=list)
    over: list[Over] = field(default_factory=list)


def decide(notes: Iterable[Note], findings: Findings, now: datetime, settings: AlertSettings) -> Decision:
    """Return what is to be noted and sent. notes, findings: of the same keys."""
    decision, noted = Decision(), set()
    for note in notes:
        noted.add(note.key)
        finding = findings.found.get(note.key)
        if finding is not None and (finding.is_beyond or note.sent_at is not None):
            decision.seen.append(note.key)
            if _is_due(note, finding, now, settings):
                since = finding.since or note.first_seen_at
                decision.alerts.append(Alerting(finding, since, note.sent_at is not None))
        elif now - note.seen_at >= FORGOTTEN_AFTER:
            decision.dropped.append(note.key)
        elif finding is not None or findings.is_over(note.key):
            if note.sent_at is None:
                decision.dropped.append(note.key)
            elif now - note.seen_at >= timedelta(seconds=settings.every * OVER_AFTER):
                lasted = (note.seen_at - note.first_seen_at).total_seconds()
                decision.over.append(Over(note.key, note.title, note.first_seen_at, lasted))
    decision.new.extend(Note(each.key, each.title, now, now) for each in findings.alerts() if each.key not in noted)
    return decision


def _is_due(note: Note, finding: Finding, now: datetime, settings: AlertSettings) -> bool:
    if note.sent_at is not None:
        return now - note.sent_at >= timedelta(seconds=settings.again)
    hold = max(finding.hold_seconds, settings.every * HOLDS_FOR)
    return now - note.first_seen_at >= timedelta(seconds=hold)


def only(decision: Decision, keys: Collection[Key]) -> Decision:
    """Return a decision of which only these keys are sent."""
    return Decision(
        alerts=[each for each in decision.alerts if each.finding.key in keys],
        over=[each for each in decision.over if each.key in keys],
    )
