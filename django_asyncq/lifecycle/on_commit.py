"""One call after the commit for all that a transaction has changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

from django.db.backends.base.base import BaseDatabaseWrapper

from .. import gates
from ..aliases import uses_redis
from ..django_internals import last_commit_hook
from ..models import TaskRecord
from ..storage.rollbacks import Acquired, Release
from ..storage.routing import is_in_transaction
from ..test_run import is_test_run


class CommitHook(ABC):
    """Collects the tasks that one transaction changed, and follows up once after its commit.

    deletes: whether the change is their deletion.
    """

    deletes: ClassVar[bool] = False

    def __init__(self) -> None:
        self.records: list[TaskRecord] = []
        self._is_registered = False
        self._is_called = False
        # What gives it back → what these tasks hold until the commit.
        self._acquired: dict[Release, Acquired] = {}

    @property
    def is_called(self) -> bool:
        """Whether the transaction has committed, so that the hook was called."""
        return self._is_called

    def __call__(self) -> None:
        """Follow up; Django calls this after the commit."""
        self._is_called = True
        for acquired in self._acquired.values():
            acquired.keep()
        self.follow_up()

    @abstractmethod
    def follow_up(self) -> None:
        """Do what follows the commit. Called once."""

    @classmethod
    def of_transaction(cls, connection: BaseDatabaseWrapper) -> Self:
        """Return the hook of this kind that the current transaction or savepoint registered last, or a new one.

        In the transaction of a test case each task has a hook of its own, as it would without that transaction:
        `captureOnCommitCallbacks` calls only the hooks that were registered within it.
        """
        hook = last_commit_hook(connection)
        # Not isinstance: a hook of a subclass does something else. A capture leaves the hooks there that it has called.
        if type(hook) is not cls or hook._is_called or (is_test_run() and not is_in_transaction(connection.alias)):
            return cls()
        return hook

    def release_at_rollback(self, records: Iterable[TaskRecord], connection: BaseDatabaseWrapper) -> None:
        """Have the gate slots of tasks released if the transaction, or its savepoint, is rolled back."""
        holders = [record for record in records if record.gate and uses_redis(record.backend)]
        self.give_back_at_rollback(holders, connection, gates.give_back)

    def give_back_at_rollback(
        self, holders: Sequence[TaskRecord], connection: BaseDatabaseWrapper, release: Release
    ) -> None:
        """Have `release` called with tasks that hold something, if the transaction or its savepoint is rolled back."""
        # Without a transaction the tasks are committed already.
        if not (holders and connection.in_atomic_block):
            return
        if release not in self._acquired:
            self._acquired[release] = Acquired(self, connection, release)
        self._acquired[release].add(holders)

    def register(self, connection: BaseDatabaseWrapper) -> None:
        """Have the hook called after the commit; without a transaction it is called at once."""
        if not self._is_registered:
            self._is_registered = True
            # robust: a failed push must not turn a committed request into an error, nor skip other hooks. Django only
            # logs what a robust hook raises, and a developer must see that a test would use a foreign Redis.
            connection.on_commit(self, robust=not is_test_run())
