"""One string in Redis, by which processes notice that they do not share the SECRET_KEY (`maintenance/key_check.py`)."""

from __future__ import annotations

from . import clients, commands
from .clients import broker_errors
from .keys import key_check_key

# What the leader signs, and for what.
PURPOSE, MESSAGE = "key-check", b"key-check"


def read_key_check(largest_bytes: int) -> bytes:
    """Return what the leader has written, at most `largest_bytes` of it; b"" for nothing.

    Raises: BrokerUnavailable.
    """
    return bytes(commands.send(clients.client("worker"), "getrange", key_check_key(), 0, largest_bytes - 1))


def write_key_check(value: bytes) -> None:
    """Replace what is there, of whatever type. Raises: BrokerUnavailable."""
    client = clients.client("worker")
    with broker_errors(client):
        client.set(key_check_key(), value)
