"""huey on Redis, with threads."""

from __future__ import annotations

from .base import NO_ASYNC, NO_BULK, NO_GATE, NO_TRANSACTION, Peer, Stores


class Huey(Peer):
    """No row; a task that was popped is gone."""

    name = "huey"
    requirements = "huey"
    application = "huey_app"
    packages = ("huey", "redis", "hiredis")
    record = "none (a list; popped before it runs; results of None are not kept)"
    settings = {
        "-k thread, two consumers": "one consumer keeps to one processor; its processes are slower",
        "-w 4 (16 for sleep, 4 for mix, 2 for latency)": "more threads were slower with tasks that do nothing",
        "-n (no periodic tasks), -C (no health check)": "neither is needed here",
    }
    unmeasured = {"transaction": NO_TRANSACTION, "bulk": NO_BULK, "asleep": NO_ASYNC, "gated": NO_GATE}

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        threads = {"sleep": "16", "latency": "2"}.get(profile, "4")
        return [["huey_consumer", "huey_app.huey", "-w", threads, "-k", "thread", "-n", "-C", "-q"] for _ in range(2)]

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Nothing waits; it does not know more."""
        return not stores.redis("LLEN", "huey.redis.bench") and not stores.redis("ZCARD", "huey.schedule.bench")
