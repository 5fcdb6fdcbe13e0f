"""Read how much memory a worker process uses."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

PAGE_BYTES = resource.getpagesize()
STATM = Path("/proc/self/statm")


def memory_mb() -> float:
    """Return the resident memory that this process has now; where there is no /proc, the most it has had.

    Not `ru_maxrss` on Linux: that of a child begins at the peak of its parent, here the supervisor.
    """
    try:
        pages = int(STATM.read_bytes().split()[1])
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1024 / 1024 if sys.platform == "darwin" else peak / 1024
    return pages * PAGE_BYTES / 1024 / 1024
