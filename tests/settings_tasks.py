"""Tasks that say with which settings their process works. `tests.tasks` imports them, so that workers know them."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connections

from django_asyncq import conf, startup_task, task
from django_asyncq.core.test_run import is_test_run


def database_name() -> str:
    """Return the name of the database that this process works on."""
    return str(connections["default"].settings_dict["NAME"])


@task
def sees_settings() -> dict[str, Any]:
    """Return what the process has got of its supervisor's settings."""
    with warnings.catch_warnings(action="ignore"):
        mail = settings.EMAIL_BACKEND
    return {
        "database": database_name(),
        "prefix": conf.current().key_prefix,
        "caches": sorted(settings.CACHES),
        "mail": mail,
        "is_test_run": is_test_run(),
    }


@task(max_attempts=1)
def dies_once(mark: str) -> str:
    """Kill the worker process the first time."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second run"


if names := os.environ.get("ASYNCQ_TEST_NAMES"):

    @startup_task("notes its database")
    def notes_database() -> None:
        """Write the name of the database into a file."""
        Path(str(names)).write_text(database_name())
