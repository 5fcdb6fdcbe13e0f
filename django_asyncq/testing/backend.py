"""The backend for a project's tests: rows as in production, nothing in Redis.

`TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend"}}` in the settings of the tests. Django creates it
while user modules are being imported, so it must not import models at the top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..backend import AsyncqBackend, Option
from ..tasks import Arguments

MODES = ("store", "immediate")


class TestBackend(AsyncqBackend):
    """Stores tasks as rows, as `AsyncqBackend` does, and never connects to Redis; no option is dropped.

    OPTIONS, beside those of `AsyncqBackend`: `mode`. "store", the default: tasks stay QUEUED until `run_tasks` runs
    them. "immediate": a task that is due runs when it is enqueued, or in a transaction of the tested code after its
    commit; one with `run_after`, and a retry that is not due, stay for `run_tasks`. A test case's own transaction does
    not count: in a TestCase, `captureOnCommitCallbacks(execute=True)` runs what waits for a commit.
    Admission limits (gates) are counted from the rows.
    """

    # Not a test case, whatever pytest makes of its name.
    __test__ = False

    uses_redis = False
    known_options: ClassVar[Mapping[str, Option]] = {
        **AsyncqBackend.known_options,
        "mode": Option(lambda value: value in MODES, 'Give "store" or "immediate".'),
    }

    def enqueue_many(self, task: Any, calls: Sequence[Arguments], *, partial: bool = False) -> list[Any]:
        """Enqueue many calls, all or none; in the mode "immediate" also run them.

        Raises: as `AsyncqBackend.enqueue`; what a task raises is in its result.
        """
        if self.options.get("mode") != "immediate":
            return super().enqueue_many(task, calls, partial=partial)
        from .running import run_enqueued

        def enqueue() -> list[Any]:
            return super(TestBackend, self).enqueue_many(task, calls, partial=partial)

        return run_enqueued(self.alias, enqueue)
