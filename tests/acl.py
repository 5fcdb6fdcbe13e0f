"""Run the package under a Redis user with the rights that the guide lists: `ASYNCQ_TEST_ACL=worker` or `producer`.

The fixtures stay unrestricted: they use the address of the server, the package the one that `package_url` returns.
Imports no pytest, because the settings of every started process import this.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "redis.md"
PASSWORD = "secret"
# The guide's lines are for this prefix; in this mode, tests have prefixes that begin with it.
PREFIX = "asynq"
# Refusals that change nothing. Redis before 7.2 does not know the first, and redis-py ignores its refusal; the second
# would let a user read the server's passwords. So neither is in the guide's lines.
IGNORED = ("client|setinfo", "config|get")


def user() -> str:
    """The user under which the package runs: "worker", "producer", or "" for the default user."""
    return os.environ.get("ASYNCQ_TEST_ACL", "")


def rules(name: str) -> list[str]:
    """Return the rules of a user, as the guide has them after `ACL SETUSER <name>`, with PASSWORD in place."""
    (found,) = re.findall(rf"^ACL SETUSER {name} (.+)$", GUIDE.read_text(), re.MULTILINE)
    return [f">{PASSWORD}" if word.startswith(">") else word for word in found.split()]


def server_settings() -> list[str]:
    """Return the words of a server's command line that create the user; none without one."""
    # The lists that tasks of the suite read, as the guide adds those of a project.
    return ["--user", user(), *rules(user()), "~tests*"] if user() else []


def url_as(name: str, url: str) -> str:
    """Return an address with the name and the password of a user, unless it has some."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=f"{name}:{PASSWORD}@{parts.netloc}"))


def package_url(url: str) -> str:
    """Return the address that the package uses for a server of the suite."""
    return url_as(user(), url) if user() else url


def unrestricted(client: Any) -> Any:
    """Return a client of the same server and database with all rights, for what a test itself does and reads."""
    if not user():
        return client
    options = client.get_connection_kwargs()
    return _unrestricted(options["host"], options["port"], options.get("db", 0))


@cache
def _unrestricted(host: str, port: int, db: int) -> redis.Redis:
    return redis.Redis(host=host, port=port, db=db, protocol=2)
