"""Arm failpoints while a process runs, so that a kill does not cost the start of a fleet.

The rig writes a file for each role; every process of that role reads it some 30 times a second. All share one mark, so
only the first process that reaches the point dies there.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from contextlib import suppress
from pathlib import Path

from django_asyncq.testing import failpoints
from django_asyncq.testing.crashes import KillAt

VARIABLE = "ASYNCQ_CHAOS_ARMS"
LOOK_SECONDS = 0.03
ROLES = ("worker", "supervisor")


class Arms:
    """Arm at most one point for each role at a time; the rig's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._turn = 0

    def arm(self, role: str, point: str, nth: int) -> Path:
        """Arm all processes of a role; return the mark that the first to die leaves."""
        self._turn += 1
        mark = self.folder / f"mark-{role}-{self._turn}"
        self._write(role, f"{point}:{nth}\n{mark}")
        return mark

    def disarm(self, role: str) -> None:
        """Disarm all processes of a role."""
        self._write(role, "\n")

    def _write(self, role: str, text: str) -> None:
        # Renamed into place, so that no process reads half of it.
        fresh = self.folder / f"{role}.new"
        fresh.write_text(text)
        fresh.rename(self.folder / role)


def victim_of(mark: Path) -> int | None:
    """Return the pid of the process that died at the point; None when none has."""
    with suppress(FileNotFoundError):
        words = mark.read_text().split()
        return int(words[0]) if len(words) == 2 else None
    return None


def watch(folder: str) -> None:
    """Keep this process armed as its role's file says. Called once, when the tasks are imported."""
    role = ROLES[multiprocessing.parent_process() is None]
    path, known = Path(folder) / role, [""]

    def look() -> None:
        with suppress(FileNotFoundError):
            text = path.read_text()
            if text != known[0]:
                known[0] = text
                point, _, mark = text.partition("\n")
                failpoints.arm(KillAt.parse(point, mark)) if point else failpoints.disarm()

    def keep_looking() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            look()

    look()
    threading.Thread(target=keep_looking, daemon=True, name="arming").start()
