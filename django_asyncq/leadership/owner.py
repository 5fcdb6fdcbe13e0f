"""The owner of a lock, as its value describes it. Decides nothing: the coordinator judges whether an owner is dead."""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Owner(NamedTuple):
    """Describe the owner of a lock. The value of the lock is `token|boot id|written|host|pid`.

    token: identifies one coordinator object. boot: identifies the running kernel, "" where there is no boot id.
    written: `st_ctime_ns` of the lock file after the owner signed it, "" without a file. host, pid: for people only.
    """

    token: str
    boot: str
    written: str
    host: str
    pid: int

    @classmethod
    def of_this_process(cls) -> Owner:
        """Return this process as an owner with a new token."""
        return cls(uuid.uuid4().hex, _boot_id(), "", socket.gethostname().replace("|", "_"), os.getpid())

    @classmethod
    def read(cls, value: str) -> Owner | None:
        """Read a lock's value; return None for a value that another program wrote."""
        parts = value.split("|")
        if len(parts) != 5 or not re.fullmatch(r"[0-9]*", parts[2]) or not re.fullmatch(r"[0-9]{1,10}", parts[4]):
            return None
        return cls(parts[0], parts[1], parts[2], parts[3], int(parts[4]))

    def value(self) -> str:
        """Return the value that is written into the lock."""
        return "|".join(str(part) for part in self)

    @property
    def since(self) -> datetime | None:
        """Since when it holds the lock: the time of its signature by the clock of its host; None without a file."""
        return datetime.fromtimestamp(int(self.written) / 1e9, tz=UTC) if self.written else None

    def __str__(self) -> str:
        """Return host and pid, for people."""
        return f"{self.host}:{self.pid}"

    def shares_kernel(self, other: Owner) -> bool:
        """Return whether both run under one kernel, which manages the file locks; in doubt, False."""
        # Linux without a boot id is a sandbox, which may have its own file locks. Other systems have no boot id.
        return self.boot == other.boot and (bool(self.boot) or not sys.platform.startswith("linux"))


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
