"""Settings of Celery with django-celery-results."""

from django_base import *  # noqa: F403
from django_base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_celery_results"]
