"""django_asyncq, from this very working tree."""

from __future__ import annotations

from .base import MIGRATE, Peer, Stores


class DjangoAsyncq(Peer):
    """Ours."""

    name = "django_asyncq"
    requirements = "django_asyncq"
    application = "asyncq_app"
    packages = ("Django", "redis", "hiredis", "psycopg")
    record = "PostgreSQL row: INSERT at enqueue, one UPDATE at the end (one more when it runs for 50 ms)"
    settings = {
        "--processes 2 --concurrency 8": "two processes as for every peer; 8 slots is the default",
        "--concurrency 16 (sleep, asleep)": "32 at once are asked for",
        "--concurrency 4 (mix)": "8 slots in all are asked for",
        "hiredis": "redis-py parses replies with it where it is installed",
        "CONN_MAX_AGE = None": "as for every peer with Django",
        "server_side_binding, prepare_threshold = 5": "as for every peer with Django: no pooler is in between",
    }
    unmeasured = {}
    uses_postgres = True

    def workers(self, profile: str) -> list[list[str]]:
        """See Peer."""
        concurrency = {"sleep": 16, "asleep": 16, "mix": 4}.get(profile, 8)
        command = ["python", "-m", "django", "runworkers", "--processes", "2", "--concurrency", str(concurrency)]
        return [command]

    def environment(self, profile: str) -> dict[str, str]:
        """See Peer."""
        return {"DJANGO_SETTINGS_MODULE": "asyncq_settings"}

    def migrations(self) -> list[list[str]]:
        """See Peer."""
        return MIGRATE

    def is_settled(self, stores: Stores, tasks: int) -> bool:
        """No row is unfinished, and Redis holds no lease any more."""
        if stores.redis("ZCARD", "asynq:{default}:lease") or stores.redis("LLEN", "asynq:{default}:active"):
            return False
        return not stores.sql("SELECT EXISTS (SELECT FROM django_asyncq_taskrecord WHERE state <> 2)")
