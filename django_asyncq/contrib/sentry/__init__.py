"""Failures of tasks in Sentry: `sentry_sdk.init(..., integrations=[AsyncqIntegration()])`.

It needs `pip install django-asyncq[sentry]`. Settings import it, so it needs no app to be loaded.
"""

try:
    import sentry_sdk  # noqa: F401 - only to say what to install
except ModuleNotFoundError as error:
    raise ImportError(
        "django_asyncq.contrib.sentry needs the sentry-sdk package: pip install django-asyncq[sentry]"
    ) from error

from .integration import AsyncqIntegration

__all__ = ["AsyncqIntegration"]
