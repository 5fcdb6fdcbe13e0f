"""Says once that all worker processes are ready, which process leads the fleet, and that a stop has begun.

Later changes are logged.
"""

from __future__ import annotations

from collections.abc import Callable

from ..maintenance.service import MaintenanceService
from .processes import Processes


class Announcement:
    """Watches for the first two moments. The supervisor calls `stopping`.

    say: is given each sentence; it must not raise, nor block for long.
    """

    def __init__(self, processes: Processes, maintenance: MaintenanceService, say: Callable[[str], None]) -> None:
        self.processes = processes
        self.maintenance = maintenance
        self._say = say
        self._is_ready = False
        self._is_leader_known = False

    def check(self) -> None:
        """Say what has become known since the last call. One call costs nothing once both are said."""
        if not self._is_leader_known and (leader := self.maintenance.leader):
            self._is_leader_known = True
            self._say(f"Leader: {leader}.")
        if not self._is_ready and self.processes.are_ready:
            self._is_ready = True
            self._say("Ready. Press Ctrl-C to stop after the running tasks have finished, and again to stop at once.")

    def stopping(self, grace_seconds: float) -> None:
        """Say that a stop was requested. grace_seconds: how long running tasks may take to finish."""
        self._say(f"Stopping: running tasks may finish within {grace_seconds:g} s. Press Ctrl-C again to stop at once.")
