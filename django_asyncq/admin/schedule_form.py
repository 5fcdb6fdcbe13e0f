"""The form for schedules made in the admin. Each error is shown at its field."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from zoneinfo import available_timezones

from django import forms
from django.contrib.admin.widgets import AdminIntegerFieldWidget
from django.core.exceptions import ValidationError
from django.forms.fields import InvalidJSONInput
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..definitions.calls import check_call
from ..definitions.timing import MAX_INTERVAL_SECONDS, Timing, preview
from ..exceptions import InvalidArguments, InvalidOption
from ..models import Schedule, default_timezone
from ..storage import database_clock
from . import display
from .code import accepts_positional, declared_schedule_names, known_task, schedulable_names, signature_text

if TYPE_CHECKING:
    ScheduleFormBase = forms.ModelForm[Schedule]
else:
    ScheduleFormBase = forms.ModelForm

# A typing error must not queue a million tasks at once.
MAX_MISSED = 1_000
# The shortest time between two occurrences is the minimum over this many of the next ones.
OCCURRENCES_COMPARED = 10
# Names in zoneinfo that are not time zones of places: `localtime` depends on the host, `Factory` is a placeholder.
NOT_ZONES = {"localtime", "Factory"}

HELP = {
    "name": gettext_lazy("Shown in the list and in the log."),
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
def zone_names() -> list[str]:
    """Return the names of all time zones, sorted."""
    return sorted(available_timezones() - NOT_ZONES)


def zone_choices() -> list[tuple[str, str]]:
    """Return the choices of time zones, with the project's and UTC first."""
    first = list(dict.fromkeys((default_timezone(), "UTC")))
    return [(name, name) for name in [*first, *(name for name in zone_names() if name not in first)]]


def task_choices() -> list[tuple[str, str]]:
    """Return the choices of tasks, each with its parameters."""
    return [("", "---------"), *((name, f"{name} {signature_text(known_task(name))}") for name in schedulable_names())]


def shortest_step(timing: Timing) -> timedelta | None:
    """Return the shortest time between two of the next occurrences; None when fewer than two are left."""
    occurrences = [each.occurrence for each in preview(timing, database_clock.now(), OCCURRENCES_COMPARED)]
    return min((later - earlier for earlier, later in pairwise(occurrences)), default=None)


class ScheduleForm(ScheduleFormBase):
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
        fields = (
            "name",
            "task",
            "args",
            "kwargs",
            "cron",
            "interval_seconds",
            "zone",
            "starts_at",
            "ends_at",
            "enabled",
            "overlap",
            "missed",
            "missed_cap",
            "jitter_seconds",
        )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("cron", "task"):
            self.fields[name].widget.attrs["dir"] = "ltr"
        for name, text in HELP.items():
            self.fields[name].help_text = text
        self.fields["task"].help_text = _("The tasks that the code declares with @task(schedulable=True).")
        if not schedulable_names():
            self.fields["task"].help_text = _(
                "No task can be scheduled here yet. Declare one with @task(schedulable=True) in a tasks.py, "
                "then restart the web processes and the workers."
            )
        self.fields["task"].error_messages["invalid_choice"] = _(
            "%(value)s cannot be scheduled here: the code has no task of this name that is declared with "
            "@task(schedulable=True). Declare it that way, or choose another task."
        )
        self.fields["args"].help_text = _('A JSON list, such as [1, "two"]. Empty for none.')
        self.fields["kwargs"].help_text = _('A JSON object, such as {"days": 7}. Empty for none.')
        for name in ("task", "args", "kwargs", "cron"):
            self.fields[name].help_text = display.with_code(self.fields[name].help_text)

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
        if self._has_one_timing():
            self._check_timing()
        return self.cleaned_data

    def _check_arguments(self) -> None:
        values = self.cleaned_data
        if not {"task", "args", "kwargs"} <= values.keys():
            return
        task, args, kwargs = known_task(values["task"]), values["args"], values["kwargs"]
        try:
            check_call(task, args, kwargs)
        except InvalidArguments as error:
            # Without a path the function cannot be called with them, or they are too large.
            is_named = error.path.startswith("args") and bool(args)
            is_of_args = is_named if error.path else not accepts_positional(task, args)
            self.add_error("args" if is_of_args else "kwargs", str(error))

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
            self.add_error("jitter_seconds", text % {"step": display.whole_duration(step.total_seconds())})
