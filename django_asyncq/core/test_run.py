"""Whether this process runs a project's tests, and which Redis servers the tests have started.

Imports nothing of the project, and may be imported before Django's settings: the embedded server needs no Django.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# The ports of the running embedded servers of this process and of those that started it, such as pytest-xdist's.
# Processes that the tests start inherit it.
SERVERS_VARIABLE = "ASYNCQ_EMBEDDED_REDIS_PORTS"
TEST_HOST = "testserver"

# Whether a test has replaced ALLOWED_HOSTS, where the host of the test client was.
_has_changed_hosts = False


def is_test_run() -> bool:
    """Return whether Django's test environment is set up in this process, by its own runner or by pytest-django.

    Both call `setup_test_environment`, which makes `mail.outbox` and allows the host of the test client. A worker
    process that a test starts is no test run.
    """
    mail = sys.modules.get("django.core.mail")
    # Not hasattr, which has Django 6.1 answer for unknown names of this module.
    if mail is None or "outbox" not in mail.__dict__:
        return False
    return _has_changed_hosts or TEST_HOST in sys.modules["django.conf"].settings.ALLOWED_HOSTS


def note_changed_setting(*, setting: str, **kwargs: Any) -> None:
    """Receive `setting_changed`, which only the tools of tests send: a test may replace ALLOWED_HOSTS."""
    global _has_changed_hosts
    if setting == "ALLOWED_HOSTS":
        _has_changed_hosts = True


def embedded_ports() -> set[int]:
    """Return the loopback ports of the embedded servers that the tests have started."""
    return {int(word) for word in os.environ.get(SERVERS_VARIABLE, "").split(",") if word.isdigit()}


def add_embedded_port(port: int) -> None:
    """Note that an embedded server runs on a port."""
    _write_ports(embedded_ports() | {port})


def remove_embedded_port(port: int) -> None:
    """Note that an embedded server has stopped."""
    _write_ports(embedded_ports() - {port})


def _write_ports(ports: set[int]) -> None:
    if ports:
        os.environ[SERVERS_VARIABLE] = ",".join(str(port) for port in sorted(ports))
    else:
        os.environ.pop(SERVERS_VARIABLE, None)
