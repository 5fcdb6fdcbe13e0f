"""The first code of a child process: sets Django up, then runs the worker or a start-up task.

Child processes are never forks of the supervisor, which has threads and connections that must not be shared: they are
fresh interpreters, or forks of a fork server, which is one itself.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import time
import traceback
from typing import Any

from ..guard import get_logger, own_process
from ..stderr_log import log_to_stderr
from ..threads import EX_SOFTWARE, LongLivedThread
from .crash_stack import write_crash_stack
from .forks import isolate_forks
from .options import WorkerOptions
from .process_groups import ignore_signals, kill_own_group, lead_group
from .slot_table import SlotTable

logger = get_logger("django_asyncq.supervisor")

# Where a fork server finds what it is to do, as JSON; its presence says that the process is one.
PRELOAD_VARIABLE = "DJANGO_ASYNCQ_FORK_SERVER"

# Whether this process was forked, or forks others, with Django set up and the tasks imported.
_is_loaded = False


def load_to_fork(verbosity: int | None) -> None:
    """In a fork server: set Django up and import what a worker process needs, before it forks any.

    verbosity: as of `run_worker`.
    """
    global _is_loaded
    began = time.monotonic()
    own_process()
    # Garbage that is collected leaves holes in pages, which each fork would fill with copies of its own.
    gc.disable()
    _set_up(b"", "fork server", verbosity)

    from ..broker import redis_py
    from . import process  # noqa: F401 - each worker process needs it
    from .unshared import close_connections, warn_of_others

    redis_py.import_all()
    close_connections()
    warn_of_others()
    # The collector writes to each object that it looks at, which would copy its page.
    gc.freeze()
    _is_loaded = True
    logger.info("fork server %d has loaded the project in %.1f s", os.getpid(), time.monotonic() - began)


def run_worker(
    inherited: bytes,
    verbosity: int | None,
    options: WorkerOptions,
    slot_table: SlotTable,
    supervisor: Any,
    stack_file: str,
) -> None:
    """Set Django up, import the tasks, run the worker.

    inherited: see `inherited_settings`; b"" to read all settings anew. verbosity: with which the supervisor logs to
    standard error; None if the project's logging does it. stack_file: where the stacks of all threads go when a signal
    such as SIGSEGV ends the process.
    """
    lead_group()
    if stack_file:
        write_crash_stack(stack_file)
    if _is_loaded:
        gc.enable()
        if verbosity is not None:
            log_to_stderr("worker", verbosity)
    else:
        _set_up(inherited, "worker", verbosity)

    from .process import WorkerProcess

    process = WorkerProcess(options, slot_table, supervisor)
    isolate_forks(supervisor, process.wakeup, slot_table)
    process.run()


def run_isolated(
    inherited: bytes, verbosity: int | None, name: str, worker_id: str, pipe: Any, stack_file: str
) -> None:
    """Set Django up, import the tasks, run one task of this name for the worker process at the other end of the pipe.

    inherited, verbosity, stack_file: as of `run_worker`.
    """
    ignore_signals()
    if stack_file:
        write_crash_stack(stack_file)
    isolate_forks(pipe)
    has_finished: list[bool] = []
    # Registered first, so it runs last: what the project has registered runs before it.
    atexit.register(lambda: _exit_at_once() if has_finished else None)
    _set_up(inherited, "isolated task", verbosity)

    from .execute.isolated_child import IsolatedChild

    IsolatedChild(pipe, name, worker_id).run()
    has_finished.append(True)


def run_startup_task(inherited: bytes, verbosity: int | None, name: str, supervisor: Any) -> None:
    """Run one start-up task; send the supervisor "" or the traceback. Exits when the supervisor does."""
    lead_group()
    isolate_forks(supervisor)
    LongLivedThread("supervisor", lambda: _exit_with(supervisor), on_death=lambda name: os._exit(EX_SOFTWARE)).start()
    try:
        _set_up(inherited, "start-up task", verbosity)

        from asgiref.sync import async_to_sync, iscoroutinefunction

        from ..definitions.schedules import startup_tasks

        function = next(task.function for task in startup_tasks() if task.name == name)
        run = async_to_sync(function) if iscoroutinefunction(function) else function
        run()
    except BaseException:  # noqa: BLE001 - the supervisor gets any of them
        supervisor.send(traceback.format_exc())
        raise SystemExit(1) from None
    supervisor.send("")


def _set_up(inherited: bytes, process: str, verbosity: int | None) -> None:
    import django

    from .inherited_settings import apply

    if inherited:
        apply(inherited)
    django.setup()
    # Only now it is known whether LOGGING has a handler for the lines of this package.
    if verbosity is not None:
        log_to_stderr(process, verbosity)

    from ..registry import load_task_modules

    load_task_modules()


def _exit_at_once() -> None:
    """Exit without tearing down all modules, which takes a loaded host seconds, and the slot waits for it."""
    logging.shutdown()
    os._exit(0)


def _exit_with(supervisor: Any) -> None:
    """Exit with the supervisor. It never sends anything this way, so what can be read is the end of the stream."""
    supervisor.poll(None)
    kill_own_group()
    os._exit(1)
