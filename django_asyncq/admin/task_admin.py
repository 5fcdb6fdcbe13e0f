"""The admin pages of tasks: a list, a page for each, and retry. Nothing is edited by hand.

Every change of state goes through `lifecycle`. Each action names its permission and checks it again before it acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import django
from django.contrib import admin, messages
from django.contrib.admin import actions as admin_actions
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import TaskRecord, TaskState
from ..storage import database_clock
from . import (
    bulk_page,
    call_forms,
    failure_page,
    queue_pages,
    rejected_page,
    secret_page,
    task_actions,
    worker_pages,
)
from .filters import (
    EnqueuedFilter,
    GateFilter,
    LastErrorFilter,
    NameFilter,
    QueueFilter,
    ReasonFilter,
    StateFilter,
    WorkerFilter,
)
from .permissions import has_right
from .queries import RoutedAdmin, TaskChangeList, search
from .task_columns import TaskColumns
from .task_page import TaskPage

if TYPE_CHECKING:
    TaskAdminBase = admin.ModelAdmin[TaskRecord]
else:
    TaskAdminBase = admin.ModelAdmin

MOST_DELETED = 1_000
# A lookup in the URL (?kwargs__password__startswith=a) would reveal masked values letter by letter.
MASKED_COLUMNS = {"args", "kwargs", "headers", "return_value", "progress", "errors"}
# The actions of the list, and the permission that each needs.
ACTIONS = {f"{name}_selected": name for name in task_actions.ACTS}
PERMISSION_OF_ACTION = {
    **{action: task_actions.ACTS[name].permission for action, name in ACTIONS.items()},
    "delete_selected": "delete_taskrecord",
}


MODULES_OF_PAGES = (
    queue_pages,
    rejected_page,
    worker_pages,
    failure_page,
    bulk_page,
    call_forms,
    secret_page,
    task_actions,
)

# From Django 6.1 an action may also be on the page of one object. Older decorators know no `location`.
if django.VERSION >= (6, 1):
    from django.contrib.admin.options import ActionLocation

    OPTIONS: dict[str, dict[str, Any]] = {
        name: {
            "location": [ActionLocation.CHANGE_LIST, ActionLocation.CHANGE_FORM],
            "description": act.button,
            "description_plural": act.of_marked,
        }
        for name, act in task_actions.ACTS.items()
    }
else:
    OPTIONS = {name: {"description": act.of_marked} for name, act in task_actions.ACTS.items()}


class Button(NamedTuple):
    """A button on a task's page. url: what it posts to."""

    text: str
    url: str
    is_quiet: bool


class TaskRecordAdmin(TaskColumns, RoutedAdmin, TaskAdminBase):
    """The list of tasks, the page of one, and the retry of failed ones."""

    list_display = ("task", "state_and_error", "queue", "gate", "attempts", "enqueued", "run")
    list_display_links = ("task",)
    list_filter = (
        StateFilter,
        LastErrorFilter,
        ReasonFilter,
        QueueFilter,
        NameFilter,
        WorkerFilter,
        GateFilter,
        EnqueuedFilter,
    )
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ("enqueued",)
    search_fields = ("id", "name")
    search_help_text = gettext_lazy(
        "An id, its beginning or its last eight characters; a part of the task's name, or of a recent error."
    )
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = (*ACTIONS, "delete_selected")
    change_form_template = "admin/django_asyncq/taskrecord/change_form.html"

    class Media:
        css = {"all": ["django_asyncq/admin.css", "django_asyncq/list.css"]}
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
        return has_right(request, "retry_task")

    def has_cancel_permission(self, request: HttpRequest, obj: TaskRecord | None = None) -> bool:
        """Require the permission `cancel_task`."""
        return has_right(request, "cancel_task")

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

    # --- the page of one task

    def get_urls(self) -> list[URLPattern]:
        """Add the pages that are not those of a model, and the addresses that buttons post to."""
        own = [each for module in MODULES_OF_PAGES for each in module.urls(self)]
        return [*own, *super().get_urls()]

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
            context["page"] = TaskPage(obj, database_clock.now(), whole="full" in request.GET)
            context["buttons"] = self._buttons(request, obj, context["page"])
            may_change = has_right(request, "retry_task") and has_right(request, "view_payload")
            if may_change and call_forms.can_be_changed(obj) and not context["page"].is_removed:
                context["again_url"] = self._url("again", obj)
            if has_right(request, "view_payload"):
                context["buttons"].append(Button(_("Show secret values"), self._url("secrets", obj), is_quiet=True))
            context["action_form"] = self._without_own(context.get("action_form"))
        return super().render_change_form(request, context, add, change, form_url, obj)

    def _buttons(self, request: HttpRequest, record: TaskRecord, page: TaskPage) -> list[Button]:
        """Return what the user may do to the task in its state."""
        found = []
        for act in task_actions.ACTS.values():
            if not has_right(request, act.permission) or not act.suits(record):
                continue
            # Without the code a retry is refused; a failed task has the Retry button, which does the same as Run now.
            if record.state == TaskState.FAILED and act.name != "cancel" and (act.name == "run" or page.is_removed):
                continue
            found.append(Button(str(act.button), self._url(act.name, record), is_quiet=act.name == "cancel"))
        return found

    def _without_own(self, action_form: Any) -> Any:
        """Return Django's action form for this page without what has a button; None if no action is left."""
        if action_form is None:
            return None
        field = action_form.fields["action"]
        field.choices = [choice for choice in field.choices if choice[0] not in ACTIONS]
        return action_form if any(value for value, _label in field.choices) else None

    # --- the actions

    @admin.action(permissions=["retry"], **OPTIONS["retry"])  # type: ignore[untyped-decorator]
    def retry_selected(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> HttpResponse | None:
        """Ask for confirmation, then retry the tasks."""
        return task_actions.act_on_marked(self, request, queryset, "retry")

    @admin.action(permissions=["retry"], **OPTIONS["run"])  # type: ignore[untyped-decorator]
    def run_selected(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> HttpResponse | None:
        """Ask for confirmation, then let delayed tasks run now and retry failed ones."""
        return task_actions.act_on_marked(self, request, queryset, "run")

    @admin.action(permissions=["cancel"], **OPTIONS["cancel"])  # type: ignore[untyped-decorator]
    def cancel_selected(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> HttpResponse | None:
        """Ask for confirmation, then cancel the tasks."""
        return task_actions.act_on_marked(self, request, queryset, "cancel")

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Answer 403 to an action without its permission, where Django would only not find it."""
        if request.method == "POST":
            for name in request.POST.getlist("action"):
                permission = PERMISSION_OF_ACTION.get(name)
                if permission and not has_right(request, permission):
                    raise PermissionDenied
        return super().changelist_view(request, extra_context)

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

    def _url(self, view: str, record: TaskRecord | None = None) -> str:
        return reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}",
            args=[] if record is None else [quote(record.pk)],
            current_app=self.admin_site.name,
        )
