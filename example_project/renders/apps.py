"""The Django app of the studio. It has no models of its own: a render is a TaskRecord."""

from __future__ import annotations

from django.apps import AppConfig


class RendersConfig(AppConfig):
    """Configuration of the studio."""

    name = "renders"
    verbose_name = "Render Studio"
