"""Settings of Render Studio, as a small real service would have them. They read these environment variables:

STUDIO_VAR: folder of the database, the pictures and the logs (default: `var/` beside `manage.py`).
STUDIO_REDIS_URL: the Redis server (default: the local one; `manage.py demo` starts its own).
STUDIO_KEY_PREFIX: prefix of the queue keys (default: `asynq`, the only one that asynq's tools can read).
STUDIO_SECRET_KEY: without it each process generates one, so sessions do not survive a restart of the site.
STUDIO_DEBUG: 1 turns on DEBUG.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import django

BASE_DIR = Path(__file__).resolve().parent.parent
STUDIO_VAR = Path(os.environ.get("STUDIO_VAR") or BASE_DIR / "var")
STUDIO_KEY_PREFIX = os.environ.get("STUDIO_KEY_PREFIX") or "asynq"
STUDIO_VAR.mkdir(parents=True, exist_ok=True)

SECRET_KEY = os.environ.get("STUDIO_SECRET_KEY") or secrets.token_urlsafe(40)
DEBUG = os.environ.get("STUDIO_DEBUG") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "studio_site.urls"
WSGI_APPLICATION = "studio_site.wsgi.application"
STATIC_URL = "/static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_asyncq",
    "renders",
]
if django.VERSION < (6, 0):
    # The tasks framework is part of Django from 6.0; for older versions it is a package.
    INSTALLED_APPS.insert(0, "django_tasks")

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": STUDIO_VAR / "studio.sqlite3",
        "OPTIONS": {
            # With WAL, readers and the one writer do not block each other. IMMEDIATE takes the write lock at the
            # start of a transaction, because SQLite refuses to upgrade a read lock under contention.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
        },
    }
}

CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": os.environ.get("STUDIO_REDIS_URL") or "redis://127.0.0.1:6379/0",
    }
}

TASKS = {
    "default": {
        "BACKEND": "django_asyncq.backend.AsyncqBackend",
        "QUEUES": ["renders", "default"],
    }
}
# Shorter than the defaults, so that a retry, a worker crash and an expired lease are seen within seconds.
ASYNCQ = {
    "KEY_PREFIX": STUDIO_KEY_PREFIX,
    "GATE_PREFIX": "asynch:qgate:" if STUDIO_KEY_PREFIX == "asynq" else f"{STUDIO_KEY_PREFIX}:qgate:",
    "PROCESSES": 2,
    "CONCURRENCY": 2,
    "LEASE_SECONDS": 10,
    "BEAT_SECONDS": 2,
    "SHUTDOWN_GRACE_SECONDS": 8,
    "TASK_LOCK_DIR": str(STUDIO_VAR / "locks"),
}

# Log to standard error. `manage.py demo` redirects that of its processes to files.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "{asctime} {process:>7} {levelname:<7} {name}: {message}", "style": "{"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {
        "django_asyncq": {"level": "INFO"},
        "renders": {"level": "INFO"},
        # A refusal (429) is a normal answer here, not a warning.
        "django.request": {"level": "ERROR"},
        "django.server": {"handlers": ["stderr"], "level": "ERROR", "propagate": False},
    },
}
