"""The first code of a worker process: sets Django up, then hands over.

Worker processes are fresh interpreters, not forks: the supervisor has threads and connections that must not be shared.
"""

from __future__ import annotations

import signal
from typing import Any

from .board import Board
from .options import WorkerOptions


def start(options: WorkerOptions, board: Board, supervisor: Any) -> None:
    """Set Django up, import the tasks, run the worker."""
    import django

    # Ctrl-C reaches the whole process group; until the worker has its own handler, the supervisor's word counts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    django.setup()

    from ..tasks import load_task_modules
    from .process import WorkerProcess

    load_task_modules()
    WorkerProcess(options, board, supervisor).run()
