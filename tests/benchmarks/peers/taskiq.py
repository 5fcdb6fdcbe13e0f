"""taskiq on a Redis list."""

from __future__ import annotations

from .base import NO_GATE, NO_TRANSACTION, Peer, Stores


class Taskiq(Peer):
    """No row; a task that was popped is gone."""

    name = "taskiq"
    requirements = "taskiq"
    application = "taskiq_app"
    packages = ("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop", "orjson")
    record = "none (a list; popped before it runs)"
    settings = {
        "-w 2 --max-async-tasks 100 (16 for sleep, 4 for mix)": "two processes; a hundred tasks at once keep them busy",
        "--max-prefetch 100 (drain, flow)": "more at hand than run; elsewhere it would hide tasks behind others",
        "--no-parse": "arguments need no validation by pydantic",
        "ORJSONSerializer, uvloop, hiredis": "the faster of each kind",
        "socket_timeout=None": "it blocks in BRPOP for ever; with redis-py 8's default an idle worker dies after 5 s",
        "async def": "its worker is an event loop; `def` goes to threads (measured in `sleep` only)",
        "bulk": "a hundred kiq() gathered at once, for there is no bulk call",
    }
    unmeasured = {"transaction": NO_TRANSACTION, "gated": NO_GATE}

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        slots = {"sleep": "16", "asleep": "16", "mix": "4"}.get(profile, "100")
        prefetch = "100" if profile in ("drain", "flow", "retries") else "1"
        command = ["taskiq", "worker", "taskiq_app:broker", "-w", "2", "--log-level", "ERROR", "--no-parse"]
        return [[*command, "--max-async-tasks", slots, "--max-prefetch", prefetch, "--max-threadpool-threads", "16"]]

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Nothing waits; it does not know more."""
        return not stores.redis("LLEN", "taskiq")
