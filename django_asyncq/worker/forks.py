"""Children that a task forks (`os.fork`, `multiprocessing` with "fork") begin with nothing of their worker process.

A child with the worker's handlers would survive SIGTERM, so `terminate()` and the exit of a pool would hang. A child
with its pipes would wake it, or hide its death from the supervisor. A program that is started by `exec` has none of it.
Connections to Redis and to the database are not touched: redis-py notices a fork, Django leaves it to the task.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from .slot_table import SlotTable
from .wakeup import Wakeup

# Whether this process is such a child.
is_forked = False


def isolate_forks(
    supervisor: Connection[Any, Any], wakeup: Wakeup | None = None, slot_table: SlotTable | None = None
) -> None:
    """Have each child that this process forks from now on let go of these. supervisor: the pipe to it."""

    kept = threading.local()

    def hold_signals() -> None:
        # One that came before the child has let go of the handlers would be lost, and `terminate()` have no effect.
        kept.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def release_signals() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept.mask)

    def isolate() -> None:
        global is_forked
        is_forked = True
        # Whichever thread has forked is the child's main thread, so it may do this.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Its crash is not the crash of the worker process, whose file this would write to.
        faulthandler.disable()
        supervisor.close()
        if wakeup is not None:
            wakeup.disconnect()
        if slot_table is not None:
            slot_table.disconnect()
        release_signals()

    os.register_at_fork(before=hold_signals, after_in_parent=release_signals, after_in_child=isolate)


def exit_forked() -> NoReturn:
    """Exit, in a child that a task has forked and that returns from the task like its parent.

    Only the parent may record an outcome; a second process must not use its connections, nor run its other tasks.
    """
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(0 if error is None else 1)
