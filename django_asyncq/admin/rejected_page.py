"""The page *Rejected messages* of a queue: what other programs have sent that can be no task, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..exceptions import BrokerUnavailable, InvalidOption
from ..faults import one_line
from ..inspector import Inspector
from ..models import TaskRecord
from ..prefixes import DEFAULT_ALIAS
from ..redaction import mask_text
from ..storage import database_clock
from . import display, history
from .pages import Question, ask, is_confirmed, paths, render_page, unreachable_text, url_of
from .permissions import has_right, only_post, requires

SHOWN = 100


class ShownMessage(NamedTuple):
    """A rejected message. source: in words. data: its beginning, with secrets masked."""

    at: SafeString | str
    source: str
    id: str
    reason: str
    data: display.Excerpt


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the addresses of the page and of its button."""
    return paths(model_admin, {"rejected": rejected_view, "forget": forget_view})


def address_of(model_admin: ModelAdmin[Any], backend: str, queue: str) -> str:
    """Return the address of the page for a queue of an alias."""
    return f"{url_of(model_admin, 'rejected')}?{urlencode({'backend': backend, 'queue': queue})}"


@requires("view_taskrecord")
def rejected_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Show what was rejected, the newest first."""
    backend, queue = request.GET.get("backend") or DEFAULT_ALIAS, request.GET.get("queue", "")
    error, found = "", []
    try:
        # One more than is shown tells whether there are more.
        found = Inspector(backend).queues.rejected(queue, most=SHOWN + 1)
    except (BrokerUnavailable, InvalidOption) as raised:
        error = one_line(raised)
    now = database_clock.now()
    sources = {"inbox": _("inbox")}
    context = {
        "items": [
            ShownMessage(
                display.time_element(each.at, now),
                sources.get(each.source, _("queue")),
                each.id or "–",
                mask_text(each.reason),
                display.excerpt(mask_text(each.data.decode("utf-8", "backslashreplace"))),
            )
            for each in found[:SHOWN]
        ],
        "is_cut": len(found) > SHOWN,
        "shown": SHOWN,
        "error": error,
        "backend": backend,
        "queue": queue,
        "may_forget": has_right(request, "delete_taskrecord"),
    }
    title = _("Rejected messages of queue %(name)s") % {"name": queue}
    return render_page(model_admin, request, "rejected.html", title, context)


@only_post
@requires("view_taskrecord", "delete_taskrecord")
def forget_view(model_admin: ModelAdmin[Any], request: HttpRequest) -> HttpResponse:
    """Ask, then remove all that a queue has rejected. POST only."""
    backend, queue = request.POST.get("backend") or DEFAULT_ALIAS, request.POST.get("queue", "")
    question = Question(
        title=_("Forget the rejected messages of queue %(name)s?") % {"name": queue},
        lines=[_("They are no tasks, and none of them runs. They are removed from Redis and cannot be shown again.")],
        button=_("Forget them"),
        back=address_of(model_admin, backend, queue),
        is_destructive=True,
    )
    if not is_confirmed(request, question):
        return ask(model_admin, request, question)
    try:
        count = Inspector(backend).queues.forget_rejected(queue)
    except BrokerUnavailable as error:
        messages.error(request, unreachable_text(error))
        return HttpResponseRedirect(question.back)
    except InvalidOption as error:
        messages.error(request, str(error))
        return HttpResponseRedirect(url_of(model_admin, "queues"))
    history.note(request, TaskRecord, f"queue {queue}", f"Forgot {count:,} rejected messages.")
    text = ngettext("%(count)d message was forgotten.", "%(count)d messages were forgotten.", count)
    messages.success(request, text % {"count": count})
    return HttpResponseRedirect(url_of(model_admin, "queues"))
