"""Which one process of the fleet does what only one may do.

A lock in Redis with a token and a TTL; its holder renews at a third of it, and trusts it only until a moment
counted from before the last renewal was sent. In single-instance mode (the default) a lock whose owner ran on
this very host and is provably dead is taken over at once. A live lock is never deleted, by nobody, whatever
its age. Without Redis at the first acquire a file lock takes its place, for good: changing kinds at run time
would let two hold it. Has no thread: whoever holds locks calls `tick`. See `docs/explanation/coordinator.md`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async

from . import conf
from .broker import clients, scripts
from .exceptions import BrokerUnavailable, InvalidOption

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("django_asyncq.coordinator")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# How much earlier than its TTL a lock is no longer trusted: room for a slow reply and a coarse clock.
MARGIN_SHARE = 0.1
# Times a lock file is opened again because it was replaced between opening and locking it.
FILE_TRIES = 3
UNSAFE_IN_FILE_NAME = re.compile(r"[^A-Za-z0-9_.-]")

_coordinators: weakref.WeakSet[StartupTaskCoordinator] = weakref.WeakSet()


def trust_clock() -> float:
    """Return monotonic seconds that also pass while the machine is suspended, where the system has such."""
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)


class Owner(NamedTuple):
    """Who holds a lock, as written into its value: `token|host|boot id|pid|start time`."""

    token: str
    host: str
    boot: str
    pid: int
    start: str

    @classmethod
    def of_this_process(cls, host: str) -> Owner:
        """Return this process as an owner, under a token of its own."""
        pid = os.getpid()
        _, start = _process(pid)
        return cls(uuid.uuid4().hex, host, _boot_id(), pid, start)

    @classmethod
    def read(cls, value: str) -> Owner | None:
        """Read a lock's value; None for one that another program wrote."""
        parts = value.split("|")
        if len(parts) != 5 or not re.fullmatch(r"[1-9][0-9]{0,9}", parts[3]):
            return None
        return cls(parts[0], parts[1], parts[2], int(parts[3]), parts[4])

    def value(self) -> str:
        """Return what is written into the lock."""
        return "|".join(str(part) for part in self)

    def is_provably_dead(self, witness: Owner) -> bool:
        """Whether this owner ran on the witness's host and is gone; in doubt, no.

        Gone means: the host has booted since, no process has its pid, the one that has it started at another
        time, or is a zombie. witness: the process that asks.
        """
        if self.host != witness.host or os.name != "posix":
            return False  # On Windows os.kill(pid, 0) is no question but a Ctrl-C.
        if self.boot and witness.boot and self.boot != witness.boot:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass  # It is there and another user's, or the number cannot be a pid here.
        is_running, start = _process(self.pid)
        # Where /proc shows nothing of it (hidepid, other systems) it counts as alive.
        return bool(start and self.start) and (start != self.start or not is_running)


@dataclass(frozen=True, slots=True)
class Hold:
    """A lock this process holds. trusted_until, renew_at: seconds of the clock; no end for a file lock."""

    ttl_seconds: float
    trusted_until: float
    renew_at: float
    descriptor: int | None = None

    @classmethod
    def since(cls, before: float, ttl: float) -> Hold:
        """Return a lock in Redis that was asked for at `before`."""
        return cls(ttl, before + ttl * (1 - MARGIN_SHARE), before + ttl / 3)


class StartupTaskCoordinator:
    """Locks by name. Usable by itself, from any process and thread, with or without the ORM.

    redis_client: default the project's. lock_dir: folder of the file locks, default the setting.
    single_instance: default the setting. instance: the name this host keeps when it is restarted, default its
    host name; no two that run at a time may share it in single-instance mode. clock: see `trust_clock`.
    """

    def __init__(
        self,
        redis_client: Any = None,
        lock_dir: str | Path | None = None,
        *,
        single_instance: bool | None = None,
        instance: str | None = None,
        clock: Callable[[], float] = trust_clock,
    ) -> None:
        if instance is not None and (not instance or "|" in instance):
            raise InvalidOption(f"instance {instance!r} is not valid: use a name without '|'")
        self._redis_client = redis_client
        self._lock_dir = lock_dir
        self._single_instance = single_instance
        self._instance = instance
        self._clock = clock
        self._uses_files: bool | None = None
        self._is_away = False
        self._begin()
        _coordinators.add(self)

    def _begin(self) -> None:
        """Start as an owner of its own that holds nothing."""
        self._owner = Owner.of_this_process(self._instance or socket.gethostname())
        self._holds: dict[str, Hold] = {}
        # Else a renewal in flight could bring back, here only, a lock that another thread is giving up.
        self._changes = threading.RLock()

    def _leave_to_parent(self) -> None:
        """Forget, in the child of a fork, what the parent holds; files closed here stay locked there."""
        for hold in self._holds.values():
            if hold.descriptor is not None:
                with suppress(OSError):
                    os.close(hold.descriptor)
        self._begin()

    # --- the verbs

    def acquire(self, name: str, ttl: float) -> bool:
        """Take the lock for `ttl` seconds; whether it is held now. What one holds is a yes, and is prolonged.

        The first call chooses between Redis and files. Redis away later is a no.
        Raises: BrokerUnavailable when neither Redis nor a file lock can be had; InvalidOption.
        """
        if not name or not math.isfinite(ttl) or ttl < 0.001:
            raise InvalidOption(f"lock {name!r} for {ttl!r} s: a lock needs a name and a TTL of at least 1 ms")
        if os.getpid() != self._owner.pid:
            self._leave_to_parent()  # A fork that Python was not told of.
        with self._changes:
            if self._uses_files:
                return self._acquire_file(name)
            try:
                is_taken = self._acquire_redis(name, ttl)
            except BrokerUnavailable as error:
                if self._uses_files is None:
                    return self._fall_back(name, error)
                self._note_away(error)
                return False
            self._uses_files = self._is_away = False
            if not is_taken:
                self._holds.pop(name, None)
            return self.is_held(name)

    def renew(self, name: str) -> bool:
        """Prolong a held lock; False when it is lost, or Redis cannot say: then trust ends at its time."""
        with self._changes:
            hold = self._holds.get(name)
            if hold is None or os.getpid() != self._owner.pid:
                return False
            if hold.descriptor is not None:
                return True
            before = self._clock()
            arguments = [self._owner.value(), int(hold.ttl_seconds * 1000)]
            try:
                reply = scripts.run("lock_renew", self._client(), [_key(name)], arguments)
            except BrokerUnavailable as error:
                self._note_away(error)
                return False
            self._is_away = False
            if _text(reply) != "renewed":
                del self._holds[name]
                logger.error("lock %s is lost: it ran out, or another process has it", name)
                return False
            self._holds[name] = Hold.since(before, hold.ttl_seconds)
            return self.is_held(name)

    def release(self, name: str) -> None:
        """Give a lock back; nothing happens to one that is not held. Redis away: it ends with its TTL."""
        with self._changes:
            if os.getpid() != self._owner.pid or (hold := self._holds.pop(name, None)) is None:
                return
            if hold.descriptor is not None:
                # Not by closing alone: a process forked behind Python's back may have the file open too.
                fcntl.flock(hold.descriptor, fcntl.LOCK_UN)
                os.close(hold.descriptor)
                return
            try:
                scripts.run("lock_release", self._client(), [_key(name)], [self._owner.value()])
            except BrokerUnavailable as error:
                self._note_away(error)

    def is_held(self, name: str) -> bool:
        """Whether the lock may still be trusted; in doubt, no. Asks nobody and never waits."""
        hold = self._holds.get(name)
        return hold is not None and os.getpid() == self._owner.pid and self._clock() < hold.trusted_until

    def tick(self, now: float | None = None) -> list[str]:
        """Renew what is due, at a third of its TTL; return the names found lost, each once.

        now: by the coordinator's clock, default its reading. Call it some ten times within the shortest TTL.
        """
        now = self._clock() if now is None else now
        lost = []
        for name in list(self._holds):
            with self._changes:
                if (hold := self._holds.get(name)) is None:
                    continue  # Another thread has given it back.
                if now >= hold.renew_at:
                    self.renew(name)
                if self.is_held(name):
                    continue
                if self._holds.pop(name, None) is not None:
                    logger.error("lock %s is lost: it could not be renewed in time", name)
                lost.append(name)
        return lost

    @contextmanager
    def hold(self, name: str, ttl: float | None = None) -> Iterator[bool]:
        """Take the lock, tell whether it is held, give it back at the end unless it was held before.

        ttl: seconds, default the setting. A body that may take longer needs `tick` called meanwhile.
        """
        was_held = self.is_held(name)
        is_taken = self.acquire(name, conf.current().lock_ttl_seconds if ttl is None else ttl)
        try:
            yield is_taken
        finally:
            if not was_held:
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
    async def ahold(self, name: str, ttl: float | None = None) -> AsyncIterator[bool]:
        """See `hold`."""
        was_held = self.is_held(name)
        try:
            # Within the try: a task cancelled here may have taken the lock all the same.
            yield await self.aacquire(name, conf.current().lock_ttl_seconds if ttl is None else ttl)
        finally:
            if not was_held:
                await self.arelease(name)

    # --- Redis

    def _client(self) -> clients.Client:
        return self._redis_client if self._redis_client is not None else clients.client("worker")

    def _acquire_redis(self, name: str, ttl: float) -> bool:
        """Ask once; in single-instance mode once more in place of an owner that is provably dead."""
        dead: Any = ""
        for _ in range(2):
            before = self._clock()
            reply = self._ask(name, [self._owner.value(), int(ttl * 1000), dead])
            if _text(reply[0]) == "held":
                self._holds[name] = Hold.since(before, ttl)
                return True
            dead = reply[1]
            owner = Owner.read(_text(dead))
            if owner is None or not self._is_single_instance() or not owner.is_provably_dead(self._owner):
                return False
            logger.info("lock %s: its owner (pid %d) is dead; taking over", name, owner.pid)
        return False

    def _ask(self, name: str, arguments: list[Any]) -> Any:
        """Run the script, a second time after an error: if only the reply was lost, what is mine is a yes."""
        try:
            return scripts.run("lock_acquire", self._client(), [_key(name)], arguments)
        except BrokerUnavailable:
            if self._is_away:
                raise
            return scripts.run("lock_acquire", self._client(), [_key(name)], arguments)

    def _is_single_instance(self) -> bool:
        return conf.current().single_instance_mode if self._single_instance is None else self._single_instance

    def _note_away(self, error: BrokerUnavailable) -> None:
        if not self._is_away:
            logger.warning("Redis is away: held locks are trusted until their time, none is taken: %s", error)
        self._is_away = True

    # --- files

    def _fall_back(self, name: str, error: BrokerUnavailable) -> bool:
        """Choose files. Where they cannot be used either, nothing is chosen and nothing held."""
        self._lock_dir = Path(self._lock_dir or conf.current().task_lock_dir).absolute()
        is_taken = self._acquire_file(name)
        self._uses_files = True
        logger.warning(
            "no Redis at start (%s): locks are files in %s for the life of this process",
            error,
            self._lock_dir,
        )
        return is_taken

    def _acquire_file(self, name: str) -> bool:
        if self.is_held(name):
            return True
        if fcntl is None:
            raise BrokerUnavailable(
                "Redis was away at start, and this platform does not support file locks (it has no fcntl): "
                "start Redis before the workers"
            )
        path = Path(self._lock_dir or ".") / _file_name(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _lock_file(path, self._owner.value())
        except OSError as error:
            raise BrokerUnavailable(
                f"Redis was away at start, and the lock file {path} cannot be used ({error}): "
                f"start Redis before the workers, or set TASK_LOCK_DIR to a folder they may write"
            ) from error
        if descriptor is None:
            return False
        self._holds[name] = Hold(math.inf, math.inf, math.inf, descriptor)
        return True


def _leave_all_to_parent() -> None:
    for coordinator in list(_coordinators):
        coordinator._leave_to_parent()


if hasattr(os, "register_at_fork"):
    # A child that keeps the descriptor of a lock file would keep the lock after its parent was killed.
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _key(name: str) -> str:
    return f"task_lock:{name}"


def _text(reply: Any) -> str:
    """Read a reply of a client with or without `decode_responses`."""
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


def _file_name(name: str) -> str:
    """Return a file name for any lock name; a digest keeps `a/b` and `a_b` apart."""
    safe = UNSAFE_IN_FILE_NAME.sub("_", name)[:100]
    if safe != name:
        safe += "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{safe}.lock"


def _lock_file(path: Path, content: str) -> int | None:
    """Lock a file and write into it; its descriptor, or None when another process has it.

    By flock, which closing the same file elsewhere does not undo. The file is never unlinked: a new inode
    would be a new lock; if something else has replaced it, the one locked is given up for the one there.
    """
    for _ in range(FILE_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{content}\n".encode())
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
    return None


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _process(pid: int) -> tuple[bool, str]:
    """Return whether a process runs, and its start in clock ticks after boot, "" where /proc hides it."""
    try:
        # The name in parentheses may hold spaces; after it the state is the 1st, the start the 20th field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie with more than one thread is one whose other threads still run.
        return fields[0] not in "ZX" or int(fields[17]) > 1, fields[19]
    except (OSError, IndexError, ValueError):
        return False, ""
