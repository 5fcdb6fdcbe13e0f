"""Settings of the test suite; `tests/servers.py` sets the two addresses in the environment."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import dj_database_url
import django

from django_asyncq.testing import arm_from_environment

from . import acl
from .routers import ROUTERS

# A process that a test starts with the environment of `crash_at` dies where that says.
arm_from_environment()

SECRET_KEY = os.environ.get("ASYNCQ_TEST_SECRET_KEY", "tests")
USE_TZ = True
TIME_ZONE = "UTC"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "/static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ALLOWED_HOSTS = ["*"]

DATABASES = {"default": dj_database_url.parse(os.environ.get("DATABASE_URL", "sqlite:///tests.sqlite3"))}
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    # A file, not memory: worker processes open it too. Not the file of the settings: a process that a test starts and
    # that works on this one by mistake finds no table.
    DATABASES["default"]["TEST"] = {"NAME": f"{DATABASES['default']['NAME']}.test"}
    DATABASES["default"]["OPTIONS"] = {
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
    }
elif DATABASES["default"]["ENGINE"] == "django.db.backends.postgresql":
    DATABASES["default"]["ENGINE"] = "tests.postgresql"
    if pool := os.environ.get("ASYNCQ_TEST_POOL"):
        # In processes that a test starts. Django allows a pool only with connections that are closed after each use.
        DATABASES["default"]["OPTIONS"] = {"pool": json.loads(pool)}
if zone := os.environ.get("ASYNCQ_TEST_DATABASE_ZONE"):
    # On SQLite and MySQL, Django then stores times of that zone, without the zone.
    DATABASES["default"]["TIME_ZONE"] = zone
if routers := os.environ.get("ASYNCQ_TEST_ROUTER"):
    DATABASE_ROUTERS = [ROUTERS[name] for name in routers.split(",")]
    if "own" in routers:
        own_name = os.environ.get("ASYNCQ_TEST_OWN_DATABASE") or f"{DATABASES['default']['NAME']}_tasks"
        DATABASES["tasks"] = {**DATABASES["default"], "NAME": own_name}
        if "TEST" in DATABASES["tasks"]:
            DATABASES["tasks"]["TEST"] = {"NAME": f"{own_name}.test"}

CACHES: dict[str, dict[str, Any]] = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": acl.package_url(os.environ.get("ASYNCQ_TEST_REDIS_URL", "redis://127.0.0.1:6379/9")),
    }
}

if port := os.environ.get("ASYNCQ_TEST_SENTINEL_PORT"):
    CACHES["default"]["OPTIONS"] = {
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("127.0.0.1", int(port))],
    }

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_asyncq",
    "tests",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.insert(0, "django_tasks")
if otlp := os.environ.get("ASYNCQ_TEST_OTLP"):
    # A worker process that exports its spans, as a project's settings would have it.
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

    provider = TracerProvider()
    # The first sends nothing before the end of a process.
    is_late = os.environ.get("ASYNCQ_TEST_OTLP_LATE")
    exporter = OTLPSpanExporter(otlp)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, schedule_delay_millis=600_000) if is_late else SimpleSpanProcessor(exporter)
    )
    trace.set_tracer_provider(provider)
    INSTALLED_APPS.append("django_asyncq.contrib.otel")
if sentry := os.environ.get("ASYNCQ_TEST_SENTRY"):
    import sentry_sdk

    from django_asyncq.contrib.sentry import AsyncqIntegration

    sentry_sdk.init(sentry, integrations=[AsyncqIntegration(monitor_schedules=True)], traces_sample_rate=1.0)

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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

TASKS: dict[str, dict[str, Any]] = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}}
if os.environ.get("ASYNCQ_TEST_SECOND"):
    # Tests with a second alias have it in the processes that they start, too.
    TASKS["second"] = {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}
ASYNCQ = {
    # Servers of the suite, some of them behind a proxy. What tests of it need is set there.
    "REDIS_IS_FOR_TESTS": True,
    "CLIENT_FACTORY": os.environ.get("ASYNCQ_TEST_CLIENT_FACTORY", ""),
    "KEY_PREFIX": os.environ.get("ASYNCQ_TEST_PREFIX", "asynqtest"),
    "LEASE_SECONDS": int(os.environ.get("ASYNCQ_TEST_LEASE", "2")),
    "BEAT_SECONDS": 0.5,
    "STALL_SECONDS": float(os.environ.get("ASYNCQ_TEST_STALL", "60")),
    "TIMEOUT_GRACE_SECONDS": float(os.environ.get("ASYNCQ_TEST_TIMEOUT_GRACE", "5")),
    "SHUTDOWN_GRACE_SECONDS": float(os.environ.get("ASYNCQ_TEST_SHUTDOWN_GRACE", "20")),
    "UNREGISTERED_PATIENCE_SECONDS": int(os.environ.get("ASYNCQ_TEST_PATIENCE", "600")),
    "APP_VERSION": os.environ.get("ASYNCQ_TEST_APP_VERSION", ""),
    "START_METHOD": os.environ.get("ASYNCQ_TEST_START_METHOD", "auto"),
    "PUSH_BATCH_SECONDS": float(os.environ.get("ASYNCQ_TEST_PUSH_BATCH", "0.01")),
    "LOCK_TTL_SECONDS": int(os.environ.get("ASYNCQ_TEST_LOCK_TTL", "30")),
    "AROUND": json.loads(os.environ.get("ASYNCQ_TEST_AROUND", "[]")),
    "ALERTS": json.loads(os.environ.get("ASYNCQ_TEST_ALERTS", "{}")),
    "TASK_LOCK_DIR": os.environ.get("ASYNCQ_TEST_LOCK_DIR", f"{tempfile.gettempdir()}/asyncq-test-locks"),
}
# Constants of the package in all processes of the suite; `tests.apps` sets them.
TEST_CONSTANTS: dict[str, float] = {
    "django_asyncq.conf.PROVISIONAL_SECONDS": int(os.environ.get("ASYNCQ_TEST_PROVISIONAL", "60")),
    "django_asyncq.conf.RECONCILE_SECONDS": 1.0,
    "django_asyncq.conf.SWEEP_SECONDS": 5.0,
    "django_asyncq.fleet.leader.FORWARD_SECONDS": float(os.environ.get("ASYNCQ_TEST_FORWARD", "0.2")),
    "django_asyncq.broker.clients.BLOCK_SECONDS": int(os.environ.get("ASYNCQ_TEST_BLOCK", "5")),
    "django_asyncq.worker.fetch.IDLE_LOOK_SECONDS": float(os.environ.get("ASYNCQ_TEST_LOOK", "5")),
}

# The settings that are shorter in tests, as the constants are.
PERIODS = ("BEAT_SECONDS", "LEASE_SECONDS")
if os.environ.get("ASYNCQ_TEST_PERIODS") == "default":
    # In processes whose statements are counted.
    for key in PERIODS:
        del ASYNCQ[key]
    TEST_CONSTANTS = {}

if log := os.environ.get("ASYNCQ_TEST_LOG"):
    # As docs/guides/logging.md has it, into a file.
    LOGGING = {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"task": {"()": "django_asyncq.TaskLogFilter"}},
        "formatters": {"json": {"()": "tests.json_log.JsonFormatter"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": log, "filters": ["task"], "formatter": "json"}
        },
        "root": {"handlers": ["file"], "level": "INFO"},
    }
