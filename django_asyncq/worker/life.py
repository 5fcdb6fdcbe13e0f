"""What a project does at the start and at the end of a worker process: its signals, and what it does at exit.

A process that crashes, hangs or is killed says no goodbye. Every other end does: a stop, a burst that is finished, a
limit of tasks or memory, a reload, and the end of a process that was started for one task.
"""

from __future__ import annotations

import atexit
from typing import Any

from django.db import connections

from .. import lifecycle
from ..core.guard import LongLivedThread, attempt, get_logger
from ..signals import worker_started, worker_stopping
from .options import WorkerOptions

logger = get_logger("django_asyncq.worker")

# Together with the reporter's time less than the supervisor waits beyond the grace (`EXIT_MARGIN_SECONDS`).
EXIT_SECONDS = 5.0
HURRIED_SECONDS = 1.0


def greet(worker_id: str, options: WorkerOptions) -> None:
    """Send `worker_started`, in the main thread, before the first task. Errors are logged."""
    _send(worker_started, worker_id, options)


def say_goodbye(worker_id: str, options: WorkerOptions, *, is_hurried: bool) -> None:
    """Send `worker_stopping`, then call what is registered with `atexit`; give up after EXIT_SECONDS.

    The process itself ends by `os._exit`, which would skip what error monitors and tracers have collected.
    """

    def finish() -> None:
        _send(worker_stopping, worker_id, options)
        try:
            atexit._run_exitfuncs()
        finally:
            lifecycle.flush_pushes()
            connections.close_all()

    thread = LongLivedThread("at-exit", finish)
    thread.start()
    seconds = HURRIED_SECONDS if is_hurried else EXIT_SECONDS
    thread.join(seconds)
    if thread.is_alive():
        text = "worker %s exits before its exit functions and receivers of worker_stopping have returned: they had %g s"
        logger.warning(text, worker_id, seconds)


def _send(signal: Any, worker_id: str, options: WorkerOptions) -> None:
    """Send a signal about this process. Django logs the error of a receiver."""
    names = {"worker_id": worker_id, "queues": tuple(options.queues or ()), "runs_one_task": options.alone is not None}
    _, error = attempt(signal.send_robust, sender=None, **names)
    if error is not None:  # `send_robust` outlives an Exception only
        logger.error("worker %s: a receiver of a signal about it has failed", worker_id, exc_info=error)
