"""The Django app. It connects receivers and registers checks when the models are ready."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from . import stop_requests

# Here, because Django loads this module before the models of any app, which may take long to import.
stop_requests.install_for("runworkers")


class AsyncqConfig(AppConfig):
    """Configuration of django_asyncq."""

    name = "django_asyncq"
    verbose_name = _("Asyncq tasks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect the receivers of signals and register the system checks."""
        # compat is imported because Django registers its check of TASKS only when django.tasks is imported.
        from . import checks, compat, receivers  # noqa: F401
        from .gates import receivers as gate_receivers  # noqa: F401

    @staticmethod
    def cancel_tasks(rows: Any, *, by: Any, reason: str) -> Any:
        """Do what `TaskRecord.objects.cancel` does: models cannot import what changes their states."""
        from . import lifecycle

        return lifecycle.cancel_rows(rows, by=by, reason=reason)
