"""procrastinate: a queue in PostgreSQL alone."""

from __future__ import annotations

from .base import NO_GATE, NO_TRANSACTION, Peer, Stores


class Procrastinate(Peer):
    """One process: a second one was measured no faster on two cores, of which PostgreSQL needs one."""

    name = "procrastinate"
    requirements = "procrastinate"
    application = "procrastinate_app"
    packages = ("procrastinate", "psycopg", "psycopg-pool")
    record = "PostgreSQL row: INSERT at enqueue, written when it starts and when it ends, and rows of events by trigger"
    settings = {
        "one process, -c 16 (32 for sleep, 8 for mix)": "a second process was no faster on two cores",
        "async def": "its worker is an event loop; `def` goes to threads and is slower (measured in `sleep` only)",
        "max_size=18": "a connection for each task at once, and two for the worker",
        "-p 0.1 (retries)": "a retry is only found by polling; the default is 5 s",
    }
    unmeasured = {"transaction": NO_TRANSACTION, "gated": NO_GATE}
    uses_postgres, uses_redis = True, False
    drain_limit = 10_000

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        slots = {"sleep": "32", "asleep": "32", "mix": "8"}.get(profile, "16")
        polling = ["-p", "0.1"] if profile == "retries" else []
        return [["procrastinate", "-a", "procrastinate_app.app", "worker", "-c", slots, *polling]]

    def migrations(self) -> list[list[str]]:
        """See Peer."""
        return [["procrastinate", "-a", "procrastinate_app.app", "schema", "--apply"]]

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Every row says so."""
        return bool(stores.sql("SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'") >= tasks)
