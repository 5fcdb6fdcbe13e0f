"""Learn at once that a task is over: mark it as waited for, and listen to the scripts that remove or archive it.

Knows ids only. What waits reads the row, before it sleeps and when it is woken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import clients, replies, scripts
from .access import Access
from .entries import id_bytes
from .keys import over_channel
from .notifications import Listener, Settable
from .redis_internals import close_copy

IDS_PER_CALL = 200


def mark_waited(alias: str, queue: str, ids: Sequence[str]) -> set[str]:
    """Mark tasks as waited for, with a producer's timeouts; return those that Redis has, which are announced then.

    The others are to be marked again: they are not pushed yet, over, or lost from Redis. Raises: BrokerUnavailable.
    """
    access = Access("producer", alias)
    keys = access.keys(queue)
    found: set[str] = set()
    for start in range(0, len(ids), IDS_PER_CALL):
        part = ids[start : start + IDS_PER_CALL]
        reply = scripts.run("mark_waited", access.client, [keys.pending], [keys.task_prefix, *map(id_bytes, part)])
        found.update(id for id, word in zip(part, replies.texts(reply), strict=True) if word == "waited")
    return found


class OverListener(Listener):
    """Call `over` with the id of each task that is over and was waited for.

    event: is set when it begins to listen. is_needed: asked each second; when it says no, the thread returns.
    """

    def __init__(
        self,
        over: Callable[[str], object],
        event: Settable,
        *,
        is_needed: Callable[[], bool],
        on_death: Callable[[str], object],
    ) -> None:
        super().__init__([over_channel()], event, on_death=on_death)
        self._over = over
        self._is_needed = is_needed

    @property
    def is_current(self) -> bool:
        """Whether it listens, or tries to, to the channel that the settings name."""
        return self.channels == [over_channel()] and not self.has_died and not self._stopped.is_set()

    def leave_to_parent(self) -> None:
        """Close this process's copy of the connection; for a forked child, where the thread does not run."""
        close_copy(self._connection)

    def _client(self) -> clients.Client:
        # `reset_clients` would close a shared one under the thread that reads it, and redis-py then raises anything.
        return clients.private_client("blocking")

    def _goes_on(self) -> bool:
        return super()._goes_on() and self._is_needed()

    def _received(self, channel: bytes, data: Any) -> None:
        self._over(replies.text(data))
