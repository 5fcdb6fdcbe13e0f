"""A thread that does nothing but show that threads can run here, and look at the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..threads import LongLivedThread
from .execute.loop_block import LoopBlock
from .pulse import Pulse

PULSE_SECONDS = 1.0


class Heartbeat:
    """Writes the pulse once a second."""

    def __init__(self, pulse: Pulse, loop_block: LoopBlock, on_death: Callable[[str], object]) -> None:
        self.pulse = pulse
        self.loop_block = loop_block
        self._thread = LongLivedThread("heartbeat", self._beat_always, on_death=on_death, is_endless=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def beat(self) -> None:
        """Write the pulse."""
        now = time.monotonic()
        self.pulse.note_beat(now, self.loop_block.check(now))

    def _beat_always(self) -> None:
        while True:
            self.beat()
            time.sleep(PULSE_SECONDS)
