"""Look at what a test has enqueued, in the rows: with every backend, in every state, before any commit.

The functions use the database, so they are called where a test may use it, and not from a coroutine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from ..core import compat, payload
from ..core.after import checked_after, edges_of
from ..core.typed import carry_of
from ..exceptions import InvalidOption
from ..models import TaskEdge, TaskRecord
from ..results import result_of
from ..storage.routing import rows_of
from ..tasks import Arguments

RUN_AFTER_TOLERANCE = timedelta(seconds=1)
# In the message of a failed assertion: lines, and characters of each.
MOST_LINES = 20
LONGEST_LINE = 300


def enqueued(task: Any = None) -> list[compat.TaskResult[Any, Any]]:
    """Return the results of all tasks in the database, in any state, in the order in which they were enqueued.

    task: what `@task` has returned; only its calls are then returned.
    """
    return [result_of(record) for record in _records(task)]


def assert_enqueued(
    task: Any,
    /,
    *args: Any,
    count: int = 1,
    queue: str | None = None,
    run_after: datetime | timedelta | None = None,
    after: Any = None,
    **kwargs: Any,
) -> list[compat.TaskResult[Any, Any]]:
    """Check that a task was enqueued exactly `count` times with these arguments; return the results.

    args, kwargs: as they were given to `enqueue`; without any, the arguments do not matter. In place of them,
        `task.arguments(…)` may be given: for a call without arguments, and for parameters that are called `count`,
        `queue`, `run_after` or `after`.
    queue, run_after: of the calls that count; None for any. run_after: within a second; a timedelta counts from the
        moment of the enqueue.
    after: the results that it waits for, or waited for: all of them, and no others. A list of them, or as in
        `using(after={…})` with the names of the parameters that get their values; an empty list: it waits for none.
    Raises: AssertionError, which lists what was enqueued instead; InvalidOption for a naive `run_after` and for
    what is no result in `after`; InvalidArguments.
    """
    __tracebackhide__ = True
    return _check(_Call(task, args, kwargs, queue, run_after, after), count, _records())


def assert_not_enqueued(
    task: Any,
    /,
    *args: Any,
    queue: str | None = None,
    run_after: datetime | timedelta | None = None,
    after: Any = None,
    **kwargs: Any,
) -> None:
    """Check that no call of a task with these arguments was enqueued. The arguments are those of `assert_enqueued`.

    Raises: as `assert_enqueued`.
    """
    __tracebackhide__ = True
    _check(_Call(task, args, kwargs, queue, run_after, after), 0, _records())


@contextmanager
def assert_enqueues(
    task: Any,
    /,
    *args: Any,
    count: int = 1,
    queue: str | None = None,
    run_after: datetime | timedelta | None = None,
    after: Any = None,
    **kwargs: Any,
) -> Iterator[list[compat.TaskResult[Any, Any]]]:
    """Check that the block enqueues a task exactly `count` times; what was enqueued before does not count.

    The other arguments are those of `assert_enqueued`. Gives a list, which has the results after the block.
    An error in the block passes, and nothing is checked. Raises: as `assert_enqueued`.
    """
    __tracebackhide__ = True
    call = _Call(task, args, kwargs, queue, run_after, after)
    before: set[UUID] = set(rows_of(TaskRecord).values_list("id", flat=True))
    results: list[compat.TaskResult[Any, Any]] = []
    yield results
    results += _check(call, count, [record for record in _records() if record.id not in before])


class _Call:
    """The calls that an assertion is about."""

    def __init__(
        self,
        task: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        queue: str | None,
        run_after: datetime | timedelta | None,
        after: Any,
    ) -> None:
        if not hasattr(task, "module_path"):
            raise InvalidOption(f"{task!r} is no task: give what @task has returned")
        if isinstance(run_after, datetime) and run_after.utcoffset() is None:
            raise InvalidOption(f"run_after={run_after!r} is not valid: give an aware datetime, or a timedelta")
        is_whole = len(args) == 1 and isinstance(args[0], Arguments) and not kwargs
        self.task = task
        self.given: payload.Payload | None = None
        if is_whole:
            args, kwargs = args[0].args, args[0].kwargs
        if is_whole or args or kwargs:
            self.given = payload.of_call(args, kwargs, carry=carry_of(task))
        self.queue = queue
        self.run_after = run_after
        self.edges: set[tuple[UUID, str, int]] | None = None
        if after is not None:
            found = edges_of(task, checked_after(after))
            self.edges = {(edge.parent.id, edge.name, edge.position) for edge in found}
        # Without names it does not matter which parameters get the values.
        self.is_named = isinstance(after, Mapping)

    def matches(self, record: TaskRecord) -> bool:
        """Whether a row is one of these calls."""
        if record.name != self.task.module_path or self.queue not in (None, record.queue_name):
            return False
        if self.given is not None and not payload.is_same([record.args, record.kwargs], list(self.given)):
            return False
        if self.run_after is not None and not _starts_at(record, self.run_after):
            return False
        return self.edges is None or self._waits_for(record)

    def _waits_for(self, record: TaskRecord) -> bool:
        rows = rows_of(TaskEdge).filter(child_id=record.id).order_by()
        found = set(rows.values_list("parent_id", "name", "position"))
        if self.is_named:
            return found == self.edges
        return {parent for parent, *_ in found} == {parent for parent, *_ in self.edges or ()}

    def __str__(self) -> str:
        shown = "…" if self.given is None else _shown(*self.given)
        more = [f"queue={self.queue!r}"] if self.queue is not None else []
        if self.run_after is not None:
            more.append(f"run_after={self.run_after}")
        if self.edges is not None:
            more.append(f"after={sorted({str(parent) for parent, *_ in self.edges})}")
        return f"{self.task.module_path}({shown}){' with ' + ', '.join(more) if more else ''}"


def _starts_at(record: TaskRecord, run_after: datetime | timedelta) -> bool:
    if record.run_after is None:
        return False
    expected = record.enqueued_at + run_after if isinstance(run_after, timedelta) else run_after
    is_near: bool = abs(record.run_after - expected) <= RUN_AFTER_TOLERANCE
    return is_near


def _records(task: Any = None) -> list[TaskRecord]:
    # The ids of one process rise, also those of one millisecond.
    rows = rows_of(TaskRecord).order_by("id")
    return list(rows if task is None else rows.filter(name=task.module_path))


def _check(call: _Call, count: int, records: Sequence[TaskRecord]) -> list[compat.TaskResult[Any, Any]]:
    __tracebackhide__ = True
    found = [record for record in records if call.matches(record)]
    if len(found) != count:
        raise AssertionError(f"{call} was enqueued {_times(len(found))}, not {_times(count)}.\n{_listed(records)}")
    return [result_of(record) for record in found]


def _times(count: int) -> str:
    return f"{count} time" if count == 1 else f"{count} times"


def _listed(records: Sequence[TaskRecord]) -> str:
    """Return the text of each row, or of the last ones if there are many."""
    if not records:
        return "Nothing was enqueued."
    skipped = len(records) - MOST_LINES
    lines = [f"  … and {skipped} before these"] if skipped > 0 else []
    return "\n".join(["Enqueued were:", *lines, *(_line(record) for record in records[-MOST_LINES:])])


def _line(record: TaskRecord) -> str:
    when = f", run_after={record.run_after}" if record.run_after is not None else ""
    options = f"queue={record.queue_name!r}{when}, {record.get_state_display()}"
    return f"  {record.name}({_shown(record.args, record.kwargs)}) with {options}"


def _shown(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    text = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
    return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE - 1]}…"
