"""The one way to start a thread that lives long: none of them dies without a log line.

A thread that dies alone leaves a process that looks well and does not work. So whatever ends a thread is logged, and
the process does not go on without it. A worker process exits at once with EX_SOFTWARE, and its supervisor replaces it.
A supervisor shuts down in order and exits with the same code, so that what runs it starts it anew.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from .guard import attempt, get_logger, own_thread

logger = get_logger("django_asyncq.threads")

# "An internal software error has been detected", as in `sysexits.h`; `os.EX_SOFTWARE` is not on every platform.
EX_SOFTWARE = 70
# How long the last log line may take: a handler that hangs must not keep a process that cannot work.
LAST_LINE_SECONDS = 5.0


class LongLivedThread(threading.Thread):
    """A thread that calls `work`, and never dies alone.

    on_death: called in the dying thread, with its name, after the error was logged. is_endless: whether `work` must not
    return either. has_died: whether `work` has raised, or returned although it must not.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        on_death: Callable[[str], object] | None = None,
        is_endless: bool = False,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work = work
        self._on_death = on_death
        self._is_endless = is_endless
        self.has_died = False

    def run(self) -> None:
        """Do the work; log what ends it before its time."""
        own_thread()
        try:
            self._work()
            if not self._is_endless:
                return
            logger.critical("thread %s has died: its work has returned", self.name)
        except BaseException:
            logger.critical("thread %s has died", self.name, exc_info=True)
        self.has_died = True
        if self._on_death is not None:
            self._on_death(self.name)


def exit_process(last_words: Callable[[], object]) -> NoReturn:
    """End this process at once with EX_SOFTWARE, from any thread. last_words: logs why."""
    timer = threading.Timer(LAST_LINE_SECONDS, os._exit, (EX_SOFTWARE,))
    timer.daemon = True
    try:
        attempt(timer.start)
        attempt(last_words)
        attempt(sys.stderr.flush)
    finally:
        os._exit(EX_SOFTWARE)
