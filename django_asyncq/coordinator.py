"""Which one process of the fleet does what only one may do.

A lock in Redis with a token and a TTL; its holder renews at a third of it and trusts it only until a moment counted from
before the last renewal was sent. In single-instance mode (the default) a lock whose owner ran on this very host and is
provably dead is taken over at once; a live lock is never deleted, by nobody, whatever its age. Without Redis at the first
acquire, a file lock takes its place, for good: changing kinds at run time would let two hold it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async

from . import conf
from .broker import clients, scripts
from .exceptions import BrokerUnavailable

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("django_asyncq.coordinator")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# How much earlier than its TTL a lock is no longer trusted: room for a slow reply and a coarse clock.
MARGIN_SHARE = 0.1


class Owner(NamedTuple):
    """Who holds a lock, as written into its value."""

    token: str
    host: str
    boot: str
    pid: int
    start: str

    @classmethod
    def of_this_process(cls, token: str) -> Owner:
        """Return this process as an owner."""
        pid = os.getpid()
        return cls(token, socket.gethostname(), _boot_id(), pid, _start_of(pid))

    @classmethod
    def read(cls, value: str) -> Owner | None:
        """Read a lock's value; None for one that another program wrote."""
        parts = value.split("|")
        if len(parts) != 5 or not parts[3].isdigit():
            return None
        return cls(parts[0], parts[1], parts[2], int(parts[3]), parts[4])

    def value(self) -> str:
        """Return what is written into the lock."""
        return "|".join(str(part) for part in self)

    def is_provably_dead(self) -> bool:
        """Whether the owner ran on this host and is gone: rebooted, or its pid is free or another process's."""
        if self.host != socket.gethostname():
            return False
        if self.boot and _boot_id() and self.boot != _boot_id():
            return True
        if not self.start:
            return False  # without a start time a living process of the same pid cannot be told apart
        return _start_of(self.pid) != self.start


@dataclass(slots=True)
class Hold:
    """A lock this process holds. trusted_until, renew_at: monotonic seconds; no end for a file lock."""

    ttl_seconds: float
    trusted_until: float
    renew_at: float
    descriptor: int | None = None


class StartupTaskCoordinator:
    """Locks by name. Usable by itself, from any process, with or without the ORM.

    redis_client: default the project's. lock_dir: folder of the file locks. single_instance: default the setting.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        redis_client: Any = None,
        lock_dir: str | Path | None = None,
        *,
        single_instance: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis_client = redis_client
        self._lock_dir = lock_dir
        self._single_instance = single_instance
        self._clock = clock
        self._owner = Owner.of_this_process(uuid.uuid4().hex)
        self._pid = os.getpid()
        self._holds: dict[str, Hold] = {}
        self._uses_files: bool | None = None
        self._away = False

    # --- the four verbs

    def acquire(self, name: str, ttl: float) -> bool:
        """Take the lock for `ttl` seconds; whether it is held now. Acquiring again what one holds is a yes."""
        if os.getpid() != self._pid:
            # A child of a fork is another owner, and holds nothing.
            self._pid, self._holds = os.getpid(), {}
            self._owner = Owner.of_this_process(uuid.uuid4().hex)
        if self._uses_files:
            return self._acquire_file(name)
        before = self._clock()
        try:
            taken = self._acquire_redis(name, ttl)
        except BrokerUnavailable as error:
            if self._uses_files is None:
                logger.warning("no Redis at start (%s): file locks are used for the life of this process", error)
                self._uses_files = True
                return self._acquire_file(name)
            self._note_away(error)
            return False
        self._uses_files = self._away = False
        if taken:
            self._holds[name] = self._hold(before, ttl)
        return taken

    def renew(self, name: str) -> bool:
        """Prolong a held lock; False when it is lost, or Redis cannot say: then trust ends at its own time."""
        hold = self._holds.get(name)
        if hold is None or os.getpid() != self._pid:
            return False
        if hold.descriptor is not None:
            return True
        before = self._clock()
        try:
            ttl_ms = int(hold.ttl_seconds * 1000)
            kept = scripts.run("lock_renew", self._client(), [self._key(name)], [self._owner.value(), ttl_ms]) == 1
        except BrokerUnavailable as error:
            self._note_away(error)
            return False
        self._away = False
        if not kept:
            del self._holds[name]
            logger.error("lock %s is lost: another process holds it or it ran out", name)
            return False
        self._holds[name] = self._hold(before, hold.ttl_seconds)
        return True

    def release(self, name: str) -> None:
        """Give a lock back; nothing happens to one that is not held."""
        if os.getpid() != self._pid or (hold := self._holds.pop(name, None)) is None:
            return
        if hold.descriptor is not None:
            os.close(hold.descriptor)
            return
        try:
            scripts.run("lock_release", self._client(), [self._key(name)], [self._owner.value()])
        except BrokerUnavailable as error:
            self._note_away(error)

    def is_held(self, name: str) -> bool:
        """Whether the lock may still be trusted; in doubt, no."""
        hold = self._holds.get(name)
        return hold is not None and os.getpid() == self._pid and self._clock() < hold.trusted_until

    def tick(self) -> list[str]:
        """Renew what is due, at a third of its TTL; return the names that are not trusted any more."""
        for name, hold in list(self._holds.items()):
            if self._clock() >= hold.renew_at:
                self.renew(name)
        return [name for name in list(self._holds) if not self.is_held(name)]

    @contextmanager
    def hold(self, name: str, ttl: float = 30) -> Iterator[bool]:
        """Take the lock, tell whether it is held, give it back at the end."""
        taken = self.acquire(name, ttl)
        try:
            yield taken
        finally:
            if taken:
                self.release(name)

    # --- the same, async

    async def aacquire(self, name: str, ttl: float) -> bool:
        """See `acquire`."""
        return await sync_to_async(self.acquire)(name, ttl)

    async def arenew(self, name: str) -> bool:
        """See `renew`."""
        return await sync_to_async(self.renew)(name)

    async def arelease(self, name: str) -> None:
        """See `release`."""
        await sync_to_async(self.release)(name)

    @asynccontextmanager
    async def ahold(self, name: str, ttl: float = 30) -> AsyncIterator[bool]:
        """See `hold`."""
        taken = await self.aacquire(name, ttl)
        try:
            yield taken
        finally:
            if taken:
                await self.arelease(name)

    # --- Redis

    def _client(self) -> clients.Client:
        return self._redis_client if self._redis_client is not None else clients.client("worker")

    def _key(self, name: str) -> str:
        return f"task_lock:{name}"

    def _hold(self, before: float, ttl: float) -> Hold:
        return Hold(ttl, before + ttl * (1 - MARGIN_SHARE), before + ttl / 3)

    def _acquire_redis(self, name: str, ttl: float) -> bool:
        """Ask once; in single-instance mode once more in the place of an owner that is provably dead."""
        dead = ""
        for _ in range(2):
            arguments = [self._owner.value(), int(ttl * 1000), dead]
            reply = scripts.run("lock_acquire", self._client(), [self._key(name)], arguments)
            if reply[0] == b"held":
                return True
            dead = reply[1].decode("utf-8", "replace")
            owner = Owner.read(dead)
            if not self._is_single_instance() or owner is None or not owner.is_provably_dead():
                return False
            logger.info("lock %s: its owner (pid %d) is dead; taking over", name, owner.pid)
        return False

    def _is_single_instance(self) -> bool:
        return conf.current().single_instance_mode if self._single_instance is None else self._single_instance

    def _note_away(self, error: BrokerUnavailable) -> None:
        if not self._away:
            logger.warning("the coordinator cannot reach Redis; held locks are trusted until their time: %s", error)
        self._away = True

    # --- files

    def _acquire_file(self, name: str) -> bool:
        """Lock a file. The descriptor is kept for life and the file never unlinked: a new inode would be a new lock."""
        if self.is_held(name):
            return True
        if fcntl is None:
            raise RuntimeError("file locks need a POSIX system: start Redis before the workers on this platform")
        folder = Path(self._lock_dir or conf.current().task_lock_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino != path.stat().st_ino:
                raise BlockingIOError("the lock file was replaced")
        except OSError:
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, self._owner.value().encode())
        self._holds[name] = Hold(float("inf"), float("inf"), float("inf"), descriptor)
        return True


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """Return the start time of a process in clock ticks after boot, or "" when there is none (or no /proc)."""
    try:
        # The name in parentheses may hold spaces; the start time is the 20th field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
