"""The page that asks before everything that matches the filters of the list is retried, cancelled or deleted.

What it starts is a `BulkAction`: the leader of the workers does it in the background, page by page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import NoReverseMatch, URLPattern
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import conf
from ..bulk_actions import start_bulk
from ..exceptions import InvalidOption
from ..models import BulkAction, BulkKind
from ..storage.matching import checked, rows_matching
from . import history
from .matching import PERMISSIONS, in_words, matching_of
from .pages import Input, Question, ask, is_confirmed, next_url, paths, reason_of, url_of
from .permissions import has_right, requires
from .tabs import as_count

EXAMPLES = 5
MOST_COUNTED = 10_000


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the address of the page."""
    return paths(model_admin, {"bulk": bulk_view})


@requires("view_taskrecord")
def bulk_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Ask, with the filter in words and the number of tasks; then start the action. GET asks, POST starts."""
    kind = request.GET.get("kind", "")
    if kind not in PERMISSIONS:
        return _refuse(model_admin, request, _("There is no such action on many tasks."))
    if not has_right(request, PERMISSIONS[BulkKind(kind)]):
        raise PermissionDenied
    matching = matching_of(request)
    try:
        if matching is None:
            raise InvalidOption(_("an action on many tasks knows no such filter"))
        found = checked(kind, matching)
    except InvalidOption as error:
        return _refuse(model_admin, request, str(error))
    return start_or_ask(model_admin, request, kind, found)


def start_or_ask(model_admin: ModelAdmin[Any], request: HttpRequest, kind: str, found: dict[str, Any]) -> HttpResponse:
    """Start an action that a person has confirmed, else ask. found: the filter, as `checked` returns it."""
    rows = rows_matching(found)
    count = rows.order_by().values("pk")[: MOST_COUNTED + 1].count()
    if not count:
        return _refuse(model_admin, request, _("No task matches, so nothing was changed."))
    back = next_url(request, url_of(model_admin, "changelist"))
    question = Question(
        title=_title(kind, count),
        lines=[*_lines(kind), *in_words(found)],
        examples=[str(row) for row in rows.order_by("-id").only("id", "name")[:EXAMPLES]],
        button=_title(kind, count).rstrip("?؟"),
        back=back,
        needs_reason=kind != BulkKind.RETRY,
        is_destructive=kind != BulkKind.RETRY,
        inputs=[Input("pace", _("Tasks per second"), str(conf.current().bulk_rows_per_second), "number", "1", "10000")],
    )
    if not is_confirmed(request, question):
        return ask(model_admin, request, question)
    try:
        pace = int(request.POST.get("pace") or conf.current().bulk_rows_per_second)
        action = start_bulk(kind, found, by=request.user, rows_per_second=pace)
    except (InvalidOption, ValueError) as error:
        return _refuse(model_admin, request, str(error))
    text = f"Started: {'; '.join(in_words(found))}"
    if reason := reason_of(request):
        text += f". Reason: {reason}"
    history.note(request, BulkAction, str(action), text, id=str(action.pk))
    messages.success(request, _("Started. The workers do it in the background; this page shows how far they are."))
    try:
        return HttpResponseRedirect(url_of(model_admin, "change", quote(action.pk), model="bulkaction"))
    except NoReverseMatch:
        return HttpResponseRedirect(back)


def _title(kind: str, count: int) -> str:
    texts = {
        BulkKind.RETRY: ngettext("Retry %(count)s failed task?", "Retry %(count)s failed tasks?", count),
        BulkKind.CANCEL: ngettext("Cancel %(count)s task?", "Cancel %(count)s tasks?", count),
        BulkKind.DELETE: ngettext("Delete %(count)s task?", "Delete %(count)s tasks?", count),
    }
    return texts[BulkKind(kind)] % {"count": as_count(count)}


def _lines(kind: str) -> Iterator[str]:
    if kind == BulkKind.RETRY:
        yield _("They are queued again, oldest first. Tasks of a full gate (admission limit) wait for a free slot.")
    elif kind == BulkKind.CANCEL:
        yield _("Tasks that wait fail as cancelled. Tasks that run are asked to stop.")
    else:
        yield _("The finished tasks are deleted with their results and logs. This cannot be undone.")
    yield _("You can pause or stop it while it runs. Tasks that are enqueued later are not touched. It is about:")


def _refuse(model_admin: ModelAdmin[Any], request: HttpRequest, why: str) -> HttpResponse:
    messages.warning(request, why)
    return HttpResponseRedirect(next_url(request, url_of(model_admin, "changelist")))
