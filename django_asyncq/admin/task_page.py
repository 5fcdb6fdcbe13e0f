"""Build what the page of a task shows, with secrets masked and long texts shortened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import QuerySet
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from .. import registry
from ..definitions.exception_text import class_path
from ..definitions.progress import shown_progress
from ..exceptions import TaskCancelled, TaskExpired
from ..masking import masker_of
from ..models import FailureReason, TaskLogLine, TaskRecord, TaskState
from ..storage.routing import rows_of
from . import display
from .code import known_task

ATTEMPTS_SHOWN = 50
# Masking takes a second for each megabyte: a task may have thousands of lines of 2 KiB for each of its attempts.
LOG_LINES_SHOWN = 200
CLOSED = (class_path(TaskCancelled()), class_path(TaskExpired()))


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


class Progress(NamedTuple):
    """The progress of a task. text: both numbers. data: None if there is none."""

    done: float
    total: float | None
    text: str
    message: display.Excerpt
    data: display.Excerpt | None


class TaskPage:
    """The content of the page of one task. The template calls the methods it needs.

    whole: do not shorten long texts.
    """

    def __init__(self, record: TaskRecord, now: datetime, *, whole: bool) -> None:
        self.record = record
        self.now = now
        self.whole = whole
        self.task = known_task(record.name)
        self.masker = masker_of(record)
        self.has_failed = record.state == TaskState.FAILED
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

    def cancel(self) -> SafeString | str:
        """Say when a cancel was asked for, by whom and why, and what became of it; "" if none was."""
        record = self.record
        if record.cancel_requested_at is None:
            return ""
        if record.reason == FailureReason.CANCELLED:
            template = _("Cancelled {}.")
        elif record.state == TaskState.SUCCEEDED:
            template = _("A cancel was asked for {}. The task succeeded before it noticed.")
        elif record.is_final:
            template = _("A cancel was asked for {}. The task failed for another reason before it noticed.")
        else:
            template = _("A cancel was asked for {}. The task may still succeed.")
        at = display.time_element(record.cancel_requested_at, self.now)
        by = self.masker.text(record.cancelled_by)
        return format_html(template, format_html("{} (<bdi>{}</bdi>)", at, by) if by else at)

    def attempt_count(self) -> str:
        """Return how many attempts were made, of how many."""
        return display.attempt_count(self.record)

    def error(self) -> display.Excerpt | None:
        """Return the last error of a failed task as one text."""
        entries = self._entries()
        if not self.has_failed or not entries:
            return None
        last = entries[-1]
        line = display.error_line(str(last.get("exception", "")), self.masker.text(str(last.get("message", ""))))
        return display.excerpt(line, whole=self.whole)

    def attempts(self) -> list[Attempt]:
        """Return the latest attempts, newest first: the running or successful one, then those that failed."""
        shown = [*self._current(), *self._failed()]
        return shown if self.whole else shown[:ATTEMPTS_SHOWN]

    def attempts_not_shown(self) -> int:
        """Return how many earlier attempts are not shown."""
        return 0 if self.whole else max(0, len(self._runs()) + len(list(self._current())) - ATTEMPTS_SHOWN)

    def args(self) -> display.Excerpt:
        """Return the positional arguments as JSON. Those of parameters with a secret name are masked."""
        if not self.record.args:
            return display.Excerpt(_("none"), 0)
        return self._json(self.masker.positional(self.record.args))

    def kwargs(self) -> display.Excerpt:
        """Return the keyword arguments as JSON."""
        return (
            self._json(self.masker.keyword(self.record.kwargs)) if self.record.kwargs else display.Excerpt(_("none"), 0)
        )

    def return_value(self) -> display.Excerpt | None:
        """Return the return value of a successful task as JSON."""
        if self.record.state != TaskState.SUCCEEDED:
            return None
        return self._json(self.masker.result(self.record.return_value))

    def progress(self) -> Progress | None:
        """Return the progress the task reported last, as its row has it."""
        shown = shown_progress(self.record.progress)
        if shown is None:
            return None
        text = f"{shown['done']:,}" if shown["total"] is None else f"{shown['done']:,} / {shown['total']:,}"
        message = self.masker.text(str(shown["message"]))
        data = self._json(self.masker.data(shown["data"])) if shown["data"] else None
        return Progress(shown["done"], shown["total"], text, display.excerpt(message, whole=self.whole), data)

    def log_lines(self) -> display.Excerpt | None:
        """Return the latest lines that the task has logged, oldest first, as one text; their secrets are masked."""
        lines = self._log().order_by("-fence", "-number")
        texts = [
            f"{display.plain_time(each.logged_at)} {logging.getLevelName(each.level)} {each.logger}: {each.text}"
            for each in (lines if self.whole else lines[:LOG_LINES_SHOWN])
        ]
        return display.excerpt(self.masker.text("\n".join(reversed(texts))), whole=self.whole) if texts else None

    def log_lines_not_shown(self) -> int:
        """Return how many earlier lines are not shown."""
        return 0 if self.whole else max(0, self._log().count() - LOG_LINES_SHOWN)

    def times(self) -> list[Fact]:
        """Return the times that are set."""
        record = self.record
        listed = [
            (_("Enqueued"), record.enqueued_at),
            (_("Not before"), record.run_after),
            (_("First started"), record.started_at),
            (_("Last started"), record.last_attempted_at),
            (_("Retry due"), record.retry_at),
            (_("Must begin before"), record.expires_at),
            (_("Deadline"), record.deadline),
            (_("Cancel asked for"), record.cancel_requested_at),
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
            (_("Soft timeout"), _seconds(record.soft_timeout_seconds), False),
            (_("Gate (admission limit)"), record.gate, True),
            (_("Gate limit set by the task"), limit, False),
            (_("Expected duration"), _seconds(record.expected_seconds), False),
            (_("Unique"), self._unique(), False),
            (_("Runs after the task"), "" if record.after_id is None else str(record.after_id), True),
            (_("Copy with new arguments of"), self._link(record.retried_from), True),
            (_("Group"), record.group, True),
            (_("Runs in the batch"), "" if record.batch_id is None else str(record.batch_id), True),
            (_("Calls in the batch"), "" if record.waits_for is None else str(record.waits_for), False),
            (_("Last worker"), self._last_worker(), True),
            (_("Runs alone next"), _("Yes: its worker died together with others") if record.is_suspect else "", False),
            (_("Fence"), str(record.fence), False),
        ]
        return [Fact(*fact) for fact in listed if fact[1]]

    def _entries(self) -> Sequence[dict[str, Any]]:
        """Return the entries of failed attempts, oldest first. Skip anything else the column may hold."""
        errors = self.record.errors
        return [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []

    def _log(self) -> QuerySet[TaskLogLine]:
        return rows_of(TaskLogLine).filter(task_id=self.record.id)

    def _runs(self) -> Sequence[dict[str, Any]]:
        """Return the entries of runs, without those of a task that was closed while it waited."""
        entries = self._entries()
        before = [0, *(entry.get("attempt") for entry in entries)]
        return [
            entry
            for entry, last in zip(entries, before, strict=False)
            if entry.get("exception") not in CLOSED or entry.get("attempt") not in (0, last)
        ]

    def _unique(self) -> SafeString | str:
        """Say until when no other task takes the unique key of this one, and whether this one holds it."""
        record = self.record
        if not record.unique_key:
            return ""
        until: SafeString | str = _("until it begins") if record.unique_until_start else _("until it has finished")
        if record.unique_until is not None:
            until = format_html(_("for a time, which ends {}"), display.time_element(record.unique_until, self.now))
        if record.unique_slot == record.unique_key:
            return format_html(_("{}; it holds its key"), until)
        return format_html(_("{}; it does not hold its key"), until)

    def _link(self, id: UUID | None) -> SafeString | str:
        """Return a link to another task; "" for none. Its page says when it exists no longer."""
        return "" if id is None else format_html('<a href="../../{}/change/">{}</a>', id, id)

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
        entries = self._runs()
        for position, entry in enumerate(reversed(entries)):
            started = display.parse_time(entry.get("started_at"))
            yield Attempt(
                number=entry["attempt"] if isinstance(entry.get("attempt"), int) else len(entries) - position,
                worker=str(entry.get("worker") or ""),
                started=display.time_element(started, self.now),
                duration=_between(started, display.parse_time(entry.get("failed_at"))),
                state=display.state_badge(TaskState.FAILED),
                exception=str(entry.get("exception", "")),
                message=display.excerpt(self.masker.text(str(entry.get("message") or "")), whole=self.whole),
                traceback=display.excerpt(self.masker.text(str(entry.get("traceback") or "")), whole=self.whole),
                is_latest=position == 0 and self.has_failed,
            )

    def _json(self, value: Any) -> display.Excerpt:
        return display.excerpt(display.json_text(value), whole=self.whole)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else display.exact_duration(seconds)


def _between(start: datetime | None, end: datetime | None) -> str:
    if start is None or end is None:
        return ""
    return display.duration((display.aware(end) - display.aware(start)).total_seconds())
