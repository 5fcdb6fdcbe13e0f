"""Which one process of the fleet does what only one may do.

A lock in Redis with a token and a TTL; its holder renews at a third of it, and trusts it only until a moment
counted from before the last renewal was sent. In single-instance mode (the default) the holder also keeps a file
locked; who gets that file, signed by the very owner in Redis, has the proof that this owner lives no more. A live
lock is never deleted, whatever its age. Without Redis at the first acquire a file lock takes its place, for good:
changing kinds at run time would let two hold it. Has no thread: whoever holds locks calls `tick`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async

from .. import conf
from ..broker import clients, scripts
from ..exceptions import BrokerUnavailable, InvalidOption, LockLost
from .hold import Hold, key_of, let_go_of_orphans, orphan, text_of, trust_clock
from .lock_files import LockFile, LockFolder
from .owner import Owner

__all__ = ["Owner", "StartupTaskCoordinator"]

logger = logging.getLogger("django_asyncq.leadership.coordinator")

_coordinators: weakref.WeakSet[StartupTaskCoordinator] = weakref.WeakSet()


class StartupTaskCoordinator:
    """Locks by name. Usable by itself, from any process and thread, with or without the ORM.

    redis_client: default the project's. lock_dir: folder of the lock files, default the setting; one for a project.
    single_instance: default the setting. clock: see `trust_clock`.
    """

    def __init__(
        self,
        redis_client: Any = None,
        lock_dir: str | Path | None = None,
        *,
        single_instance: bool | None = None,
        clock: Callable[[], float] = trust_clock,
    ) -> None:
        self._redis_client = redis_client
        self._folder = LockFolder(lock_dir)
        self._single_instance = single_instance
        self._clock = clock
        self._uses_files: bool | None = None
        self._is_away = False
        self._holds: dict[str, Hold] = {}
        self._begin()
        _coordinators.add(self)
        weakref.finalize(self, orphan, self._holds, clock).atexit = False

    def _begin(self) -> None:
        """Start as an owner of its own that holds nothing."""
        self._owner = Owner.of_this_process()
        # By lock name: inode, former token -> when it was written; until Redis has answered.
        self._evidence: dict[str, dict[tuple[tuple[int, int], str], str]] = {}
        # Else a renewal in flight could bring back, here only, a lock that another thread is giving up.
        self._changes = threading.RLock()
        # Apart from the above: a renewal must not wait for the database.
        self._drawing = threading.RLock()

    def _leave_to_parent(self) -> None:
        """Forget, in the child of a fork, what the parent holds; files closed here stay locked there."""
        for hold in self._holds.values():
            if hold.file is not None:
                hold.file.leave()
        self._holds.clear()
        self._begin()

    # --- the verbs

    def acquire(self, name: str, ttl: float) -> bool:
        """Take the lock for `ttl` seconds; whether it is held now. What one holds is a yes, and is prolonged.

        The first call that gets to ask Redis chooses between Redis and files. Redis away later: nothing is taken.
        Raises: BrokerUnavailable when neither Redis nor a file lock can be had; InvalidOption.
        """
        if not name or not math.isfinite(ttl) or ttl < 0.001:
            raise InvalidOption(f"lock {name!r} for {ttl!r} s: a lock needs a name and a TTL of at least 1 ms")
        if os.getpid() != self._owner.pid:
            self._leave_to_parent()  # A fork that Python was not told of.
        let_go_of_orphans()
        with self._changes:
            file = None
            is_taken = False
            try:
                file = self._holds[name].file if self._keep_if_trusted(name) else self._file_for(name)
                is_taken = self._take(name, ttl, file)
            except BlockingIOError:
                # Somebody on this storage lives and has it; only one whose trust is over, by its own word, may be
                # succeeded: it was stopped. Then Redis decides alone.
                is_taken = self._is_overdue(name) and self._take(name, ttl, None)
            finally:
                if not is_taken and not self._drop(name) and file is not None:
                    file.unlock()
            self._add_file(name)
            return is_taken and self._keep_if_trusted(name)

    def renew(self, name: str) -> bool:
        """Prolong a held lock; False when it is lost, or Redis cannot say: then trust ends at its time."""
        with self._changes:
            hold = self._holds.get(name)
            if hold is None or os.getpid() != self._owner.pid:
                return False
            if not hold.value:
                return True
            before = self._clock()
            if hold.file is not None:
                hold.file.promise(self._owner, before + hold.ttl_seconds)
            arguments = [hold.value, int(hold.ttl_seconds * 1000)]
            try:
                reply = scripts.run("lock_renew", self._client(), [key_of(name)], arguments)
            except BrokerUnavailable as error:
                self._note_away(error)
                self._keep_if_trusted(name)
                return False
            self._is_away = False
            if text_of(reply) != "renewed":
                self._drop(name)
                logger.error("lock %s is lost: it ran out, or another process has it", name)
                return False
            self._holds[name] = hold.since(before, hold.ttl_seconds)
            self._add_file(name)
            return self._keep_if_trusted(name)

    def release(self, name: str) -> None:
        """Give a lock back; nothing happens to one that is not held. Redis away: it ends with its TTL."""
        with self._changes:
            if os.getpid() != self._owner.pid or (hold := self._holds.pop(name, None)) is None:
                return
            try:
                if hold.value:
                    scripts.run("lock_release", self._client(), [key_of(name)], [hold.value])
            except BrokerUnavailable as error:
                self._note_away(error)
                # The deletion may still be on its way: the next hold must not be what it deletes.
                self._owner = Owner.of_this_process()
            finally:
                if hold.file is not None:
                    hold.file.unlock()

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
                if not self._keep_if_trusted(name):
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

    # --- terms

    def term(self, name: str) -> int:
        """Return the number of this hold's term, from the database at the first call; each hold has its own.

        Draw it outside a transaction (RuntimeError otherwise). Raises: LockLost when the lock is not held.
        """
        from . import fencing

        if (hold := self._holds.get(name)) is not None and hold.term is not None and self.is_held(name):
            return hold.term
        with self._drawing:
            hold = self._trusted_hold(name)
            if hold.term is not None:
                return hold.term
            number = fencing.begin(name, f"{self._owner.host} {self._owner.pid}")
            with self._changes:
                now_held = self._trusted_hold(name, number)
                if now_held.serial != hold.serial:
                    raise LockLost(name, number)  # Lost and taken again meanwhile: the new hold draws its own.
                self._holds[name] = replace(now_held, term=number)
            return number

    @contextmanager
    def fenced(self, name: str) -> Iterator[int]:
        """Run the body in a transaction that ends before a newer term of the lock can begin; yield the term.

        For what is written to the database of `LockTerm`. Raises: LockLost, then nothing was written, and the hold
        is given up.
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
        with self._changes:
            if not self._keep_if_trusted(name):
                raise LockLost(name, number)
            return self._holds[name]

    def _give_up(self, name: str, number: int) -> None:
        """Release a hold whose term is over, but not a newer one of another thread."""
        with self._changes:
            hold = self._holds.get(name)
            if hold is not None and hold.term == number:
                logger.error("lock %s is lost: its term %d is over", name, number)
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

    async def aterm(self, name: str) -> int:
        """See `term`."""
        return await sync_to_async(self.term)(name)

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

    # --- holds

    def _drop(self, name: str) -> bool:
        """Forget a hold and let go of its file, which by now any other may have; whether there was one."""
        if (hold := self._holds.pop(name, None)) is None:
            return False
        if hold.file is not None:
            hold.file.unlock()
        return True

    def _keep_if_trusted(self, name: str) -> bool:
        """Whether a lock is held; one that is not trusted any more is dropped."""
        if self.is_held(name):
            return True
        if self._drop(name):
            logger.error("lock %s is lost: it was not renewed in time", name)
        return False

    def _take(self, name: str, ttl: float, file: LockFile | None) -> bool:
        """Take a lock whose file is locked, if it has one."""
        if self._uses_files:
            self._hold_file(name, file)
            return True
        try:
            is_taken = self._take_in_redis(name, ttl, file)
        except BrokerUnavailable as error:
            if self._uses_files is None:
                return self._fall_back(name, file, error)
            self._note_away(error)
            return self._keep_if_trusted(name)
        self._uses_files = self._is_away = False
        return is_taken and self._keep_if_trusted(name)

    # --- Redis

    def _client(self) -> clients.Client:
        return self._redis_client if self._redis_client is not None else clients.client("worker")

    def _take_in_redis(self, name: str, ttl: float, file: LockFile | None) -> bool:
        """Ask once; once more in place of an owner that holds it no more."""
        value = self._owner._replace(written="" if file is None else file.written).value()
        if file is not None and file.former_token not in ("", self._owner.token):
            self._evidence.setdefault(name, {})[file.inode, file.former_token] = file.former_written
        if file is not None and self._uses_files is None:
            file.promise(self._owner, math.inf)  # The file may become the lock, for good.
        before, reply = self._ask(name, value, ttl)
        if text_of(reply[0]) == "taken":
            owner = Owner.read(text_of(reply[1]))
            if owner is not None and self._has_ended(name, owner, file):
                logger.info("lock %s: its owner (%s, pid %d) is gone; taking over", name, owner.host, owner.pid)
                before, reply = self._ask(name, value, ttl, reply[1])
        # Not earlier: had Redis been unable to answer, the file would be signed anew at the next attempt.
        self._evidence.pop(name, None)
        if text_of(reply[0]) != "held":
            return False
        # A hold that was trusted to this moment goes on; any other begins, and draws a term of its own.
        hold = self._holds[name] if self.is_held(name) else Hold(file, value)
        if file is not None:
            file.promise(self._owner, before + ttl)
        self._holds[name] = hold.since(before, ttl)
        return True

    def _has_ended(self, name: str, owner: Owner, file: LockFile | None) -> bool:
        """Whether the owner in Redis provably holds the lock no more; in doubt, no.

        The proof: it had signed the very file that is locked here, and would keep that file locked if it lived. A
        copy of the file bears another time, and under another kernel a file on the network may be locked twice.
        """
        if owner.token == self._owner.token:
            return True  # This very object, before it dropped an earlier hold.
        if file is None or not owner.written or not owner.shares_kernel(self._owner):
            return False
        return self._evidence.get(name, {}).get((file.inode, owner.token)) == owner.written

    def _ask(self, name: str, value: str, ttl: float, dead: Any = "") -> tuple[float, Any]:
        """Run the script, a second time after an error: if only the reply was lost, what is mine is a yes.

        Returns: the time before, and the reply.
        """
        before = self._clock()
        arguments = [value, int(ttl * 1000), dead]
        try:
            return before, scripts.run("lock_acquire", self._client(), [key_of(name)], arguments)
        except BrokerUnavailable:
            if self._is_away:
                raise
            return before, scripts.run("lock_acquire", self._client(), [key_of(name)], arguments)

    def _is_single_instance(self) -> bool:
        return conf.current().single_instance_mode if self._single_instance is None else self._single_instance

    def _note_away(self, error: BrokerUnavailable) -> None:
        if not self._is_away:
            logger.warning("Redis is away: held locks are trusted until their time, none is taken: %s", error)
        self._is_away = True

    # --- files

    def _file_for(self, name: str) -> LockFile | None:
        """Lock the file a lock needs; None where it needs none, or Redis has to do without.

        Raises: BlockingIOError when somebody on this storage has it; BrokerUnavailable.
        """
        if not self._uses_files:
            return self._folder.lock_if_usable(name, self._owner) if self._is_single_instance() else None
        try:
            return self._folder.lock(name, self._owner)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._folder.neither(error) from error

    def _fall_back(self, name: str, file: LockFile | None, error: BrokerUnavailable) -> bool:
        """Choose files. Where they cannot be used either, nothing is chosen and nothing held."""
        if file is None:
            try:
                file = self._folder.lock(name, self._owner)
            except BlockingIOError:
                pass  # Somebody has it; files it is, all the same.
            except OSError as unusable:
                raise self._folder.neither(unusable) from unusable
        self._uses_files = True
        if file is not None:
            self._hold_file(name, file)
        logger.warning("no Redis at start (%s): locks are files in %s for good", error, self._folder.path)
        return file is not None

    def _hold_file(self, name: str, file: LockFile | None) -> None:
        """Hold a lock that is a file alone, for as long as this process lives."""
        if file is not None:
            file.promise(self._owner, math.inf)
        self._holds.setdefault(name, Hold(file))

    def _is_overdue(self, name: str) -> bool:
        """Whether who has the file locked trusts its lock no more."""
        return not self._uses_files and self._clock() >= self._folder.promised_until(name, self._owner)

    def _add_file(self, name: str) -> None:
        """Lock the file of a lock that was taken from one who was stopped: then a death can be proved.

        If somebody else has it by now, and is not stopped, the lock is given up: it may have chosen files for good.
        """
        hold = self._holds.get(name)
        if hold is None or hold.file is not None or not self._is_single_instance():
            return
        try:
            file = self._file_for(name)
        except BlockingIOError:
            if not self._is_overdue(name):
                logger.error("lock %s is lost: another process on this storage has its file", name)
                self.release(name)
            return
        if file is None:
            return
        value = self._owner._replace(written=file.written).value()
        try:
            before, reply = self._ask(name, value, hold.ttl_seconds, hold.value)
        except BrokerUnavailable as error:
            self._note_away(error)
            file.unlock()
            return
        if text_of(reply[0]) == "held":
            file.promise(self._owner, before + hold.ttl_seconds)
            self._holds[name] = replace(hold, file=file, value=value).since(before, hold.ttl_seconds)
        else:
            file.unlock()


def _leave_all_to_parent() -> None:
    for coordinator in list(_coordinators):
        coordinator._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
