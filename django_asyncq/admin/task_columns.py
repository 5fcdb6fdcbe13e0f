"""The columns of the task list."""

from __future__ import annotations

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from . import display
from .code import known_task


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
        state = display.state_element(record, database_clock.now(), why_stuck=getattr(record, "why_stuck", ""))
        state = format_html('<span class="asyncq-first">{}</span>', state)
        # The state says it too when a gate is full.
        if record.state != TaskState.FAILED or (record.reason == FailureReason.GATE_FULL and record.retry_at):
            return state
        if record.reason not in display.REASONS_WITH_ERROR or not record.last_exception:
            reason = record.get_reason_display()
            return format_html('{} <span class="asyncq-note asyncq-second" dir="auto">{}</span>', state, reason)
        # The list reads no arguments, so a sensitive value in a message would not be found: the page shows it masked.
        is_open = not getattr(known_task(record.name), "sensitive", ())
        message = str(getattr(record, "last_message", None) or "") if is_open else ""
        return format_html("{} {}", state, display.short_error(record.last_exception, message))

    @admin.display(description=gettext_lazy("attempts"))
    def attempts(self, record: TaskRecord) -> SafeString:
        """Show how many attempts were made, of how many, and the worker crashes."""
        return display.short_attempt_count(record)

    @admin.display(description=gettext_lazy("enqueued"), ordering="id")
    def enqueued(self, record: TaskRecord) -> SafeString | str:
        """Show when it was enqueued."""
        return display.time_element(record.enqueued_at, database_clock.now())

    @admin.display(description=gettext_lazy("ran"))
    def run(self, record: TaskRecord) -> SafeString | str:
        """Show how long the attempt has run, or took; below, when a finished one finished."""
        started, finished = record.last_attempted_at, record.finished_at
        if record.state == TaskState.RUNNING and started is not None:
            now = database_clock.now()
            span = display.duration(max(0.0, (display.aware(now) - display.aware(started)).total_seconds()))
            return display.time_element(started, now, text=_("for %(span)s") % {"span": span})
        if finished is None or started is None:
            return "–" if finished is None else display.time_element(finished, database_clock.now())
        took = display.duration(max(0.0, (display.aware(finished) - display.aware(started)).total_seconds()))
        at = display.time_element(finished, database_clock.now())
        return format_html('<bdi>{}</bdi> <span class="asyncq-note asyncq-second">{}</span>', took, at)

    @admin.display(description=gettext_lazy("queue"))
    def queue(self, record: TaskRecord) -> SafeString:
        """Show the queue, and whether it is paused."""
        name = format_html('<bdi dir="ltr" title="{}">{}</bdi>', record.queue_name, record.queue_name)
        if getattr(record, "queue_pause", None) is None:
            return name
        mark = format_html('<span class="asyncq-mark">{}</span>', _("Paused"))
        return format_html('{} <span class="asyncq-second">{}</span>', name, mark)
