"""One maintenance thread: a step that is repeated, through outages and errors, until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.db import close_old_connections, connections

from ..exceptions import DatabaseNotSetUp, LockLost
from ..faults import Faults, Outages
from ..guard import get_logger
from ..storage.pooling import return_connections
from ..threads import LongLivedThread

logger = get_logger("django_asyncq.maintenance.loop")

# How often a loop that is disabled in this process asks whether it is enabled now.
DISABLED_POLL_SECONDS = 5.0
ERROR_PAUSE_SECONDS = 1.0


class Loop(LongLivedThread):
    """Repeat a step until stopped.

    step: returns the seconds until its next call; None ends the loop. is_enabled: whether this process may do the step
    now; while it may not, the loop uses neither store and says nothing about them. outages: those of all its loops.
    A step may raise anything, SystemExit of the project's code included: nothing is kept from one step to the next, so
    it is called again.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float | None],
        is_enabled: Callable[[], bool] = lambda: True,
        *,
        outages: Outages | None = None,
    ) -> None:
        super().__init__(name, self.repeat)
        self._step = step
        self._is_enabled = is_enabled
        self._wakeup = threading.Event()
        self._is_stopping = False
        self._faults = Faults(
            logger,
            "the %s loop cannot reach a store and tries again",
            name,
            over="the %s loop can reach both stores again",
            failed="the %s loop failed and tries again",
            outages=outages,
        )
        # Why this process cannot go on, if it cannot.
        self.not_set_up: DatabaseNotSetUp | None = None

    def repeat(self) -> None:
        """Step and sleep in turn until stopped."""
        try:
            while not self._is_stopping:
                pause = self.tick()
                if pause is None:
                    return
                self._wakeup.wait(pause)
                self._wakeup.clear()
        finally:
            connections.close_all()

    def wake(self) -> None:
        """Cut the current or the next sleep short."""
        self._wakeup.set()

    def stop(self) -> None:
        """Begin no further step."""
        self._is_stopping = True
        self._wakeup.set()

    def tick(self) -> float | None:
        """Do one step if it is enabled; log an outage once when it begins and once when it is over."""
        try:
            if not self._is_enabled():
                return DISABLED_POLL_SECONDS
            close_old_connections()
            pause = self._step()
        except LockLost as error:
            logger.info("%s: %s", self.name, error)
            return ERROR_PAUSE_SECONDS
        except Exception as error:  # noqa: BLE001 - it is logged there
            connections.close_all()
            pause = self._faults.note(error)
            self.not_set_up = self._faults.not_set_up
            return pause
        except BaseException:
            logger.exception("the %s loop failed and tries again", self.name)
            return ERROR_PAUSE_SECONDS
        finally:
            return_connections()
        self._faults.clear()
        return pause


class LoopWaker:
    """Stand in for the event that a `Listener` sets: wake loops instead."""

    def __init__(self, *loops: Loop) -> None:
        self._loops = loops

    def set(self) -> None:
        """Wake every loop."""
        for loop in self._loops:
            loop.wake()
