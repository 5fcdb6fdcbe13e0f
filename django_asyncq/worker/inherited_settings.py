"""What a child process must take from its supervisor's settings, which it would otherwise read anew.

A test runner gives the databases other names, and a test overrides settings: a child with the settings as they are
written would work on the development database. In production both are equal, and nothing changes.
A child imports this module before Django is set up.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from django.conf import ENVIRONMENT_VARIABLE, settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..test_run import is_test_run

# Where the tasks are, and how they are reached.
INHERITED = ("ASYNCQ", "CACHES", "TASKS")

# The names of the settings that this process has inherited; the processes that it starts inherit them too.
_of_this_process: set[str] = set()
# What `apply` was given in this process.
_applied = b""


def require_shared_databases(aliases: Iterable[str]) -> None:
    """Refuse databases of which another process could not see the rows.

    Raises: ImproperlyConfigured for one in memory, and for an open transaction in any database.
    """
    for alias in aliases:
        connection: Any = connections[alias]
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            raise ImproperlyConfigured(
                f"The database {alias!r} is in the memory of this process, so worker processes cannot read it. "
                f"Use a file; in tests, set DATABASES[{alias!r}]['TEST'] = {{'NAME': BASE_DIR / 'test.sqlite3'}}, "
                f"or run the tasks in the process of the test with django_asyncq.testing.run_tasks()."
            )
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            raise ImproperlyConfigured(
                f"A transaction of the database {connection.alias!r} is open, and worker processes see only what is "
                f"committed. Start them outside of it; in tests, use TransactionTestCase (pytest: "
                f"django_db(transaction=True)), or run the tasks in the process of the test with "
                f"django_asyncq.testing.run_tasks()."
            )


def pack() -> bytes:
    """Return the names of the databases and the settings that are in force now, for `apply` in a child process.

    Raises: ImproperlyConfigured for a value that no other process can get: it was changed and cannot be pickled.
    """
    databases = {alias: connections[alias].settings_dict["NAME"] for alias in connections}
    names = {*INHERITED, *_of_this_process}
    if is_test_run():
        # A task must not send by mail what a test has sent into `mail.outbox`.
        names.add("MAILERS" if hasattr(settings, "MAILERS") else "EMAIL_BACKEND")
    # Django 6.1 deprecates EMAIL_BACKEND, also for a reader.
    with warnings.catch_warnings(action="ignore"):
        values = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return pickle.dumps((databases, {name: value for name, value in values.items() if _can_be_sent(name, value)}))


def apply(packed: bytes) -> None:
    """Put the values of the supervisor in place, before Django is set up: before any connection or backend is made.

    The settings module is imported first, so what it has imported can be unpickled.
    """
    global _applied
    _applied = packed
    written = settings.DATABASES
    databases, values = pickle.loads(packed)  # noqa: S301 - from the supervisor, which has started this process
    for alias, name in databases.items():
        if alias in written:
            # As Django's test runner does it.
            written[alias]["NAME"] = name
    with warnings.catch_warnings(action="ignore"):
        for name, value in values.items():
            setattr(settings, name, value)
    _of_this_process.update(values)


def applied() -> bytes:
    """Return what `apply` was given in this process, for a process that it starts; b"" if it was not called."""
    return _applied


def _can_be_sent(name: str, value: Any) -> bool:
    """Return whether a value can be pickled; False for one that a child reads from the same settings module."""
    try:
        pickle.dumps(value)
    except Exception as error:
        module = sys.modules.get(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        if module is None or getattr(module, name, None) == value:
            return False
        raise ImproperlyConfigured(
            f"worker processes cannot get the changed setting {name}, because a part of it cannot be pickled "
            f"({error}). Change it to values without a lambda or an open object, such as a dotted path."
        ) from error
    return True
