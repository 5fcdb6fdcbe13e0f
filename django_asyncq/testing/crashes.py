"""Processes of a test that kill themselves at a failpoint. Needs no Django, so settings modules may import it."""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from pathlib import Path

from . import failpoints

CRASH_VARIABLE = "ASYNCQ_CRASH"
CRASH_MARK_VARIABLE = "ASYNCQ_CRASH_MARK"


def crash_at(point: str, *, nth: int = 1, mark: Path | str | None = None) -> dict[str, str]:
    """Return this process's environment, plus the failpoint at which a process started with it kills itself.

    The started process must call `arm_from_environment`, usually in the settings module of the tests.
    point: a name from docs/reference/failpoints.md. nth: each process dies the n-th time it reaches the point.
    mark: a file that the first process to die creates, with its pid and the point; while the file exists, no other
        process dies. Without a mark, the successors of a worker process die too.
    Raises: ValueError for an unknown point, or an nth below 1.
    """
    KillAt(point, nth)
    environment = {**os.environ, CRASH_VARIABLE: f"{point}:{nth}"}
    environment.pop(CRASH_MARK_VARIABLE, None)
    return {**environment, CRASH_MARK_VARIABLE: str(mark)} if mark is not None else environment


def arm_from_environment() -> None:
    """Arm the failpoint that `crash_at` put into the environment; do nothing without one.

    Call it once, in the settings module of the tests. Raises: ValueError for a value that `crash_at` does not write.
    """
    if text := os.environ.get(CRASH_VARIABLE, ""):
        kill = KillAt.parse(text, os.environ.get(CRASH_MARK_VARIABLE, ""))
        failpoints.arm(kill, kill.point)


class AtPoint(ABC):
    """Act the n-th time that one point is reached; an action for `failpoints.arm`. May be called from any thread.

    Raises: ValueError for an unknown point, or an nth below 1.
    """

    def __init__(self, point: str, nth: int = 1) -> None:
        _check_point(point)
        if nth < 1:
            raise ValueError(f"{point}:{nth}: n counts from 1")
        self.point = point
        self.nth = nth
        self.reached = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        """Count one arrival at a point. Raises: ValueError for a point that is not declared."""
        _check_point(name)
        if name != self.point:
            return
        with self._lock:
            self.reached += 1
            is_due = self.reached == self.nth
        if is_due:
            self.act()

    @abstractmethod
    def act(self) -> None:
        """Do what happens there."""


class KillAt(AtPoint):
    """Kill the process (SIGKILL) the n-th time it reaches one point. mark: see `crash_at`; "" for none."""

    def __init__(self, point: str, nth: int = 1, mark: str = "") -> None:
        super().__init__(point, nth)
        self.mark = mark

    @classmethod
    def parse(cls, text: str, mark: str = "") -> KillAt:
        """Read `<point>` or `<point>:<n>`. Raises: ValueError."""
        point, _, nth = text.partition(":")
        if nth and not (nth.isascii() and nth.isdigit()):
            raise ValueError(f"{CRASH_VARIABLE}={text!r}: write <point>:<n>, n counts from 1")
        return cls(point, int(nth or 1), mark)

    def act(self) -> None:
        """Kill the process, unless another one was killed before."""
        if self._is_first():
            os.write(2, f"failpoint {self.point}: process {os.getpid()} kills itself\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self) -> bool:
        """Write pid and point into the mark; return False when another process has written it."""
        if not self.mark:
            return True
        # Written under another name and then linked: a reader that finds the mark finds all of it.
        draft = Path(f"{self.mark}.{os.getpid()}")
        draft.write_text(f"{os.getpid()} {self.point}\n")
        try:
            Path(self.mark).hardlink_to(draft)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True


def _check_point(name: str) -> None:
    if name not in failpoints.POINTS:
        raise ValueError(f"{name!r} is not a failpoint; the failpoints are {', '.join(sorted(failpoints.POINTS))}")
