"""django-tasks-db: the database backend of Django's tasks framework."""

from __future__ import annotations

from .base import MIGRATE, NO_ASYNC, NO_BULK, NO_GATE, Peer, Stores


class DjangoTasksDb(Peer):
    """One task at a time in each process."""

    name = "django-tasks-db"
    requirements = "django-tasks-db"
    application = "tasksdb_app"
    packages = ("django-tasks-db", "Django", "psycopg")
    record = "PostgreSQL row: INSERT at enqueue, written when it starts and when it ends"
    settings = {
        "--interval 0.01": "it polls; the default of 1 s would be its latency. The price is in `idle`",
        "--no-startup-delay": "the pause before the first look is not what is measured",
        "two workers": "each runs one task at a time, so 2 slots is all there is",
        "VACUUM ANALYZE after the backlog was made": "its query for the next task needs statistics",
    }
    unmeasured = {
        "bulk": NO_BULK,
        "asleep": NO_ASYNC,
        "mix": "has 2 slots with two processes, and a mix needs 8",
        "retries": "has no retries",
        "gated": NO_GATE,
    }
    uses_postgres, uses_redis = True, False
    drain_limit = 10_000
    sleep_slots = 2

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        command = ["python", "-m", "django", "db_worker", "--interval", "0.01", "--no-startup-delay", "-v", "0"]
        return [[*command, "--worker-id", f"worker{number}"] for number in range(2)]

    def environment(self, profile: str) -> dict[str, str]:
        """See Peer."""
        return {"DJANGO_SETTINGS_MODULE": "tasksdb_settings"}

    def migrations(self) -> list[list[str]]:
        """See Peer."""
        return MIGRATE

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """Every row says so."""
        statement = "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status = 'SUCCESSFUL'"
        return bool(stores.sql(statement) >= tasks)
