"""The admin pages of schedules: a list, a page for each with its next and latest occurrences, a form, and run now.

Schedules made here can be edited. Schedules declared in code can only be disabled, enabled and run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import actions as admin_actions
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import flatten_fieldsets, quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..exceptions import InvalidOption
from ..models import Occurrence, Schedule
from ..storage import database_clock
from ..storage.routing import rows_of
from . import display, schedule_actions, schedule_page
from .queries import RoutedAdmin
from .schedule_form import ScheduleForm
from .schedule_page import SchedulePage, TaskLinks

if TYPE_CHECKING:
    ScheduleAdminBase = admin.ModelAdmin[Schedule]
else:
    ScheduleAdminBase = admin.ModelAdmin

OCCURRENCES_LISTED = 3
WHAT = ("name", "task", "args", "kwargs", "enabled")
WHAT_READ_ONLY = ("name", "task", "masked_args", "masked_kwargs", "enabled")
WHEN = ("cron", "interval_seconds", "zone", ("starts_at", "ends_at"))
WHEN_READ_ONLY = ("cron_left_to_right", *WHEN[1:])
OTHERWISE = ("overlap", "missed", "missed_cap", "jitter_seconds")
# A lookup in the URL would reveal masked values letter by letter.
MASKED_COLUMNS = {"args", "kwargs"}


class ScheduleAdmin(RoutedAdmin, ScheduleAdminBase):
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

    class Media:
        css = {"all": ["django_asyncq/admin.css"]}

    # --- permissions

    def has_run_permission(self, request: HttpRequest) -> bool:
        """Require the permission `run_schedule` besides view."""
        user: Any = request.user
        return self.has_view_permission(request) and bool(user.has_perm(f"{self.opts.app_label}.run_schedule"))

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Refuse lookups into masked columns."""
        allowed: bool = super().lookup_allowed(lookup, value, request)  # type: ignore[arg-type]
        return allowed and lookup.partition("__")[0] not in MASKED_COLUMNS

    # --- the list

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
            row.page_url = f"{self._url('change', row)}?{filters}" if request.GET else self._url("change", row)
            row.switch_url = f"{self._url('switch', row)}?list=1&{filters}" if may_switch else ""
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
        shown = [display.time_element(occurrence, now) for occurrence in following]
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

    def get_urls(self) -> list[URLPattern]:
        """Add the URLs that the buttons post to."""
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        run = path("<path:object_id>/run/", self.admin_site.admin_view(self.run_view), name=f"{name}_run")
        switch = path("<path:object_id>/switch/", self.admin_site.admin_view(self.switch_view), name=f"{name}_switch")
        return [run, switch, *super().get_urls()]

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
        return format_html('<pre class="asyncq-pre" dir="ltr" tabindex="0">{}</pre>', schedule_page.masked_args(row))

    @admin.display(description=gettext_lazy("keyword arguments"))
    def masked_kwargs(self, row: Schedule) -> SafeString:
        """Show the arguments with secrets masked."""
        return format_html('<pre class="asyncq-pre" dir="ltr" tabindex="0">{}</pre>', schedule_page.masked_kwargs(row))

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Schedule | None = None,
    ) -> HttpResponse:
        """Show the next and the latest occurrences above the form."""
        if obj is not None:
            row = rows_of(Schedule).filter(pk=obj.pk).first() if context.get("errors") else obj
            context["page"] = row and SchedulePage(
                row,
                database_clock.now(),
                TaskLinks(self.admin_site, request),
                may_run=self.has_run_permission(request),
                may_switch=self.has_change_permission(request, obj),
            )
            context["run_url"], context["switch_url"] = self._url("run", obj), self._url("switch", obj)
            context["show_delete"] = not self._is_still_declared(obj)
            if obj.is_declared:
                # There is nothing to save, only to press.
                names = ("show_save", "show_save_and_continue", "show_save_and_add_another")
                context |= dict.fromkeys(names, False)
        return super().render_change_form(request, context, add, change, form_url, obj)

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
                schedule_actions.warn_never_fires(request, obj)

    def response_post_save_add(self, request: HttpRequest, obj: Schedule) -> HttpResponseRedirect:
        """Go to the page of the new schedule, which shows when it will fire."""
        if self.has_view_permission(request, obj):
            return HttpResponseRedirect(self._url("change", obj))
        return super().response_post_save_add(request, obj)

    # --- the buttons

    def run_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Queue the schedule's task now. POST only."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_run_permission(request):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None:
            return self._missing(request)
        schedule_actions.run(request, row, TaskLinks(self.admin_site, request))
        return HttpResponseRedirect(self._url("change", row))

    def switch_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Enable or disable the schedule, as the button says. POST only."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_change_permission(request):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None:
            return self._missing(request)
        if not self.has_change_permission(request, row):
            raise PermissionDenied
        schedule_actions.switch_and_report(request, [row.pk], enabled=request.POST.get("enabled") == "1")
        if "list" in request.GET:
            filters: Any = {"preserved_filters": self.get_preserved_filters(request), "opts": self.opts}
            return HttpResponseRedirect(add_preserved_filters(filters, self._url("changelist")))
        return HttpResponseRedirect(self._url("change", row))

    def _missing(self, request: HttpRequest) -> HttpResponse:
        messages.warning(request, _("This schedule no longer exists."))
        return HttpResponseRedirect(self._url("changelist"))

    # --- the actions

    @admin.action(permissions=["change"], description=gettext_lazy("Enable selected %(verbose_name_plural)s"))
    def enable_selected(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        """Enable the selected schedules."""
        schedule_actions.switch_and_report(request, _keys(queryset), enabled=True)

    @admin.action(permissions=["change"], description=gettext_lazy("Disable selected %(verbose_name_plural)s"))
    def disable_selected(self, request: HttpRequest, queryset: QuerySet[Schedule]) -> None:
        """Disable the selected schedules."""
        schedule_actions.switch_and_report(request, _keys(queryset), enabled=False)

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
            return HttpResponseRedirect(self._url("change", row))
        return super().delete_view(request, object_id, extra_context)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Count the occurrences that are deleted too, because there may be too many to list."""
        rows = list(objs)
        count = rows_of(Occurrence).filter(schedule__in=rows).count()
        names = [self._deleted_line(row) for row in rows]
        occurrences = ngettext("%(count)d occurrence", "%(count)d occurrences", count) % {"count": count}
        counts = {self.opts.verbose_name_plural: len(rows), Occurrence._meta.verbose_name_plural: count}
        refused = set() if self.has_delete_permission(request) else {self.opts.verbose_name}
        return ([*names, occurrences] if count else names), counts, refused, []

    def _deleted_line(self, row: Schedule) -> SafeString:
        return format_html('{}: <a href="{}">{}</a>', self.opts.verbose_name, self._url("change", row), row)

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: Any) -> HttpResponse:
        """Return to the list, where Django would send a user without change permission to the admin index."""
        response = super().response_delete(request, obj_display, obj_id)
        if isinstance(response, HttpResponseRedirect) and self.has_view_permission(request):
            return HttpResponseRedirect(self._url("changelist"))
        return response

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

    def _url(self, view: str, row: Schedule | None = None) -> str:
        return reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}",
            args=[] if row is None else [quote(row.pk)],
            current_app=self.admin_site.name,
        )


def _keys(rows: QuerySet[Schedule]) -> list[UUID]:
    return list(rows.order_by("name").values_list("pk", flat=True))
