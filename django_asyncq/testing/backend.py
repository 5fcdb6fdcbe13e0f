"""The backend for a project's tests: rows as in production, nothing in Redis.

`TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend"}}` in the settings of the tests. Django creates it
while user modules are being imported, so it must not import models at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial as with_arguments
from typing import TYPE_CHECKING, Any, ClassVar

from asgiref.sync import sync_to_async

from ..backend import AsyncqBackend, Node, Option
from ..core import django_internals
from ..core.time import Duration
from ..tasks import Arguments

if TYPE_CHECKING:
    from .running import CommitsOfTestCase

MODES = ("store", "immediate")


def _memory_client(role: str) -> Any:
    """Return what answers in the place of Redis."""
    from .memory_broker import client

    return client(role)


class TestBackend(AsyncqBackend):
    """Stores tasks as rows, as `AsyncqBackend` does, and never connects to Redis; no option is dropped.

    OPTIONS, beside those of `AsyncqBackend`: `mode`. "store", the default: tasks stay QUEUED until `run_tasks` runs
    them. "immediate": a task that is due runs when it is enqueued, or in a transaction of the tested code after its
    commit; one with `run_after`, and a retry that is not due, stay for `run_tasks`. A test case's own transaction does
    not count: in a TestCase, what follows a commit is done when the outermost block of the tested code ends, and no
    `captureOnCommitCallbacks` lists it. A block without a savepoint is the exception.
    Admission limits (gates) are counted from the rows.
    """

    # Not a test case, whatever pytest makes of its name.
    __test__ = False

    client_factory: ClassVar[Callable[[str], Any] | None] = staticmethod(_memory_client)
    known_options: ClassVar[Mapping[str, Option]] = {
        **AsyncqBackend.known_options,
        "mode": Option(lambda value: value in MODES, 'Give "store" or "immediate".'),
    }

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        django_internals.commits_of = _commits_of

    def enqueue_many(self, task: Any, calls: Sequence[Arguments], *, partial: bool = False) -> list[Any]:
        """Enqueue many calls, all or none; in the mode "immediate" also run them.

        Raises: as `AsyncqBackend.enqueue`; what a task raises is in its result.
        """
        return self._run(with_arguments(super().enqueue_many, task, calls, partial=partial))

    def enqueue_steps(self, nodes: Sequence[Node]) -> list[Any]:
        """Do the same for calls that wait for each other."""
        return self._run(with_arguments(super().enqueue_steps, nodes))

    def _run(self, enqueue: Callable[[], list[Any]]) -> list[Any]:
        if self.options.get("mode") != "immediate":
            return enqueue()
        from .running import run_enqueued

        return run_enqueued(self.alias, enqueue)

    def cancel(self, result: Any, reason: str = "", *, wait: Duration | None = None) -> str:
        """Cancel the task of a result; outside a transaction of the tested code, a run of it learns of that at once."""
        from ..models import TaskRecord
        from ..storage.routing import is_in_transaction, writing_database
        from .running import as_in_autocommit

        if is_in_transaction(writing_database(TaskRecord)):
            return super().cancel(result, reason, wait=wait)
        with as_in_autocommit():
            return super().cancel(result, reason, wait=wait)

    def wait(self, results: Sequence[Any], timeout: Duration | None, *, allow_in_task: bool = False) -> list[Any]:
        """Run what is due, retries within the time to wait included, until the tasks have succeeded.

        Raises: as `AsyncqResult.wait`.
        """
        from ..observe.waits import checked_seconds
        from .running import run_until_finished

        return run_until_finished(self.alias, results, checked_seconds(timeout), allow_in_task=allow_in_task)

    async def wait_async(
        self, results: Sequence[Any], timeout: Duration | None, *, allow_in_task: bool = False
    ) -> list[Any]:
        """Do the same in the thread that has the caller's connections."""
        return await sync_to_async(self.wait)(results, timeout, allow_in_task=allow_in_task)


def _commits_of(connection: Any) -> CommitsOfTestCase | None:
    from .running import commits_of

    return commits_of(connection)
