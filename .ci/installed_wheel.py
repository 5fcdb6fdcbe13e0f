"""Use the package where only its wheel and its dependencies are installed: import each module, check, migrate.

Without the folder of the repository on the path: `python -P .ci/installed_wheel.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
from pathlib import Path

import django
from django.conf import settings
from django.core.management import call_command

import django_asyncq

# What belongs to an extra, or to the tests of a project.
OF_EXTRAS = ("django_asyncq.contrib.", "django_asyncq.testing.pytest_plugin")
APPS = ["contenttypes", "auth", "sessions", "messages", "admin"]
BACKPORT = ["django_tasks"] if django.VERSION < (6, 0) else []


def main(folder: Path) -> None:
    """Do it with a database in this folder. Raises: what is wrong."""
    settings.configure(
        SECRET_KEY="installed" * 8,
        USE_TZ=True,
        INSTALLED_APPS=[*BACKPORT, *(f"django.contrib.{name}" for name in APPS), "django_asyncq"],
        SILENCED_SYSTEM_CHECKS=["admin.E403", "admin.E408", "admin.E409", "admin.E410"],  # this is no site
        TASKS={"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"}},
        ASYNCQ={"REDIS": "redis://127.0.0.1:6379/0"},
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "installed.sqlite3"}},
    )
    django.setup()
    installed = Path(django_asyncq.__file__).parent
    if "site-packages" not in installed.parts:
        sys.exit(f"this is not the installed package: {installed}")
    wanted = [
        each.name
        for each in pkgutil.walk_packages([str(installed)], "django_asyncq.", onerror=lambda name: None)
        if not each.name.startswith(OF_EXTRAS)
    ]
    for name in wanted:
        importlib.import_module(name)
    call_command("check", fail_level="ERROR")
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
    call_command("migrate", verbosity=0)
    call_command("asyncq", "prune", "--older-than", "1", "--yes")
    print(f"the wheel: {len(wanted)} modules imported, checks and migrations passed")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
