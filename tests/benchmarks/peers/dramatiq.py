"""dramatiq on Redis."""

from __future__ import annotations

from .base import NO_ASYNC, NO_BULK, NO_GATE, NO_TRANSACTION, Peer, Stores


class Dramatiq(Peer):
    """No row; messages stay in a hash until they are acknowledged."""

    name = "dramatiq"
    requirements = "dramatiq"
    application = "dramatiq_app"
    packages = ("dramatiq", "redis", "hiredis")
    record = "none (a list and a hash of what is unacknowledged)"
    settings = {
        "-p 2 -t 8 (16 for sleep, 4 for mix)": "two processes; more threads were no faster with tasks that do nothing",
        "dramatiq_queue_prefetch=1000 (drain, flow, retries)": "the default, 2 for each thread, makes it sleep",
        "min_backoff = max_backoff = 1 ms (retries)": "the default is 15 s",
    }
    unmeasured = {"transaction": NO_TRANSACTION, "bulk": NO_BULK, "asleep": NO_ASYNC, "gated": NO_GATE}

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        return [["dramatiq", "dramatiq_app", "-p", "2", "-t", {"sleep": "16", "mix": "4"}.get(profile, "8")]]

    def environment(self, profile: str) -> dict[str, str]:
        """See Peer."""
        return {"dramatiq_queue_prefetch": "1000"} if profile in ("drain", "flow", "retries") else {}

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Nothing waits to be acknowledged, delayed or not."""
        return not any(stores.redis("HLEN", f"dramatiq:{queue}.msgs") for queue in ("default", "default.DQ"))
