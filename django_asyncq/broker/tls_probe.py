"""Find out, when a connection has failed, whether one side uses TLS and the other does not.

The errors do not say so: a server with TLS resets a plain connection, and a server without it never answers a TLS
handshake. So the server is asked once, the other way.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from redis import Redis
from redis.connection import SSLConnection

from ..exceptions import BrokerMisconfigured
from . import clients, configuration
from .location import DEFAULT_PORT

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
    remedy = f"the scheme in {configuration.setting()}: write {scheme}"
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
