"""One call after the commit for all that a transaction has changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from django.db.backends.base.base import BaseDatabaseWrapper

from ..django_internals import last_commit_hook
from ..models import TaskRecord
from ..test_run import is_test_run


class CommitHook(ABC):
    """Collects the tasks that one transaction changed, and follows up once after its commit."""

    def __init__(self) -> None:
        self.records: list[TaskRecord] = []
        self._is_registered = False

    @abstractmethod
    def __call__(self) -> None:
        """Follow up. Called once, after the commit."""

    @classmethod
    def of_transaction(cls, connection: BaseDatabaseWrapper) -> Self:
        """Return the hook of this kind that the current transaction or savepoint registered last, or a new one."""
        hook = last_commit_hook(connection)
        # Not isinstance: a hook of a subclass does something else.
        return hook if type(hook) is cls else cls()

    def register(self, connection: BaseDatabaseWrapper) -> None:
        """Have the hook called after the commit; without a transaction it is called at once."""
        if not self._is_registered:
            self._is_registered = True
            # robust: a failed push must not turn a committed request into an error, nor skip other hooks. Django only
            # logs what a robust hook raises, and a developer must see that a test would use a foreign Redis.
            connection.on_commit(self, robust=not is_test_run())
