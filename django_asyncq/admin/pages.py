"""The pages of ours that are not those of a model: their frame, and the page that asks before something is changed.

Every action works without JavaScript: a button posts, a page asks, and its button posts again with `confirmed=yes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import django
from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _

from ..faults import one_line
from .display import Text
from .visible_text import visible

if TYPE_CHECKING:
    AnyModelAdmin = ModelAdmin[Any]
else:
    AnyModelAdmin = ModelAdmin

REASON_CHARACTERS = 300
# What a form of ours posts besides what the question is about.
OWN_FIELDS = {"csrfmiddlewaretoken", "confirmed", "reason"}


def render_page(
    model_admin: AnyModelAdmin,
    request: HttpRequest,
    template: str,
    title: Text,
    context: Mapping[str, Any] | None = None,
) -> HttpResponse:
    """Return a page with the frame of the admin. template: below "admin/django_asyncq/"; it extends "page.html"."""
    request.current_app = model_admin.admin_site.name
    values = {
        **model_admin.admin_site.each_context(request),
        "title": title,
        "opts": model_admin.opts,
        "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
        **(context or {}),
    }
    return visible(TemplateResponse(request, f"admin/django_asyncq/{template}", values))


class Input(NamedTuple):
    """A field of a question besides the reason. kind: the type of the input; least, most: of a number, else ""."""

    name: str
    label: Text
    value: str
    kind: str = "text"
    least: str = ""
    most: str = ""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a page asks before something is changed.

    lines: paragraphs that say what will happen. button: the text of the button that does it. examples: up to some ten
    lines that name what it is about. asks_reason: show a field for the reason; needs_reason: it must not be empty.
    is_destructive: what is done cannot be undone. back: where Cancel leads. inputs: more fields.
    """

    title: Text
    lines: Sequence[Text]
    button: Text
    back: str
    examples: Sequence[Text] = ()
    asks_reason: bool = False
    needs_reason: bool = False
    is_destructive: bool = False
    inputs: Sequence[Input] = ()


def is_confirmed(request: HttpRequest, question: Question) -> bool:
    """Whether a person has answered the question with its button, and with a reason where it needs one."""
    if request.method != "POST" or request.POST.get("confirmed") != "yes":
        return False
    return bool(reason_of(request)) or not question.needs_reason


def reason_of(request: HttpRequest) -> str:
    """Return the reason that a person has typed, as one line; "" for none."""
    return " ".join(request.POST.get("reason", "").split())[:REASON_CHARACTERS]


def ask(model_admin: AnyModelAdmin, request: HttpRequest, question: Question) -> HttpResponse:
    """Return the page that asks. Its form posts to the same address all that this request has posted."""
    posted = request.POST if request.method == "POST" else QueryDict()
    context = {
        "question": question,
        "fields": _pairs(posted, {each.name for each in question.inputs}),
        "action_url": request.get_full_path(),
        "is_reason_missing": request.POST.get("confirmed") == "yes" and question.needs_reason,
    }
    return render_page(model_admin, request, "question.html", question.title, context)


def _pairs(posted: QueryDict, others: Collection[str]) -> Iterable[tuple[str, str]]:
    skipped = {*OWN_FIELDS, *others}
    return [(name, value) for name, values in posted.lists() if name not in skipped for value in values]


def paths(
    model_admin: AnyModelAdmin, views: Mapping[str, Callable[..., HttpResponse]], *, of_object: bool = False
) -> list[URLPattern]:
    """Return the addresses of views of a ModelAdmin: their names, below the list or below the page of an object.

    views: name → function of the ModelAdmin, the request, and for an object its quoted key.
    """
    opts, protect = model_admin.opts, model_admin.admin_site.admin_view
    return [
        path(
            f"<path:object_id>/{name}/" if of_object else f"{name}/",
            protect(partial(view, model_admin)),
            name=f"{opts.app_label}_{opts.model_name}_{name}",
        )
        for name, view in views.items()
    ]


def url_of(model_admin: AnyModelAdmin, view: str, *args: Any, model: str = "") -> str:
    """Return the address of a view of the admin. view: such as "changelist". model: another one than the admin's."""
    opts = model_admin.opts
    return reverse(
        f"admin:{opts.app_label}_{model or opts.model_name}_{view}", args=args, current_app=model_admin.admin_site.name
    )


def unreachable_text(error: Exception) -> str:
    """Say that nothing was changed, because Redis is unreachable."""
    return _("Redis is unreachable: %(reason)s. Nothing was changed.") % {"reason": one_line(error)}


def next_url(request: HttpRequest, default: str) -> str:
    """Return where to go after a change: the page of this site that the form has named as `next`, or the default."""
    wanted = request.POST.get("next", "")
    is_safe = url_has_allowed_host_and_scheme(
        wanted, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    )
    return wanted if wanted and is_safe else default
