"""The note that the database is unreachable, which the database cannot keep: in memory, and for a command in a file.

So each process that looks says it by itself. The file is for a process that only looks once, such as one that cron
starts: without it, it would not know that it has said so before.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import conf
from ..definitions.alert_settings import AlertSettings
from ..definitions.untrusted_json import loads_untrusted
from ..guard import get_logger
from ..leadership.lock_files import UNSAFE_IN_FILE_NAME, make_folder
from .decision import Decision, Note, decide
from .findings import THE_DATABASE, Findings
from .wording import utc

logger = get_logger("django_asyncq.alerts")

MOST_BYTES = 10_000


class LocalNotes:
    """The notes of all channels. path: of a file that keeps them; None keeps them in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._notes: dict[str, Note] = _read(path) if path else {}

    def settle(self, channel: str, findings: Findings, now: datetime, settings: AlertSettings) -> Decision:
        """Note what a look has found of the database, and return what is to be sent."""
        found = {THE_DATABASE: findings.found[THE_DATABASE]} if THE_DATABASE in findings.found else {}
        notes, now = [self._notes[channel]] if channel in self._notes else [], utc(now)
        decision = decide(notes, replace(findings, found=found), now, settings)
        for note in decision.new:
            self._keep(channel, note)
        if decision.seen:
            self._keep(channel, replace(self._notes[channel], seen_at=now))
        if decision.dropped:
            self._keep(channel, None)
        return decision

    def confirm(self, channel: str, decision: Decision, now: datetime) -> None:
        """Note that what was decided was sent."""
        if decision.over:
            self._keep(channel, None)
        elif decision.alerts:
            self._keep(channel, replace(self._notes[channel], sent_at=utc(now)))

    def _keep(self, channel: str, note: Note | None) -> None:
        if note is None:
            self._notes.pop(channel, None)
        else:
            self._notes[channel] = note
        if self._path:
            _write(self._path, self._notes)


def file_of_notes() -> Path:
    """Return the path of the file of this project, in the folder of its lock files."""
    settings = conf.current()
    return Path(settings.task_lock_dir) / f"alerts-{UNSAFE_IN_FILE_NAME.sub('_', settings.key_prefix)}.json"


def _read(path: Path) -> dict[str, Note]:
    """Return what a file holds; nothing when it cannot be read."""
    try:
        with path.open("rb") as file:
            written = loads_untrusted(file.read(MOST_BYTES + 1), max_bytes=MOST_BYTES, max_depth=3)
    except OSError:
        return {}
    found = {}
    for channel, each in written.items() if isinstance(written, dict) else ():
        with suppress(ValueError, TypeError, LookupError, OverflowError):
            found[channel] = _note(each)
    return found


def _note(written: Any) -> Note:
    first_seen_at, seen_at = (utc(datetime.fromisoformat(written[name])) for name in ("first_seen_at", "seen_at"))
    sent_at = utc(datetime.fromisoformat(written["sent_at"])) if written["sent_at"] else None
    return Note(THE_DATABASE, str(written["title"]), first_seen_at, seen_at, sent_at)


def _write(path: Path, notes: dict[str, Note]) -> None:
    """Replace the file as a whole; without notes, delete it."""
    written = {
        channel: {
            "title": note.title,
            "first_seen_at": utc(note.first_seen_at).isoformat(),
            "seen_at": utc(note.seen_at).isoformat(),
            "sent_at": utc(note.sent_at).isoformat() if note.sent_at else None,
        }
        for channel, note in notes.items()
    }
    try:
        if not written:
            path.unlink(missing_ok=True)
            return
        make_folder(path.parent)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w") as file:
            json.dump(written, file)
        Path(name).replace(path)
    except OSError as error:
        logger.warning("it cannot be noted that the database is unreachable, so it may be said again: %s", error)
