"""The admin pages of tasks: a list, a page for each, and retry. Nothing is edited by hand.

Every change of state goes through `lifecycle`. Each action names its permission and checks it again before it acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import django
from django.contrib import admin, messages
from django.contrib.admin import actions as admin_actions
from django.contrib.admin import helpers
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import TaskRecord, TaskState
from ..storage import database_clock
from . import display, retry_action, retry_all
from .filters import (
    EnqueuedFilter,
    GateFilter,
    LastErrorFilter,
    NameFilter,
    QueueFilter,
    ReasonFilter,
    StateFilter,
)
from .queries import BoundedPaginator, RoutedAdmin, TaskChangeList, as_listed, search
from .task_page import TaskPage

if TYPE_CHECKING:
    TaskAdminBase = admin.ModelAdmin[TaskRecord]
else:
    TaskAdminBase = admin.ModelAdmin

RETRY_ACTION = "retry_selected"
LISTED_TO_CONFIRM = 100
MOST_DELETED = 1_000
# A lookup in the URL (?kwargs__password__startswith=a) would reveal masked values letter by letter.
MASKED_COLUMNS = {"args", "kwargs", "headers", "return_value", "progress", "errors"}

# From Django 6.1 an action may also be on the page of one object. Older decorators know no `location`.
RETRY_OPTIONS: dict[str, Any] = {"description": gettext_lazy("Retry selected %(verbose_name_plural)s")}
if django.VERSION >= (6, 1):
    from django.contrib.admin.options import ActionLocation

    RETRY_OPTIONS = {
        "location": [ActionLocation.CHANGE_LIST, ActionLocation.CHANGE_FORM],
        "description": gettext_lazy("Retry"),
        "description_plural": gettext_lazy("Retry selected %(verbose_name_plural)s"),
    }


class TaskRecordAdmin(RoutedAdmin, TaskAdminBase):
    """The list of tasks, the page of one, and the retry of failed ones."""

    list_display = ("task", "state_and_error", "queue_name", "gate", "attempts", "enqueued", "run")
    list_display_links = ("task",)
    list_filter = (StateFilter, ReasonFilter, LastErrorFilter, QueueFilter, NameFilter, GateFilter, EnqueuedFilter)
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ("enqueued",)
    search_fields = ("id", "name")
    search_help_text = gettext_lazy("An id, the beginning of an id, or a part of the task's name.")
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    actions = (RETRY_ACTION, "delete_selected")
    change_form_template = "admin/django_asyncq/taskrecord/change_form.html"

    class Media:
        css = {"all": ["django_asyncq/admin.css"]}
        js = ["django_asyncq/copy.js"]

    # --- permissions

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allow nobody to add a task by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: TaskRecord | None = None) -> bool:
        """Allow nobody to edit a task by hand, because the row says what happened."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: TaskRecord | None = None) -> bool:
        """Never allow the deletion of a running task."""
        if obj is not None and obj.state == TaskState.RUNNING:
            return False
        return super().has_delete_permission(request, obj)

    def has_retry_permission(self, request: HttpRequest, obj: TaskRecord | None = None) -> bool:
        """Require the permission `retry_task`."""
        user: Any = request.user
        return bool(user.has_perm(f"{self.opts.app_label}.retry_task"))

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Refuse lookups into masked columns."""
        allowed: bool = super().lookup_allowed(lookup, value, request)  # type: ignore[arg-type]
        return allowed and lookup.partition("__")[0] not in MASKED_COLUMNS

    # --- the list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[TaskChangeList]:
        """Return the change list that reads only what it shows."""
        return TaskChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[TaskRecord], search_term: str
    ) -> tuple[QuerySet[TaskRecord], bool]:
        """Find tasks by id, by the beginning of an id, or by a part of the name."""
        return (queryset.filter(search(search_term)) if search_term.strip() else queryset), False

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
        state = display.state_element(record, database_clock.now())
        if record.state != TaskState.FAILED:
            return state
        if record.reason not in display.REASONS_WITH_ERROR or not record.last_exception:
            return format_html('{} <span class="asyncq-note" dir="auto">{}</span>', state, record.get_reason_display())
        message = str(getattr(record, "last_message", None) or "")
        return format_html("{} {}", state, display.short_error(record.last_exception, message))

    @admin.display(description=gettext_lazy("attempts"))
    def attempts(self, record: TaskRecord) -> SafeString:
        """Show how many attempts were made, of how many, and the worker crashes."""
        return display.short_attempt_count(record)

    @admin.display(description=gettext_lazy("enqueued"), ordering="id")
    def enqueued(self, record: TaskRecord) -> SafeString | str:
        """Show when it was enqueued."""
        return display.time_element(record.enqueued_at, database_clock.now())

    @admin.display(description=gettext_lazy("started, finished"))
    def run(self, record: TaskRecord) -> SafeString:
        """Show when it was first started, and below when it finished."""
        now = database_clock.now()
        started, finished = (display.time_element(at, now) for at in (record.started_at, record.finished_at))
        return format_html("{} <br>{}", started or "-", finished or "-")

    # --- the page of one task

    def get_urls(self) -> list[URLPattern]:
        """Add the URL that the Retry button posts to."""
        name = f"{self.opts.app_label}_{self.opts.model_name}_retry"
        retry = path("<path:object_id>/retry/", self.admin_site.admin_view(self.retry_view), name=name)
        return [retry, *super().get_urls()]

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: TaskRecord | None = None,
    ) -> HttpResponse:
        """Show the task instead of a form."""
        if obj is not None:
            may_retry = self.has_retry_permission(request, obj)
            context["page"] = TaskPage(obj, database_clock.now(), whole="full" in request.GET, may_retry=may_retry)
            context["retry_url"] = self._url("retry", obj)
            context["action_form"] = self._without_retry(context.get("action_form"))
        return super().render_change_form(request, context, add, change, form_url, obj)

    def _without_retry(self, action_form: Any) -> Any:
        """Return Django's action form for this page without retry, which has a button; None if no action is left."""
        if action_form is None:
            return None
        field = action_form.fields["action"]
        field.choices = [choice for choice in field.choices if choice[0] != RETRY_ACTION]
        return action_form if any(value for value, _label in field.choices) else None

    def retry_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Retry one task and return to its page. POST only."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_view_permission(request) or not self.has_retry_permission(request):
            raise PermissionDenied
        record = self.get_object(request, unquote(object_id))
        if record is None:
            messages.warning(request, _("This task no longer exists."))
            return HttpResponseRedirect(self._url("changelist"))
        if not self.has_retry_permission(request, record):
            raise PermissionDenied
        self._retry(request, [record.id])
        return HttpResponseRedirect(self._url("change", record))

    # --- the actions

    @admin.action(permissions=["retry"], **RETRY_OPTIONS)  # type: ignore[untyped-decorator]
    def retry_selected(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> HttpResponse | None:
        """Ask for confirmation, then retry the tasks."""
        if not self.has_view_permission(request) or not self.has_retry_permission(request):
            raise PermissionDenied
        is_confirmed = request.POST.get("confirmed") == "yes" or request.path != self._url("changelist")
        if request.POST.get("select_across") == "1":
            return self._retry_all(request, queryset, is_confirmed=is_confirmed)
        # Not from `queryset`: a task that no longer matches the list's filter must appear in the messages too.
        ids = [UUID(id) for id in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)]
        if not is_confirmed:
            failed = self.get_queryset(request).filter(pk__in=ids, state=TaskState.FAILED)
            count = failed.count()
            return self._ask_to_retry(request, failed, count, {"not_failed": len(ids) - count})
        self._retry(request, ids)
        return None

    def _retry_all(
        self, request: HttpRequest, queryset: QuerySet[TaskRecord], *, is_confirmed: bool
    ) -> HttpResponse | None:
        """Retry all tasks that the list shows, round by round; ask before the first and between two."""
        progress = retry_all.Progress.read(request)
        if progress is None:
            progress, is_confirmed = retry_all.Progress(), False
        is_over = is_confirmed and retry_all.do_round(request, queryset, progress)
        failed = retry_all.failed_of(queryset, progress)
        count = 0 if is_over else retry_all.count_up_to_limit(failed)
        if is_confirmed and not count:
            retry_all.add_messages(request, queryset, progress)
            return None
        context: dict[str, Any] = {"across": True, "not_failed": 0}
        if is_confirmed:
            context["progress"] = progress.text(request)
            context["queued"] = retry_all.queued_text(progress)
            context["set_aside"] = [text for _level, text in retry_all.gate_sentences(queryset, progress)]
        return self._ask_to_retry(request, failed, count, context)

    def _ask_to_retry(
        self, request: HttpRequest, failed: QuerySet[TaskRecord], count: int, context: dict[str, Any]
    ) -> HttpResponse | None:
        """Show the confirmation page. context: more values for the template."""
        if not count:
            messages.warning(request, _("None of the selected tasks has failed, so nothing was retried."))
            return None
        records = list(as_listed(failed.order_by("-id"))[:LISTED_TO_CONFIRM])
        title = ngettext("Retry %(count)s failed task?", "Retry %(count)s failed tasks?", count)
        if "progress" in context:
            title = ngettext("%(count)s failed task is left", "%(count)s failed tasks are left", count)
        shown = retry_all.as_count(count)
        context = {
            **self.admin_site.each_context(request),
            "title": title % {"count": shown},
            "opts": self.opts,
            "rows": [(record, self._url("change", record), self.state_and_error(record)) for record in records],
            "count": count,
            "shown_count": shown,
            "not_listed": retry_all.as_count(count - len(records)) if count > len(records) else "",
            "selected": request.POST.getlist(helpers.ACTION_CHECKBOX_NAME),
            "action": RETRY_ACTION,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "back_url": request.get_full_path(),
            "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
            **context,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_asyncq/taskrecord/retry_confirmation.html", context)

    @admin.action(permissions=["delete"], description=gettext_lazy("Delete selected %(verbose_name_plural)s"))
    def delete_selected(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> HttpResponse | None:
        """Delete tasks after a confirmation, as Django does, but never a running one."""
        running = queryset.filter(state=TaskState.RUNNING).values("pk").order_by().count()
        if running:
            text = ngettext(
                "%(count)d running task cannot be deleted.", "%(count)d running tasks cannot be deleted.", running
            )
            messages.warning(request, text % {"count": running})
        rows = queryset.exclude(state=TaskState.RUNNING)
        count = rows.values("pk").order_by()[: MOST_DELETED + 1].count()
        if count > MOST_DELETED:
            text = _("No more than %(count)d tasks can be deleted at once. Nothing was deleted.")
            messages.error(request, text % {"count": MOST_DELETED})
            return None
        if not count:
            return None
        return admin_actions.delete_selected(self, request, rows)

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: Any) -> HttpResponse:
        """Return to the list, where Django would send a user without change permission to the admin index."""
        response = super().response_delete(request, obj_display, obj_id)
        if isinstance(response, HttpResponseRedirect) and self.has_view_permission(request):
            return HttpResponseRedirect(self._url("changelist"))
        return response

    def _retry(self, request: HttpRequest, ids: list[UUID]) -> None:
        outcome = retry_action.retry(self.get_queryset(request), ids)
        retry_action.log_retried(request, outcome.retried)
        retry_action.add_messages(request, outcome, lambda record: self._url("change", record))

    def _url(self, view: str, record: TaskRecord | None = None) -> str:
        return reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}",
            args=[] if record is None else [quote(record.pk)],
            current_app=self.admin_site.name,
        )
