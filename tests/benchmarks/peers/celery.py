"""Celery on Redis, with the threads pool; without results, and with django-celery-results."""

from __future__ import annotations

from typing import ClassVar

from .base import MIGRATE, NO_ASYNC, NO_GATE, NO_TRANSACTION, Peer, Stores


class Celery(Peer):
    """Without results: nothing remembers a task."""

    name = "celery"
    requirements = "celery"
    application = "celery_app"
    packages: ClassVar[tuple[str, ...]] = ("celery", "kombu", "redis", "hiredis")
    record = "none (a list; acknowledged before the task runs)"
    settings = {
        "-P threads -c 16, twice": "two worker instances: one alone keeps to one processor",
        "-c 4 (mix)": "8 slots in all are asked for",
        "--prefetch-multiplier 64 (drain, flow, retries; else 1)": "the default of 4 waits for Redis between batches",
        "--without-gossip --without-mingle --without-heartbeat": "instances need not know of each other",
        "task_ignore_result, worker_disable_rate_limits": "no result is kept, and no bucket is asked for each task",
    }
    unmeasured = {"transaction": NO_TRANSACTION, "asleep": NO_ASYNC, "gated": NO_GATE}
    drain_limit = 100_000

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        prefetch = "64" if profile in ("drain", "flow", "retries") else "1"
        slots = "4" if profile == "mix" else "16"
        command = ["celery", "-A", "celery_app", "worker", "-P", "threads", "-c", slots]
        command += ["--prefetch-multiplier", prefetch, "--without-gossip", "--without-mingle", "--without-heartbeat"]
        return [[*command, "-l", "WARNING", "-n", f"worker{number}@bench"] for number in range(2)]

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Nothing waits and nothing is unacknowledged."""
        return not stores.redis("LLEN", "celery") and not stores.redis("HLEN", "unacked")


class CeleryWithResults(Celery):
    """With django-celery-results: a row at the end, none before."""

    name = "celery+results"
    packages = ("celery", "django-celery-results", "Django", "redis", "hiredis", "psycopg")
    record = "PostgreSQL row, inserted at the end; nothing at enqueue, nothing when it starts"
    settings = {
        **{what: why for what, why in Celery.settings.items() if "ignore" not in what},
        "worker_disable_rate_limits": "no bucket is asked for each task",
        "CELERY_DB_REUSE_MAX = 10**9": "otherwise Celery connects to the database anew for each task",
        "delay_on_commit": "what its guide tells Django's users to call",
    }
    unmeasured = {"asleep": NO_ASYNC, "gated": NO_GATE}
    uses_postgres = True

    def environment(self, profile: str) -> dict[str, str]:
        """See Peer."""
        return {"BENCH_RESULTS": "1", "DJANGO_SETTINGS_MODULE": "celery_settings"}

    def migrations(self) -> list[list[str]]:
        """See Peer."""
        return MIGRATE

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Every task has its row."""
        statement = "SELECT count(*) FROM django_celery_results_taskresult WHERE status = 'SUCCESS'"
        return bool(stores.sql(statement) >= tasks)
