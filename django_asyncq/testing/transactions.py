"""What a test case's transaction keeps from happening: commits, and the hooks that wait for them.

In a worker a body runs in autocommit. In a TestCase it runs within the transaction of the test, so each body gets a
savepoint, and its hooks are called when a worker's commit would have called them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import Error as DatabaseError
from django.db import connections, transaction

from ..django_internals import discard_commit_hooks, last_hook_number, leave_blocks, open_blocks, run_commit_hooks
from ..models import TaskRecord
from ..storage.routing import transaction_of, writing_database


class BodyTransactions:
    """The savepoints of one body, one for each database in which the caller has a transaction.

    Low-level savepoints, because Django refuses a durable block within an atomic one.
    """

    def __init__(self) -> None:
        open_aliases = [each.alias for each in connections.all(initialized_only=True) if each.in_atomic_block]
        self._savepoints = {alias: _create_savepoint(alias) for alias in open_aliases}
        self._blocks = {alias: open_blocks(connections[alias]) for alias in open_aliases}
        self._first_hooks = {alias: _separate_hooks(alias) for alias in open_aliases}

    def finish(self) -> None:
        """Keep what the body has written, as autocommit would, and call its hooks.

        Where a database error broke the transaction, nothing can be kept: it is rolled back to the beginning of the
        body. Raises: what a hook raises.
        """
        for alias, savepoint in self._savepoints.items():
            # What was never committed; a worker closes the connection.
            leave_blocks(connections[alias], self._blocks[alias])
            if not _release(alias, savepoint):
                discard_commit_hooks(connections[alias], self._first_hooks[alias])
        for alias in self._savepoints:
            _run_hooks(alias, self._first_hooks[alias])

    def holds(self, alias: str) -> bool:
        """Whether the caller has a transaction open in a database."""
        return alias in self._savepoints

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Open the transaction that completes a run; its hooks have run when it is left, as after a commit.

        What it has written is kept whatever the rest of the body does.
        """
        database = writing_database(TaskRecord)
        if not self.holds(database):
            with transaction_of(TaskRecord, durable=True):
                yield
            return
        first_hook = _separate_hooks(database)
        with transaction_of(TaskRecord, durable=True):
            yield
            # A commit would check the deferred foreign keys, and fail.
            connections[database].check_constraints()
        transaction.savepoint_commit(self._savepoints[database], database)
        self._savepoints[database] = _create_savepoint(database)
        _run_hooks(database, first_hook)


@contextmanager
def as_in_autocommit() -> Iterator[None]:
    """Keep what the block writes, and call its commit hooks when it is left, also in the transaction of a test case."""
    transactions = BodyTransactions()
    try:
        yield
    finally:
        transactions.finish()


def _separate_hooks(alias: str) -> int:
    """Register a hook that does nothing, and return its number; `_run_hooks` runs those after it.

    It keeps a hook that was registered before from collecting more: that one runs at another time, or has run.
    """
    number = last_hook_number(connections[alias])
    transaction.on_commit(_do_nothing, using=alias)
    return number


def _do_nothing() -> None:
    pass


def _run_hooks(alias: str, number: int) -> None:
    """Run the hooks after the one that `_separate_hooks` has registered, each as in autocommit; forget that one too."""
    try:
        run_commit_hooks(connections[alias], number + 1, as_in_autocommit)
    finally:
        discard_commit_hooks(connections[alias], number)


def _create_savepoint(alias: str) -> str:
    # Django 6.1 has renamed it, and warns about the old name; remove when 5.2 is no longer supported.
    create: Callable[[str], str] | None = getattr(transaction, "savepoint_create", None)
    return create(alias) if create is not None else transaction.savepoint(alias)


def _release(alias: str, savepoint: str) -> bool:
    """Release a savepoint; roll back to it if the transaction is broken, and return False."""
    if not transaction.get_rollback(alias):
        try:
            transaction.savepoint_commit(savepoint, alias)
            return True
        except DatabaseError:
            pass
    transaction.set_rollback(False, alias)
    transaction.savepoint_rollback(savepoint, alias)
    return False
