"""No queue: the least that any does which has a row for every task and dispatches by Redis."""

from __future__ import annotations

from .base import MEASURES, Peer, Stores

NO_QUEUE = "only the way of one task is there, to tell what of the others' time is theirs"


class Bare(Peer):
    """One INSERT of five columns through psycopg, and one script call of two commands through redis-py.

    Who takes it blocks for it, leases it with one script call, and reads its row: one process, one after the other.
    """

    name = "bare"
    requirements = "django_asyncq"
    application = "bare_app"
    packages = ("psycopg", "redis", "hiredis")
    record = "PostgreSQL row: INSERT at enqueue; that it ran is not written"
    settings = {
        "psycopg and redis-py alone": "below what they take no queue can get that is written with them",
        "the INSERT is prepared": "psycopg's default",
        "one index beside the primary key": "somebody has to find the rows of a state",
    }
    unmeasured = {measure: NO_QUEUE for measure in MEASURES if measure not in ("enqueue", "transaction", "latency")}
    uses_postgres = True

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        return [["python", "-m", "bare_app", "run"]] if profile == "latency" else []

    def migrations(self) -> list[list[str]]:
        """See Peer."""
        return [["python", "-m", "bare_app"]]

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Every row is there; no more is to come."""
        return bool(stores.sql("SELECT count(*) FROM bare_task") >= tasks)
