"""The links from each page of the app to the others, as far as the user may see them."""

from __future__ import annotations

from typing import NamedTuple

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext_lazy as _

from .display import Text
from .permissions import has_right


class Page(NamedTuple):
    """A page. view: its name in the admin, after "admin:". permissions: one of them is enough to see it."""

    text: Text
    view: str
    permissions: tuple[str, ...]


class Link(NamedTuple):
    """A link as the template shows it. is_here: it leads to the page that is shown."""

    text: Text
    url: str
    is_here: bool


PAGES = (
    Page(_("Tasks"), "django_asyncq_taskrecord_changelist", ("view_taskrecord",)),
    Page(_("Failures"), "django_asyncq_taskrecord_failures", ("view_taskrecord",)),
    Page(_("Queues"), "django_asyncq_taskrecord_queues", ("view_taskrecord",)),
    Page(_("Workers"), "django_asyncq_taskrecord_workers", ("view_taskrecord",)),
    Page(_("Gates"), "django_asyncq_gate_changelist", ("view_gate",)),
    Page(_("Schedules"), "django_asyncq_schedule_changelist", ("view_schedule",)),
    Page(_("Actions on many tasks"), "django_asyncq_bulkaction_changelist", ("view_bulkaction",)),
)


def links_of(request: HttpRequest) -> list[Link]:
    """Return the links for a request's user. A page that the admin site does not have is skipped."""
    app = site_of(request)
    found = []
    try:
        found.append(_link(request, _("Overview"), reverse("admin:app_list", args=["django_asyncq"], current_app=app)))
    except NoReverseMatch:
        return []
    for page in PAGES:
        if not any(has_right(request, permission) for permission in page.permissions):
            continue
        try:
            found.append(_link(request, page.text, reverse(f"admin:{page.view}", current_app=app)))
        except NoReverseMatch:
            continue
    return found


def site_of(request: HttpRequest) -> str:
    """Return the name of the admin site that answers a request."""
    found = getattr(request, "current_app", None) or getattr(request.resolver_match, "namespace", None)
    return found or "admin"


def _link(request: HttpRequest, text: Text, url: str) -> Link:
    return Link(text, url, is_here=request.path == url)
