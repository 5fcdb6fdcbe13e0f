"""Refuse, in a test run, a Redis that is not the tests' own: a test must not touch the tasks of development.

Checked where a client is built and after each commit of a test run; a process that runs no tests is asked nothing more.
"""

from __future__ import annotations

from typing import Any

from django.core.signals import setting_changed

from .. import conf
from ..exceptions import RedisNotForTests
from ..test_run import embedded_ports, is_test_run, note_changed_setting
from . import redis_py
from .configuration import CLUSTER_FACTORY
from .location import DEFAULT_PORT, identity, location

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def require_server_of_tests() -> None:
    """Pass outside of a test run, with an embedded server that the tests have started, and with REDIS_IS_FOR_TESTS.

    Raises: RedisNotForTests, which names the server.
    """
    if is_foreign():
        raise RedisNotForTests(_name())


def is_foreign() -> bool:
    """Return whether this process runs tests and Redis is not theirs."""
    return is_test_run() and not (conf.current().redis_is_for_tests or _is_embedded())


def _is_embedded() -> bool:
    found = location()
    if conf.current().client_factory or found.options.get("SENTINELS") or not found.urls:
        # Where these lead, only a connection would show.
        return False
    parsed: dict[str, Any] = redis_py.parse_url(str(found.urls[0]))  # type: ignore[no-untyped-call]
    options = {"host": "localhost", "port": DEFAULT_PORT, **found.connection, **parsed}
    return "path" not in options and options["host"] in LOOPBACK and int(options["port"]) in embedded_ports()


def _name() -> str:
    factory = conf.current().client_factory
    if factory in ("", CLUSTER_FACTORY):
        return f"Redis at {identity(any_order=bool(factory))}"
    return f"the Redis of {conf.NAME}['CLIENT_FACTORY'] ({factory})"


setting_changed.connect(note_changed_setting, dispatch_uid="django_asyncq.test_run")
