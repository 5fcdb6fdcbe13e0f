"""How worker processes are started: as fresh interpreters ("spawn"), or forked by a fork server ("forkserver").

The fork server of multiprocessing is a fresh interpreter too. It sets Django up and imports the tasks once; processes
that it forks are ready sooner, and share its memory until they write to it. What they must not share, such as
connections, it does not have: see `worker.bootstrap.load_to_fork`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

from django.conf import ENVIRONMENT_VARIABLE

from ..conf import FORKSERVER, SPAWN
from ..stderr_log import stderr_verbosity
from ..threads import LongLivedThread
from ..worker.bootstrap import PRELOAD_VARIABLE
from ..worker.child_process import ChildProcess, ForkedProcess
from ..worker.crash_stack import CrashStack
from ..worker.options import WorkerOptions
from ..worker.process_groups import start_of_child
from ..worker.slot_table import SlotTable


@dataclass(slots=True, eq=False)
class Start:
    """One process that is to be started, and what became of it: either it `began`, or there was an `error`.

    process: of multiprocessing. pipe, other_end: of this process, and of the one that starts. at: monotonic seconds.
    failed_starts: see `Vacancy`.
    """

    process: BaseProcess
    options: WorkerOptions
    slot_table: SlotTable
    pipe: Connection[Any, Any]
    other_end: Connection[Any, Any]
    crash_stack: CrashStack
    at: float
    failed_starts: int
    began: ChildProcess | None = None
    error: BaseException | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.pipe.closed

    def abandon(self) -> None:
        """Release what was made for it."""
        self.pipe.close()
        self.crash_stack.close()


class SpawnStarter:
    """Starts each process at once, in the calling thread.

    on_done: called in the thread of a start that is over later than in `begin`.
    """

    def __init__(self, on_done: Callable[[], object]) -> None:
        self._on_done = on_done
        self.context: Any = multiprocessing.get_context(SPAWN)
        self._done: SimpleQueue[Start] = SimpleQueue()

    def begin(self, start: Start) -> None:
        """Have a process started; `done` returns it."""
        try:
            with start_of_child():
                start.process.start()
            start.began = ChildProcess(start.process)
        except OSError as error:  # the system allows no more of them
            start.error = error
        self._finish(start)

    def done(self) -> Iterator[Start]:
        """Yield what became of the starts, each once."""
        while True:
            try:
                yield self._done.get_nowait()
            except Empty:
                return

    def _finish(self, start: Start) -> None:
        start.other_end.close()
        self._done.put(start)


class ForkStarter(SpawnStarter):
    """Has each process forked by a fork server, in a thread; `done` returns it later.

    The first start takes as long as the project takes to load, and one at a server that hangs never returns. The
    supervisor must renew leases meanwhile.
    """

    def __init__(self, on_done: Callable[[], object]) -> None:
        super().__init__(on_done)
        self.context = multiprocessing.get_context(FORKSERVER)
        self.context.set_forkserver_preload(["django_asyncq.worker.preload"])
        # For the fork server, and for each that replaces one that has died.
        os.environ[PRELOAD_VARIABLE] = json.dumps({"path": sys.path, "verbosity": stderr_verbosity()})
        self._wanted: SimpleQueue[Start] = SimpleQueue()
        self._thread = LongLivedThread("starts", self._run, is_endless=True)

    def begin(self, start: Start) -> None:
        """Have a process started; `done` returns it later."""
        if not self._thread.is_alive():
            self._thread.start()
        self._wanted.put(start)

    def _run(self) -> None:
        while True:
            start = self._wanted.get()
            if start.is_abandoned:
                start.other_end.close()
                continue
            try:
                # The fork server inherits what is blocked here, and so does each process that it forks.
                with start_of_child(signal.SIGTERM):
                    start.process.start()
                start.began = ForkedProcess(start.process)
            except BaseException as error:  # noqa: BLE001 - the supervisor logs it, and tries again
                # EOFError, for instance: the fork server has died.
                start.error = error
            self._finish(start)
            self._on_done()


def fork_obstacle() -> str:
    """Return why this process cannot use a fork server; "" if it can."""
    if ENVIRONMENT_VARIABLE not in os.environ:
        return f"the fork server finds the settings by {ENVIRONMENT_VARIABLE}, which is not set"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return "it needs Linux 5.3"
    return ""


STARTERS = {SPAWN: SpawnStarter, FORKSERVER: ForkStarter}
