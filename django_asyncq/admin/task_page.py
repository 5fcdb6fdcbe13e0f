"""Build what the page of a task shows, with secrets masked and long texts shortened."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import unescape
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib import admin
from django.db.models import QuerySet
from django.utils.html import format_html, strip_tags
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core import registry
from ..core.masking import masker_of
from ..core.payload import class_path, shown_progress
from ..exceptions import TaskCancelled, TaskExpired
from ..models import FailureReason, TaskLogLine, TaskRecord, TaskState
from ..observe.fleet import Fleet
from ..observe.why import Keeper, why_not_running
from ..storage import database_clock
from ..storage.routing import rows_of
from . import base
from .code import known_task

ATTEMPTS_SHOWN = 50
# Masking takes a second for each megabyte: a task may have thousands of lines of 2 KiB for each of its attempts.
LOG_LINES_SHOWN = 200
CLOSED = (class_path(TaskCancelled()), class_path(TaskExpired()))


class Fact(NamedTuple):
    """A label and a value. is_code: show the value in a monospaced font, left to right."""

    label: str
    value: SafeString | str
    is_code: bool = False


class TaskPage:
    """The content of the page of one task. The template calls the methods it needs.

    whole: do not shorten long texts.
    """

    def __init__(self, record: TaskRecord, fleet: Fleet, *, whole: bool) -> None:
        self.record = record
        self.fleet = fleet
        self.now = fleet.now
        self.whole = whole
        self.task = known_task(record.name)
        self.masker = masker_of(record)
        self.has_failed = record.state == TaskState.FAILED
        self.is_removed = self.has_failed and self.task is None
        is_waiting = record.state == TaskState.QUEUED and self.task is None
        # Of this process, whose code may be older or newer than the workers'.
        self.missing = registry.why_missing(record.name) if self.is_removed or is_waiting else ""

    def state(self) -> SafeString:
        """Return the state, and why the task does not run."""
        why = why_not_running(self.record, self.fleet, with_place=True)
        return base.state_element(self.record, self.now, why)

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
            template = _("A cancel was asked for {}. The task succeeded all the same.")
        elif record.is_final:
            template = _("A cancel was asked for {}. The task failed for another reason.")
        else:
            template = _("A cancel was asked for {}. The task may still succeed.")
        at = base.time_element(record.cancel_requested_at, self.now)
        by = self.masker.text(record.cancelled_by)
        return format_html(template, format_html("{} (<bdi>{}</bdi>)", at, by) if by else at)

    def attempt_count(self) -> str:
        """Return how many attempts were made, of how many."""
        return base.attempt_count(self.record)

    def error(self) -> base.Excerpt | None:
        """Return the last error of a failed task as one text."""
        entries = self._entries()
        if not self.has_failed or not entries:
            return None
        last = entries[-1]
        line = base.error_line(str(last.get("exception", "")), self.masker.text(str(last.get("message", ""))))
        return base.excerpt(line, whole=self.whole)

    def attempts(self) -> list[SimpleNamespace]:
        """Return the latest attempts, newest first: the running or successful one, then those that failed.

        is_latest: its traceback is shown expanded.
        """
        shown = [*self._current(), *self._failed()]
        return shown if self.whole else shown[:ATTEMPTS_SHOWN]

    def attempts_not_shown(self) -> int:
        """Return how many earlier attempts are not shown."""
        return 0 if self.whole else max(0, len(self._runs()) + len(list(self._current())) - ATTEMPTS_SHOWN)

    def args(self) -> base.Excerpt:
        """Return the positional arguments as JSON. Those of parameters with a secret name are masked."""
        if not self.record.args:
            return base.Excerpt(_("none"), 0)
        return self._json(self.masker.positional(self.record.args))

    def kwargs(self) -> base.Excerpt:
        """Return the keyword arguments as JSON."""
        return self._json(self.masker.keyword(self.record.kwargs)) if self.record.kwargs else base.Excerpt(_("none"), 0)

    def return_value(self) -> base.Excerpt | None:
        """Return the return value of a successful task as JSON."""
        if self.record.state != TaskState.SUCCEEDED:
            return None
        return self._json(self.masker.result(self.record.return_value))

    def progress(self) -> SimpleNamespace | None:
        """Return the progress the task reported last, as its row has it."""
        shown = shown_progress(self.record.progress)
        if shown is None:
            return None
        text = f"{shown['done']:,}" if shown["total"] is None else f"{shown['done']:,} / {shown['total']:,}"
        message = self.masker.text(str(shown["message"]))
        data = self._json(self.masker.data(shown["data"])) if shown["data"] else None
        words = base.excerpt(message, whole=self.whole)
        return SimpleNamespace(done=shown["done"], total=shown["total"], text=text, message=words, data=data)

    def checkpoint(self) -> base.Excerpt | None:
        """Return where the next run of the task goes on, as JSON."""
        return None if self.record.checkpoint is None else self._json(self.masker.data(self.record.checkpoint))

    def log_lines(self) -> base.Excerpt | None:
        """Return the latest lines that the task has logged, oldest first, as one text; their secrets are masked."""
        lines = self._log().order_by("-fence", "-number")
        texts = [
            f"{base.plain_time(each.logged_at)} {logging.getLevelName(each.level)} {each.logger}: {each.text}"
            for each in (lines if self.whole else lines[:LOG_LINES_SHOWN])
        ]
        return base.excerpt(self.masker.text("\n".join(reversed(texts))), whole=self.whole) if texts else None

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
        return [Fact(label, base.time_element(value, self.now)) for label, value in listed if value]

    def facts(self) -> list[Fact]:
        """Return the other columns of the row."""
        record = self.record
        gates, worker = record.gates, self._last_worker()
        has_own = any(each.limit is not None for each in gates)
        limits = ["–" if each.limit is None else str(each.limit) for each in gates if has_own]
        listed = [
            (_("Id"), str(record.id), True),
            (_("Task"), _page("task", record.name, name=record.name), True),
            (_("Backend"), record.backend, True),
            (_("Queue"), _page("queue", record.queue_name, backend=record.backend, queue=record.queue_name), True),
            (_("Priority"), str(record.priority), False),
            (_("Timeout"), _seconds(record.timeout_seconds), False),
            (_("Soft timeout"), _seconds(record.soft_timeout_seconds), False),
            (_("Gate (admission limit)"), ", ".join(each.name for each in gates), True),
            (_("Gate limit set by the task"), ", ".join(limits), False),
            (_("Expected duration"), _seconds(record.expected_seconds), False),
            (_("Unique"), self._unique(), False),
            (_("Runs after the task"), self._link(record.after_id), True),
            (_("Copy with new arguments of"), self._link(record.retried_from), True),
            (_("Group"), record.group, True),
            (_("Runs in the batch"), self._link(record.batch_id), True),
            (_("Calls in the batch"), "" if record.batch_size is None else str(record.batch_size), False),
            (_("Last worker"), worker and _page("worker", worker, id=worker), True),
            (
                _("Runs alone next"),
                _("Yes: its worker died, and it may be the cause") if record.is_suspect else "",
                False,
            ),
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
            until = format_html(_("for a time, which ends {}"), base.time_element(record.unique_until, self.now))
        if record.unique_slot == record.unique_key:
            return format_html(_("{}; it holds its key"), until)
        return format_html(_("{}; it does not hold its key"), until)

    def _link(self, id: UUID | None) -> SafeString | str:
        """Return a link to another task; "" for none. Its page says when it exists no longer."""
        return "" if id is None else format_html('<a href="../../{}/change/">{}</a>', id, id)

    def _last_worker(self) -> str:
        workers = self.record.worker_ids
        return str(workers[-1]) if isinstance(workers, list) and workers else ""

    def _current(self) -> Iterator[SimpleNamespace]:
        """Yield the running or successful attempt, which has no error entry."""
        record = self.record
        if record.state not in (TaskState.RUNNING, TaskState.SUCCEEDED):
            return
        started = record.last_attempted_at
        nothing = base.Excerpt("", 0)
        yield SimpleNamespace(
            number=record.attempt,
            worker=self._last_worker(),
            started=base.time_element(started, self.now),
            duration=_between(started, record.finished_at or self.now),
            state=base.state_badge(record.state),
            exception="",
            message=nothing,
            traceback=nothing,
            is_latest=True,
        )

    def _failed(self) -> Iterator[SimpleNamespace]:
        """Yield the failed attempts, newest first."""
        entries = self._runs()
        for position, entry in enumerate(reversed(entries)):
            started = base.parse_time(entry.get("started_at"))
            yield SimpleNamespace(
                number=entry["attempt"] if isinstance(entry.get("attempt"), int) else len(entries) - position,
                worker=" ".join(str(entry[name]) for name in ("worker", "app_version") if entry.get(name)),
                started=base.time_element(started, self.now),
                duration=_between(started, base.parse_time(entry.get("failed_at"))),
                state=base.state_badge(TaskState.FAILED),
                exception=str(entry.get("exception", "")),
                message=base.excerpt(self.masker.text(str(entry.get("message") or "")), whole=self.whole),
                traceback=base.excerpt(self.masker.text(str(entry.get("traceback") or "")), whole=self.whole),
                is_latest=position == 0 and self.has_failed,
            )

    def _json(self, value: Any) -> base.Excerpt:
        return base.excerpt(base.json_text(value), whole=self.whole)


def _page(view: str, text: str, /, **query: str) -> SafeString:
    """Return a link to a page of what the task has to do with."""
    return format_html('<a href="../../{}/?{}">{}</a>', view, urlencode(query), text)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else base.exact_duration(seconds)


def _between(start: datetime | None, end: datetime | None) -> str:
    if start is None or end is None:
        return ""
    return base.duration(base.seconds_between(start, end))


# --- The columns of the task list.


class TaskColumns:
    """What the list shows of each task."""

    @admin.display(description=gettext_lazy("task"))
    def task(self, record: TaskRecord) -> SafeString:
        """Show the function's name and the end of the id."""
        return format_html(
            '<span class="asyncq-name" dir="ltr" title="{}">{}</span> <span class="asyncq-id" title="{}">{}</span>',
            record.name,
            record.short_name,
            record.id,
            record.short_id,
        )

    @admin.display(description=gettext_lazy("state"))
    def state_and_error(self, record: TaskRecord) -> SafeString:
        """Show the state as a badge, and the error of a failed task, or its reason where that is no error."""
        why = getattr(record, "why", None)
        state = base.state_element(record, database_clock.now(), None if why and why.keeper is Keeper.DUE else why)
        state = format_html('<span title="{}">{}</span>', unescape(strip_tags(state)), state)
        # The state says it too when a gate is full.
        if record.state != TaskState.FAILED or (record.reason == FailureReason.GATE_FULL and record.retry_at):
            return state
        # The list reads no arguments, so a sensitive value in a message would not be found: the page shows it masked.
        is_open = not getattr(known_task(record.name), "sensitive", ())
        message = str(getattr(record, "last_message", None) or "") if is_open else ""
        if record.reason not in base.REASONS_WITH_ERROR or not record.last_exception:
            reason = record.get_reason_display()
            if record.is_discarded and message:
                reason = f"{reason}: {message[: base.ERROR_CHARACTERS]}"
            note = '{} <span class="asyncq-note asyncq-second" dir="auto" title="{}">{}</span>'
            return format_html(note, state, reason, reason)
        return format_html("{} {}", state, base.short_error(record.last_exception, message))

    @admin.display(description=gettext_lazy("attempts"))
    def attempts(self, record: TaskRecord) -> SafeString:
        """Show how many attempts were made, of how many, and the worker crashes."""
        return base.short_attempt_count(record)

    @admin.display(description=gettext_lazy("enqueued"), ordering="id")
    def enqueued(self, record: TaskRecord) -> SafeString | str:
        """Show when it was enqueued."""
        return base.time_element(record.enqueued_at, database_clock.now())

    @admin.display(description=gettext_lazy("ran"))
    def run(self, record: TaskRecord) -> SafeString | str:
        """Show how long the attempt has run, or took; below, when a finished one finished."""
        started, finished = record.last_attempted_at, record.finished_at
        if record.state == TaskState.RUNNING and started is not None:
            now = database_clock.now()
            span = base.duration(max(0.0, base.seconds_between(started, now)))
            return base.time_element(started, now, text=_("for %(span)s") % {"span": span})
        if finished is None or started is None:
            return "–" if finished is None else base.time_element(finished, database_clock.now())
        took = base.duration(max(0.0, base.seconds_between(started, finished)))
        at = base.time_element(finished, database_clock.now())
        return format_html('<bdi>{}</bdi> <span class="asyncq-note asyncq-second">{}</span>', took, at)

    @admin.display(description=gettext_lazy("gate"))
    def gate(self, record: TaskRecord) -> SafeString | None:
        """Show the gates; a dash for none."""
        names = ", ".join(each.name for each in record.gates)
        return format_html('<bdi title="{}">{}</bdi>', names, names) if names else None

    @admin.display(description=gettext_lazy("queue"))
    def queue(self, record: TaskRecord) -> SafeString:
        """Show the queue."""
        return format_html('<bdi dir="ltr" title="{}">{}</bdi>', record.queue_name, record.queue_name)
