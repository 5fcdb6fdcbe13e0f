"""The app: it begins with the first `django.setup()` of a process, also in workers."""

from __future__ import annotations

from django.apps import AppConfig


class OtelConfig(AppConfig):
    """Instruments tasks when the process starts."""

    name = "django_asyncq.contrib.otel"
    label = "asyncq_otel"
    verbose_name = "Asyncq traces"

    def ready(self) -> None:
        """Connect what makes the spans."""
        from .tracing import instrument

        instrument()
