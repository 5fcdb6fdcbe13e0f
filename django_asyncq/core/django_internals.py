"""The parts of Django without documentation that this package uses. Nothing else in the package may touch them.

Each function says why it is needed and when it can be removed. Imports only `guard` of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from .guard import get_logger

logger = get_logger("django_asyncq.testing")


def last_commit_hook(connection: BaseDatabaseWrapper) -> Callable[[], Any] | None:
    """Return the hook that was registered last, if that was in the current transaction or savepoint.

    Uses `run_on_commit`, so that all tasks of a transaction are pushed with one script call. A savepoint that is rolled
    back discards its hooks, so a hook may be shared only within one savepoint.
    Remove when Django offers a way to look up or to merge the hooks of a transaction.
    """
    if not (connection.in_atomic_block and connection.run_on_commit):
        return None
    savepoints, hook, *_ = connection.run_on_commit[-1]
    return hook if savepoints == set(connection.savepoint_ids) else None


def waiting_commit_hooks(connection: BaseDatabaseWrapper, *, of_project_only: bool = False) -> list[Callable[[], Any]]:
    """Return the hooks that wait for the commit of the open transaction, those of released savepoints too.

    of_project_only: not those that only the transaction of a test case around the project's keeps waiting.
    Uses `run_on_commit`, `savepoint_ids`, `atomic_blocks` and `_from_testcase`, so that a wait which could never return
    is refused. The hooks of a test case stay on the list until the test ends, as its transaction never commits.
    Remove when Django offers a way to look up the hooks of a transaction.
    """
    hooks = list(connection.run_on_commit)
    around = _blocks_of_test_case(connection)
    if of_project_only and around:
        if len(connection.atomic_blocks) <= around:
            return []
        # The outermost block has no savepoint, so the project's outermost one follows after one fewer.
        outermost = connection.savepoint_ids[around - 1]
        hooks = [entry for entry in hooks if outermost in entry[0]]
    return [hook for _, hook, *_ in hooks]


def _blocks_of_test_case(connection: BaseDatabaseWrapper) -> int:
    return sum(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)


class Commits(Protocol):
    """What stands for the commits of a connection within the transaction of a test case."""

    @property
    def hooks(self) -> Sequence[Callable[[], Any]]:
        """Those that wait."""

    def last_hook(self) -> Callable[[], Any] | None:
        """Return the hook that was added last, if that was in the current block."""

    def add(self, hook: Callable[[], Any]) -> None:
        """Have a hook called when production would commit."""


# Set by the test kit: returns None where Django calls the hooks.
commits_of: Callable[[BaseDatabaseWrapper], Commits | None] | None = None


def savepoint_of_project(connection: BaseDatabaseWrapper) -> str | None:
    """Return the savepoint of the project's outermost block within the transaction of a test case.

    "" where the project has no block open. None outside a test case, and where the block has no savepoint.
    Uses `savepoint_ids`, `atomic_blocks` and `_from_testcase`, as `waiting_commit_hooks` says.
    """
    around = _blocks_of_test_case(connection)
    if not around:
        return None
    # The outermost block has no savepoint, so the project's outermost one follows after one fewer.
    return connection.savepoint_ids[around - 1] if len(connection.atomic_blocks) > around else ""


def open_savepoints(connection: BaseDatabaseWrapper) -> set[str]:
    """Return the savepoints of the `atomic` blocks that are open. Uses `savepoint_ids`, as `last_commit_hook` says."""
    return {savepoint for savepoint in connection.savepoint_ids if savepoint is not None}


def outer_wrappers(connection: BaseDatabaseWrapper) -> list[Any]:
    """Return the wrappers of the statements of a connection, the outermost first.

    Uses `execute_wrappers`: the documented `execute_wrapper` is a block, and the last to begin must be the first to
    end. The blocks of a test begin and end while a hook waits.
    Remove when Django can remove one wrapper.
    """
    wrappers: list[Any] = connection.execute_wrappers
    return wrappers


def may_have_committed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether hooks that are dropped now may belong to a transaction that is committed, or will be.

    Uses `errors_occurred`. When the reply to a COMMIT is lost, Django closes the connection, and drops the hooks as it
    does after a rollback. The server may be committing meanwhile. Only then there was an error that no successful
    rollback has followed, and no transaction or savepoint is open.
    Remove when Django calls a hook whose transaction was rolled back.
    """
    return connection.errors_occurred and not connection.in_atomic_block


def open_blocks(connection: BaseDatabaseWrapper) -> int:
    """Return how many `atomic` blocks are open. Uses `atomic_blocks`, as `leave_blocks` says."""
    return len(connection.atomic_blocks)


def leave_blocks(connection: BaseDatabaseWrapper, count: int) -> None:
    """Leave the innermost `atomic` blocks until `count` are open, as an error in them would.

    Uses `atomic_blocks`: code that has entered a block by hand and never left it is found in no other way, and all that
    follows on the connection would be within the block.
    Remove when Django closes what a block leaves open within it.
    """
    while len(connection.atomic_blocks) > count:
        error = RuntimeError("a task has left a transaction open")
        connection.atomic_blocks[-1].__exit__(RuntimeError, error, None)


def last_hook_number(connection: BaseDatabaseWrapper) -> int:
    """Return how many commit hooks wait on a connection. Uses `run_on_commit`, as `run_commit_hooks` says."""
    return len(connection.run_on_commit)


def run_commit_hooks(
    connection: BaseDatabaseWrapper, first: int, surroundings: Callable[[], AbstractContextManager[None]]
) -> None:
    """Call the commit hooks of a test case's transaction from a number on, and those that they register; forget them.

    surroundings: in which each hook is called.
    Raises: what a hook raises that is not robust, as a commit does; the hooks after it are forgotten.
    Uses `run_on_commit`: Django's `captureOnCommitCallbacks` calls the same hooks, but leaves them there, so one
    that is nested in another would have them called twice.
    Remove when Django has a public way to call the hooks of a test's transaction once.
    """
    try:
        while len(connection.run_on_commit) > first:
            entry: Any = connection.run_on_commit.pop(first)
            _, hook, is_robust = entry
            if is_robust:
                try:
                    with surroundings():
                        hook()
                except Exception:
                    logger.exception("a robust commit hook failed")
            else:
                with surroundings():
                    hook()
    finally:
        discard_commit_hooks(connection, first)


def discard_commit_hooks(connection: BaseDatabaseWrapper, first: int) -> None:
    """Forget the commit hooks from a number on, as a rollback does.

    Uses `run_on_commit`, as `run_commit_hooks` says.
    """
    del connection.run_on_commit[first:]


def delete_rows(rows: QuerySet[Any], database: str) -> None:
    """Delete rows with one DELETE statement: no signals, no cascades.

    Uses `_raw_delete`: a receiver of `post_delete` is connected, so `delete()` would load every row with all columns.
    Remove when Django has a public DELETE of a queryset without signals.
    """
    rows._raw_delete(database)
