"""The admin pages of actions on many tasks: how far each is, the button that stops it, the page that starts one.

They are started from the list of tasks and from the failures; nothing of them is edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature, TimestampSigner
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch
from django.utils import translation
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import conf
from ..control import EXAMPLES, BulkPreview, preview_bulk, start_bulk, stop_bulk
from ..core.redaction import mask_text
from ..exceptions import InvalidOption
from ..models import BulkAction, BulkKind, BulkState
from ..storage import database_clock
from ..storage.matching import Counted, checked, count_on, is_counted_in_parts, rows_matching
from . import base, history
from .base import Asking, Input, Question, has_right, url_of
from .filters import ReadOnlyAdmin
from .history import Did
from .matching import PERMISSIONS, UNTIL, Matching, in_words
from .task_page import Fact

# As the states of tasks are shown.
COLOURS = {BulkState.RUNNING: "running", BulkState.STOPPED: "failed", BulkState.FINISHED: "succeeded"}

# Above it, a deletion asks to type the number of tasks.
MOST_WITHOUT_TYPING = 10_000


class BulkActionAdmin(ReadOnlyAdmin):
    """List the actions on many tasks with their progress."""

    list_display = ("kind", "shown_state", "progress", "filter_text", "created", "created_by", "first_error")
    change_form_template = "admin/django_asyncq/bulkaction/change_form.html"
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ()

    missing = gettext_lazy("There is no such action on many tasks.")

    class Media:
        js = ["django_asyncq/live.js"]

    def title_of(self, obj: BulkAction) -> str:
        """Return what is done to which tasks."""
        titles = {
            BulkKind.RETRY: _("Retry of many tasks"),
            BulkKind.CANCEL: _("Cancel of many tasks"),
            BulkKind.DELETE: _("Deletion of many tasks"),
        }
        return titles[BulkKind(obj.kind)]

    def add_to_page(self, request: HttpRequest, context: dict[str, Any], obj: BulkAction) -> None:
        """Show the action instead of a form."""
        now = database_clock.now()
        can_stop = obj.state == BulkState.RUNNING and has_right(request, PERMISSIONS[BulkKind(obj.kind)])
        context |= {
            "badge": self.shown_state(obj),
            "numbers": self.progress(obj),
            "words": in_words(obj.matching),
            "errors": mask_text(obj.error),
            "facts": [
                Fact(_("Started"), base.time_element(obj.created_at, now)),
                Fact(_("Started by"), obj.created_by or "–"),
                Fact(_("Tasks per second"), str(obj.rows_per_second)),
                Fact(_("Finished"), base.time_element(obj.finished_at, now) or "–"),
            ],
            "stop_url": url_of(self, "stop", quote(obj.pk)) if can_stop else "",
        }

    @admin.display(description=gettext_lazy("state"))
    def shown_state(self, action: BulkAction) -> SafeString:
        """Show the state as a badge."""
        colour = COLOURS[BulkState(action.state)]
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
        # Once it has looked at all others.
        if action.left and len(action.full_gates) == len(action.positions):
            parts.append(_("%(left)s at full gates") % numbers)
        return ", ".join(parts)

    @admin.display(description=gettext_lazy("tasks"))
    def filter_text(self, action: BulkAction) -> str:
        """Show which tasks it takes."""
        return "; ".join(in_words(action.matching))

    @admin.display(description=gettext_lazy("started"))
    def created(self, action: BulkAction) -> SafeString | str:
        """Show when it was started."""
        return base.time_element(action.created_at, database_clock.now())

    @admin.display(description=gettext_lazy("first refusal"))
    def first_error(self, action: BulkAction) -> str:
        """Show the first reason of a refusal, with secrets masked."""
        return mask_text(action.error).partition("\n")[0]


def stop(model_admin: ModelAdmin[Any], request: HttpRequest, action: BulkAction) -> Asking:
    """Stop an action for good."""
    _check_kind(request, action.kind)
    yield Question(
        title=_("Stop this action?"),
        lines=[_("What it has changed stays changed. It cannot be continued, but you can start it again.")],
        button=_("Stop"),
        is_destructive=True,
    )
    try:
        stop_bulk(action)
    except InvalidOption:
        messages.warning(request, _("It is over, so nothing was changed."))
    else:
        history.note(request, BulkAction, str(action), Did.STOPPED, row_id=str(action.pk))
        messages.success(request, _("Done."))
    return None


def _check_kind(request: HttpRequest, kind: str) -> None:
    if not has_right(request, PERMISSIONS[BulkKind(kind)]):
        raise PermissionDenied


# --- The page that asks before everything that matches the filters of the list is retried, cancelled or deleted.
#
# What it starts is a `BulkAction`: the leader of the workers does it in the background, page by page.


def start(model_admin: ModelAdmin[Any], request: HttpRequest) -> Asking:
    """Ask, with the filter in words and the number of tasks; then start the action. GET asks, POST starts.

    An address without a moment behind which no task is meant is answered by one that has it.
    """
    kind, matching = request.GET.get("kind", ""), Matching.of(request.GET)
    if kind not in PERMISSIONS:
        messages.warning(request, _("There is no such action on many tasks."))
        return None
    _check_kind(request, kind)
    if matching is None:
        messages.warning(request, _("an action on many tasks knows no such filter"))
        return None
    if UNTIL[BulkKind(kind)] not in matching.keys and matching.suits(kind):
        matching = matching.until(BulkKind(kind), base.aware(database_clock.now()))
        if request.method == "GET":
            return matching.url_of_action(model_admin.admin_site.name, BulkKind(kind))
    return (yield from _start(model_admin, request, BulkKind(kind), matching))


# How long an answer counts; then the next one goes on where it has come to.
COUNTING_SECONDS = 0.25


def _count_on(
    model_admin: ModelAdmin[Any], request: HttpRequest, kind: BulkKind, matching: Matching
) -> HttpResponse | BulkPreview | None:
    """Count what no index leads to; return a page that says how far this has come, and leads on by itself to the end.

    None: the database counts it in one statement. Raises: InvalidOption.
    """
    found = checked(kind, matching.keys)
    if request.method != "GET" or not is_counted_in_parts(found):
        return None
    # Signed, for this filter: somebody else's link must not make up the number that is asked about.
    signer, counted = TimestampSigner(salt=f"asyncq counting {kind} {sorted(found.items())}"), Counted()
    if said := request.GET.get("counted"):
        with suppress(BadSignature, ValueError, TypeError):
            total, first, behind = signer.unsign_object(said, max_age=timedelta(hours=1))
            counted = Counted(int(total), UUID(first) if first else None, UUID(behind))
    counted = count_on(found, counted, COUNTING_SECONDS)
    if counted.behind is None:
        rows = rows_matching(found).filter(id__gte=counted.first).order_by("id") if counted.first else ()
        return BulkPreview(found, counted.total, list(rows[:EXAMPLES]))
    query = request.GET.copy()
    query["counted"] = signer.sign_object([counted.total, str(counted.first or ""), str(counted.behind)])
    url, count = f"?{query.urlencode()}", number_format(counted.total, force_grouping=True)
    title = ngettext("%(count)s task so far …", "%(count)s tasks so far …", counted.total) % {"count": count}
    back = base.next_url(request, url_of(model_admin, "changelist", model="taskrecord"))
    context = {"lines": in_words(found), "url": url, "back": back}
    page = base.render_page(model_admin, request, "counting.html", title, context)
    page["Refresh"] = f"0; url={url}"
    return page


def _start(model_admin: ModelAdmin[Any], request: HttpRequest, kind: BulkKind, matching: Matching) -> Asking:
    try:
        found = _count_on(model_admin, request, kind, matching) or preview_bulk(kind, matching.keys)
        if isinstance(found, HttpResponse):
            return found
        if not found.total:
            raise InvalidOption(_("No task matches, so nothing was changed."))
        default = conf.current().bulk_rows_per_second
        texts = {
            BulkKind.RETRY: ngettext("Retry %(count)s failed task?", "Retry %(count)s failed tasks?", found.total),
            BulkKind.CANCEL: ngettext("Cancel %(count)s task?", "Cancel %(count)s tasks?", found.total),
            BulkKind.DELETE: ngettext("Delete %(count)s task?", "Delete %(count)s tasks?", found.total),
        }
        title = texts[kind] % {"count": number_format(found.total, force_grouping=True)}
        yield Question(
            title=title,
            lines=[*_lines(kind), *in_words(found.matching)],
            examples=[str(row) for row in found.examples],
            button=title.rstrip("?؟"),
            needs_reason=kind != BulkKind.RETRY,
            is_destructive=kind != BulkKind.RETRY,
            inputs=[Input("pace", _("Tasks per second"), str(default), "number", "1", "10000")],
            typed=str(found.total) if kind == BulkKind.DELETE and found.total > MOST_WITHOUT_TYPING else "",
        )
        pace: Any = request.POST.get("pace") or default
        # Anything else is refused by its own name.
        pace = int(pace) if str(pace).isdecimal() and len(str(pace)) < 9 else pace
        action = start_bulk(kind, matching.keys, by=request.user, rows_per_second=pace)
    except InvalidOption as error:
        messages.warning(request, str(error))
        return None
    reason = base.reason_of(request)
    with translation.override("en"):
        words = "; ".join(str(each) for each in in_words(found.matching))
    did = Did.STARTED_BECAUSE if reason else Did.STARTED
    history.note(request, BulkAction, str(action), did, row_id=str(action.pk), filter=words, reason=reason)
    if not has_right(request, "view_bulkaction"):
        messages.success(request, _("Started. The workers do it in the background."))
        return None
    messages.success(request, _("Started. The workers do it in the background; this page shows how far they are."))
    try:
        return url_of(model_admin, "change", quote(action.pk), model="bulkaction")
    except NoReverseMatch:
        return None


def _lines(kind: BulkKind) -> Iterator[str]:
    if kind == BulkKind.RETRY:
        yield _("They are queued again, oldest first. Tasks of a full gate (admission limit) wait for a free slot.")
    elif kind == BulkKind.CANCEL:
        yield _("Tasks that wait fail as cancelled. Tasks that a worker has are asked to stop.")
    else:
        yield _("The finished tasks are deleted with their results and logs. This cannot be undone.")
    yield _("You can stop it while it runs. Tasks that are enqueued later are not touched. It is about:")
