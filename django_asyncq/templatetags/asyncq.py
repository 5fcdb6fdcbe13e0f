"""Template tags: `{% load asyncq %}`."""

from __future__ import annotations

from typing import Any

from django import template

from ..core.late import Late

register = template.Library()

# Django imports every module of tags with the first template, whether it has such a tag or not.
TASK_STATUS_URL = Late("views.task_status_url")


@register.simple_tag(name="task_status_url")
def show_task_status_url(result: Any) -> str:
    """Return the signed address of a task's status; `{% task_status_url result %}`. result: or a row, or an id."""
    return str(TASK_STATUS_URL(result))
