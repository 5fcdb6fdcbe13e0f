"""Failpoints armed while a process runs, so that a kill at one costs no start of a fleet.

The rig writes a file for each role; every process of that role reads it some times a second. All share one mark, so
only the first that comes to the point dies there. What they then run is `django_asyncq.failpoints`, as with a variable.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from contextlib import suppress
from pathlib import Path

from django_asyncq import failpoints

VARIABLE = "ASYNCQ_CHAOS_ARMS"
LOOK_SECONDS = 0.03
ROLES = ("worker", "supervisor")


class Arms:
    """The rig's side: at most one point is armed for a role at a time."""

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
        """Let the others pass."""
        self._write(role, "\n")

    def _write(self, role: str, text: str) -> None:
        # By a renaming, so that nobody reads half of it.
        fresh = self.folder / f"{role}.new"
        fresh.write_text(text)
        fresh.rename(self.folder / role)


def victim_of(mark: Path) -> int | None:
    """Return the pid of who died at the point, if somebody has."""
    with suppress(FileNotFoundError):
        words = mark.read_text().split()
        return int(words[0]) if len(words) == 2 else None
    return None


def watch(folder: str) -> None:
    """Arm this process as its role's file says, from now on. Called once, at import of the tasks."""
    role = ROLES[multiprocessing.parent_process() is None]
    path, known = Path(folder) / role, [""]

    def look() -> None:
        with suppress(FileNotFoundError):
            text = path.read_text()
            if text != known[0]:
                known[0] = text
                point, _, mark = text.partition("\n")
                failpoints.reach = failpoints.read(point, mark)

    def keep_looking() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            look()

    look()
    threading.Thread(target=keep_looking, daemon=True, name="arming").start()
