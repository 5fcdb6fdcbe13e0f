"""Build what the page of a task shows, with secrets masked and long texts shortened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from .. import registry
from ..models import TaskRecord, TaskState
from . import display
from .code import known_task, parameter_names
from .redaction import mask_positional, mask_text

ATTEMPTS_SHOWN = 50


class Attempt(NamedTuple):
    """One attempt of a task. is_latest: its traceback is shown expanded."""

    number: int
    worker: str
    started: SafeString | str
    duration: str
    state: SafeString
    exception: str
    message: display.Excerpt
    traceback: display.Excerpt
    is_latest: bool


class Fact(NamedTuple):
    """A label and a value. is_code: show the value in a monospaced font, left to right."""

    label: str
    value: SafeString | str
    is_code: bool = False


class TaskPage:
    """The content of the page of one task. The template calls the methods it needs.

    whole: do not shorten long texts. may_retry: whether the user has the permission to retry.
    """

    def __init__(self, record: TaskRecord, now: datetime, *, whole: bool, may_retry: bool) -> None:
        self.record = record
        self.now = now
        self.whole = whole
        self.task = known_task(record.name)
        self.has_failed = record.state == TaskState.FAILED
        self.can_retry = may_retry and self.has_failed and self.task is not None
        self.is_removed = self.has_failed and self.task is None
        is_waiting = record.state == TaskState.QUEUED and self.task is None
        # Of this process, whose code may be older or newer than the workers'.
        self.missing = registry.why_missing(record.name) if self.is_removed or is_waiting else ""

    def state(self) -> SafeString:
        """Return the state, and when the task or its retry is due."""
        return display.state_element(self.record, self.now)

    def reason(self) -> str:
        """Return why the task is FAILED or RETRYING; "" in other states."""
        return str(self.record.get_reason_display()) if self.has_failed else ""

    def attempt_count(self) -> str:
        """Return how many attempts were made, of how many."""
        return display.attempt_count(self.record)

    def error(self) -> display.Excerpt | None:
        """Return the last error of a failed task as one text."""
        entries = self._entries()
        if not self.has_failed or not entries:
            return None
        last = entries[-1]
        line = display.error_line(str(last.get("exception", "")), str(last.get("message", "")))
        return display.excerpt(line, whole=self.whole)

    def attempts(self) -> list[Attempt]:
        """Return the latest attempts, newest first: the running or successful one, then those that failed."""
        shown = [*self._current(), *self._failed()]
        return shown if self.whole else shown[:ATTEMPTS_SHOWN]

    def attempts_not_shown(self) -> int:
        """Return how many earlier attempts are not shown."""
        return 0 if self.whole else max(0, len(self._entries()) + len(list(self._current())) - ATTEMPTS_SHOWN)

    def args(self) -> display.Excerpt:
        """Return the positional arguments as JSON. Those of parameters with a secret name are masked."""
        return self._json(mask_positional(self.record.args, parameter_names(self.task)))

    def kwargs(self) -> display.Excerpt:
        """Return the keyword arguments as JSON."""
        return self._json(self.record.kwargs)

    def return_value(self) -> display.Excerpt | None:
        """Return the return value of a successful task as JSON."""
        return self._json(self.record.return_value) if self.record.state == TaskState.SUCCEEDED else None

    def progress(self) -> display.Excerpt | None:
        """Return the progress the task reported last, as JSON."""
        return None if self.record.progress is None else self._json(self.record.progress)

    def times(self) -> list[Fact]:
        """Return the times that are set."""
        record = self.record
        listed = [
            (_("Enqueued"), record.enqueued_at),
            (_("Not before"), record.run_after),
            (_("First started"), record.started_at),
            (_("Last started"), record.last_attempted_at),
            (_("Retry due"), record.retry_at),
            (_("Finished"), record.finished_at),
        ]
        return [Fact(label, display.time_element(value, self.now)) for label, value in listed if value]

    def facts(self) -> list[Fact]:
        """Return the other columns of the row."""
        record = self.record
        limit = "" if record.queue_limit is None else str(record.queue_limit)
        listed = [
            (_("Id"), str(record.id), True),
            (_("Task"), record.name, True),
            (_("Backend"), record.backend, True),
            (_("Queue"), record.queue_name, True),
            (_("Priority"), str(record.priority), False),
            (_("Timeout"), _seconds(record.timeout_seconds), False),
            (_("Gate (admission limit)"), record.gate, True),
            (_("Gate limit set by the task"), limit, False),
            (_("Expected duration"), _seconds(record.expected_seconds), False),
            (_("Group"), record.group, True),
            (_("Last worker"), self._last_worker(), True),
            (_("Runs alone next"), _("Yes: its worker died together with others") if record.is_suspect else "", False),
            (_("Fence"), str(record.fence), False),
        ]
        return [Fact(*fact) for fact in listed if fact[1]]

    def _entries(self) -> Sequence[dict[str, Any]]:
        """Return the entries of failed attempts, oldest first. Skip anything else the column may hold."""
        errors = self.record.errors
        return [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []

    def _last_worker(self) -> str:
        workers = self.record.worker_ids
        return str(workers[-1]) if isinstance(workers, list) and workers else ""

    def _current(self) -> Iterator[Attempt]:
        """Yield the running or successful attempt, which has no error entry."""
        record = self.record
        if record.state not in (TaskState.RUNNING, TaskState.SUCCEEDED):
            return
        started = record.last_attempted_at
        nothing = display.Excerpt("", 0)
        yield Attempt(
            number=record.attempt,
            worker=self._last_worker(),
            started=display.time_element(started, self.now),
            duration=_between(started, record.finished_at or self.now),
            state=display.state_badge(record.state),
            exception="",
            message=nothing,
            traceback=nothing,
            is_latest=True,
        )

    def _failed(self) -> Iterator[Attempt]:
        """Yield the failed attempts, newest first."""
        entries = self._entries()
        for position, entry in enumerate(reversed(entries)):
            started = display.parse_time(entry.get("started_at"))
            yield Attempt(
                number=entry["attempt"] if isinstance(entry.get("attempt"), int) else len(entries) - position,
                worker=str(entry.get("worker") or ""),
                started=display.time_element(started, self.now),
                duration=_between(started, display.parse_time(entry.get("failed_at"))),
                state=display.state_badge(TaskState.FAILED),
                exception=str(entry.get("exception", "")),
                message=display.excerpt(mask_text(str(entry.get("message") or "")), whole=self.whole),
                traceback=display.excerpt(mask_text(str(entry.get("traceback") or "")), whole=self.whole),
                is_latest=position == 0 and self.has_failed,
            )

    def _json(self, value: Any) -> display.Excerpt:
        return display.excerpt(display.json_text(value), whole=self.whole)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else display.duration(seconds)


def _between(start: datetime | None, end: datetime | None) -> str:
    if start is None or end is None:
        return ""
    return display.duration((display.aware(end) - display.aware(start)).total_seconds())
