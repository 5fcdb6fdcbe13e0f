"""Make the first calls of a worker, so that it stops at start when the user of Redis lacks a basic right.

Real calls, which change nothing: asking Redis about rights (`ACL`) is itself a right that hardly any user has.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, NamedTuple

from redis import Redis
from redis.connection import SSLConnection

from .. import conf
from ..exceptions import BrokerMisconfigured
from . import Broker, clients, entries, redis_py, scripts
from .clients import DEFAULT_PORT, broker_errors, client
from .keys import due_channel, names_channel, odd_channel

# Long enough for any server to accept; 0 would wait forever.
BLOCK_SECONDS = 0.01
# A name that no project gives: its keys do not exist.
NAME = "check-rights"


def check_rights(alias: str) -> None:
    """Call what every worker needs, once: a plain command, a script, locks, gates, what blocks, and the channels.

    alias: whose tasks the worker runs.
    Raises: BrokerPermissionDenied when Redis refuses one of them to its user; BrokerUnavailable.
    """
    broker, settings = Broker("worker", alias), conf.current()
    keys = broker.keys(NAME)
    broker.queues()
    broker.alive_since()
    broker.has_pending(NAME)
    scripts.run("held", broker.client, [keys.held(NAME)], [keys.task_prefix, NAME])
    scripts.send(broker.client, "get", f"{settings.lock_prefix}{NAME}")
    scripts.send(broker.client, "zcard", f"{settings.gate_prefix}{NAME}")
    broker.notify_due()
    blocking = clients.client("blocking")
    with broker_errors(blocking):
        blocking.blpop([keys.wake], BLOCK_SECONDS)
        subscription = blocking.pubsub()
        try:
            subscription.subscribe(due_channel(), names_channel(alias), odd_channel())
            subscription.get_message(timeout=clients.TIMEOUTS["blocking"][0])
        finally:
            subscription.close()


# --- Whether Redis stores the hash of a task in its compact form, which takes about half of the memory.
#
# It does so while no field is longer than a limit of the server's configuration. The message of a task is longer
# than the limit's default of 64 bytes. Source: redis.conf, "hash-max-listpack-value".

# The message of most tasks is shorter.
ADVISED_BYTES = 512
# The name that servers have since Redis 7, and the one of Redis 6.2, which newer servers take too.
NAMES = ("hash-max-listpack-value", "hash-max-ziplist-value")


class Limit(NamedTuple):
    """The longest field of a compact hash, as the server is configured."""

    name: str
    bytes: int


def too_low_limit() -> Limit | None:
    """Return the limit when it is below ADVISED_BYTES.

    None when it is not, and when the server does not say it: managed ones refuse CONFIG, and so do the rights of a
    careful user. Raises: BrokerUnavailable.
    """
    connection = client("worker")
    with broker_errors(connection):
        try:
            found = connection.config_get("hash-max-*-value")
        except redis_py.ResponseError:
            return None
    for name in NAMES:
        limit = entries.whole(str(found.get(name, "")).encode(), 0)
        if limit is not None:
            return Limit(name, limit) if limit < ADVISED_BYTES else None
    return None


# --- Find out, when a connection has failed, whether one side uses TLS and the other does not.
#
# The errors do not say so: a server with TLS resets a plain connection, and a server without it never answers a TLS
# handshake. So the server is asked once, the other way.

PROBE_SECONDS = 1.0


def tls_mismatch(found: clients.Client) -> BrokerMisconfigured | None:
    """Return the error to end with, if the server of a client speaks TLS and the client does not, or the reverse."""
    options = found.get_connection_kwargs() if isinstance(found, Redis) else {}
    if "host" not in options:
        return None
    address = (options["host"], options.get("port", DEFAULT_PORT))
    uses_tls = issubclass(found.connection_pool.connection_class, SSLConnection)
    if not (_answers_plainly(address) if uses_tls else _answers_with_tls(address)):
        return None
    wrong = "does not use TLS, and this client does" if uses_tls else "uses TLS, and this client does not"
    scheme = "redis://" if uses_tls else "rediss://"
    remedy = f"the scheme in {clients.setting()}: write {scheme}"
    return BrokerMisconfigured(clients.server_name(found), wrong, "asked the other way, it answers", remedy)


def _answers_plainly(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, PROBE_SECONDS) as connection:
            connection.sendall(b"PING\r\n")
            # An error, such as that a password is needed, is an answer too.
            return connection.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _answers_with_tls(address: tuple[str, int]) -> bool:
    context: Any = ssl.create_default_context()
    context.check_hostname = False
    # Only whether there is TLS is asked; nothing is sent through it.
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection(address, PROBE_SECONDS) as connection, context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        # The server refuses this client, with TLS: it may ask for a certificate.
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
