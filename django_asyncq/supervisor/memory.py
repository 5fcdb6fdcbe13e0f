"""How much memory worker processes have used, and whether the kernel may have killed one for want of memory.

Linux only; elsewhere nothing is known. A dead process no longer has these figures, so they are read while it lives.
Source: man 5 proc, and the kernel's admin-guide/cgroup-v1/memory and cgroup-v2.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

from .processes import Child

# A task may use up the memory quickly. Reading those of 8 processes takes 0.2 ms.
SAMPLE_SECONDS = 0.2
# The kernel begins to kill at the limit, and a process may grow a little between a sample and its death.
NEAR_LIMIT = 0.9
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
OOM_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)
# cgroup version → names of the files of its limit, its usage, and its count of processes killed.
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.current", "memory.events"),
}


class MemorySampler:
    """Samples the memory of the processes and of their cgroup. root: where the file systems are, for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.peaks_mb: dict[str, float] = {}
        self.was_near_limit = False
        self._sample_at = 0.0
        self._version, self._folder = self._find_cgroup()
        self._oom_kills = self._count_oom_kills()

    def sample(self, children: list[Child], now: float) -> None:
        """Read the figures of the living processes, at most each SAMPLE_SECONDS. now: monotonic seconds."""
        if now < self._sample_at:
            return
        self._sample_at = now + SAMPLE_SECONDS
        living = {child.worker_id: self._peak_mb(child.process.pid) for child in children}
        # One that has just died keeps its last figure until its tasks are recovered.
        self.peaks_mb |= {worker_id: peak for worker_id, peak in living.items() if peak}
        self.was_near_limit = self._is_near_limit()

    def describe(self, child: Child) -> list[str]:
        """Describe the memory of a dead process: its peak if known, and whether it may have been killed for it."""
        peak = self.peaks_mb.get(child.worker_id)
        found = [f"it had used up to {peak:.0f} MB of memory"] if peak else []
        if child.exit_code == -signal.SIGKILL and not child.was_killed and self._may_be_out_of_memory():
            found.append("the kernel may have killed it because memory was used up (OOM killer)")
        return found

    def forget(self, child: Child) -> None:
        """Forget a dead process whose tasks are recovered."""
        self.peaks_mb.pop(child.worker_id, None)
        self._oom_kills = self._count_oom_kills()

    def _may_be_out_of_memory(self) -> bool:
        return self.was_near_limit or self._count_oom_kills() > self._oom_kills

    def _peak_mb(self, pid: int) -> float:
        found = PEAK.search(_read(self.root / f"proc/{pid}/status"))
        return int(found[1]) / 1024 if found else 0.0

    def _find_cgroup(self) -> tuple[int, Path]:
        """Return the cgroup's version and its folder; in a container it is seen as the root."""
        for line in _read(self.root / "proc/self/cgroup").splitlines():
            number, controllers, path = line.split(":", 2)
            version = 2 if number == "0" else 1 if "memory" in controllers.split(",") else 0
            base = self.root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
            for folder in (base / path.lstrip("/"), base) if version else ():
                if (folder / FILES[version][2]).exists():
                    return version, folder
        return 2, self.root / "sys/fs/cgroup"

    def _is_near_limit(self) -> bool:
        limit, used = (_read(self._folder / name).strip() for name in FILES[self._version][:2])
        return limit.isdigit() and used.isdigit() and int(used) > NEAR_LIMIT * int(limit)

    def _count_oom_kills(self) -> int:
        found = OOM_KILLS.search(_read(self._folder / FILES[self._version][2]))
        return int(found[1]) if found else 0


def _read(path: Path) -> str:
    """Return the text of a small file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
