"""Build what the pages of schedules show: when they fire, what is wrong, and what happened to their occurrences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import available_timezones

from django import forms
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import ValidationError
from django.db.models import OuterRef, Subquery
from django.forms.fields import InvalidJSONInput
from django.http import HttpRequest
from django.urls import reverse
from django.utils import dateformat
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext_lazy

from ..core.calls import check_call
from ..core.guard import attempt
from ..core.masking import masker_of_call
from ..core.needs import NEEDS_OF_SCHEDULE, lacking
from ..core.redaction import Masker
from ..core.timing import (
    MAX_INTERVAL_SECONDS,
    DstKind,
    DstNote,
    Timing,
    Upcoming,
    describe,
    fires_on_either_day,
    preview,
)
from ..exceptions import InvalidArguments, InvalidOption
from ..models import Missed, Occurrence, OccurrenceOutcome, Schedule, TaskRecord, default_timezone
from ..observe.fleet import Fleet
from ..observe.why import why_not_running
from ..scheduling.occurrences import arguments_of
from ..storage import database_clock
from ..storage.routing import rows_of
from . import base
from .code import accepts_positional, declared_schedule_names, known_task, schedulable_names, signature_text
from .task_page import Fact

OCCURRENCES_SHOWN = 10
RUNS_SHOWN = 20
# A running scheduler fires an occurrence within seconds, so after this time no scheduler can be running.
OVERDUE_SECONDS = 60
# More wall times than this are shown as a range.
WALLS_LISTED = 3
MARK_CHARACTERS = 60
RECORD_FIELDS = (
    "id", "name", "state", "reason", "backend", "queue_name", "gate", "other_gates", "run_after", "retry_at", "attempt",
    "max_attempts", "after_id", "batch_id", "waits_for", "is_remote", "last_attempted_at", "timeout_seconds",
)  # fmt: skip
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
        view = "admin:django_asyncq_taskrecord_change"
        url = reverse(view, args=[quote(record.pk)], current_app=self._site.name)
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
        return preview(row.timing, base.aware(now), count, zone=row.zone)
    except InvalidOption:
        return []


def problems(row: Schedule, now: datetime) -> Iterator[str]:
    """Say why a schedule does not work, each reason as a sentence without a full stop."""
    if row.retired_at is not None:
        yield _("Removed from code")
        return
    if (reason := _task_problem(row)) or (reason := _timing_problem(row, now)):
        yield _("Does not fire: %(reason)s") % {"reason": reason}
    elif row.enabled and getattr(row, "is_paused", False):
        yield _("Paused with all schedules")
    elif row.enabled and row.next_occurrence_at and base.seconds_between(row.next_occurrence_at, now) > OVERDUE_SECONDS:
        yield _("Overdue: is a worker running?")


def problem_marks(row: Schedule, now: datetime) -> SafeString:
    """Return the problems for the list, each truncated, with the whole text as its title."""
    cut = [(each, Truncator(each).chars(MARK_CHARACTERS)) for each in problems(row, now)]
    return format_html_join("", '<span class="asyncq-mark" dir="auto" title="{}">{}</span>', cut)


def _task_problem(row: Schedule) -> str:
    task = known_task(row.task)
    if task is None:
        return _("the code has no task %(task)s") % {"task": row.task}
    if not row.is_declared and not task.schedulable:
        return _("its task is no longer declared with schedulable=True")
    try:
        if fits := isinstance(row.args, list) and isinstance(row.kwargs, dict):
            arguments_of(row, task)
    except InvalidOption:
        fits = False
    return "" if fits else _("its task can no longer be called with these arguments")


def _timing_problem(row: Schedule, now: datetime) -> str:
    try:
        following = row.timing.after(base.aware(now))
    except InvalidOption as error:
        return str(error)
    if following is None and (row.next_occurrence_at is None or not row.enabled):
        return _("it has no more occurrences")
    if following is not None and row.enabled and row.next_occurrence_at is None:
        return _("its next occurrence is not planned; save the schedule again")
    return ""


# --- next occurrences


def occurrence_row(each: Upcoming, now: datetime) -> SimpleNamespace:
    """Return a row of the table of next occurrences.

    day, clock: in the schedule's time zone. note: the effect of a clock change.
    """
    local = each.local
    # The end of the ISO text is the offset: +02:00, or with seconds for times before there were time zones.
    offset = f"UTC{local.isoformat()[19:]}"
    name = local.tzname() or ""
    zone = name if name == "UTC" else f"{name} ({offset})" if name[:1].isalpha() else offset
    clock = f"{local:%H:%M:%S}" if local.second else f"{local:%H:%M}"
    return SimpleNamespace(
        iso=local.isoformat(),
        day=dateformat.format(local, "D"),
        clock=f"{local:%Y-%m-%d} {clock}",
        zone=zone,
        relative=base.time_element(each.occurrence, now),
        note="" if each.note is None else note_words(each.note, local),
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


def run_row(run: Run, now: datetime, links: TaskLinks, masker: Masker) -> SimpleNamespace:
    """Return a row of the table of past occurrences."""
    occurrence = run.occurrence
    kind, word, explanation = OUTCOMES[OccurrenceOutcome(occurrence.outcome)]
    badge = format_html('<span class="asyncq-state asyncq-state-{}">{}</span>', kind, word)
    task: SafeString | str = ""
    if run.record is not None:
        state = base.state_element(run.record, now, why_not_running(run.record, Fleet(now, needs_redis=False)))
        task = format_html("{} {}", links.element(run.record), state)
    elif occurrence.task_id is not None:
        task = format_html(
            '<bdi class="asyncq-id" dir="ltr" title="{}">{}</bdi> <span class="asyncq-note" dir="auto">{}</span>',
            occurrence.task_id,
            TaskRecord(pk=occurrence.task_id).short_id,
            _("pruned"),
        )
    note = base.excerpt(masker.text(occurrence.note) or str(explanation))
    when = base.time_element(occurrence.occurs_at, now)
    return SimpleNamespace(when=when, by_person=occurrence.by_person, outcome=badge, note=note, task=task)


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
        found = rows_of(Occurrence).filter(schedule=self.row, by_person=True).order_by("-pk")
        return found.values_list("pk", flat=True).first() or 0

    def facts(self) -> list[Fact]:
        """Return what the schedule is, in a few lines."""
        row = self.row
        jitter = _("each task is delayed by up to %(span)s") % {"span": base.whole_duration(row.jitter_seconds)}
        listed = [
            (_("Fires"), timing_in_words(row), False),
            (_("Days"), either_day_words(row), False),
            (_("As written"), f"{as_written(row)} ({row.zone})" if row.cron else as_written(row), True),
            (_("Task"), row.task, True),
            (_("Made in"), origin(row), False),
            (
                _("Next occurrence"),
                base.time_element(row.next_occurrence_at, self.now) if row.enabled else "",
                False,
            ),
            (_("Jitter"), jitter if row.jitter_seconds else "", False),
            (_("Removed from code"), base.time_element(row.retired_at, self.now), False),
        ]
        return [Fact(*fact) for fact in listed if fact[1]]

    def upcoming(self) -> list[SimpleNamespace]:
        """Return the next occurrences, in the schedule's time zone."""
        return [occurrence_row(each, self.now) for each in upcoming(self.row, self.now, OCCURRENCES_SHOWN)]

    def runs(self) -> list[SimpleNamespace]:
        """Return the latest occurrences and their tasks, newest first."""
        masker = masker_of_schedule(self.row)
        return [run_row(run, self.now, self._links, masker) for run in self._runs]


def origin(row: Schedule) -> str:
    """Say where the schedule was made."""
    return _("code") if row.is_declared else _("admin")


def masker_of_schedule(row: Schedule) -> Masker:
    """Return what masks the secrets of the tasks that a schedule enqueues."""
    known_task(row.task)  # loads what the code declares
    return masker_of_call(row.task, row.args, row.kwargs)


def masked(row: Schedule, column: str) -> str:
    """Return the arguments of one kind as JSON, with secrets masked. column: "args" or "kwargs"."""
    value, masker = getattr(row, column), masker_of_schedule(row)
    if not value:
        return _("none")
    return base.json_text(masker.positional(value) if column == "args" else masker.keyword(value))


# --- The form for schedules made in the admin. Each error is shown at its field.

# A typing error must not queue a million tasks at once.
MAX_MISSED = 1_000
# The shortest time between two occurrences is the minimum over this many of the next ones.
OCCURRENCES_COMPARED = 10
# Names in zoneinfo that are not time zones of places: `localtime` depends on the host, `Factory` is a placeholder.
NOT_ZONES = {"localtime", "Factory"}

HELP = {
    "name": gettext_lazy("Shown in the list and in the log."),
    "task": gettext_lazy("The tasks that the code declares with @task(schedulable=True)."),
    "args": gettext_lazy('A JSON list, such as [1, "two"]. Empty for none.'),
    "kwargs": gettext_lazy('A JSON object, such as {"days": 7}. Empty for none.'),
    "cron": gettext_lazy(
        "Minute, hour, day of month, month, day of week: 30 2 * * 1-5 means 02:30 from Monday to Friday. "
        "If day of month and day of week are both given, one is enough: 0 0 13 * 5 means every 13th and every Friday. "
        "Leave empty to use an interval."
    ),
    "interval_seconds": gettext_lazy(
        "The number of seconds between occurrences, counted from the start below, or else from when the schedule "
        "was created. Leave empty to use a cron expression."
    ),
    "zone": gettext_lazy("The cron expression is read, and occurrences are shown, in this time zone."),
    "starts_at": gettext_lazy("No occurrence before this time, in the time zone of this site. Empty for no limit."),
    "ends_at": gettext_lazy("No occurrence after this time, in the time zone of this site. Empty for no limit."),
    "enabled": gettext_lazy(
        "A disabled schedule does not fire. When it is enabled again, it continues with the next occurrence; "
        "those in between do not count as missed."
    ),
    "overlap": gettext_lazy(
        "What to do when an occurrence is due while the task of an earlier one is queued, running or retrying: "
        "run another task anyway, or skip this occurrence."
    ),
    "missed": gettext_lazy(
        "What to do with occurrences that passed while no worker was running: skip them, queue one task for all of "
        "them, or queue one task for each of the latest."
    ),
    "missed_cap": gettext_lazy("The maximum number of missed occurrences to queue when one task is queued for each."),
    "jitter_seconds": gettext_lazy(
        "Each task is delayed by up to this many seconds, spread evenly, so that not all start at once. 0 for none."
    ),
}


class RepeatedKey(ValueError):
    """An object of JSON has a key twice, of which Python would keep the last value without a word."""


class StrictDecoder(json.JSONDecoder):
    """Refuse an object that has a key twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(object_pairs_hook=self._object, **options)

    @staticmethod
    def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise RepeatedKey(next(key for key in keys if keys.count(key) > 1))
        return found


class ArgumentsField(forms.JSONField):
    """A JSON field for a list or an object. A syntax error is reported with line and column. kind: list or dict."""

    def __init__(self, kind: type, **options: Any) -> None:
        attributes = {"rows": 3, "class": "vLargeTextField asyncq-json", "dir": "ltr", "spellcheck": "false"}
        super().__init__(required=False, widget=forms.Textarea(attributes), decoder=StrictDecoder, **options)
        self.kind = kind

    def to_python(self, value: Any) -> Any:
        """Return the list or object; an empty one for an empty text."""
        if isinstance(value, str) and not value.strip():
            return self.kind()
        try:
            found = super().to_python(value)
        except ValidationError as error:
            raise ValidationError(self._syntax_error(value), code="invalid") from error
        except RepeatedKey as error:
            text = _("The key “%(key)s” occurs twice in one object; only one value could be kept.")
            raise ValidationError(text % {"key": error}, code="repeated") from error
        # For too deep nesting, and for numbers of thousands of digits, Python raises no JSONDecodeError.
        except (RecursionError, ValueError) as error:
            raise ValidationError(
                _("This JSON is nested too deeply or contains a number that is too long."), code="invalid"
            ) from error
        if found is None:
            return self.kind()
        if not isinstance(found, self.kind):
            is_list = self.kind is list
            text = _('Enter a list, such as [1, "two"].') if is_list else _('Enter an object, such as {"days": 7}.')
            raise ValidationError(text, code="kind")
        return found

    def bound_data(self, data: Any, initial: Any) -> Any:
        """Return what the person typed, even when it cannot be parsed."""
        try:
            return super().bound_data(data, initial)
        except (RecursionError, ValueError):
            return InvalidJSONInput(data)

    def prepare_value(self, value: Any) -> Any:
        """Return the text to edit; an empty one for nothing, where JSON would say "null"."""
        if value is None:
            return ""
        if isinstance(value, InvalidJSONInput):
            return value
        return json.dumps(value, ensure_ascii=False)

    @staticmethod
    def _syntax_error(value: Any) -> str:
        try:
            json.loads(value)
        except json.JSONDecodeError as error:
            return _("This is not valid JSON: line %(line)d, column %(column)d: %(reason)s.") % {
                "line": error.lineno,
                "column": error.colno,
                "reason": error.msg,
            }
        return _("This is not valid JSON.")


@cache
def _zones() -> list[str]:
    return sorted(available_timezones() - NOT_ZONES)


def zone_choices() -> list[tuple[str, str]]:
    """Return the choices of time zones, with the project's and UTC first."""
    return [(name, name) for name in dict.fromkeys((default_timezone(), "UTC", *_zones()))]


def task_choices() -> list[tuple[str, str]]:
    """Return the choices of tasks, each with its parameters."""
    return [("", "---------"), *((name, f"{name} {signature_text(known_task(name))}") for name in schedulable_names())]


def shortest_step(timing: Timing) -> timedelta | None:
    """Return the shortest time between two of the next occurrences; None when fewer than two are left."""
    occurrences = [each.occurrence for each in preview(timing, database_clock.now(), OCCURRENCES_COMPARED)]
    return min((later - earlier for earlier, later in pairwise(occurrences)), default=None)


class ScheduleForm(base.AnyModelForm):
    """The form of a schedule whose task people may schedule."""

    task = forms.ChoiceField(label=gettext_lazy("Task"), choices=task_choices)
    args = ArgumentsField(list, label=gettext_lazy("Positional arguments"))
    kwargs = ArgumentsField(dict, label=gettext_lazy("Keyword arguments"))
    zone = forms.ChoiceField(label=gettext_lazy("Time zone"), choices=zone_choices, initial=default_timezone)
    interval_seconds = forms.IntegerField(
        label=gettext_lazy("Interval in seconds"),
        required=False,
        min_value=1,
        max_value=MAX_INTERVAL_SECONDS,
        widget=AdminIntegerFieldWidget,
    )
    missed_cap = forms.IntegerField(
        label=gettext_lazy("Maximum missed occurrences"),
        min_value=1,
        max_value=MAX_MISSED,
        initial=10,
        widget=AdminIntegerFieldWidget,
    )

    class Meta:
        model = Schedule
        fields = tuple(HELP)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if (task := known_task(self.instance.task or "")) is not None:
            # As the code has them now: the row may know the task by a former name, and older arguments of it.
            self.initial["task"] = task.module_path
            if (call := attempt(arguments_of, self.instance, task).value) is not None:
                self.initial.update(args=list(call.args), kwargs=call.kwargs)
        for name in ("cron", "task"):
            self.fields[name].widget.attrs["dir"] = "ltr"
        for name, text in HELP.items():
            self.fields[name].help_text = text
        if not schedulable_names():
            self.fields["task"].help_text = _(
                "No task can be scheduled here yet. Declare one with @task(schedulable=True) in a tasks.py, "
                "then restart the web processes and the workers."
            )
        self.fields["task"].error_messages["invalid_choice"] = _(
            "%(value)s cannot be scheduled here: the code has no task of this name that is declared with "
            "@task(schedulable=True). Declare it that way, or choose another task."
        )
        for name in ("task", "args", "kwargs", "cron"):
            self.fields[name].help_text = base.with_code(self.fields[name].help_text)

    def clean_name(self) -> str:
        """Refuse the name of a schedule that the code declares."""
        name: str = self.cleaned_data["name"]
        if name != self.initial.get("name") and name in declared_schedule_names():
            raise ValidationError(_("The code declares a schedule of this name; choose another."), code="declared")
        return name

    def clean(self) -> dict[str, Any] | None:
        """Validate the fields that depend on each other."""
        super().clean()
        self._check_arguments()
        self._check_needs()
        if self._has_one_timing():
            self._check_timing()
        return self.cleaned_data

    def _check_arguments(self) -> None:
        values = self.cleaned_data
        if not {"task", "args", "kwargs"} <= values.keys():
            return
        task, args, kwargs = known_task(values["task"]), values["args"], values["kwargs"]
        if task is not None:
            # They are entered as the code takes them now.
            self.instance.version = task.version
        try:
            check_call(task, args, kwargs)
        except InvalidArguments as error:
            # Without a path the function cannot be called with them, or they are too large.
            is_named = error.path.startswith("args") and bool(args)
            is_of_args = is_named if error.path else not accepts_positional(task, args)
            self.add_error("args" if is_of_args else "kwargs", str(error))

    def _check_needs(self) -> None:
        """Refuse what a person has entered and does nothing beside the other values."""
        if "missed" not in self.cleaned_data:
            return
        for field, _remedy in lacking(SimpleNamespace(**self.cleaned_data), NEEDS_OF_SCHEDULE):
            if field in self.changed_data:
                text = _("It counts only if missed occurrences are queued one by one: “%(choice)s”.")
                self.add_error(field, text % {"choice": Missed.ALL.label})

    def _has_one_timing(self) -> bool:
        """Whether exactly one of cron expression and interval is given; add an error otherwise."""
        values = self.cleaned_data
        if not {"cron", "interval_seconds"} <= values.keys():
            return False
        cron, seconds = values["cron"], values["interval_seconds"]
        starts_at, ends_at = values.get("starts_at"), values.get("ends_at")
        if cron and seconds is not None:
            self.add_error("interval_seconds", _("Enter a cron expression or an interval, not both."))
        elif not cron and seconds is None:
            self.add_error("cron", _("Enter a cron expression here or an interval below."))
        elif starts_at and ends_at and ends_at <= starts_at:
            self.add_error("ends_at", _("The end must be after the start."))
        else:
            return True
        return False

    def _check_timing(self) -> None:
        """Refuse a timing that never fires and a jitter that is too long. Skip fields that have an error already."""
        values = self.cleaned_data
        given = {name: values[name] for name in Schedule.TIMING_FIELDS if name in values}
        try:
            timing = Schedule(created_at=self.instance.created_at, **given).timing
        except InvalidOption as error:
            field = getattr(error, "field", "cron")
            self.add_error(field if field in self.fields else None, str(error))
            return
        step, jitter = shortest_step(timing), values.get("jitter_seconds") or 0
        if jitter and step is not None and jitter >= step.total_seconds():
            text = _("The jitter must be shorter than the time between two occurrences, which is %(step)s.")
            self.add_error("jitter_seconds", text % {"step": base.whole_duration(step.total_seconds())})
