"""Lock files: locked while their descriptor is open, never unlinked, signed by the last process that locked them.

They use flock, which is not released when another descriptor of the same file is closed. A second file beside it says
until when the owner trusts its lock, for a process that finds the file locked: the owner may be stopped.
Must not know Redis.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from .. import conf
from ..core.guard import get_logger
from ..exceptions import BrokerUnavailable

# --- The owner of a lock, as its value describes it. Decides nothing: the coordinator judges whether an owner is dead.

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


try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]
HAS_FLOCK = fcntl is not None

logger = get_logger("django_asyncq.leadership.coordinator")

# How often a lock file is opened, when another program replaces it between opening and locking.
OPEN_ATTEMPTS = 3
UNSAFE_IN_FILE_NAME = re.compile(r"[^A-Za-z0-9_.-]")
# More than any owner's value: host names have at most 64 bytes.
MOST_BYTES = 4096
# More than any token and time, so that a newer line overwrites all of the older one.
TRUST_LINE_BYTES = 96

# The files that a forked child must close. The guard prevents a fork while a file is open and not yet listed.
_open_files: set[LockFile] = set()
_guard = threading.RLock()


class LockFile:
    """An open lock file; `LockFolder.lock` returns it locked.

    inode: device and number. former_token, former_written: token of the owner that had signed it, and the file's
    `st_ctime_ns` then. written: `st_ctime_ns` after this owner's signature, "" when it could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _guard:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _open_files.add(self)
        self.inode = (0, 0)
        self.former_token = self.former_written = self.written = ""

    def sign(self, owner: Owner) -> None:
        """Read the signature in the locked file, then sign it; this owner's own signature keeps its time."""
        before = os.fstat(self.descriptor)
        line = os.pread(self.descriptor, MOST_BYTES, 0).decode("utf-8", "replace").partition("\n")[0]
        former = Owner.read(line)
        self.inode = (before.st_dev, before.st_ino)
        self.former_token = "" if former is None else former.token
        self.former_written = self.written = str(before.st_ctime_ns)
        if self.former_token == owner.token:
            return
        content = f"{owner.value()}\n".encode()
        try:
            os.pwrite(self.descriptor, content, 0)
            os.ftruncate(self.descriptor, len(content))
            self.written = str(os.fstat(self.descriptor).st_ctime_ns)
        except OSError:
            self.written = ""  # A full disk: the file is locked all the same, but this owner cannot be proved dead.

    def publish_trust(self, owner: Owner, until: float) -> None:
        """Write until when this owner may trust its lock, for other processes. until: seconds since boot, or inf.

        It may be later than the real time, never sooner. It is not in the lock file, whose time must stay. One write
        overwrites the older line: a process that is stopped at any moment leaves one of the two.
        """
        line = f"{owner.token} {until}".ljust(TRUST_LINE_BYTES - 1) + "\n"
        with suppress(OSError):  # The older line stays; then Redis alone decides whether the lock is free.
            descriptor = os.open(_beside(self.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                os.pwrite(descriptor, line.encode(), 0)
            finally:
                os.close(descriptor)

    def unlock(self) -> None:
        """Unlock and close it; a second call does nothing.

        Closing alone is not enough: a child that was forked without Python's fork hooks has the file open too.
        """
        with _guard:
            if self in _open_files:
                with suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)
                self.close()

    def close(self) -> None:
        """Close it without unlocking it, in a forked child: the parent keeps it locked."""
        with _guard:
            if self in _open_files:
                _open_files.remove(self)
                os.close(self.descriptor)


class LockFolder:
    """The folder of the lock files, made when it is first needed.

    given: default the setting. scope_of: returns what tells apart the projects and environments that share the folder.
    Both are read at the first use.
    """

    def __init__(self, given: str | Path | None, scope_of: Callable[[], str]) -> None:
        self._given = given
        self._scope_of = scope_of
        self._scope: str | None = None
        self._is_unusable = False

    @property
    def path(self) -> Path:
        """The folder; absolute from the first use on, because a process may change its working directory."""
        self._given = Path(self._given or conf.current().task_lock_dir).absolute()
        return self._given

    def lock(self, name: str, owner: Owner) -> LockFile:
        """Lock and sign the file of a lock.

        If another program has replaced the file meanwhile, lock the new one instead.
        Raises: BlockingIOError when another process has locked it; OSError when it cannot be used.
        """
        if not HAS_FLOCK:
            raise OSError("this platform does not support file locks (it has no fcntl)")
        path = self._file(name)
        make_folder(path.parent)
        for _ in range(OPEN_ATTEMPTS):
            file = LockFile(path)
            try:
                fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and os.path.samestat(os.fstat(file.descriptor), path.stat()):
                    file.sign(owner)
                    return file
            except BaseException:
                file.unlock()
                raise
            file.unlock()
        raise BlockingIOError(f"{path} was replaced {OPEN_ATTEMPTS} times while it was being locked")

    def lock_if_usable(self, name: str, owner: Owner) -> LockFile | None:
        """Lock and sign as `lock` does; return None when the folder is unusable, and log that once.

        Raises: BlockingIOError.
        """
        try:
            file = self.lock(name, owner)
        except BlockingIOError:
            raise
        except OSError as error:
            if not self._is_unusable:
                logger.warning("lock folder %s cannot be used (%s): locks are in Redis only", self.path, error)
            self._is_unusable = True
            return None
        self._is_unusable = False
        return file

    def lock_as_the_only_store(self, name: str, owner: Owner) -> LockFile:
        """Lock and sign as `lock` does, where the lock can be in Redis no more.

        Raises: BlockingIOError; BrokerUnavailable when the folder cannot be used either.
        """
        try:
            return self.lock(name, owner)
        except BlockingIOError:
            raise
        except OSError as error:
            raise BrokerUnavailable(
                f"Redis was unreachable at start, and the lock folder {self.path} cannot be used ({error}): "
                f"start Redis before the workers, or set TASK_LOCK_DIR to a folder they can write to"
            ) from error

    def trusted_until(self, name: str, asker: Owner) -> float:
        """Return until when the process that has locked a file may trust its lock: seconds since boot; inf in doubt."""
        path = self._file(name)
        try:
            signer = Owner.read(path.read_text(errors="replace").partition("\n")[0])
            token, until = _beside(path).read_text(errors="replace").split()
            is_valid = signer is not None and token == signer.token and signer.shares_kernel(asker)
            return float(until) if is_valid else math.inf
        except (OSError, ValueError):
            return math.inf

    def signer(self, name: str) -> Owner | None:
        """Return the process that signed the file of a lock last, and when, for people; None if that is unknown."""
        path = self._file(name)
        try:
            found = Owner.read(path.read_text(errors="replace").partition("\n")[0])
            return None if found is None else found._replace(written=str(path.stat().st_ctime_ns))
        except OSError:
            return None

    def _file(self, name: str) -> Path:
        if self._scope is None:
            self._scope = self._scope_of()
        return self.path / file_name(name, self._scope)


def _beside(path: Path) -> Path:
    return path.with_suffix(".until")


def file_name(name: str, scope: str) -> str:
    """Return a file name for any lock name; a digest of name and scope makes those of `a/b` and `a_b` different."""
    safe = UNSAFE_IN_FILE_NAME.sub("_", name)[:100]
    both = f"{scope}\n{name}".encode("utf-8", "surrogatepass")
    return f"{safe}-{hashlib.sha256(both).hexdigest()[:16]}.lock"


def make_folder(folder: Path) -> None:
    """Make the folder; keep a new one out of version control."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    with suppress(OSError):
        (folder / ".gitignore").write_text("*\n")


def _before_fork() -> None:
    _guard.acquire()


def _after_fork_in_parent() -> None:
    _guard.release()


def _after_fork_in_child() -> None:
    global _guard
    _guard = threading.RLock()
    for file in list(_open_files):
        file.close()


if hasattr(os, "register_at_fork"):
    # A child that kept the descriptor of a lock file would keep the lock after its parent was killed.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
