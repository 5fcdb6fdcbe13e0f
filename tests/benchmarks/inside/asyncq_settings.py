"""Settings of django_asyncq: its defaults. Redis 6.2 and later, everything in one server."""

from __future__ import annotations

import os

import probe  # noqa: F401 - counts Redis commands in the supervisor too
from django_base import *  # noqa: F403
from django_base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_asyncq", "asyncq_app"]
TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}}
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": os.environ["BENCH_REDIS_URL"]}}
ASYNCQ = {"TASK_LOCK_DIR": os.environ["BENCH_LOCKS"]}
