"""Who holds a lock, as its value says. Decides nothing: what proves an owner dead is the coordinator's matter."""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Owner(NamedTuple):
    """Who holds a lock, as written into its value: `token|boot id|written|host|pid`.

    token: of one coordinator object. boot: names the running kernel, "" where none can be had. written:
    `st_ctime_ns` of the lock file after the token was written into it, "" for a lock without one. host, pid: for
    people only.
    """

    token: str
    boot: str
    written: str
    host: str
    pid: int

    @classmethod
    def of_this_process(cls) -> Owner:
        """Return this process as an owner, under a token of its own."""
        return cls(uuid.uuid4().hex, _boot_id(), "", socket.gethostname().replace("|", "_"), os.getpid())

    @classmethod
    def read(cls, value: str) -> Owner | None:
        """Read a lock's value; None for one that another program wrote."""
        parts = value.split("|")
        if len(parts) != 5 or not re.fullmatch(r"[0-9]*", parts[2]) or not re.fullmatch(r"[0-9]{1,10}", parts[4]):
            return None
        return cls(parts[0], parts[1], parts[2], parts[3], int(parts[4]))

    def value(self) -> str:
        """Return what is written into the lock."""
        return "|".join(str(part) for part in self)

    def shares_kernel(self, other: Owner) -> bool:
        """Whether both run under one kernel, which is what keeps file locks; in doubt, no."""
        # Linux without a boot id is a sandbox that may keep file locks to itself. Elsewhere there is none to compare.
        return self.boot == other.boot and (bool(self.boot) or not sys.platform.startswith("linux"))


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
