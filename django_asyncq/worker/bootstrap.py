"""The first code of a worker process, and of the fork server that makes them: sets Django up, then runs the worker."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

from ..core.guard import get_logger, own_process
from ..core.masking import log_to_stderr
from .child_process import lead_group, write_crash_stack
from .entry_points import set_up
from .forks import isolate_forks
from .options import WorkerOptions
from .slot_table import SlotTable

logger = get_logger("django_asyncq.fleet")

# Where a fork server finds what it is to do, as JSON; its presence says that the process is one.
PRELOAD_VARIABLE = "DJANGO_ASYNCQ_FORK_SERVER"

# Whether this process was forked, or forks others, with Django set up and the tasks imported.
_is_loaded = False


def load_to_fork(verbosity: int | None, obstacle_file: str) -> None:
    """In a fork server: set Django up and import what a worker process needs, before it forks any.

    verbosity: as of `run_worker`. obstacle_file: where it says why it should not fork, and exits; "" to warn of that
    and to fork all the same.
    """
    global _is_loaded
    began = time.monotonic()
    own_process()
    # Garbage that is collected leaves holes in pages, which each fork would fill with copies of its own.
    gc.disable()
    set_up(b"", "fork server", verbosity)

    from ..broker import redis_py
    from . import process  # noqa: F401 - each worker process needs it
    from .entry_points import close_connections, obstacle, warn_of_others

    redis_py.import_all()
    close_connections()
    if obstacle_file and (reason := obstacle()):
        Path(obstacle_file).write_text(f"{os.getpid()} {reason}")
        os._exit(0)
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

    inherited: see `entry_points`; b"" to read all settings anew. verbosity: with which the supervisor logs to
    standard error; None if the project's logging does it. stack_file: where the stacks of all threads go when a signal
    such as SIGSEGV ends the process.
    """
    lead_group()
    if stack_file:
        write_crash_stack(stack_file)
    if _is_loaded:
        gc.enable()
        if verbosity is not None:
            log_to_stderr(options.process_name, verbosity)
    else:
        set_up(inherited, options.process_name, verbosity)

    from .process import WorkerProcess

    process = WorkerProcess(options, slot_table, supervisor)
    isolate_forks(supervisor, process.wakeup, slot_table)
    process.run()
