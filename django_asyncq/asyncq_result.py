"""`AsyncqResult`: what `enqueue` returns.

User code imports it before the app registry is ready, so it must not import models; each method imports what it needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast

from asgiref.sync import sync_to_async

from . import compat, conf
from .definitions.coroutine_errors import blocking
from .durations import Duration, is_duration, seconds_of
from .exceptions import InvalidOption

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:

    class _FrameworkResult(compat.TaskResult[P, R]):
        pass

else:

    class _FrameworkResult(compat.TaskResult, Generic[P, R]):
        __slots__ = ()


class LogLine(NamedTuple):
    """A line that a task has logged. attempt: from 1. level: a number, such as `logging.INFO`. logger: its name."""

    attempt: int
    logged_at: datetime
    level: int
    logger: str
    text: str

    @property
    def level_name(self) -> str:
        """The name of the level, such as "INFO"."""
        return logging.getLevelName(self.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncqResult(_FrameworkResult[P, R]):  # type: ignore[misc]
    """A task as its row was when it was read: a result of Django's framework, and what this backend adds.

    progress: what the task reported last with `context.progress`, as {"done", "total", "message", "data"}; None if
    nothing. A retry begins with None.
    is_new: of what `enqueue` returned: whether the call has made this task; False when an existing one stands for it,
    as with `on_duplicate="return"`. None of a result that was read.
    """

    progress: dict[str, Any] | None = None
    is_new: bool | None = field(default=None, compare=False)

    def refresh(self) -> None:
        """Read the row again; the progress of a running task from Redis, where it is newer."""
        self._take(self.task.get_backend().get_result(self.id))

    async def arefresh(self) -> None:
        """Read the row again, as `refresh` does."""
        self._take(await self.task.get_backend().aget_result(self.id))

    def logs(self) -> list[LogLine]:
        """Return the lines that the runs of this task have logged, oldest first: those that `keep_logs` keeps.

        A run's lines are there when it has finished; those of a run whose process died, when it is recovered.
        """
        lines: list[LogLine] = compat.task_backends[self.backend].logs(self)  # type: ignore[attr-defined]
        return lines

    async def alogs(self) -> list[LogLine]:
        """Return the lines, as `logs` does."""
        return await sync_to_async(self.logs)()

    @blocking("result.await_")
    def wait(self, timeout: Duration | None = None, *, allow_in_task: bool = False) -> R:
        """Sleep until the task has succeeded; return its value, and have this result show its row.

        timeout: seconds or a timedelta, 0 to look once; default ASYNCQ["WAIT_SECONDS"], 30 s. allow_in_task: also wait
        within a task, which keeps its slot meanwhile.
        Raises: TaskFailed when no attempt follows; WaitTimeout, and the task goes on; TaskResultDoesNotExist when the
        row was deleted; InvalidOption for a wait that could never return, as in the transaction that enqueued.
        """
        (value,) = _backend_of(self).wait([self], timeout, allow_in_task=allow_in_task)
        return cast("R", value)

    async def await_(self, timeout: Duration | None = None, *, allow_in_task: bool = False) -> R:
        """Do the same as `wait` without holding a thread; may be cancelled at any time."""
        (value,) = await _backend_of(self).wait_async([self], timeout, allow_in_task=allow_in_task)
        return cast("R", value)

    def _take(self, newer: Any) -> None:
        for name in (*compat.TASK_REFRESH_ATTRS, "progress"):
            object.__setattr__(self, name, getattr(newer, name))

    def cancel(self, reason: str = "") -> Literal["cancelled", "asked", "over"]:
        """Cancel the task, in the caller's transaction; after a rollback it never happened. reason: for its error.

        Returns: "cancelled": it fails as cancelled, and no run of it begins after the commit; "asked": it runs, and is
        asked to stop, but may still succeed; "over": it had finished.
        Raises: the framework's TaskResultDoesNotExist.
        """
        backend: Any = compat.task_backends[self.backend]
        word: Literal["cancelled", "asked", "over"] = backend.cancel(self, reason)
        return word

    async def acancel(self, reason: str = "") -> Literal["cancelled", "asked", "over"]:
        """Do what `cancel` does, in the thread that holds the caller's database connection."""
        return await sync_to_async(self.cancel, thread_sensitive=True)(reason)


@blocking("await_all")
def wait_all(
    results: Sequence[AsyncqResult[Any, R]], timeout: Duration | None = None, *, allow_in_task: bool = False
) -> list[R]:
    """Sleep until all tasks have succeeded; return their values in the order of the results, and refresh these.

    timeout: as of `AsyncqResult.wait`, for all together. Results of several aliases are waited for alias by alias.
    Raises: as `AsyncqResult.wait`, for the first task that is found to have failed; the others go on.
    """
    values: dict[str, Any] = {}
    for group, left in _by_alias(results, timeout):
        found = _backend_of(group[0]).wait(group, left, allow_in_task=allow_in_task)
        values.update(zip((result.id for result in group), found, strict=True))
    return [values[result.id] for result in results]


async def await_all(
    results: Sequence[AsyncqResult[Any, R]], timeout: Duration | None = None, *, allow_in_task: bool = False
) -> list[R]:
    """Do the same as `wait_all` without holding a thread."""
    values: dict[str, Any] = {}
    for group, left in _by_alias(results, timeout):
        found = await _backend_of(group[0]).wait_async(group, left, allow_in_task=allow_in_task)
        values.update(zip((result.id for result in group), found, strict=True))
    return [values[result.id] for result in results]


def _by_alias(
    results: Sequence[AsyncqResult[Any, Any]], timeout: Duration | None
) -> Iterator[tuple[list[AsyncqResult[Any, Any]], Duration | None]]:
    """Yield the results of each alias, and how long they may be waited for. Raises: InvalidOption."""
    groups: dict[str, list[AsyncqResult[Any, Any]]] = {}
    for result in results:
        _backend_of(result)
        groups.setdefault(result.backend, []).append(result)
    deadline = None
    for group in groups.values():
        if len(groups) == 1 or not (timeout is None or is_duration(timeout, or_zero=True)):
            yield group, timeout  # the backend refuses what is no duration
            continue
        if deadline is None:
            seconds = conf.current().wait_seconds if timeout is None else float(seconds_of(timeout))
            deadline = time.monotonic() + seconds
        yield group, max(deadline - time.monotonic(), 0.0)


def _backend_of(result: Any) -> Any:
    """Return the backend of a result. Raises: InvalidOption for one of a backend that is not of this package."""
    if not isinstance(result, AsyncqResult):
        raise InvalidOption(
            f"wait for {result!r}: it is no AsyncqResult, so its backend is not of django_asyncq. Remedy: for Django's "
            f"immediate backend read `result.return_value`; enqueue has run the task"
        )
    return compat.task_backends[result.backend]
