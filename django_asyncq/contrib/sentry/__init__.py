"""Failures of tasks in Sentry: `sentry_sdk.init(..., integrations=[AsyncqIntegration()])`.

It needs `pip install django-asyncq[sentry]`. Settings import it, so it needs no app to be loaded.
"""

from .integration import AsyncqIntegration

__all__ = ["AsyncqIntegration"]
