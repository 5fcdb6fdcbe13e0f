"""Decide which process of the fleet leads, and which one runs a start-up task.

A lock is a key in Redis with a token and a TTL. Its holder renews it at a third of the TTL, and trusts it only until a
moment counted from before the last renewal was sent. In single-instance mode (the default) the holder also keeps a file
locked. A process that can lock this file, and finds the signature of the owner in Redis in it, has the proof that the
owner is dead. The lock of a live owner is never deleted, whatever its age. If Redis is unreachable at the first
acquire, file locks replace it for the life of the coordinator: a later change would let two processes hold one lock.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async

from .. import conf
from ..broker import clients, scripts
from ..core.guard import get_logger
from ..core.time import steady_seconds
from ..exceptions import BrokerMisconfigured, BrokerUnavailable, InvalidOption, LockLost
from .lock_files import LockFile, LockFolder, Owner

# --- One hold of a lock by this process, and until when the process may trust it.

# The last tenth of the TTL is not trusted: a margin for a slow reply and a coarse clock.
MARGIN_SHARE = 0.1

_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class Hold:
    """Describe one hold of a lock, from acquiring it to releasing or losing it.

    value: the value in Redis, "" for a file lock. trusted_until, renew_at: seconds of the clock, infinite for a file
    lock. term: None until it is first asked for. serial: distinguishes this hold from the next one of the same lock.
    """

    file: LockFile | None
    value: str = ""
    ttl_seconds: float = math.inf
    trusted_until: float = math.inf
    renew_at: float = math.inf
    term: int | None = None
    serial: int = field(default_factory=_serials.__next__)

    def renewed(self, before: float, ttl: float) -> Hold:
        """Return this hold as Redis has confirmed it. before: clock time before the call."""
        trusted_until = before + ttl * (1 - MARGIN_SHARE)
        return replace(self, ttl_seconds=ttl, trusted_until=trusted_until, renew_at=before + ttl / 3)


def key_of(name: str) -> str:
    """Return the key of a lock in Redis."""
    return f"{conf.current().lock_prefix}{name}"


def environment_scope() -> str:
    """Return what tells apart the environments that share a lock folder: their Redis, and their prefix in it.

    Of the settings, also for a coordinator with a client of its own: in doubt, two exclude each other.
    """
    return f"{clients.server_identity()} {conf.current().key_prefix}"


def text_of(reply: Any) -> str:
    """Return a reply as text, from a client with or without `decode_responses`."""
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


# Holds of garbage-collected coordinators, with their clocks.
_orphans: list[tuple[Callable[[], float], Hold]] = []


def keep_orphans(holds: Mapping[str, Hold], clock: Callable[[], float]) -> None:
    """Keep the files of a garbage-collected coordinator, so that its locks last until they expire."""
    _orphans.extend((clock, hold) for hold in holds.values() if hold.file is not None)


def unlock_orphans() -> None:
    """Unlock the files of garbage-collected coordinators whose locks have expired."""
    for entry in list(_orphans):
        clock, hold = entry
        if hold.file is not None and clock() >= hold.trusted_until:
            hold.file.unlock()
            with suppress(ValueError):  # Another thread has removed it.
                _orphans.remove(entry)


logger = get_logger("django_asyncq.leadership.coordinator")

_coordinators: weakref.WeakSet[StartupTaskCoordinator] = weakref.WeakSet()


class StartupTaskCoordinator:
    """Acquire, renew and release locks by name, from any process and thread, with or without the ORM.

    redis_client: default the project's client. lock_dir: folder of the lock files, the same for the whole project;
    default the setting. single_instance: default the setting. clock: `core.time.steady_seconds`. No thread: call
    `tick`.
    """

    def __init__(
        self,
        redis_client: Any = None,
        lock_dir: str | Path | None = None,
        *,
        single_instance: bool | None = None,
        clock: Callable[[], float] = steady_seconds,
    ) -> None:
        self._redis_client = redis_client
        self._folder = LockFolder(lock_dir, environment_scope)
        self._single_instance = single_instance
        self._clock = clock
        self.uses_files: bool | None = None  # None until the first acquire has chosen between Redis and files.
        self._holds: dict[str, Hold] = {}
        self._reset()
        _coordinators.add(self)
        weakref.finalize(self, keep_orphans, self._holds, clock).atexit = False

    def _reset(self) -> None:
        """Become a new owner that holds no lock."""
        self.owner = Owner.of_this_process()
        self._holders: dict[str, Owner | None] = {}  # As seen when the lock was last refused.
        self._is_unreachable = False
        # Lock name → {(inode, token of the former owner): when it signed}, kept until Redis has answered.
        self.evidence: dict[str, dict[tuple[tuple[int, int], str], str]] = {}
        # Without it, a renewal in one thread could restore a hold that another thread is releasing.
        self._guard = threading.RLock()
        self._term_guard = threading.RLock()  # A second one, because a renewal must not wait for the database.

    def _leave_to_parent(self) -> None:
        """Forget, in a forked child, the locks of the parent; files that are closed here stay locked there."""
        for hold in self._holds.values():
            if hold.file is not None:
                hold.file.close()
        self._holds.clear()
        self._reset()

    # --- locks

    def acquire(self, name: str, ttl: float) -> bool:
        """Acquire the lock for `ttl` seconds, or extend it when it is held; return whether it is held now.

        The first call chooses Redis or files. If Redis is unreachable later, or refuses this client, nothing is held.
        Raises: BrokerUnavailable when neither Redis nor a lock file can be used; InvalidOption.
        """
        if not name or not math.isfinite(ttl) or ttl < 0.001:
            raise InvalidOption(f"lock {name!r} for {ttl!r} s: a lock needs a name and a TTL of at least 1 ms")
        if os.getpid() != self.owner.pid:
            self._leave_to_parent()  # A fork that did not run Python's fork hooks.
        unlock_orphans()
        with self._guard:
            file, is_acquired = None, False
            try:
                file = self._holds[name].file if self._keep_if_trusted(name) else self._file_for(name)
                is_acquired = self._acquire_with(name, ttl, file)
            except BlockingIOError:
                # A live process on this storage has the file. It may be succeeded only when it no longer trusts its
                # lock, by what it wrote itself: then it was stopped, and Redis alone decides.
                self._holders[name] = self._folder.signer(name)
                is_acquired = self._is_overdue(name) and self._acquire_with(name, ttl, None)
            finally:
                if not is_acquired and not self._drop(name) and file is not None:
                    file.unlock()
            self._lock_missing_file(name)
            return is_acquired and self._keep_if_trusted(name)

    def renew(self, name: str) -> bool:
        """Extend a held lock; return False when it is lost, or Redis is unreachable: then trust expires in time."""
        with self._guard:
            hold = self._holds.get(name)
            if hold is None or os.getpid() != self.owner.pid:
                return False
            if not hold.value:
                return True
            before = self._clock()
            if hold.file is not None:
                hold.file.publish_trust(self.owner, before + hold.ttl_seconds)
            arguments = [hold.value, int(hold.ttl_seconds * 1000)]
            try:
                reply = scripts.run("lock_renew", self._client(), [key_of(name)], arguments)
            except BrokerUnavailable as error:
                self._note_outage(error)
                self._keep_if_trusted(name)
                return False
            self._note_outage(None)
            if text_of(reply) != "renewed":
                self._drop(name)
                logger.error("lock %s is lost: it expired, or another process holds it", name)
                return False
            self._holds[name] = hold.renewed(before, hold.ttl_seconds)
            self._lock_missing_file(name)
            return self._keep_if_trusted(name)

    def release(self, name: str) -> None:
        """Release a held lock; do nothing for another. If Redis is unreachable, it expires with its TTL."""
        with self._guard:
            if os.getpid() != self.owner.pid or (hold := self._holds.pop(name, None)) is None:
                return
            try:
                if hold.value:
                    scripts.run("lock_release", self._client(), [key_of(name)], [hold.value])
            except BrokerUnavailable as error:
                self._note_outage(error)
                # The deletion may still arrive: as a new owner, the next hold cannot be what it deletes.
                self.owner = Owner.of_this_process()
            finally:
                if hold.file is not None:
                    hold.file.unlock()

    def is_held(self, name: str) -> bool:
        """Return whether the lock may still be trusted; in doubt, False. Never waits for Redis, a file or a thread."""
        hold = self._holds.get(name)
        return hold is not None and os.getpid() == self.owner.pid and self._clock() < hold.trusted_until

    def holder(self, name: str) -> Owner | None:
        """Return the process that held a lock at the last `acquire`, for people; None when it is not known."""
        return self.owner if self.is_held(name) else self._holders.get(name)

    def tick(self, now: float | None = None) -> list[str]:
        """Renew the locks that are due, at a third of their TTL; return the names of lost locks, each once.

        now: seconds of the coordinator's clock. Call it some ten times within the shortest TTL.
        """
        now = self._clock() if now is None else now
        lost = []
        for name in list(self._holds):
            with self._guard:
                if (hold := self._holds.get(name)) is None:
                    continue  # Another thread has released it.
                if now >= hold.renew_at:
                    self.renew(name)
                if not self._keep_if_trusted(name):
                    lost.append(name)
        return lost

    @contextmanager
    def hold(self, name: str, ttl: float | None = None) -> Iterator[bool]:
        """Acquire the lock, yield whether it is held, and release it afterwards unless it was held before.

        ttl: seconds, default the setting. If the body may take longer, call `tick` meanwhile.
        """
        was_held = self.is_held(name)
        is_acquired = self.acquire(name, conf.current().lock_ttl_seconds if ttl is None else ttl)
        try:
            yield is_acquired
        finally:
            if not was_held:
                self.release(name)

    # --- leadership terms

    def term(self, name: str) -> int:
        """Return the fencing token of this hold: the number of its leadership term, higher than that of earlier holds.

        The first call of each hold reads it from the database, and must be outside a transaction (RuntimeError
        otherwise). Raises: LockLost when the lock is not held.
        """
        from . import fencing

        if (hold := self._holds.get(name)) is not None and hold.term is not None and self.is_held(name):
            return hold.term
        with self._term_guard:
            hold = self._trusted_hold(name)
            if hold.term is not None:
                return hold.term
            number = fencing.begin(name, f"{self.owner.host} {self.owner.pid}")
            with self._guard:
                now_held = self._trusted_hold(name, number)
                if now_held.serial != hold.serial:
                    raise LockLost(name, number)  # Lost and acquired again meanwhile: a new hold has its own term.
                self._holds[name] = replace(now_held, term=number)
            return number

    @contextmanager
    def fenced(self, name: str) -> Iterator[int]:
        """Run the body in a transaction that finishes before a newer term of the lock can begin; yield the term.

        Protects writes to the database of `LockTerm` only. Raises: LockLost; nothing is written, the hold is released.
        """
        from . import fencing

        number = self.term(name)
        try:
            with fencing.fenced(name, number):
                yield number
        except LockLost as error:
            if (error.name, error.term) == (name, number):
                self._give_up(name, number)
            raise

    def _trusted_hold(self, name: str, number: int | None = None) -> Hold:
        with self._guard:
            if not self._keep_if_trusted(name):
                raise LockLost(name, number)
            return self._holds[name]

    def _give_up(self, name: str, number: int) -> None:
        """Release a hold that a newer term has replaced, but not a newer hold of another thread."""
        with self._guard:
            hold = self._holds.get(name)
            if hold is not None and hold.term == number:
                logger.error("lock %s is lost: a newer term than %d has begun", name, number)
                self.release(name)

    # --- async versions

    async def aacquire(self, name: str, ttl: float) -> bool:
        """See `acquire`."""
        return await sync_to_async(self.acquire)(name, ttl)

    async def arenew(self, name: str) -> bool:
        """See `renew`."""
        return await sync_to_async(self.renew)(name)

    async def arelease(self, name: str) -> None:
        """See `release`."""
        await sync_to_async(self.release)(name)

    async def aterm(self, name: str) -> int:
        """See `term`."""
        return await sync_to_async(self.term)(name)

    @asynccontextmanager
    async def ahold(self, name: str, ttl: float | None = None) -> AsyncIterator[bool]:
        """See `hold`."""
        was_held = self.is_held(name)
        try:
            # Inside the try, because a task that is cancelled here may have acquired the lock all the same.
            yield await self.aacquire(name, conf.current().lock_ttl_seconds if ttl is None else ttl)
        finally:
            if not was_held:
                await self.arelease(name)

    # --- holds

    def _drop(self, name: str) -> bool:
        """Forget a hold and unlock its file; return whether there was one."""
        if (hold := self._holds.pop(name, None)) is None:
            return False
        if hold.file is not None:
            hold.file.unlock()
        return True

    def _keep_if_trusted(self, name: str) -> bool:
        """Return whether a lock is held; drop a hold that is no longer trusted."""
        if self.is_held(name):
            return True
        if self._drop(name):
            logger.error("lock %s is lost: it was not renewed in time", name)
        return False

    def _acquire_with(self, name: str, ttl: float, file: LockFile | None) -> bool:
        """Acquire a lock. file: its locked lock file, None when it needs none."""
        if self.uses_files:
            self._hold_file(name, file)
            return True
        try:
            is_acquired = self._acquire_in_redis(name, ttl, file)
        except BrokerUnavailable as error:
            # A password that is corrected later must not leave some processes with files and others with Redis.
            if self.uses_files is None and not isinstance(error, BrokerMisconfigured):
                return self._fall_back(name, file, error)
            self._note_outage(error)
            return self._keep_if_trusted(name)
        self.uses_files = False
        self._note_outage(None)
        return is_acquired and self._keep_if_trusted(name)

    # --- Redis

    def _client(self) -> clients.Client:
        return self._redis_client if self._redis_client is not None else clients.client("worker")

    def _acquire_in_redis(self, name: str, ttl: float, file: LockFile | None) -> bool:
        """Acquire a lock in Redis, if need be in place of an owner that is proved dead."""
        value = self.owner._replace(written="" if file is None else file.written).value()
        if file is not None and file.former_token not in ("", self.owner.token):
            self.evidence.setdefault(name, {})[file.inode, file.former_token] = file.former_written
        if file is not None and self.uses_files is None:
            file.publish_trust(self.owner, math.inf)  # The file may become the lock for the life of this coordinator.
        before, reply = self._run_script(name, value, ttl)
        if text_of(reply[0]) == "taken":
            owner = Owner.read(text_of(reply[1]))
            self._holders[name] = owner
            if owner is not None and self._is_proved_dead(name, owner, file):
                logger.info("lock %s: its owner (%s, pid %d) is dead; acquiring it", name, owner.host, owner.pid)
                before, reply = self._run_script(name, value, ttl, reply[1])
        # Not earlier: if Redis had not answered, the proof would be needed again, and the file is signed again by now.
        self.evidence.pop(name, None)
        if text_of(reply[0]) != "held":
            return False
        # A hold that is still trusted continues; any other is a new hold with a new term.
        hold = self._holds[name] if self.is_held(name) else Hold(file, value)
        if file is not None:
            file.publish_trust(self.owner, before + ttl)
        self._holds[name] = hold.renewed(before, ttl)
        return True

    def _is_proved_dead(self, name: str, owner: Owner, file: LockFile | None) -> bool:
        """Return whether the owner in Redis is proved not to hold the lock any more; in doubt, False.

        The proof: it had signed the very file that is locked here, and would keep that file locked if it lived. A copy
        of the file has another time. Under another kernel, a file on a network disk may be locked twice.
        """
        if owner.token == self.owner.token:
            return True  # This coordinator itself, before it dropped an earlier hold.
        if file is None or not owner.written or not owner.shares_kernel(self.owner):
            return False
        return self.evidence.get(name, {}).get((file.inode, owner.token)) == owner.written

    def _run_script(self, name: str, value: str, ttl: float, dead: Any = "") -> tuple[float, Any]:
        """Run the script, and once more after an error: if only the reply was lost, the second one says "held".

        Returns: the time before the call, and the reply.
        """
        before = self._clock()
        arguments = [value, int(ttl * 1000), dead]
        try:
            return before, scripts.run("lock_acquire", self._client(), [key_of(name)], arguments)
        except BrokerUnavailable:
            if self._is_unreachable:
                raise
            return before, scripts.run("lock_acquire", self._client(), [key_of(name)], arguments)

    def _is_single_instance(self) -> bool:
        return conf.current().single_instance_mode if self._single_instance is None else self._single_instance

    def _note_outage(self, error: BrokerUnavailable | None) -> None:
        """Log once that Redis is unreachable, and once that it is not any more. error: of the last call."""
        if error is not None and not self._is_unreachable:
            logger.warning("Redis is unreachable: locks cannot be acquired or renewed: %s", error)
        elif error is None and self._is_unreachable:
            logger.info("locks can be acquired and renewed again")
        self._is_unreachable = error is not None

    # --- files

    def _file_for(self, name: str) -> LockFile | None:
        """Lock the file that a lock needs; return None when it needs none, or when the folder is unusable.

        Raises: BlockingIOError when another process on this storage has locked it; BrokerUnavailable.
        """
        if not self.uses_files:
            return self._folder.lock_if_usable(name, self.owner) if self._is_single_instance() else None
        return self._folder.lock_as_the_only_store(name, self.owner)

    def _fall_back(self, name: str, file: LockFile | None, error: BrokerUnavailable) -> bool:
        """Choose files; if they cannot be used either, choose nothing and hold nothing."""
        if file is None:
            with suppress(BlockingIOError):  # Another process holds this lock; files are chosen all the same.
                file = self._folder.lock_as_the_only_store(name, self.owner)
        self.uses_files = True
        if file is not None:
            self._hold_file(name, file)
        logger.warning("using lock files in %s for the life of this process: %s", self._folder.path, error)
        return file is not None

    def _hold_file(self, name: str, file: LockFile | None) -> None:
        """Hold a lock that is only a file, until this process releases it or dies."""
        if file is not None:
            file.publish_trust(self.owner, math.inf)
        self._holds.setdefault(name, Hold(file))

    def _is_overdue(self, name: str) -> bool:
        """Return whether the process that has locked the file no longer trusts its lock."""
        return not self.uses_files and self._clock() >= self._folder.trusted_until(name, self.owner)

    def _lock_missing_file(self, name: str) -> None:
        """Lock the file of a lock that was acquired from a stopped process, so that a later death can be proved.

        If another process that is not stopped has the file by now, release the lock: that process may use files only.
        """
        hold = self._holds.get(name)
        if hold is None or hold.file is not None or not self._is_single_instance():
            return
        try:
            file = self._file_for(name)
        except BlockingIOError:
            if not self._is_overdue(name):
                logger.error("lock %s is lost: another process on this storage has locked its file", name)
                self.release(name)
            return
        if file is None:
            return
        value = self.owner._replace(written=file.written).value()
        try:
            before, reply = self._run_script(name, value, hold.ttl_seconds, hold.value)
        except BrokerUnavailable as error:
            self._note_outage(error)
            file.unlock()
            return
        if text_of(reply[0]) == "held":
            file.publish_trust(self.owner, before + hold.ttl_seconds)
            self._holds[name] = replace(hold, file=file, value=value).renewed(before, hold.ttl_seconds)
        else:
            file.unlock()


def _leave_all_to_parent() -> None:
    for coordinator in list(_coordinators):
        coordinator._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
