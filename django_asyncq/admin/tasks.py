"""The admin pages of tasks: a list, a page for each, and retry. Nothing is edited by hand.

Every change of state goes through `lifecycle`. Each action names its permission and checks it again before it acts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import django
from django.contrib import admin, messages
from django.contrib.admin import actions as admin_actions
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import TaskRecord, TaskState
from . import base, filters, forms, task_actions, workflows
from .base import LIVE_HEADER, has_right, render_page
from .filters import ReadOnlyAdmin, TaskChangeList, search
from .fleet import fleet_of
from .matching import Matching
from .task_page import TaskColumns, TaskPage

MOST_DELETED = 1_000
# The actions of the list, and the permission that each needs.
ACTIONS = {f"{name}_selected": name for name in task_actions.ACTS}
PERMISSION_OF_ACTION = {
    **{action: task_actions.ACTS[name].permission for action, name in ACTIONS.items()},
    "delete_selected": "delete_taskrecord",
}


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


class TaskRecordAdmin(TaskColumns, ReadOnlyAdmin):
    """The list of tasks, the page of one, and the retry of failed ones."""

    list_display = ("task", "state_and_error", "queue", "gate", "attempts", "enqueued", "run")
    list_display_links = ("task",)
    list_filter = (
        filters.StateFilter,
        filters.LastErrorFilter,
        filters.ReasonFilter,
        filters.QueueFilter,
        filters.NameFilter,
        filters.WorkerFilter,
        filters.GateFilter,
        filters.EnqueuedFilter,
        filters.BackendFilter,
        *filters.ADDRESS_FILTERS,
    )
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ("enqueued",)
    search_fields = ("id", "name")
    search_help_text = gettext_lazy(
        "An id, its beginning or its last eight characters; what another program calls the task; a part of the task's "
        "name, or of a recent error."
    )
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = (*ACTIONS, "delete_selected")
    change_form_template = "admin/django_asyncq/taskrecord/change_form.html"

    missing = gettext_lazy("This task no longer exists.")
    masked_columns = ("args", "kwargs", "headers", "return_value", "progress", "checkpoint", "errors")
    may_delete = True

    class Media:
        css = {"all": ["django_asyncq/list.css"]}
        js = ["django_asyncq/copy.js", "django_asyncq/live.js"]

    # --- permissions

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

    # --- the list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[TaskChangeList]:
        """Return the change list that reads only what it shows."""
        return TaskChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[TaskRecord], search_term: str
    ) -> tuple[QuerySet[TaskRecord], bool]:
        """Find tasks by an id, by its beginning, by a name or a part of it, or by an error."""
        return (queryset.filter(search(search_term)) if search_term.strip() else queryset), False

    # --- the page of one task

    def add_to_page(self, request: HttpRequest, context: dict[str, Any], obj: TaskRecord) -> None:
        """Show the task instead of a form."""
        context["page"] = TaskPage(obj, fleet_of(request), whole="full" in request.GET)
        context["buttons"] = self._buttons(request, obj, context["page"])
        context["workflow"] = workflows.neighbours(self, obj)
        if obj.is_batch:
            context["members_url"] = f"{self.url_to('changelist')}{Matching({'batch_id': str(obj.pk)}).query}"
        may_change = has_right(request, "retry_task") and has_right(request, "view_payload")
        if may_change and forms.can_be_changed(obj) and not context["page"].is_removed:
            context |= {"again_url": self.url_to("again", obj), "again_text": forms.again_text(obj)}
        if has_right(request, "retry_task") and forms.can_wait_longer(obj):
            context["reschedule_url"] = self.url_to("reschedule", obj)
        if has_right(request, "view_payload"):
            url = self.url_to("secrets", obj)
            context["buttons"].append(SimpleNamespace(text=_("Show secret values"), url=url, is_quiet=True))
        if action_form := context.get("action_form"):
            # Django's, for what has no button; not shown when no action is left.
            field = action_form.fields["action"]
            field.choices = [choice for choice in field.choices if choice[0] not in ACTIONS]
            if not any(value for value, _label in field.choices):
                context["action_form"] = None

    def _buttons(self, request: HttpRequest, record: TaskRecord, page: TaskPage) -> list[SimpleNamespace]:
        """Return what the user may do to the task in its state."""
        found = []
        for act in task_actions.ACTS.values():
            if not has_right(request, act.permission) or not act.suits(record):
                continue
            # Without the code a retry is refused; a failed task has the Retry button, which does the same as Run now.
            if record.state == TaskState.FAILED and act.name != "cancel" and (act.name == "run" or page.is_removed):
                continue
            url = self.url_to(act.name, record)
            found.append(SimpleNamespace(text=act.button, url=url, is_quiet=act.name == "cancel"))
        return found

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
        """Answer 403 to an action without its permission, where Django would only not find it.

        What is live of the list needs no row of it.
        """
        if LIVE_HEADER in request.headers:
            base.check_rights(self, request, ())
            return render_page(self, request, "taskrecord/change_list.html", "")
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
