"""Settings that every peer with Django has alike."""

from __future__ import annotations

import os

SECRET_KEY = "benchmarks"
USE_TZ = True
TIME_ZONE = "UTC"
LOGGING_CONFIG = None
INSTALLED_APPS = ["django.contrib.contenttypes"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": os.environ["BENCH_POSTGRES_HOST"],
        "PORT": os.environ["BENCH_POSTGRES_PORT"],
        "USER": os.environ["BENCH_POSTGRES_USER"],
        "NAME": os.environ["BENCH_POSTGRES_DATABASE"],
        # With the default (0) several peers connect anew for every task.
        "CONN_MAX_AGE": None,
        # No pooler is in between: statements are prepared when they are used the sixth time (psycopg's own default).
        "OPTIONS": {"server_side_binding": True, "prepare_threshold": 5},
    }
}
