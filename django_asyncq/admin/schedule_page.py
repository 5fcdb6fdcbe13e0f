"""Build what the pages of schedules show: when they fire, what is wrong, and what happened to their occurrences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.db.models import OuterRef, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils import dateformat
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext_lazy

from ..definitions.calls import check_call
from ..definitions.timing import DstKind, DstNote, Upcoming, describe, fires_on_either_day, preview
from ..exceptions import InvalidOption
from ..masking import masker_of_call
from ..models import Occurrence, OccurrenceOutcome, Schedule, TaskRecord
from ..redaction import Masker
from ..storage.routing import rows_of
from . import display
from .code import declared_schedule_names, known_task
from .task_page import Fact

OCCURRENCES_SHOWN = 10
RUNS_SHOWN = 20
# A running scheduler fires an occurrence within seconds, so after this time no scheduler can be running.
OVERDUE_SECONDS = 60
# More wall times than this are shown as a range.
WALLS_LISTED = 3
MARK_CHARACTERS = 60
RECORD_FIELDS = ("id", "name", "state", "run_after", "retry_at", "attempt", "max_attempts")
OUTCOMES = {
    OccurrenceOutcome.QUEUED: ("succeeded", pgettext_lazy("occurrence", "Fired"), ""),
    OccurrenceOutcome.SKIPPED: ("skipped", gettext_lazy("Skipped"), gettext_lazy("an earlier task had not finished")),
    OccurrenceOutcome.MISSED: ("running", gettext_lazy("Missed"), gettext_lazy("no worker was running")),
    OccurrenceOutcome.REFUSED: ("failed", gettext_lazy("Refused"), ""),
}


class Run(NamedTuple):
    """An occurrence and its task. record: None when it has no task, or when the task was pruned or deleted."""

    occurrence: Occurrence
    record: TaskRecord | None


class RunRow(NamedTuple):
    """A row of the table of past occurrences."""

    when: SafeString | str
    by_person: bool
    outcome: SafeString
    note: display.Excerpt
    task: SafeString | str


class OccurrenceRow(NamedTuple):
    """A row of the table of next occurrences.

    day, clock: in the schedule's time zone. note: the effect of a clock change.
    """

    iso: str
    day: str
    clock: str
    zone: str
    relative: SafeString | str
    note: str


class TaskLinks:
    """Links to the pages of tasks on this site; plain names for a user who may not view tasks."""

    def __init__(self, site: AdminSite, request: HttpRequest) -> None:
        self._site = site
        registered = site.is_registered(TaskRecord)
        self._may_open = registered and site.get_model_admin(TaskRecord).has_view_permission(request)

    def element(self, record: TaskRecord) -> SafeString:
        """Return a link with the task's name and the end of its id."""
        if not self._may_open:
            return format_html('<bdi dir="ltr">{}</bdi>', record)
        opts = TaskRecord._meta
        url = reverse(
            f"admin:{opts.app_label}_{opts.model_name}_change", args=[quote(record.pk)], current_app=self._site.name
        )
        return format_html('<a href="{}"><bdi dir="ltr">{}</bdi></a>', url, record)

    def of_occurrence(self, row: Schedule, task_id: UUID | None) -> SafeString:
        """Return a link to an occurrence's task without reading its row."""
        return self.element(TaskRecord(pk=task_id, name=row.task))


# --- timing and problems


def timing_in_words(row: Schedule) -> str:
    """Describe when the schedule fires; "" when its timing is invalid."""
    try:
        return describe(row.timing)
    except InvalidOption:
        return ""


def either_day_words(row: Schedule) -> str:
    """Say that one of the two fields for days is enough; "" when both must match, or when the timing is invalid."""
    try:
        is_either = fires_on_either_day(row.timing)
    except InvalidOption:
        return ""
    return _("each day that matches the day of month or the day of week; one is enough") if is_either else ""


def as_written(row: Schedule) -> str:
    """Return the cron expression or the interval as it was entered."""
    return row.cron or _("every %(seconds)s s") % {"seconds": row.interval_seconds}


def upcoming(row: Schedule, now: datetime, count: int) -> list[Upcoming]:
    """Return the next occurrences; an empty list for a schedule that does not fire.

    An overdue occurrence is not among them, because nobody knows when it will fire.
    """
    if not row.enabled or row.retired_at is not None or row.next_occurrence_at is None:
        return []
    try:
        return preview(row.timing, display.aware(now), count, zone=row.zone)
    except InvalidOption:
        return []


def problems(row: Schedule, now: datetime) -> Iterator[str]:
    """Say why a schedule does not work, each reason as a sentence without a full stop."""
    if row.retired_at is not None:
        yield _("Removed from code")
        return
    if (reason := _task_problem(row)) or (reason := _timing_problem(row, now)):
        yield _("Does not fire: %(reason)s") % {"reason": reason}
    elif row.enabled and row.next_occurrence_at and _late_seconds(row.next_occurrence_at, now) > OVERDUE_SECONDS:
        yield _("Overdue: is a worker running?")


def problem_marks(row: Schedule, now: datetime) -> SafeString:
    """Return the problems for the list, each truncated, with the whole text as its title."""
    cut = [(each, Truncator(each).chars(MARK_CHARACTERS)) for each in problems(row, now)]
    return format_html_join("", '<span class="asyncq-mark" dir="auto" title="{}">{}</span>', cut)


def _late_seconds(occurs_at: datetime, now: datetime) -> float:
    return (display.aware(now) - display.aware(occurs_at)).total_seconds()


def _task_problem(row: Schedule) -> str:
    task = known_task(row.task)
    if task is None:
        return _("the code has no task %(task)s") % {"task": row.task}
    if not row.is_declared and not task.schedulable:
        return _("its task is no longer declared with schedulable=True")
    try:
        fits = isinstance(row.args, list) and isinstance(row.kwargs, dict)
        check_call(task, row.args if fits else [], row.kwargs if fits else {})
    except InvalidOption:
        fits = False
    return "" if fits else _("its task can no longer be called with these arguments")


def _timing_problem(row: Schedule, now: datetime) -> str:
    try:
        following = row.timing.after(display.aware(now))
    except InvalidOption as error:
        return str(error)
    if following is None and (row.next_occurrence_at is None or not row.enabled):
        return _("it has no more occurrences")
    if following is not None and row.enabled and row.next_occurrence_at is None:
        return _("its next occurrence is not planned; save the schedule again")
    return ""


# --- next occurrences


def occurrence_row(each: Upcoming, now: datetime) -> OccurrenceRow:
    """Return a row of the table of next occurrences."""
    local = each.local
    # The end of the ISO text is the offset: +02:00, or with seconds for times before there were time zones.
    offset = f"UTC{local.isoformat()[19:]}"
    name = local.tzname() or ""
    zone = name if name == "UTC" else f"{name} ({offset})" if name[:1].isalpha() else offset
    clock = f"{local:%H:%M:%S}" if local.second else f"{local:%H:%M}"
    note = "" if each.note is None else note_words(each.note, local)
    return OccurrenceRow(
        local.isoformat(),
        dateformat.format(local, "D"),
        f"{local:%Y-%m-%d} {clock}",
        zone,
        display.time_element(each.occurrence, now),
        note,
    )


def note_words(note: DstNote, local: datetime) -> str:
    """Say how a clock change affects an occurrence. local: the occurrence's time in the schedule's time zone."""
    count = len(note.walls)
    values = {"times": _clock_times(note.walls, local), "time": f"{local:%H:%M}"}
    if note.kind is DstKind.GAP:
        text = ngettext(
            "%(times)s does not exist on this day; runs at %(time)s",
            "%(times)s do not exist on this day; runs at %(time)s",
            count,
        )
    elif note.kind is DstKind.SKIPPED:
        text = ngettext(
            "%(times)s does not exist, so there was no occurrence then",
            "%(times)s do not exist, so there were no occurrences then",
            count,
        )
    elif note.kind is DstKind.ONCE:
        text = _("%(times)s occurs twice on this day; runs only the first time")
    elif note.kind is DstKind.FIRST:
        text = _("%(times)s occurs twice on this day; this is the first")
    else:
        text = _("%(times)s occurs twice on this day; this is the second")
    return text % values


def _clock_times(walls: Sequence[datetime], local: datetime) -> str:
    """Format wall times, with the date if one is on another day. Many are shown as a range from first to last."""
    same_day = all(wall.date() == local.date() for wall in walls)
    written = [f"{wall:%H:%M}" if same_day else f"{wall:%Y-%m-%d %H:%M}" for wall in walls]
    if len(written) > WALLS_LISTED:
        return _("%(first)s to %(last)s") % {"first": written[0], "last": written[-1]}
    return ", ".join(written)


# --- past occurrences


def latest_runs(rows: Iterable[Schedule]) -> dict[UUID, Run]:
    """Return the latest occurrence of each schedule, in three queries."""
    newest = rows_of(Occurrence).filter(schedule=OuterRef("pk")).order_by("-occurs_at").values("pk")[:1]
    found = rows_of(Schedule).filter(pk__in=[row.pk for row in rows]).values_list(Subquery(newest), flat=True)
    occurrences = rows_of(Occurrence).filter(pk__in=[pk for pk in found if pk is not None])
    return {run.occurrence.schedule_id: run for run in with_records(occurrences)}


def with_records(occurrences: Iterable[Occurrence]) -> list[Run]:
    """Pair the occurrences with their tasks, in one query."""
    occurrences = list(occurrences)
    ids = [occurrence.task_id for occurrence in occurrences if occurrence.task_id is not None]
    records = rows_of(TaskRecord).only(*RECORD_FIELDS).in_bulk(ids) if ids else {}
    return [
        Run(occurrence, records.get(occurrence.task_id) if occurrence.task_id else None) for occurrence in occurrences
    ]


def run_row(run: Run, now: datetime, links: TaskLinks, masker: Masker) -> RunRow:
    """Return a row of the table of past occurrences."""
    occurrence = run.occurrence
    kind, word, explanation = OUTCOMES[OccurrenceOutcome(occurrence.outcome)]
    badge = format_html('<span class="asyncq-state asyncq-state-{}">{}</span>', kind, word)
    task: SafeString | str = ""
    if run.record is not None:
        task = format_html("{} {}", links.element(run.record), display.state_element(run.record, now))
    elif occurrence.task_id is not None:
        task = format_html(
            '<bdi class="asyncq-id" dir="ltr" title="{}">{}</bdi> <span class="asyncq-note" dir="auto">{}</span>',
            occurrence.task_id,
            TaskRecord(pk=occurrence.task_id).short_id,
            _("pruned"),
        )
    note = display.excerpt(masker.text(occurrence.note) or str(explanation))
    return RunRow(display.time_element(occurrence.occurs_at, now), occurrence.by_person, badge, note, task)


def run_summary(run: Run | None, now: datetime, links: TaskLinks, masker: Masker) -> SafeString | str:
    """Summarise the latest occurrence for the list: its time, then its task or its outcome."""
    if run is None:
        return "–"
    shown = run_row(run, now, links, masker)
    if run.record is not None:
        return format_html('{} <span class="asyncq-second">{}</span>', shown.when, shown.task)
    note = shown.note.text if run.occurrence.task_id is None else _("task pruned")
    return format_html(
        '{} <span class="asyncq-second" title="{}">{} <span class="asyncq-note" dir="auto">{}</span></span>',
        shown.when,
        note,
        shown.outcome,
        note,
    )


class SchedulePage:
    """The content of the page of one schedule besides its form. The template calls the methods it needs."""

    def __init__(self, row: Schedule, now: datetime, links: TaskLinks, *, may_run: bool, may_switch: bool) -> None:
        self.row = row
        self.now = now
        self.may_run = may_run
        self.may_switch = may_switch
        self._links = links
        self._runs = with_records(rows_of(Occurrence).filter(schedule=row).order_by("-occurs_at")[:RUNS_SHOWN])

    def problems(self) -> list[str]:
        """Return why it does not fire, and what else is wrong."""
        # That it was removed from the code is said in a sentence of its own.
        found = [] if self.row.retired_at is not None else list(problems(self.row, self.now))
        if not self.row.is_declared and self.row.name in declared_schedule_names():
            found.append(
                _("The code declares a schedule with this name, which does not fire until this one is renamed")
            )
        return found

    def seen(self) -> int:
        """Return the key of the latest run by a person. The button posts it, so that a second click is recognised."""
        return latest_by_person(self.row)

    def facts(self) -> list[Fact]:
        """Return what the schedule is, in a few lines."""
        row = self.row
        listed = [
            (_("Fires"), timing_in_words(row), False),
            (_("Days"), either_day_words(row), False),
            (_("As written"), f"{as_written(row)} ({row.zone})" if row.cron else as_written(row), True),
            (_("Task"), row.task, True),
            (_("Made in"), origin(row), False),
            (
                _("Next occurrence"),
                display.time_element(row.next_occurrence_at, self.now) if row.enabled else "",
                False,
            ),
            (_("Jitter"), self._jitter(), False),
            (_("Removed from code"), display.time_element(row.retired_at, self.now), False),
        ]
        return [Fact(*fact) for fact in listed if fact[1]]

    def upcoming(self) -> list[OccurrenceRow]:
        """Return the next occurrences, in the schedule's time zone."""
        return [occurrence_row(each, self.now) for each in upcoming(self.row, self.now, OCCURRENCES_SHOWN)]

    def runs(self) -> list[RunRow]:
        """Return the latest occurrences and their tasks, newest first."""
        masker = masker_of_schedule(self.row)
        return [run_row(run, self.now, self._links, masker) for run in self._runs]

    def _jitter(self) -> str:
        seconds = self.row.jitter_seconds
        return (
            _("each task is delayed by up to %(span)s") % {"span": display.whole_duration(seconds)} if seconds else ""
        )


def latest_by_person(row: Schedule) -> int:
    """Return the primary key of the latest occurrence that a person fired, or 0."""
    found = rows_of(Occurrence).filter(schedule=row, by_person=True).order_by("-pk")
    return found.values_list("pk", flat=True).first() or 0


def origin(row: Schedule) -> str:
    """Say where the schedule was made."""
    return _("code") if row.is_declared else _("admin")


def masker_of_schedule(row: Schedule) -> Masker:
    """Return what masks the secrets of the tasks that a schedule enqueues."""
    known_task(row.task)  # loads what the code declares
    return masker_of_call(row.task, row.args, row.kwargs)


def masked_args(row: Schedule) -> str:
    """Return the positional arguments as JSON, with secrets masked."""
    if not row.args:
        return _("none")
    return display.json_text(masker_of_schedule(row).positional(row.args))


def masked_kwargs(row: Schedule) -> str:
    """Return the keyword arguments as JSON, with secrets masked."""
    if not row.kwargs:
        return _("none")
    return display.json_text(masker_of_schedule(row).keyword(row.kwargs))
