"""Forms that enqueue: a task after one that has ended, and a call that a person makes.

Both go through the task's own `enqueue`, so gates, unique keys and the check of arguments hold as they do for code.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import lifecycle
from ..core.calls import check_call
from ..exceptions import AsyncqError, InvalidArguments, InvalidOption
from ..models import TaskRecord, TaskState
from ..storage import database_clock
from ..storage.errors import one_line
from ..storage.routing import rows_of, transaction_of
from . import base, history
from .base import Asking, Question, url_of
from .code import has_secret_arguments, known_task, schedulable_names, signature_text
from .history import Did
from .schedule_page import ArgumentsField

LONGEST_DELAY_SECONDS = 366 * 86_400


class CallForm(forms.Form):
    """The arguments of a call. task: the declared task; None while it is not known."""

    args = ArgumentsField(list, label=gettext_lazy("Positional arguments"))
    kwargs = ArgumentsField(dict, label=gettext_lazy("Keyword arguments"))

    def __init__(self, *arguments: Any, task: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.task = task

    def clean(self) -> dict[str, Any]:
        """Refuse arguments that the function does not take."""
        found: dict[str, Any] = super().clean() or self.cleaned_data
        if self.task is not None and "args" in found and "kwargs" in found:
            try:
                check_call(self.task, found["args"], found["kwargs"])
            except InvalidArguments as error:
                raise ValidationError(str(error)) from error
        return found


class EnqueueForm(CallForm):
    """A task that people may enqueue, its arguments, and where and when it runs."""

    name = forms.ChoiceField(label=gettext_lazy("Task"))
    queue_name = forms.CharField(
        label=gettext_lazy("Queue"),
        required=False,
        max_length=64,
        help_text=gettext_lazy("Empty for the queue that the task declares."),
    )
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"),
        required=False,
        validators=[MinValueValidator(-100), MaxValueValidator(100)],
        help_text=gettext_lazy("From -100 to 100; empty for that of the task."),
    )
    delay_seconds = forms.IntegerField(
        label=gettext_lazy("Delay in seconds"),
        required=False,
        validators=[MinValueValidator(0), MaxValueValidator(LONGEST_DELAY_SECONDS)],
        help_text=gettext_lazy("Empty to run it as soon as a worker is free."),
    )
    field_order = ("name", "args", "kwargs", "queue_name", "priority", "delay_seconds")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        choices: Any = self.fields["name"]
        choices.choices = [(name, f"{name}{signature_text(known_task(name))}") for name in schedulable_names()]

    def clean(self) -> dict[str, Any]:
        """Check the arguments with the chosen task, and its options."""
        name = self.cleaned_data.get("name")
        self.task = self.task or (known_task(name) if name else None)
        found = super().clean()
        if self.task is not None and not self.errors:
            try:
                self.task = self.task.using(**self.options())
            except InvalidOption as error:
                raise ValidationError(str(error)) from error
        return found

    def options(self) -> dict[str, Any]:
        """Return what differs from the declaration, for `using`."""
        found = {name: self.cleaned_data.get(name) for name in ("queue_name", "priority")}
        options: dict[str, Any] = {name: value for name, value in found.items() if value not in (None, "")}
        if self.cleaned_data.get("delay_seconds"):
            options["run_after"] = timedelta(seconds=self.cleaned_data["delay_seconds"])
        return options


def can_be_changed(record: TaskRecord) -> bool:
    """Whether a task can be enqueued anew, as it was or with other arguments: it has ended, and it is of our code."""
    has_ended = record.state in (TaskState.FAILED, TaskState.SUCCEEDED)
    return has_ended and not record.is_batch and not record.is_remote and record.wire_id is None


def again_text(record: TaskRecord) -> str:
    """Return the text of the button that shows the form."""
    return _("Retry with new arguments") if record.state == TaskState.FAILED else _("Run again")


def enqueue(model_admin: ModelAdmin[Any], request: HttpRequest) -> dict[str, Any] | str:
    """Show the form, and enqueue a task that people may enqueue: one with `@task(schedulable=True)`."""
    form = EnqueueForm(request.POST or None)
    if request.method == "POST" and form.is_valid() and (enqueued := _enqueue(form)) is not None:
        if enqueued.is_new or enqueued.is_changed:
            did = Did.ENQUEUED if enqueued.is_new else Did.GOT_ARGUMENTS
            history.note_tasks(request, [enqueued.record], did)
        return _done(model_admin, request, enqueued)
    return {"form": form}


def again(model_admin: ModelAdmin[Any], request: HttpRequest, old: TaskRecord) -> Asking:
    """Show the arguments of a task that has ended, and enqueue a new one with those, or what a person has entered."""
    task = known_task(old.name)
    if task is None or not can_be_changed(old):
        messages.warning(request, _("This task cannot be enqueued with new arguments."))
        return None
    title = _("Retry %(task)s with new arguments") if old.state == TaskState.FAILED else _("Run %(task)s again")
    title %= {"task": old}
    is_submitted = request.method == "POST" and "args" in request.POST
    if has_secret_arguments(old) and not is_submitted:
        yield Question(
            title=title,
            lines=[_("Some of its arguments are secret. The form shows them, and the history of the task notes that.")],
            button=_("Show the form"),
        )
        history.note_tasks(request, [old], Did.SECRETS_SHOWN)
    initial = {"args": old.args, "kwargs": old.kwargs}
    form = CallForm(request.POST if is_submitted else None, initial=initial, task=task)
    if is_submitted and form.is_valid() and (enqueued := _enqueue_again(request, form, old)) is not None:
        return _done(model_admin, request, enqueued)
    return {"title": title, "form": form}


def can_wait_longer(record: TaskRecord) -> bool:
    """Whether a task may get another time: it waits by itself, for our workers."""
    is_alone = record.after_id is None and record.batch_id is None and not record.group and not record.is_batch
    return record.state == TaskState.QUEUED and is_alone and not record.is_remote and not record.waits_for


class RescheduleForm(forms.Form):
    """When a task that waits runs, and before which others."""

    delay_seconds = forms.IntegerField(
        label=gettext_lazy("Delay in seconds"),
        required=False,
        validators=[MinValueValidator(0), MaxValueValidator(LONGEST_DELAY_SECONDS)],
        help_text=gettext_lazy("From now on; empty to run it as soon as a worker is free."),
    )
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"),
        validators=[MinValueValidator(-100), MaxValueValidator(100)],
        help_text=gettext_lazy("From -100 to 100; tasks with a higher one run first."),
    )


def reschedule(model_admin: ModelAdmin[Any], request: HttpRequest, record: TaskRecord) -> dict[str, Any] | str | None:
    """Show when a task that waits runs, and give it another time and priority."""
    page, now = url_of(model_admin, "change", quote(record.pk)), database_clock.now()
    wait = 0.0 if record.run_after is None else base.seconds_between(now, record.run_after)
    initial = {"delay_seconds": round(wait) if wait > 0 else None, "priority": record.priority}
    form = RescheduleForm(request.POST or None, initial=initial)
    if request.method != "POST" or not form.is_valid():
        title = _("Postpone or reprioritise %(task)s") % {"task": record}
        return {"title": title, "form": form, "submit": _("Save")}
    delay = form.cleaned_data["delay_seconds"]
    changed = lifecycle.reschedule(
        record.pk,
        run_after=now + timedelta(seconds=delay) if delay else None,
        priority=form.cleaned_data["priority"],
    )
    if changed is None:
        messages.warning(request, _("It waits no more, or a worker has just taken it, so nothing was changed."))
        return page
    history.note_tasks(request, [changed], Did.RESCHEDULED, seconds=delay or 0, priority=changed.priority)
    messages.success(request, _("Done."))
    return page


class Enqueued(NamedTuple):
    """The row that stands for a call.

    is_new: False for a unique task's existing one; the call has made none then. is_changed: whether that has got the
    arguments of the call.
    """

    record: TaskRecord
    is_new: bool
    is_changed: bool


def _enqueue_again(request: HttpRequest, form: CallForm, old: TaskRecord) -> Enqueued | None:
    """Enqueue what the form says, as a copy of a task that has ended, and note it; None after a refusal."""
    try:
        form.task = form.task.using(queue_name=old.queue_name, priority=old.priority, backend=old.backend)
    except InvalidOption as error:
        form.add_error(None, str(error))
        return None
    enqueued = _enqueue(form, retried_from=old)
    if enqueued is not None and enqueued.is_new:
        is_same = (enqueued.record.args, enqueued.record.kwargs) == (old.args, old.kwargs)
        of_old = Did.ENQUEUED_AGAIN_AS if is_same else Did.ENQUEUED_ANEW_AS
        of_new = Did.ENQUEUED_AGAIN_AFTER if is_same else Did.ENQUEUED_ANEW_AFTER
        history.note_tasks(request, [old], of_old, task=enqueued.record.pk)
        history.note_tasks(request, [enqueued.record], of_new, task=old.pk)
    elif enqueued is not None and enqueued.is_changed:
        history.note_tasks(request, [enqueued.record], Did.GOT_ARGUMENTS_OF, task=old.pk)
    return enqueued


def _enqueue(form: CallForm, retried_from: TaskRecord | None = None) -> Enqueued | None:
    """Enqueue what the form says; note a refusal in the form, and return None then."""
    data = form.cleaned_data
    try:
        with transaction_of(TaskRecord):
            result = form.task.enqueue(*data["args"], **data["kwargs"])
            rows = rows_of(TaskRecord).filter(pk=result.id)
            if retried_from is not None and result.is_new:
                rows.update(retried_from=retried_from.pk)
            record = rows.first()
    except AsyncqError as error:
        form.add_error(None, one_line(error))
        return None
    if record is None:
        form.add_error(None, _("The task that stands for this call was deleted at this moment. Enqueue again."))
        return None
    is_new = bool(result.is_new)
    return Enqueued(record, is_new, is_changed=not is_new and form.task.on_duplicate != "return")


def _done(model_admin: ModelAdmin[Any], request: HttpRequest, enqueued: Enqueued) -> str:
    url = url_of(model_admin, "change", quote(enqueued.record.pk))
    link = format_html('<a href="{}">{}</a>', url, str(enqueued.record))
    if enqueued.is_new:
        messages.success(request, format_html(_("Enqueued: {}."), link))
    elif enqueued.is_changed:
        messages.success(request, format_html(_("No new task: {} was waiting, and got these arguments."), link))
    else:
        messages.warning(request, format_html(_("No new task: {} has the same key, and stays as it is."), link))
    return url
