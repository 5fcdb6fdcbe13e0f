"""Database routers of the suite: ASYNCQ_TEST_ROUTER names them, and `.ci/run` runs some files once more with them.

`own`: the app's models live in a database of their own, the rest of the project in `default`.
`no-replica`: there is a replica, and the package may not read it; the tests and the project's code may.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

APP = "django_asyncq"


class OwnDatabase:
    """Keep the app's models in `tasks`, and everything else out of it."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        """Read where the model lives."""
        return self.db_for_write(model)

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        """Write where the model lives."""
        return "tasks" if model._meta.app_label == APP else None

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        """Make the app's tables in `tasks`, the others in `default`."""
        return (db == "tasks") == (app_label == APP)


class NoReplica:
    """Refuse a read of the app's models that the package, or Django's admin for it, leaves to the routers."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        """Return no database of its own. Raises: AssertionError."""
        if model._meta.app_label == APP and is_internal():
            raise AssertionError(f"{model._meta.object_name} is read from a replica")
        return None


def is_internal() -> bool:
    """Whether the code that asks is not that of a test: the nearest frame that is neither Django's nor a router's.

    Within a request it is the admin's, whoever sent it.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "django.core.handlers.base" or name.split(".")[0] == APP:
            return True
        if name.split(".")[0] not in ("django", "asgiref", "contextlib") and name != __name__:
            return False
        frame = frame.f_back
    return True


ROUTERS = {"own": "tests.routers.OwnDatabase", "no-replica": "tests.routers.NoReplica"}
