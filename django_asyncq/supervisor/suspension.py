"""Ctrl-Z and `fg`: a terminal reaches only the supervisor, so it passes both on to the groups of its processes.

After a long stop the leases have run out, as after a freeze of the host: tasks may have been recovered elsewhere, and
their fences refuse the late outcomes.
"""

from __future__ import annotations

import signal
from typing import Any

from .processes import Processes


class Suspension:
    """Stops and continues a supervisor together with its processes and all that their tasks have started."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._received: list[int] = []

    def attach(self) -> None:
        """Handle SIGTSTP and SIGCONT, unless the supervisor was started with SIGTSTP ignored. Main thread only."""
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            for number in (signal.SIGTSTP, signal.SIGCONT):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._received.append(number)

    def apply(self) -> None:
        """Do what the signals since the last call ask for."""
        while self._received:
            if self._received.pop(0) == signal.SIGTSTP:
                self._stop()
            self.processes.signal_groups(signal.SIGCONT)

    def _stop(self) -> None:
        """Stop the processes, then this one, until SIGCONT comes.

        The kernel ignores SIGTSTP in a group that no shell could continue; then this returns at once.
        """
        self.processes.signal_groups(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_signal)
