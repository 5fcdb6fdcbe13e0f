"""The admin pages of the runs of start-up tasks. They are read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext

from ..models import StartupRun
from ..redaction import mask_text
from ..storage import database_clock
from . import display
from .queries import RoutedAdmin
from .task_page import Fact

if TYPE_CHECKING:
    StartupRunAdminBase = admin.ModelAdmin[StartupRun]
else:
    StartupRunAdminBase = admin.ModelAdmin


class StartupRunAdmin(RoutedAdmin, StartupRunAdminBase):
    """List the runs of start-up tasks, and show a page for each."""

    list_display = ("name", "started", "duration", "outcome", "held_by")
    list_display_links = ("name",)
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ("name", "started")
    search_fields = ("name", "holder")
    change_form_template = "admin/django_asyncq/startuprun/change_form.html"

    class Media:
        css = {"all": ["django_asyncq/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allow nobody to add a run by hand, because the row says what happened."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: StartupRun | None = None) -> bool:
        """Allow nobody to edit a run by hand, because the row says what happened."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: StartupRun | None = None) -> bool:
        """Allow nobody to delete a run, because old runs are pruned automatically."""
        return False

    def get_fields(self, request: HttpRequest, obj: StartupRun | None = None) -> Any:
        """Return no fields, because the page shows the run, with secrets masked, instead of a form."""
        return ()

    @admin.display(description=gettext_lazy("started"), ordering="begun_at")
    def started(self, run: StartupRun) -> SafeString | str:
        """Show when it started."""
        return display.time_element(run.begun_at, database_clock.now())

    @admin.display(description=gettext_lazy("duration"))
    def duration(self, run: StartupRun) -> SafeString | str:
        """Show how long it took."""
        if run.finished_at is None:
            return "–"
        seconds = (display.aware(run.finished_at) - display.aware(run.begun_at)).total_seconds()
        return format_html("<bdi>{}</bdi>", display.duration(seconds))

    @admin.display(description=gettext_lazy("outcome"))
    def outcome(self, run: StartupRun) -> SafeString:
        """Show the outcome, with the last line of the error."""
        badge = outcome_badge(run)
        if not run.error:
            return badge
        line = display.excerpt(mask_text(run.error).strip().rpartition("\n")[2]).text
        cut = line if len(line) <= display.ERROR_CHARACTERS else line[: display.ERROR_CHARACTERS - 1] + "…"
        return format_html('{} <span class="asyncq-error-line" dir="ltr" title="{}">{}</span>', badge, line, cut)

    @admin.display(description=gettext_lazy("supervisor"))
    def held_by(self, run: StartupRun) -> SafeString:
        """Show the supervisor process that ran it."""
        return format_html('<bdi class="asyncq-code" dir="ltr">{}</bdi>', run.holder)

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: StartupRun | None = None,
    ) -> HttpResponse:
        """Show the run instead of a form."""
        if obj is not None:
            now = database_clock.now()
            context["run"] = obj
            context["outcome"] = outcome_badge(obj)
            context["error"] = display.excerpt(mask_text(obj.error), whole="full" in request.GET) if obj.error else None
            context["facts"] = [
                Fact(_("Name"), obj.name, is_code=True),
                Fact(_("Started"), display.time_element(obj.begun_at, now)),
                Fact(pgettext("run", "Finished"), display.time_element(obj.finished_at, now) or "–"),
                Fact(pgettext("run", "Duration"), self.duration(obj)),
                Fact(_("Supervisor"), obj.holder, is_code=True),
                Fact(_("Fencing token"), str(obj.term)),
            ]
        return super().render_change_form(request, context, add, change, form_url, obj)


def outcome_badge(run: StartupRun) -> SafeString:
    """Return the outcome of a run as a badge."""
    if run.finished_at is None:
        kind, word, title = "running", _("Not finished"), _("It is still running, or its process died.")
    elif run.error:
        kind, word, title = "failed", pgettext("run", "Failed"), ""
    else:
        kind, word, title = "succeeded", pgettext("run", "Succeeded"), ""
    return format_html('<span class="asyncq-state asyncq-state-{}" title="{}">{}</span>', kind, title, word)
