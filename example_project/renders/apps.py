"""The Django app of the studio. It has no models: a render is a TaskRecord."""

from __future__ import annotations

from django.apps import AppConfig


class RendersConfig(AppConfig):
    """Configure the studio."""

    name = "renders"
    verbose_name = "Render Studio"
