"""The admin pages of schedules: a list, a page for each with its next and latest occurrences, a form, and run now.

Schedules made here can be edited. Schedules declared in code can only be disabled, enabled and run.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin import actions as admin_actions
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

from ..core import compat
from ..core.redaction import mask_text
from ..exceptions import AsyncqError, InvalidOption
from ..models import Occurrence, Schedule, StartupRun
from ..models.schedules import all_paused
from ..scheduling.occurrences import run_now
from ..scheduling.scheduler import resume_all, switch
from ..storage import database_clock, identity
from ..storage.routing import rows_of, transaction_of
from . import base, history, schedule_page
from .filters import ReadOnlyAdmin, RoutedAdmin
from .history import Did
from .schedule_page import ScheduleForm, SchedulePage, TaskLinks
from .task_page import Fact

# --- The actions of the buttons of schedules: run now, enable, disable. Each shows a message and is logged.

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


def run(model_admin: ModelAdmin[Any], request: HttpRequest, row: Schedule) -> None:
    """Run a schedule now, and log it."""
    try:
        seen = int(request.POST.get("seen", ""))
    except ValueError:
        messages.error(request, _("This request did not come from the page of the schedule. Nothing was queued."))
        return
    try:
        result = run_once(row.pk, seen)
    except Schedule.DoesNotExist:
        messages.warning(request, ScheduleAdmin.missing)
        return
    except (AsyncqError, compat.InvalidTask) as error:
        messages.error(request, _("Not run: %(reason)s. Nothing was queued.") % {"reason": error})
        return
    task = TaskLinks(model_admin.admin_site, request).of_occurrence(row, result.occurrence.task_id)
    if not result.is_new:
        since = base.relative(result.occurrence.created_at, database_clock.now())
        text = _("Somebody has run it since this page was opened: {}, {}. No other task was queued.")
        messages.warning(request, format_html(text, task, since))
        return
    history.note_rows(request, [row], Did.RUN_NOW_AS, task=result.occurrence.task_id)
    messages.success(request, format_html(_("Queued: {}."), task))


def switch_one(model_admin: ScheduleAdmin, request: HttpRequest, row: Schedule) -> str | None:
    """Enable or disable a schedule, as the button says; return the list where it was pressed there."""
    switch_and_report(request, [row.pk], enabled=request.POST.get("enabled") == "1")
    if "list" not in request.GET:
        return None
    filters: Any = {"preserved_filters": model_admin.get_preserved_filters(request), "opts": model_admin.opts}
    return add_preserved_filters(filters, model_admin.url_to("changelist"))


def switch_and_report(request: HttpRequest, pks: list[UUID], *, enabled: bool) -> None:
    """Enable or disable schedules, show messages, and log it."""
    switched = switch(pks, enabled=enabled)
    if switched.changed:
        history.note_rows(request, switched.changed, Did.ENABLED if enabled else Did.DISABLED)
        on = ngettext("Enabled: %(names)s.", "%(count)d schedules enabled: %(names)s.", len(switched.changed))
        off = ngettext("Disabled: %(names)s.", "%(count)d schedules disabled: %(names)s.", len(switched.changed))
        messages.success(request, _with_names(on if enabled else off, switched.changed))
    if switched.unchanged:
        text = _("Already enabled: %(names)s.") if enabled else _("Already disabled: %(names)s.")
        messages.info(request, _with_names(text, switched.unchanged))
    for row in switched.never_firing:
        warn_never_fires(request, row)
    for row, error in switched.broken:
        text = _("Not enabled: %(name)s: %(reason)s.")
        messages.error(request, text % {"name": row.name, "reason": error})


def resume(model_admin: ModelAdmin[Any], request: HttpRequest) -> None:
    """End the pause of all schedules, and log it."""
    if resume_all():
        history.note(request, Schedule, "all schedules", Did.RESUMED)
    messages.success(request, _("All schedules fire again."))


def warn_never_fires(request: HttpRequest, row: Schedule) -> None:
    """Warn that a schedule has no occurrence left."""
    messages.warning(request, _("%(name)s has no more occurrences, so it will not fire.") % {"name": row.name})


def _with_names(text: str, rows: list[Schedule]) -> str:
    names = ", ".join(row.name for row in rows[:NAMES_IN_MESSAGE])
    return text % {"count": len(rows), "names": names if len(rows) <= NAMES_IN_MESSAGE else f"{names}, …"}


OCCURRENCES_LISTED = 3
WHAT = ("name", "task", "args", "kwargs", "enabled")
WHAT_READ_ONLY = ("name", "task", "masked_args", "masked_kwargs", "enabled")
WHEN = ("cron", "interval_seconds", "zone", ("starts_at", "ends_at"))
WHEN_READ_ONLY = ("cron_left_to_right", *WHEN[1:])
OTHERWISE = ("overlap", "missed", "missed_cap", "jitter_seconds")


class ScheduleAdmin(RoutedAdmin):
    """The list of schedules, the page of one, its form, and the buttons."""

    form = ScheduleForm
    list_display = ("name_and_task", "switch", "timing", "next_occurrences", "last_run")
    # The first column renders its own link, because it also shows marks.
    list_display_links = None
    list_filter = ("enabled", "is_declared")
    list_per_page = 100
    search_fields = ("name", "task")
    search_help_text = gettext_lazy("A part of the schedule's name or of the task's name.")
    ordering = ("name",)
    actions = ("enable_selected", "disable_selected", "delete_selected")
    change_form_template = "admin/django_asyncq/schedule/change_form.html"
    change_list_template = "admin/django_asyncq/schedule/change_list.html"

    missing = gettext_lazy("This schedule no longer exists.")
    masked_columns = ("args", "kwargs")

    def has_run_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        """Require the permission `run_schedule` besides view."""
        return self.has_view_permission(request, obj) and base.has_right(request, "run_schedule")

    # --- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[Schedule]:
        """Return the schedules, each with whether all of them are paused."""
        rows: QuerySet[Schedule] = super().get_queryset(request).annotate(is_paused=all_paused())
        return rows

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, and the pause of all schedules with the button that ends it."""
        paused_at = identity.schedules_paused_at()
        may_resume = paused_at is not None and self.has_change_permission(request)
        more = {"paused_at": paused_at, "resume_url": self.url_to("resume") if may_resume else ""}
        return super().changelist_view(request, more | (extra_context or {}))

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Read the latest occurrence of each schedule on this page, and set the URLs this user may use."""
        changelist = super().get_changelist_instance(request)
        rows: Any = changelist.result_list
        runs, links = schedule_page.latest_runs(rows), TaskLinks(self.admin_site, request)
        filters = urlencode({"_changelist_filters": request.GET.urlencode()})
        now, may_switch = database_clock.now(), self.has_change_permission(request)
        for row in rows:
            row.latest_run = schedule_page.run_summary(
                runs.get(row.pk), now, links, schedule_page.masker_of_schedule(row)
            )
            row.page_url = f"{self.url_to('change', row)}?{filters}" if request.GET else self.url_to("change", row)
            row.switch_url = f"{self.url_to('switch', row)}?list=1&{filters}" if may_switch else ""
        return changelist

    @admin.display(description=gettext_lazy("schedule"), ordering="name")
    def name_and_task(self, row: Schedule) -> SafeString:
        """Show the name, the task, where it was made, and what is wrong."""
        return format_html(
            '<a href="{}">{}</a> <span class="asyncq-second"><bdi class="asyncq-id" dir="ltr" title="{}">{}</bdi> '
            '<span class="asyncq-note">· {}</span></span>{}',
            getattr(row, "page_url", ""),
            row.name,
            row.task,
            row.task.rpartition(".")[2],
            schedule_page.origin(row),
            schedule_page.problem_marks(row, database_clock.now()),
        )

    @admin.display(description=gettext_lazy("fires"))
    def timing(self, row: Schedule) -> SafeString:
        """Show the timing in words, and as it was entered."""
        return format_html(
            '{} <span class="asyncq-second asyncq-id"><bdi dir="ltr">{}</bdi> {}</span>',
            schedule_page.timing_in_words(row),
            schedule_page.as_written(row),
            row.zone if row.cron else "",
        )

    @admin.display(description=gettext_lazy("next occurrences"), ordering="next_occurrence_at")
    def next_occurrences(self, row: Schedule) -> SafeString | str:
        """Show the next occurrence, and below it the following ones."""
        now = database_clock.now()
        following = [each.occurrence for each in schedule_page.upcoming(row, now, OCCURRENCES_LISTED)]
        if (
            row.next_occurrence_at
            and row.next_occurrence_at not in following
            and row.enabled
            and row.retired_at is None
        ):
            following = [row.next_occurrence_at, *following][:OCCURRENCES_LISTED]
        if not following:
            return "–"
        shown = [base.time_element(occurrence, now) for occurrence in following]
        then = format_html_join(", ", "{}", ((each,) for each in shown[1:]))
        return format_html('{} <span class="asyncq-second asyncq-note">{}</span>', shown[0], then)

    @admin.display(description=gettext_lazy("last run"))
    def last_run(self, row: Schedule) -> SafeString | str:
        """Show the latest occurrence and its task."""
        shown: SafeString | str = getattr(row, "latest_run", "–")
        return shown

    @admin.display(description=gettext_lazy("enabled"), ordering="enabled")
    def switch(self, row: Schedule) -> SafeString:
        """Show on or off: a button for users who may change the schedule, a word for others."""
        word, kind = (_("On"), "on") if row.enabled else (_("Off"), "off")
        url = getattr(row, "switch_url", "")
        if not url:
            return format_html('<span class="asyncq-state asyncq-state-{}">{}</span>', kind, word)
        return format_html(
            '<button type="submit" class="asyncq-switch asyncq-switch-{}" role="switch" aria-checked="{}" '
            'aria-label="{}" formaction="{}" formmethod="post" name="enabled" value="{}">{}</button>',
            kind,
            "true" if row.enabled else "false",
            row.name,
            url,
            "0" if row.enabled else "1",
            word,
        )

    # --- the page of one schedule

    def _is_read_only(self, request: HttpRequest, obj: Schedule | None) -> bool:
        """Whether the user may only read the form, so that secrets are masked."""
        return obj is not None and (obj.is_declared or not self.has_change_permission(request, obj))

    def get_fieldsets(self, request: HttpRequest, obj: Schedule | None = None) -> Any:
        """Return the three parts of the form."""
        what, when = (WHAT_READ_ONLY, WHEN_READ_ONLY) if self._is_read_only(request, obj) else (WHAT, WHEN)
        return [
            (_("What"), {"fields": what}),
            (_("When"), {"fields": when}),
            (_("Overlap, missed occurrences and jitter"), {"fields": OTHERWISE}),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Schedule | None = None) -> Any:
        """Make every field of a declared schedule read-only: its switch is a button."""
        return flatten_fieldsets(self.get_fieldsets(request, obj)) if self._is_read_only(request, obj) else ()

    def get_form(
        self, request: HttpRequest, obj: Schedule | None = None, change: bool = False, **options: Any
    ) -> type[forms.ModelForm[Schedule]]:
        """Return the whole form, or one with only the switch."""
        if self._is_read_only(request, obj):
            options["form"] = forms.ModelForm
        return super().get_form(request, obj, change, **options)

    @admin.display(description=gettext_lazy("cron expression"))
    def cron_left_to_right(self, row: Schedule) -> SafeString:
        """Show the expression, left to right in every language."""
        return format_html('<bdi dir="ltr">{}</bdi>', row.cron or "–")

    @admin.display(description=gettext_lazy("positional arguments"))
    def masked_args(self, row: Schedule) -> SafeString:
        """Show the arguments with secrets masked."""
        return format_html('<pre class="asyncq-pre" dir="ltr" tabindex="0">{}</pre>', schedule_page.masked(row, "args"))

    @admin.display(description=gettext_lazy("keyword arguments"))
    def masked_kwargs(self, row: Schedule) -> SafeString:
        """Show the arguments with secrets masked."""
        return format_html(
            '<pre class="asyncq-pre" dir="ltr" tabindex="0">{}</pre>', schedule_page.masked(row, "kwargs")
        )

    def add_to_page(self, request: HttpRequest, context: dict[str, Any], obj: Schedule) -> None:
        """Show the next and the latest occurrences above the form."""
        row = rows_of(Schedule).filter(pk=obj.pk).first() if context.get("errors") else obj
        context["page"] = row and SchedulePage(
            row,
            database_clock.now(),
            TaskLinks(self.admin_site, request),
            may_run=self.has_run_permission(request),
            may_switch=self.has_change_permission(request, obj),
        )
        context["run_url"], context["switch_url"] = self.url_to("run", obj), self.url_to("switch", obj)
        context["show_delete"] = not self._is_still_declared(obj)
        if obj.is_declared:
            # There is nothing to save, only to press.
            names = ("show_save", "show_save_and_continue", "show_save_and_add_another")
            context |= dict.fromkeys(names, False)

    # --- saving

    def save_model(self, request: HttpRequest, obj: Schedule, form: Any, change: bool) -> None:
        """Save only the changed fields, because the scheduler may have written others in the meantime.

        A change of the timing or of the switch plans the next occurrence again.
        """
        changed = set(form.changed_data) & {field.name for field in obj._meta.concrete_fields}
        if not change:
            # Intervals are counted from it.
            obj.created_at = database_clock.now()
        if not change or changed & {*Schedule.TIMING_FIELDS, "enabled"}:
            changed.add("next_occurrence_at")
            self._plan(request, obj)
        if change:
            obj.save(update_fields=changed)
        else:
            obj.save()

    @staticmethod
    def _plan(request: HttpRequest, obj: Schedule) -> None:
        """Plan the next occurrence, and show a message when there is none."""
        try:
            obj.plan_next(database_clock.now())
        except InvalidOption as error:
            obj.next_occurrence_at = None
            messages.error(request, _("%(name)s will not fire: %(reason)s.") % {"name": obj.name, "reason": error})
        else:
            if obj.enabled and obj.next_occurrence_at is None:
                warn_never_fires(request, obj)

    def response_post_save_add(self, request: HttpRequest, obj: Schedule) -> HttpResponseRedirect:
        """Go to the page of the new schedule, which shows when it will fire."""
        if self.has_view_permission(request, obj):
            return HttpResponseRedirect(self.url_to("change", obj))
        return super().response_post_save_add(request, obj)

    # --- the actions

    @admin.action(permissions=["change"], description=gettext_lazy("Enable selected %(verbose_name_plural)s"))
    def enable_selected(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        """Enable the selected schedules."""
        switch_and_report(request, _keys(queryset), enabled=True)

    @admin.action(permissions=["change"], description=gettext_lazy("Disable selected %(verbose_name_plural)s"))
    def disable_selected(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        """Disable the selected schedules."""
        switch_and_report(request, _keys(queryset), enabled=False)

    @admin.action(permissions=["delete"], description=gettext_lazy("Delete selected %(verbose_name_plural)s"))
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> HttpResponse | None:
        """Delete schedules after a confirmation, as Django does, except those that the code still declares."""
        declared = queryset.filter(is_declared=True, retired_at=None)
        names = list(declared.values_list("name", flat=True))
        if names:
            self._refuse_deletion(request, names)
        rows = queryset.exclude(is_declared=True, retired_at=None)
        return admin_actions.delete_selected(self, request, rows) if rows.exists() else None

    # --- deleting

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Delete a schedule after a confirmation, unless the code still declares it."""
        row = self.get_object(request, unquote(object_id))
        if row is not None and self._is_still_declared(row) and self.has_delete_permission(request, row):
            self._refuse_deletion(request, [row.name])
            return HttpResponseRedirect(self.url_to("change", row))
        return super().delete_view(request, object_id, extra_context)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Count the occurrences that are deleted too, because there may be too many to list."""
        rows = list(objs)
        count = rows_of(Occurrence).filter(schedule__in=rows).count()
        line = '{}: <a href="{}">{}</a>'
        names = [format_html(line, self.opts.verbose_name, self.url_to("change", row), row) for row in rows]
        occurrences = ngettext("%(count)d occurrence", "%(count)d occurrences", count) % {"count": count}
        counts = {self.opts.verbose_name_plural: len(rows), Occurrence._meta.verbose_name_plural: count}
        refused = set() if self.has_delete_permission(request) else {self.opts.verbose_name}
        return ([*names, occurrences] if count else names), counts, refused, []

    @staticmethod
    def _is_still_declared(row: Schedule) -> bool:
        return row.is_declared and row.retired_at is None

    @staticmethod
    def _refuse_deletion(request: HttpRequest, names: list[str]) -> None:
        text = ngettext(
            "Not deleted, because the code declares it and would create it again: %(names)s. Disable it instead, "
            "or remove it from the code first.",
            "Not deleted, because the code declares them and would create them again: %(names)s. Disable them instead, "
            "or remove them from the code first.",
            len(names),
        )
        messages.error(request, text % {"names": ", ".join(names)})


def _keys(rows: QuerySet[Schedule]) -> list[UUID]:
    return list(rows.order_by("name").values_list("pk", flat=True))


# --- The admin pages of the runs of start-up tasks. They are read-only.


class StartupRunAdmin(ReadOnlyAdmin):
    """List the runs of start-up tasks, and show a page for each."""

    list_display = ("name", "started", "duration", "outcome", "held_by")
    list_display_links = ("name",)
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ("name", "started")
    search_fields = ("name", "holder")
    change_form_template = "admin/django_asyncq/startuprun/change_form.html"

    @admin.display(description=gettext_lazy("started"), ordering="begun_at")
    def started(self, run: StartupRun) -> SafeString | str:
        """Show when it started."""
        return base.time_element(run.begun_at, database_clock.now())

    @admin.display(description=gettext_lazy("duration"))
    def duration(self, run: StartupRun) -> SafeString | str:
        """Show how long it took."""
        if run.finished_at is None:
            return "–"
        return format_html("<bdi>{}</bdi>", base.duration(base.seconds_between(run.begun_at, run.finished_at)))

    @admin.display(description=gettext_lazy("outcome"))
    def outcome(self, run: StartupRun) -> SafeString:
        """Show the outcome, with the last line of the error."""
        last = mask_text(run.error).strip().rpartition("\n")[2]
        return format_html("{} {}", outcome_badge(run), base.first_line(last) if run.error else "")

    @admin.display(description=gettext_lazy("supervisor"))
    def held_by(self, run: StartupRun) -> SafeString:
        """Show the supervisor process that ran it."""
        return format_html('<bdi class="asyncq-code" dir="ltr">{}</bdi>', run.holder)

    def add_to_page(self, request: HttpRequest, context: dict[str, Any], obj: StartupRun) -> None:
        """Show the run instead of a form."""
        now = database_clock.now()
        context["run"] = obj
        context["outcome"] = outcome_badge(obj)
        context["error"] = base.excerpt(mask_text(obj.error), whole="full" in request.GET) if obj.error else None
        context["facts"] = [
            Fact(_("Name"), obj.name, is_code=True),
            Fact(_("Started"), base.time_element(obj.begun_at, now)),
            Fact(pgettext("run", "Finished"), base.time_element(obj.finished_at, now) or "–"),
            Fact(pgettext("run", "Duration"), self.duration(obj)),
            Fact(_("Supervisor"), obj.holder, is_code=True),
            Fact(_("Fencing token"), str(obj.term)),
        ]


def outcome_badge(run: StartupRun) -> SafeString:
    """Return the outcome of a run as a badge."""
    if run.finished_at is None:
        kind, word, title = "running", _("Not finished"), _("It is still running, or its process died.")
    elif run.error:
        kind, word, title = "failed", pgettext("run", "Failed"), ""
    else:
        kind, word, title = "succeeded", pgettext("run", "Succeeded"), ""
    return format_html('<span class="asyncq-state asyncq-state-{}" title="{}">{}</span>', kind, title, word)
