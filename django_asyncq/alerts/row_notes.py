"""What looks have noted, in the database: one row for each alert and channel. It decides which sender sends.

A sender reserves what it sends with one guarded UPDATE, so of two that look at the same time one sends. If it dies
before it has noted that, its reservation expires and the message is sent once more.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from uuid import uuid4

from django.db.models import Q, QuerySet

from ..definitions.alert_settings import AlertSettings
from ..models import Alert
from ..storage.routing import rows_of
from .decision import OVER_AFTER, Decision, Note, decide, only
from .findings import Findings, Key

# Longer than any attempt to send takes.
RESERVED_FOR = timedelta(minutes=2)


class RowNotes:
    """The notes of one channel. Every method raises django.db.Error."""

    def __init__(self, channel: str, settings: AlertSettings) -> None:
        self._channel = channel
        self._settings = settings
        self._sender = uuid4().hex
        self._reserved = Decision()
        self._over_ids: list[int] = []

    def settle(self, findings: Findings, now: datetime) -> Decision:
        """Note what a look has found, and return what this sender is to send: what it has reserved."""
        ids: dict[Key, int] = {}
        notes = []
        for row in self._rows():
            key = Key(row.kind, row.backend, row.subject)
            ids[key] = row.pk
            notes.append(Note(key, row.title, row.first_seen_at, row.seen_at, row.sent_at))
        decision = decide(notes, findings, now, self._settings)
        if decision.new:
            # Another sender may have noted them at this moment.
            rows_of(Alert).bulk_create([self._row(each) for each in decision.new], ignore_conflicts=True)
        if decision.seen:
            self._of(ids, decision.seen).update(seen_at=now)
        if decision.dropped:
            self._of(ids, decision.dropped).filter(_is_free(now)).delete()
        self._reserve(ids, decision, now)
        return self._reserved

    def confirm(self, now: datetime) -> None:
        """Note that what is reserved was sent."""
        mine = self._rows().filter(reserved_by=self._sender)
        if self._over_ids:
            mine.filter(pk__in=self._over_ids).delete()
        mine.update(sent_at=now, reserved_by="", reserved_until=None)

    def release(self) -> None:
        """Let what is reserved be sent at the next look."""
        self._rows().filter(reserved_by=self._sender).update(reserved_by="", reserved_until=None)

    def _reserve(self, ids: dict[Key, int], decision: Decision, now: datetime) -> None:
        self._reserved, self._over_ids = Decision(), []
        settings, free = self._settings, self._rows().filter(_is_free(now))
        wanted = []
        if decision.alerts:
            is_due = Q(sent_at=None) | Q(sent_at__lte=now - timedelta(seconds=settings.again))
            wanted.append(self._of(ids, [each.finding.key for each in decision.alerts], free).filter(is_due))
        if decision.over:
            is_over = Q(seen_at__lte=now - timedelta(seconds=settings.every * OVER_AFTER))
            wanted.append(self._of(ids, [each.key for each in decision.over], free).filter(is_over))
        reserved = [each.update(reserved_by=self._sender, reserved_until=now + RESERVED_FOR) for each in wanted]
        if any(reserved):
            mine = self._rows().filter(reserved_by=self._sender).values_list("kind", "backend", "subject")
            self._reserved = only(decision, {Key(*each) for each in mine})
            self._over_ids = [ids[each.key] for each in self._reserved.over]

    def _rows(self) -> QuerySet[Alert]:
        return rows_of(Alert).filter(channel=self._channel)

    def _of(self, ids: dict[Key, int], keys: Collection[Key], rows: QuerySet[Alert] | None = None) -> QuerySet[Alert]:
        return (self._rows() if rows is None else rows).filter(pk__in=[ids[key] for key in keys])

    def _row(self, note: Note) -> Alert:
        return Alert(
            channel=self._channel,
            **note.key._asdict(),
            title=note.title,
            first_seen_at=note.first_seen_at,
            seen_at=note.seen_at,
        )


def _is_free(now: datetime) -> Q:
    return Q(reserved_until=None) | Q(reserved_until__lte=now)
