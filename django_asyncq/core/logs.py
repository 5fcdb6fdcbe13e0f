"""The keys that a log line about a task has in its `extra`, and the filter that adds them.

Needs no Django, so LOGGING may name the filter before any app is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from .headers import trace_id_of

if TYPE_CHECKING:
    from ..models import TaskRecord

__all__ = ["TaskLogFilter"]

PACKAGE_LOGGER = "django_asyncq"
RUN_LOGGER = "django_asyncq.runs"
# Of Django's tasks framework, and of its backport.
FRAMEWORK_LOGGERS = ("django.tasks", "django_tasks")
# A line about several tasks names this many: an outage may concern thousands.
IDS_IN_A_LINE = 100

# The row of the run that a thread or coroutine works for; asgiref and asyncio take it along to other threads.
running: ContextVar[TaskRecord | None] = ContextVar("django_asyncq_running", default=None)
# The row that lines are about which are logged after the body, such as that of its failure.
_about: ContextVar[TaskRecord | None] = ContextVar("django_asyncq_about", default=None)


class CurrentTask(NamedTuple):
    """The task whose body runs: the five keys that every log line about one task has in its `extra`.

    task_id: the id of the row. task: the path of the function. queue: the name of its queue. attempt: from 1.
    trace_id: the trace of its headers `traceparent`, `trace-id` or `x-request-id`; without one, its own id.
    """

    task_id: str
    task: str
    queue: str
    attempt: int
    trace_id: str


def current_task() -> CurrentTask | None:
    """Return the task whose body the caller is part of; None outside of a run.

    It is known in the thread or coroutine of the run, in what it awaits, and in threads that `sync_to_async` and
    `asyncio.to_thread` use for it. A thread that the body starts by itself does not know it.
    """
    record = running.get()
    return None if record is None else _task_of(record)


def enter_run(record: TaskRecord) -> None:
    """Note that the body of a task begins in this context."""
    running.set(record)


def leave_run() -> None:
    """Note that the body has returned, or raised."""
    running.set(None)


class about:
    """Let the secrets of a task be masked in lines that are logged in the block, as in those of its body."""

    __slots__ = ("_record", "_token")

    def __init__(self, record: TaskRecord) -> None:
        self._record = record

    def __enter__(self) -> None:
        self._token = _about.set(self._record)

    def __exit__(self, *error: object) -> None:
        _about.reset(self._token)


def about_to_log(record: TaskRecord) -> None:
    """Do the same for the rest of this context, which is a copy that ends soon."""
    _about.set(record)


def record_in_question() -> TaskRecord | None:
    """Return the row of the task that the caller logs about, or whose body it is part of; None for others."""
    return _about.get() or running.get()


def log_extra(*records: TaskRecord) -> dict[str, object]:
    """Return the `extra` of a log line about tasks: the five keys for one, `task_ids` for several.

    task_ids: list of str, at most 100.
    """
    if len(records) == 1:
        return _task_of(records[0])._asdict()
    return {"task_ids": [str(record.id) for record in records[:IDS_IN_A_LINE]]}


def log_extra_of_ids(ids: Sequence[str], **more: object) -> dict[str, object]:
    """Return the `extra` of a log line about tasks whose rows are not at hand. more: what else is known of all."""
    about = {"task_id": ids[0]} if len(ids) == 1 else {"task_ids": list(ids[:IDS_IN_A_LINE])}
    return {**about, **more}


def _task_of(record: TaskRecord) -> CurrentTask:
    id = str(record.id)
    trace_id = trace_id_of(record.headers) if record.headers else None
    return CurrentTask(id, record.name, record.queue_name, record.attempt, trace_id or id)


def is_about_a_run() -> bool:
    """Whether what is logged now says how a run has failed."""
    return _about.get() is not None


def lowered(line: logging.LogRecord, level: int) -> bool:
    """Give a line a lower level; return whether its logger takes it then."""
    line.levelno, line.levelname = level, logging.getLevelName(level)
    return logging.getLogger(line.name).isEnabledFor(level)


class FrameworkFilter(logging.Filter):
    """Lower the framework's own line about a final failure to INFO: this package has logged it, with its traceback.

    An error monitor, which counts ERROR lines, would count each failure twice.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the logger takes the line. That of a task of another backend stays as it is."""
        if record.levelno != logging.ERROR or not is_about_a_run():
            return True
        record.exc_info = None
        return lowered(record, logging.INFO)


for framework_logger in FRAMEWORK_LOGGERS:
    logging.getLogger(framework_logger).addFilter(FrameworkFilter())


class TaskLogFilter(logging.Filter):
    """Add `task_id`, `task`, `queue`, `attempt` and `trace_id` to each line that passes a handler; it refuses no line.

    A line that is written while a task's body runs gets those of the task; a line with a key of its own keeps it.
    default: what the keys are outside of a run.
    """

    def __init__(self, default: object = None) -> None:
        super().__init__()
        self.default = default

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the keys that the line lacks."""
        current = current_task()
        # A line about another task than the one that runs here is not given the keys of this one.
        if current is not None and getattr(record, "task_id", current.task_id) != current.task_id:
            current = None
        for key in CurrentTask._fields:
            if not hasattr(record, key):
                setattr(record, key, self.default if current is None else getattr(current, key))
        return True
