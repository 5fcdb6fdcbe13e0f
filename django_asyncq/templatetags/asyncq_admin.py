"""Template tags of the admin pages: the links between them, and the banner that says what is wrong."""

from __future__ import annotations

from typing import Any

from django import template

from ..admin.banner import warnings_of
from ..admin.matching import links_of as bulk_links_of
from ..admin.navigation import links_of, site_of
from ..admin.overview import overview_of
from ..admin.tabs import tabs_of

register = template.Library()


@register.inclusion_tag("admin/django_asyncq/navigation.html", takes_context=True)
def asyncq_navigation(context: Any) -> dict[str, Any]:
    """Show links to the pages that the user may see."""
    return {"links": links_of(context["request"])}


@register.inclusion_tag("admin/django_asyncq/banner.html", takes_context=True)
def asyncq_banner(context: Any) -> dict[str, Any]:
    """Say what is wrong with the fleet, at the head of each page."""
    return {"warnings": warnings_of(context["request"])}


@register.inclusion_tag("admin/django_asyncq/taskrecord/tabs.html", takes_context=True)
def asyncq_tabs(context: Any, changelist: Any) -> dict[str, Any]:
    """Show how many tasks are in each state, above the list."""
    return {"tabs": tabs_of(context["request"], changelist)}


@register.inclusion_tag("admin/django_asyncq/taskrecord/bulk_links.html", takes_context=True)
def asyncq_bulk_links(context: Any, changelist: Any) -> dict[str, Any]:
    """Show what can be done to everything that matches the filters of the list."""
    return bulk_links_of(context["request"], changelist)


@register.inclusion_tag("admin/django_asyncq/overview.html", takes_context=True)
def asyncq_overview(context: Any) -> dict[str, Any]:
    """Answer the questions of an operator, on the first page of the app."""
    return overview_of(context["request"], site_of(context["request"]))


@register.filter
def admin_url(opts: Any, view: str) -> str:
    """Return the name of a view of a model's admin, for `{% url opts|admin_url:'queues' %}`."""
    return f"admin:{opts.app_label}_{opts.model_name}_{view}"
