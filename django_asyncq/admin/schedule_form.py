"""The form of a schedule that a person makes: what is wrong is told at the field it is in."""

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
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..definitions.timing import MAX_INTERVAL_SECONDS, Timing, preview
from ..exceptions import InvalidArguments, InvalidOption
from ..models import Schedule, default_timezone
from ..tasks import check_call
from . import display
from .code import declared_schedule_names, known_task, positional_fit, schedulable_names, signature_text

if TYPE_CHECKING:
    ScheduleFormBase = forms.ModelForm[Schedule]
else:
    ScheduleFormBase = forms.ModelForm

# A slip of the hand in "for each" must not queue a million tasks at once.
MOST_MISSED = 1_000
# Among so many occurrences to come the shortest time between two is sought.
OCCURRENCES_COMPARED = 10
# Names of zoneinfo that are no places: one is of this host, the other a default of makers of clocks.
NO_PLACES = {"localtime", "Factory"}

HELP = {
    "name": gettext_lazy("What the list and the log call it."),
    "cron": gettext_lazy(
        "Minute, hour, day of month, month, day of week: 30 2 * * 1-5 is 02:30 from Monday to Friday. "
        "Leave it empty for an interval."
    ),
    "interval_seconds": gettext_lazy(
        "Every so many seconds, counted from the start below, else from when the schedule was made. "
        "Leave it empty for a cron expression."
    ),
    "zone": gettext_lazy("The clock that the cron expression is read by, and the occurrences are shown in."),
    "starts_at": gettext_lazy("No occurrence before this moment, in the time zone of this site; empty: no bound."),
    "ends_at": gettext_lazy("No occurrence after this moment, in the time zone of this site; empty: it goes on."),
    "enabled": gettext_lazy(
        "Switched off it has no occurrences. Switched on again it goes on with the next one: what came between is not missed."
    ),
    "overlap": gettext_lazy(
        "If an occurrence comes while a task of an earlier one is queued, running or waits for a retry: "
        "queue another, or leave this occurrence out."
    ),
    "missed": gettext_lazy(
        "If occurrences came while no worker was there to see them: leave them out, queue one task for all of them, "
        "or one for each of the latest."
    ),
    "missed_cap": gettext_lazy("How many of the latest missed occurrences are queued at most, if each is to be."),
    "jitter_seconds": gettext_lazy(
        "Each task starts up to so many seconds late, spread evenly, so that not all start at once; 0 is none."
    ),
}


class ArgumentsField(forms.JSONField):
    """JSON of one kind; what is not JSON is told with the place. kind: list or dict."""

    def __init__(self, kind: type, **options: Any) -> None:
        attributes = {"rows": 3, "class": "vLargeTextField asyncq-json", "dir": "ltr", "spellcheck": "false"}
        super().__init__(required=False, widget=forms.Textarea(attributes), **options)
        self.kind = kind

    def to_python(self, value: Any) -> Any:
        """Return the list or the object; an empty one for no text."""
        if isinstance(value, str) and not value.strip():
            return self.kind()
        try:
            found = super().to_python(value)
        except ValidationError as error:
            raise ValidationError(self._what_is_wrong(value), code="invalid") from error
        # Far too deeply nested, or a number of thousands of digits: Python has no error of JSON for these.
        except (RecursionError, ValueError) as error:
            raise ValidationError(
                _("This JSON is nested too deeply, or has a number that is too long."), code="invalid"
            ) from error
        if found is None:
            return self.kind()
        if not isinstance(found, self.kind):
            wanted = _('a list, such as [1, "two"]') if self.kind is list else _('an object, such as {"days": 7}')
            raise ValidationError(
                _("This is no list or object as it is needed here: give %(wanted)s.") % {"wanted": wanted}, code="kind"
            )
        return found

    def bound_data(self, data: Any, initial: Any) -> Any:
        """Return what was typed, also when it cannot be read."""
        try:
            return super().bound_data(data, initial)
        except (RecursionError, ValueError):
            return InvalidJSONInput(data)

    def prepare_value(self, value: Any) -> Any:
        """Return the text to edit."""
        if isinstance(value, InvalidJSONInput):
            return value
        return json.dumps(value, ensure_ascii=False)

    @staticmethod
    def _what_is_wrong(value: Any) -> str:
        try:
            json.loads(value)
        except json.JSONDecodeError as error:
            return _("This is not JSON: line %(line)d, column %(column)d: %(reason)s.") % {
                "line": error.lineno,
                "column": error.colno,
                "reason": error.msg,
            }
        return _("This is not JSON.")


@cache
def zone_names() -> list[str]:
    """Return the names of all time zones, sorted."""
    return sorted(available_timezones() - NO_PLACES)


def zone_choices() -> list[tuple[str, str]]:
    """Return the time zones to choose from, the project's and UTC first."""
    first = list(dict.fromkeys((default_timezone(), "UTC")))
    return [(name, name) for name in [*first, *(name for name in zone_names() if name not in first)]]


def task_choices() -> list[tuple[str, str]]:
    """Return the tasks that may be chosen, each with what it is called with."""
    return [("", "---------"), *((name, f"{name} {signature_text(known_task(name))}") for name in schedulable_names())]


def shortest_step(timing: Timing) -> timedelta | None:
    """Return the shortest time between two of the next occurrences; None when fewer than two are to come."""
    occurrences = [each.occurrence for each in preview(timing, timezone.now(), OCCURRENCES_COMPARED)]
    return min((later - earlier for earlier, later in pairwise(occurrences)), default=None)


class ScheduleForm(ScheduleFormBase):
    """A schedule of a task that may be scheduled by people."""

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
        label=gettext_lazy("Cap of missed occurrences"),
        min_value=1,
        max_value=MOST_MISSED,
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
        self.fields["task"].help_text = _("Tasks that the code declares with @task(schedulable=True).")
        if not schedulable_names():
            self.fields["task"].help_text = _(
                "No task may be scheduled here yet. Declare one with @task(schedulable=True) in a tasks.py, "
                "and start the web processes and the workers anew."
            )
        self.fields["task"].error_messages["invalid_choice"] = _(
            "%(value)s cannot be scheduled here: the code has no task of this name that is declared with "
            "@task(schedulable=True). Declare it so, or choose another."
        )
        self.fields["args"].help_text = _('A JSON list, such as [1, "two"]; empty for none.')
        self.fields["kwargs"].help_text = _('A JSON object, such as {"days": 7}; empty for none.')

    def clean_name(self) -> str:
        """Leave the names of declared schedules to the code."""
        name: str = self.cleaned_data["name"]
        if name != self.initial.get("name") and name in declared_schedule_names():
            raise ValidationError(_("The code declares a schedule of this name; choose another."), code="declared")
        return name

    def clean(self) -> dict[str, Any] | None:
        """Compare the fields with each other."""
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
            self.add_error("args" if error.path.startswith("args") and args else "kwargs", str(error))
        except InvalidOption as error:
            self.add_error("kwargs" if positional_fit(task, args) else "args", str(error))

    def _has_one_timing(self) -> bool:
        """Refuse both kinds, and none."""
        values = self.cleaned_data
        if not {"cron", "interval_seconds"} <= values.keys():
            return False
        cron, seconds = values["cron"], values["interval_seconds"]
        starts_at, ends_at = values.get("starts_at"), values.get("ends_at")
        if cron and seconds is not None:
            self.add_error("interval_seconds", _("Give a cron expression or an interval, not both."))
        elif not cron and seconds is None:
            self.add_error("cron", _("Give a cron expression here or an interval below."))
        elif starts_at and ends_at and ends_at <= starts_at:
            self.add_error("ends_at", _("This is not after the start."))
        else:
            return True
        return False

    def _check_timing(self) -> None:
        """Refuse what never fires, and a jitter that is too long; fields that are wrong in themselves are left out."""
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
            text = _("A task would start after the next occurrence: occurrences come %(step)s apart, so give less.")
            self.add_error("jitter_seconds", text % {"step": display.whole_duration(step.total_seconds())})
