"""What an idle worker process waits for: a push to each of few queues, or a name in the wake list of many."""

from __future__ import annotations

from collections.abc import Collection

from ...broker import Broker
from ...broker.blocking import descriptors
from ...broker.handoff import Handoff, WaitResult
from ...broker.many_queues import FEW
from ...broker.wake_lists import WakeWait

# In the place of a queue, whose name can be printed.
WAKE_LIST = "\n"


class Waits:
    """The waits of one process, used by its main thread only. Methods raise BrokerUnavailable where they say so.

    named: the queues that it was started for; none for all that there are.
    """

    def __init__(self, broker: Broker, worker_id: str, lease_seconds: int, named: Collection[str]) -> None:
        self.handoff = Handoff(broker, worker_id, lease_seconds)
        self.of_many = WakeWait(broker, named)

    @property
    def could_be_ready(self) -> bool:
        """Whether a task would be handed to this process if it reported that it is ready; of many queues none is."""
        return self.handoff.could_be_ready

    @property
    def sockets(self) -> dict[int, str]:
        """What to sleep on: file descriptor → queue, or WAKE_LIST."""
        return {**self.handoff.sockets, **descriptors({WAKE_LIST: self.of_many.socket})}

    def has_outgrown(self, served: Collection[str]) -> bool:
        """Return whether the waits must end because the queues have become many, or few again."""
        return bool(self.handoff.queues) if len(served) > FEW else self.of_many.socket is not None

    @staticmethod
    def to_begin(queues: Collection[str], served: Collection[str]) -> set[str]:
        """Return what to begin, to wait for pushes to some queues. served: all that are known now."""
        return {WAKE_LIST} if queues and len(served) > FEW else set(queues)

    def report_ready(self, *, ready: bool, served: Collection[str]) -> None:
        """Say whether a task may be handed to this process. served: as above. Raises: BrokerUnavailable."""
        if len(served) <= FEW:
            self.handoff.report_ready(ready=ready)

    def begin(self, queue: str, served: Collection[str]) -> None:
        """Begin to wait for pushes to a queue. queue: one of `to_begin`. Raises: BrokerUnavailable."""
        if queue == WAKE_LIST:
            self.of_many.begin(served)
        else:
            self.handoff.wait_for(queue)

    def note_fetch(self, got: int, drained: Collection[str], paused: Collection[str]) -> None:
        """Note that this process has dequeued so many tasks itself, and in which queues it found none, or a pause."""
        if got:
            self.handoff.note_dequeue()
        self.of_many.settle(drained, paused, is_full=got > 0)

    def read(self, queue: str) -> WaitResult | None:
        """Read what ended a wait; return None if it goes on. queue: or WAKE_LIST. Raises: BrokerUnavailable."""
        if queue != WAKE_LIST:
            return self.handoff.read(queue)
        is_woken = self.of_many.read()
        return None if is_woken is None else WaitResult(is_woken, None, 0.0)

    def close(self) -> dict[str, WaitResult]:
        """End every wait; return the tasks that were handed at the last moment, by queue."""
        self.of_many.close()
        return self.handoff.close()
