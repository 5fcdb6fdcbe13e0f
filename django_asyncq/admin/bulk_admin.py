"""The admin pages of actions on many tasks: how far each is, and the buttons that pause, resume and stop it.

They are started from the list of tasks (`bulk_page`); nothing of them is edited by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote, unquote
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from ..bulk_actions import pause_bulk, resume_bulk, stop_bulk
from ..exceptions import InvalidOption
from ..models import BulkAction, BulkKind, BulkState
from ..redaction import mask_text
from ..storage import database_clock
from . import display, history
from .matching import PERMISSIONS, in_words
from .pages import Question, ask, is_confirmed, paths, url_of
from .permissions import has_right, only_post, require
from .queries import RoutedAdmin
from .task_page import Fact

if TYPE_CHECKING:
    BulkActionAdminBase = admin.ModelAdmin[BulkAction]
else:
    BulkActionAdminBase = admin.ModelAdmin

# As the states of tasks are shown.
COLOURS = {
    BulkState.RUNNING: "running",
    BulkState.PAUSED: "queued",
    BulkState.STOPPED: "failed",
    BulkState.FINISHED: "succeeded",
}


class BulkActionAdmin(RoutedAdmin, BulkActionAdminBase):
    """List the actions on many tasks with their progress."""

    list_display = ("kind", "shown_state", "progress", "filter_text", "created", "created_by", "first_error")
    change_form_template = "admin/django_asyncq/bulkaction/change_form.html"
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ()

    class Media:
        css = {"all": ["django_asyncq/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allow nobody to add an action here, because its filter must be checked first."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: BulkAction | None = None) -> bool:
        """Allow nobody to edit an action by hand, because the row says how far it has come."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: BulkAction | None = None) -> bool:
        """Allow nobody to delete an action, because the row says who has changed the tasks."""
        return False

    def get_fields(self, request: HttpRequest, obj: BulkAction | None = None) -> Any:
        """Return no fields, because the page shows the action instead of a form."""
        return ()

    def get_urls(self) -> list[URLPattern]:
        """Add the addresses that the buttons post to."""
        views = {"pause": pause_view, "resume": resume_view, "stop": stop_view}
        return [*paths(self, views, of_object=True), *super().get_urls()]

    def title_of(self, obj: BulkAction) -> str:
        """Return what is done to which tasks."""
        return _title(obj)

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: BulkAction | None = None,
    ) -> HttpResponse:
        """Show the action instead of a form."""
        if obj is not None:
            now = database_clock.now()
            context |= {
                "action": obj,
                "badge": self.shown_state(obj),
                "numbers": self.progress(obj),
                "words": in_words(obj.matching) if isinstance(obj.matching, dict) else [],
                "errors": mask_text(obj.error),
                "facts": [
                    Fact(_("Started"), display.time_element(obj.created_at, now)),
                    Fact(_("Started by"), obj.created_by or "–"),
                    Fact(_("Tasks per second"), str(obj.rows_per_second)),
                    Fact(_("Finished"), display.time_element(obj.finished_at, now) or "–"),
                ],
                "buttons": _buttons(self, request, obj),
            }
        return super().render_change_form(request, context, add, change, form_url, obj)

    @admin.display(description=gettext_lazy("state"))
    def shown_state(self, action: BulkAction) -> SafeString:
        """Show the state as a badge."""
        colour = COLOURS.get(BulkState(action.state), "queued")
        return format_html('<span class="asyncq-state asyncq-state-{}">{}</span>', colour, action.get_state_display())

    @admin.display(description=gettext_lazy("progress"))
    def progress(self, action: BulkAction) -> str:
        """Show how many tasks are done, of how many, and what became of the others."""
        numbers = {
            name: number_format(getattr(action, name), force_grouping=True)
            for name in ("done", "total", "refused", "left")
        }
        parts = [_("%(done)s of %(total)s done") % numbers]
        if action.refused:
            parts.append(_("%(refused)s refused") % numbers)
        if action.left:
            parts.append(_("%(left)s at full gates") % numbers)
        return ", ".join(parts)

    @admin.display(description=gettext_lazy("tasks"))
    def filter_text(self, action: BulkAction) -> str:
        """Show which tasks it takes."""
        return "; ".join(in_words(action.matching)) if isinstance(action.matching, dict) else ""

    @admin.display(description=gettext_lazy("started"))
    def created(self, action: BulkAction) -> SafeString | str:
        """Show when it was started."""
        return display.time_element(action.created_at, database_clock.now())

    @admin.display(description=gettext_lazy("first refusal"))
    def first_error(self, action: BulkAction) -> str:
        """Show the first reason of a refusal, with secrets masked."""
        return mask_text(action.error).partition("\n")[0]


def _title(action: BulkAction) -> str:
    titles = {
        BulkKind.RETRY: _("Retry of many tasks"),
        BulkKind.CANCEL: _("Cancel of many tasks"),
        BulkKind.DELETE: _("Deletion of many tasks"),
    }
    return titles.get(BulkKind(action.kind), str(action))


# --- pause, resume, stop


class Button(NamedTuple):
    """A button on the page of an action. url: what it posts to."""

    text: str
    url: str
    is_quiet: bool


def _buttons(model_admin: ModelAdmin[Any], request: HttpRequest, action: BulkAction) -> list[Button]:
    if not has_right(request, PERMISSIONS[BulkKind(action.kind)]):
        return []
    texts = {"pause": pgettext("verb", "Pause"), "resume": _("Resume"), "stop": _("Stop")}
    possible = {BulkState.RUNNING: ("pause", "stop"), BulkState.PAUSED: ("resume", "stop")}
    return [
        Button(texts[name], url_of(model_admin, name, quote(action.pk)), is_quiet=name == "stop")
        for name in possible.get(BulkState(action.state), ())
    ]


def _change(
    model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str, change: Callable[[UUID], Any], text: str
) -> HttpResponse:
    """Change the state of an action, and say so. text: for the history."""
    action = _action_of(model_admin, request, object_id)
    if action is None:
        return HttpResponseRedirect(url_of(model_admin, "changelist"))
    try:
        change(action.pk)
    except InvalidOption:
        messages.warning(request, _("It is over, so nothing was changed."))
    else:
        history.note(request, BulkAction, str(action), text, id=str(action.pk))
        messages.success(request, _("Done."))
    return HttpResponseRedirect(url_of(model_admin, "change", quote(action.pk)))


def _action_of(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> BulkAction | None:
    """Return the action that a button is about. Raises: PermissionDenied without the permission of its kind."""
    action: BulkAction | None = model_admin.get_object(request, unquote(object_id))
    if action is None:
        require(request, "view_bulkaction")
        messages.warning(request, _("There is no such action on many tasks."))
        return None
    require(request, "view_bulkaction", PERMISSIONS[BulkKind(action.kind)])
    return action


@only_post
def pause_view(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> HttpResponse:
    """Pause an action. POST only."""
    return _change(model_admin, request, object_id, pause_bulk, "Paused.")


@only_post
def resume_view(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> HttpResponse:
    """Go on with a paused action. POST only."""
    return _change(model_admin, request, object_id, resume_bulk, "Resumed.")


@only_post
def stop_view(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> HttpResponse:
    """Ask, then stop an action for good. POST only."""
    action = _action_of(model_admin, request, object_id)
    if action is None:
        return HttpResponseRedirect(url_of(model_admin, "changelist"))
    question = Question(
        title=_("Stop this action?"),
        lines=[_("What it has changed stays changed. It cannot be continued, but you can start it again.")],
        button=_("Stop"),
        back=url_of(model_admin, "change", quote(action.pk)),
        is_destructive=True,
    )
    if not is_confirmed(request, question):
        return ask(model_admin, request, question)
    return _change(model_admin, request, object_id, stop_bulk, "Stopped.")
