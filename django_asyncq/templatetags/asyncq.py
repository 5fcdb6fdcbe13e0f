"""Template tags: `{% load asyncq %}`."""

from __future__ import annotations

from typing import Any

from django import template

from ..views import task_status_url

register = template.Library()


@register.simple_tag(name="task_status_url")
def show_task_status_url(result: Any) -> str:
    """Return the signed address of a task's status; `{% task_status_url result %}`. result: or a row, or an id."""
    return task_status_url(result)
