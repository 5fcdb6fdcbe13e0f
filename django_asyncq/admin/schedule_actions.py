"""The actions of the buttons of schedules: run now, enable, disable. Each shows a message and is logged."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import compat
from ..exceptions import AsyncqError
from ..models import Occurrence, Schedule
from ..scheduling.enqueueing import run_now
from ..scheduling.switching import switch
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of, writing_database
from . import display
from .schedule_page import TaskLinks

NAMES_IN_MESSAGE = 5


class RunResult(NamedTuple):
    """The result of a click on "Run now". is_new: False for a second click; occurrence is then that of the first."""

    occurrence: Occurrence
    is_new: bool


def run_once(pk: UUID, seen: int) -> RunResult:
    """Queue the schedule's task, unless a person has run it since the page was rendered.

    seen: primary key of the latest run by a person when the page was rendered. The schedule's row is locked, so the
    second of two simultaneous clicks sees the occurrence of the first.
    Raises: Schedule.DoesNotExist, and what `run_now` raises.
    """
    with transaction_of(Schedule):
        row = rows_of(Schedule).select_for_update().get(pk=pk)
        newer = rows_of(Occurrence).filter(schedule=row, by_person=True, pk__gt=seen).order_by("-pk").first()
        return RunResult(newer, is_new=False) if newer else RunResult(run_now(row), is_new=True)


def run(request: HttpRequest, row: Schedule, links: TaskLinks) -> None:
    """Run a schedule now, show a message, and log it."""
    try:
        seen = int(request.POST.get("seen", ""))
    except ValueError:
        messages.error(request, _("This request did not come from the page of the schedule. Nothing was queued."))
        return
    try:
        result = run_once(row.pk, seen)
    except Schedule.DoesNotExist:
        messages.warning(request, _("This schedule no longer exists."))
        return
    except (AsyncqError, compat.InvalidTask) as error:
        messages.error(request, _("Not run: %(reason)s. Nothing was queued.") % {"reason": error})
        return
    task = links.of_occurrence(row, result.occurrence.task_id)
    if not result.is_new:
        since = display.relative(result.occurrence.created_at, database_clock.now())
        text = _("Somebody has run it since this page was opened: {}, {}. No other task was queued.")
        messages.warning(request, format_html(text, task, since))
        return
    _log(request, [row], f"Run now: task {result.occurrence.task_id}.")
    messages.success(request, format_html(_("Queued: {}."), task))


def switch_and_report(request: HttpRequest, pks: list[UUID], *, enabled: bool) -> None:
    """Enable or disable schedules, show messages, and log it."""
    switched = switch(pks, enabled=enabled)
    if switched.changed:
        _log(request, switched.changed, "Enabled." if enabled else "Disabled.")
        on = ngettext("Enabled: %(names)s.", "%(count)d schedules enabled: %(names)s.", len(switched.changed))
        off = ngettext("Disabled: %(names)s.", "%(count)d schedules disabled: %(names)s.", len(switched.changed))
        messages.success(request, _named(on if enabled else off, switched.changed))
    if switched.unchanged:
        text = _("Already enabled: %(names)s.") if enabled else _("Already disabled: %(names)s.")
        messages.info(request, _named(text, switched.unchanged))
    for row in switched.never_firing:
        warn_never_fires(request, row)
    for row, error in switched.broken:
        text = _("Not enabled: %(name)s: %(reason)s.")
        messages.error(request, text % {"name": row.name, "reason": error})


def warn_never_fires(request: HttpRequest, row: Schedule) -> None:
    """Warn that a schedule has no occurrence left."""
    messages.warning(request, _("%(name)s has no more occurrences, so it will not fire.") % {"name": row.name})


def _named(text: str, rows: list[Schedule]) -> str:
    names = ", ".join(row.name for row in rows[:NAMES_IN_MESSAGE])
    return text % {"count": len(rows), "names": names if len(rows) <= NAMES_IN_MESSAGE else f"{names}, …"}


def _log(request: HttpRequest, rows: list[Schedule], text: str) -> None:
    user: Any = request.user
    entries = LogEntry.objects.db_manager(writing_database(LogEntry))
    entries.log_actions(user_id=user.pk, queryset=rows, action_flag=CHANGE, change_message=text)
