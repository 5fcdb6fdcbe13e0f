"""The supervisor starts worker processes, renews their leases, replaces dead ones and shuts all of them down in order.

`supervision` has the main loop. It owns its parts, such as `processes` (start, watch, kill), `leases` (renew) and
`recovery` (the tasks of dead processes).
"""

from __future__ import annotations

from .liveness import LivenessFile
from .processes import WorkersCannotStart
from .reloading import Reloader, start_again
from .starting import fork_obstacle
from .supervision import Supervisor, ThreadDied, as_guest

__all__ = [
    "LivenessFile",
    "Reloader",
    "Supervisor",
    "ThreadDied",
    "WorkersCannotStart",
    "as_guest",
    "fork_obstacle",
    "start_again",
]
