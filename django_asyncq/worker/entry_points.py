"""The first code of a child process: sets Django up, then runs a start-up task.

Child processes are never forks of the supervisor, which has threads and connections that must not be shared: they are
fresh interpreters, or forks of a fork server, which is one itself. `bootstrap` has the worker's own.
"""

from __future__ import annotations

import os
import pickle
import socket
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from django.conf import ENVIRONMENT_VARIABLE, settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..core.guard import EX_SOFTWARE, LongLivedThread, get_logger
from ..core.masking import log_to_stderr
from ..core.test_run import is_test_run
from .child_process import kill_own_group, lead_group
from .forks import isolate_forks


def run_startup_task(inherited: bytes, verbosity: int | None, name: str, supervisor: Any) -> None:
    """Run one start-up task; send the supervisor "" or the traceback. Exits when the supervisor does."""
    lead_group()
    isolate_forks(supervisor)
    LongLivedThread("supervisor", lambda: _exit_with(supervisor), on_death=lambda name: os._exit(EX_SOFTWARE)).start()
    try:
        set_up(inherited, "start-up task", verbosity)

        from asgiref.sync import async_to_sync, iscoroutinefunction

        from ..core.schedules import startup_tasks

        function = next(task.function for task in startup_tasks() if task.name == name)
        run = async_to_sync(function) if iscoroutinefunction(function) else function
        run()
    except BaseException:  # noqa: BLE001 - the supervisor gets any of them
        supervisor.send(traceback.format_exc())
        raise SystemExit(1) from None
    supervisor.send("")


def set_up(inherited: bytes, process: str, verbosity: int | None) -> None:
    import django

    if inherited:
        apply(inherited)
    django.setup()
    # Only now it is known whether LOGGING has a handler for the lines of this package.
    if verbosity is not None:
        log_to_stderr(process, verbosity)

    from ..core.registry import load_task_modules

    load_task_modules()


def _exit_with(supervisor: Any) -> None:
    """Exit with the supervisor. It never sends anything this way, so what can be read is the end of the stream."""
    supervisor.poll(None)
    kill_own_group()
    os._exit(1)


# --- What a fork server should not have when it forks: its processes would share connections, and lack threads.

logger = get_logger("django_asyncq.fleet")

REMEDY = "when they are first used, or set ASYNCQ['START_METHOD'] = 'spawn'"
STANDARD_STREAMS = (0, 1, 2)


def close_connections() -> None:
    """Close the connections to databases that were opened while the project was loaded."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        # Of PostgreSQL, since Django 5.1: it ends the threads of a pool.
        if close_pool := getattr(connection, "close_pool", None):
            close_pool()


def obstacle() -> str:
    """Return what else the project has started and opened, so that nothing should be forked; "" for nothing."""
    kinds = (("threads were started", _threads()), ("connections were opened", _peers()))
    found = [f"{kind} while the project was loaded: {', '.join(names)}" for kind, names in kinds if names]
    return "; ".join(found)


def warn_of_others() -> None:
    """Log the same, as warnings. Whether it survives a fork, only the project can know."""
    if threads := _threads():
        text = "worker processes lack the threads that the project has started while it was loaded: %s; start them %s"
        logger.warning(text, ", ".join(threads), REMEDY)
    if peers := _peers():
        text = "worker processes share connections that the project has opened while it was loaded: %s; open them %s"
        logger.warning(text, ", ".join(peers), REMEDY)


def _threads() -> list[str]:
    """Return the names of the other threads of this process; without any, the number of those that are not Python's.

    A library that knows of forks, such as NumPy's, ends its threads before one, and has them again when it needs them.
    """
    names = sorted(each.name for each in threading.enumerate() if each is not threading.current_thread())
    if names or _count_threads() <= 1:
        return names
    with warnings.catch_warnings(action="ignore"):  # Python's, of the threads that are left
        child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    left = _count_threads() - 1
    return [f"{left} of libraries"] if left > 0 else []


def _count_threads() -> int:
    """Return how many threads the system knows of; 1 where it does not say."""
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if folder.is_dir() else 1


def _peers() -> list[str]:
    """Return to what this process is connected."""
    return sorted(_connected())


def _connected() -> Iterator[str]:
    """Yield to what this process is connected; its standard streams may be sockets of systemd, which all may share."""
    folder = Path("/proc/self/fd")
    for number in [int(each.name) for each in folder.iterdir()] if folder.is_dir() else ():
        try:
            if number in STANDARD_STREAMS or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                peer = found.getpeername()
        except OSError:
            continue  # closed meanwhile, or not connected
        yield f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else os.fsdecode(peer) or "a local socket"


# --- What a child process must take from its supervisor's settings, which it would otherwise read anew.
#
# A test runner gives the databases other names, and a test overrides settings: a child with the settings as they
# are written would work on the development database. In production both are equal, and nothing changes. A child
# imports this module before Django is set up.

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
