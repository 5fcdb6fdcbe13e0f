"""The lock file: locked as long as its descriptor is kept, never unlinked, signed by who had it last.

By flock, which closing the same file elsewhere does not undo. Beside it stands until when its owner may trust the
lock, for those who find the file locked: its owner may be stopped. Knows nothing of Redis.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from .. import conf
from ..exceptions import BrokerUnavailable
from .owner import Owner

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("django_asyncq.leadership.coordinator")

# Times a lock file is opened again because it was replaced between opening and locking it.
TRIES = 3
UNSAFE_IN_FILE_NAME = re.compile(r"[^A-Za-z0-9_.-]")
# Longer than any owner's value: host names have 64 bytes at most.
MOST_BYTES = 4096
# Longer than any token and time: a newer line covers the older one.
PROMISE_BYTES = 96

# What a child of a fork must close. The guard keeps a fork out while a file is open and not yet listed.
_open_files: set[LockFile] = set()
_guard = threading.RLock()


class LockFile:
    """A lock file: open, locked once `lock` has returned it.

    inode: device and number. former_token, former_written: who had signed it, and its `st_ctime_ns` then.
    written: the same after this owner's signature; "" when it could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _guard:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _open_files.add(self)
        self.inode = (0, 0)
        self.former_token = self.former_written = self.written = ""

    def sign(self, owner: Owner) -> None:
        """Read who signed the locked file, then sign it, unless the signature is this owner's: its time must stay."""
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
            self.written = ""  # A full disk: locked it is all the same, only nobody can prove this owner dead.

    def promise(self, owner: Owner, until: float) -> None:
        """Tell others that the lock is not trusted any more from then on. until: seconds since boot, or inf.

        Never sooner than it ends to be trusted. Not in the lock file, whose time must stay. With one write over the
        older one: who is stopped at any moment leaves one of the two, and nobody ever finds none.
        """
        line = f"{owner.token} {until}".ljust(PROMISE_BYTES - 1) + "\n"
        with suppress(OSError):  # An older promise stays; then Redis alone says whether the lock is free.
            descriptor = os.open(_beside(self.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                os.pwrite(descriptor, line.encode(), 0)
            finally:
                os.close(descriptor)

    def unlock(self) -> None:
        """Give it back, once; the next call does nothing.

        Not by closing alone: a process forked behind Python's back may have the file open too.
        """
        with _guard:
            if self in _open_files:
                with suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)
                self.leave()

    def leave(self) -> None:
        """Close it without unlocking, in the child of a fork: it stays locked by the parent."""
        with _guard:
            if self in _open_files:
                _open_files.remove(self)
                os.close(self.descriptor)


class LockFolder:
    """The folder of the lock files; made when it is first needed. given: default the setting, read then."""

    def __init__(self, given: str | Path | None) -> None:
        self._given = given
        self._is_unusable = False

    @property
    def path(self) -> Path:
        """The folder, absolute from the first use on: a process may change its own."""
        self._given = Path(self._given or conf.current().task_lock_dir).absolute()
        return self._given

    def lock(self, name: str, owner: Owner) -> LockFile:
        """Lock and sign the file of a lock.

        If something else has replaced the file, the one locked is given up for the one there.
        Raises: BlockingIOError when somebody else has it; OSError when it cannot be used.
        """
        if fcntl is None:
            raise OSError("this platform does not support file locks (it has no fcntl)")
        path = self._file(name)
        _make_folder(path.parent)
        for _ in range(TRIES):
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
        raise BlockingIOError(f"{path} is being replaced all the time")

    def lock_if_usable(self, name: str, owner: Owner) -> LockFile | None:
        """The same, but None where the folder cannot be used, which is told once. Raises: BlockingIOError."""
        try:
            file = self.lock(name, owner)
        except BlockingIOError:
            raise
        except OSError as error:
            if not self._is_unusable:
                logger.warning("lock folder %s cannot be used (%s): locks are Redis's alone", self.path, error)
            self._is_unusable = True
            return None
        self._is_unusable = False
        return file

    def promised_until(self, name: str, asker: Owner) -> float:
        """Return until when whoever has a file locked may trust its lock, in seconds since boot; inf in doubt."""
        path = self._file(name)
        try:
            signer = Owner.read(path.read_text(errors="replace").partition("\n")[0])
            token, until = _beside(path).read_text(errors="replace").split()
            is_said = signer is not None and token == signer.token and signer.shares_kernel(asker)
            return float(until) if is_said else math.inf
        except (OSError, ValueError):
            return math.inf

    def neither(self, error: OSError) -> BrokerUnavailable:
        """Return the error for a lock that neither Redis nor this folder can keep."""
        return BrokerUnavailable(
            f"Redis was away at start, and the lock folder {self.path} cannot be used ({error}): "
            f"start Redis before the workers, or set TASK_LOCK_DIR to a folder they may write"
        )

    def _file(self, name: str) -> Path:
        return self.path / file_name(name)


def _beside(path: Path) -> Path:
    return path.with_suffix(".until")


def file_name(name: str) -> str:
    """Return a file name for any lock name; a digest keeps `a/b` and `a_b` apart."""
    safe = UNSAFE_IN_FILE_NAME.sub("_", name)[:100]
    if safe != name:
        safe += "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{safe}.lock"


def _make_folder(folder: Path) -> None:
    """Make the folder; one that was not there is kept out of version control."""
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
        file.leave()


if hasattr(os, "register_at_fork"):
    # A child that keeps the descriptor of a lock file would keep the lock after its parent was killed.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
