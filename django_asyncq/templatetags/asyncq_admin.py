"""Template tags of the admin pages: the links between them, and the banner that says what is wrong."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from ..core.late import Late

register = template.Library()

# Django imports every module of tags with the first template, whether it has such a tag or not.
WARNINGS_OF = Late("admin.banner.warnings_of")
BULK_LINKS_OF = Late("admin.matching.links_of")
LINKS_OF = Late("admin.navigation.links_of")
SITE_OF = Late("admin.navigation.site_of")
TABS_OF = Late("admin.navigation.tabs_of")
OVERVIEW_OF = Late("admin.overview.overview_of")


@register.inclusion_tag("admin/django_asyncq/navigation.html", takes_context=True)
def asyncq_navigation(context: Any) -> dict[str, Any]:
    """Show links to the pages that the user may see."""
    return {"links": LINKS_OF(context["request"])}


@register.inclusion_tag("admin/django_asyncq/banner.html", takes_context=True)
def asyncq_banner(context: Any) -> dict[str, Any]:
    """Say what is wrong with the fleet, at the head of each page."""
    warnings: dict[str, Any] = WARNINGS_OF(context["request"])
    return warnings


@register.inclusion_tag("admin/django_asyncq/taskrecord/tabs.html", takes_context=True)
def asyncq_tabs(context: Any) -> dict[str, Any]:
    """Show how many tasks are in each state, above the list."""
    return {"tabs": TABS_OF(context["request"])}


@register.inclusion_tag("admin/django_asyncq/taskrecord/bulk_links.html", takes_context=True)
def asyncq_bulk_links(context: Any, changelist: Any) -> dict[str, Any]:
    """Show what can be done to everything that matches the filters of the list."""
    links: dict[str, Any] = BULK_LINKS_OF(context["request"], changelist)
    return links


@register.inclusion_tag("admin/django_asyncq/overview.html", takes_context=True)
def asyncq_overview(context: Any) -> dict[str, Any]:
    """Answer the questions of an operator, on the first page of the app."""
    overview: dict[str, Any] = OVERVIEW_OF(context["request"], SITE_OF(context["request"]))
    return overview


@register.filter
def admin_url(opts: Any, view: str) -> str:
    """Return the name of a view of a model's admin, for `{% url opts|admin_url:'queues' %}`."""
    return f"admin:{opts.app_label}_{opts.model_name}_{view}"


@register.filter
def asyncq_labelled(results: list[list[str]], headers: list[dict[str, Any]]) -> list[list[str]]:
    """Give the cells of a list of Django's the names of their columns: where rows are cards, there is no head."""
    texts = [header["text"] for header in headers]
    # The column of checkboxes has one as its head, and the row's link needs no name.
    labels = ["" if "<" in text else format_html(' data-asyncq-label="{}"', capfirst(text)) for text in texts]
    for row in results:
        cells = zip_longest(row, labels[: len(row)], fillvalue="")
        row[:] = [SafeString(f"<td{label}{cell[3:]}") if cell.startswith("<td") else cell for cell, label in cells]
    return results
