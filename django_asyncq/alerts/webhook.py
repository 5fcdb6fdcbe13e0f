"""Send a message to a webhook: a POST of JSON to the address in the settings, and to no other.

The address has a secret in it, so only its scheme and host are ever shown. No redirect is followed: it could lead into
the project's own network. Proxies of the environment are used, as other programs use them.
"""

from __future__ import annotations

import json
from http.client import HTTPMessage
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from .. import __version__
from ..faults import one_line
from ..guard import class_name
from ..models import AlertChannel
from .message import Message

# The answer is read, so that the server has sent it, but nobody needs it.
MOST_BYTES_READ = 4_096


class _NoRedirects(HTTPRedirectHandler):
    """Let a redirect be an error like any other answer that is none of 2xx."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follow nothing."""


class Webhook:
    """Sends to one address. seconds: how long that may take in all."""

    channel = AlertChannel.WEBHOOK.value
    seconds = 5.0

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = f"webhook of {shown(url)}"

    def send(self, message: Message) -> None:
        """Send it. Raises: OSError, http.client.HTTPException."""
        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": f"django_asyncq/{__version__}"}
        # Of two schemes only: the check says so, and there is no handler for another one.
        request = Request(self._url, json.dumps(message.document).encode(), headers, method="POST")  # noqa: S310
        opener = OpenerDirector()
        handlers = (ProxyHandler, HTTPHandler, HTTPSHandler, HTTPDefaultErrorHandler, _NoRedirects, HTTPErrorProcessor)
        for handler in handlers:
            opener.add_handler(handler())
        try:
            with opener.open(request, timeout=self.seconds) as answer:
                answer.read(MOST_BYTES_READ)
        except HTTPError as error:
            # It is an answer too, which has a connection.
            error.close()
            raise

    def text_of(self, error: BaseException) -> str:
        """Return what went wrong, on one line and without the address: errors of `http.client` may repeat it."""
        if isinstance(error, HTTPError):
            is_redirect = 300 <= error.code < 400
            return f"status {error.code}{', and no redirect is followed' if is_redirect else ''}"
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, OSError):
            return f"{class_name(reason)}: {one_line(reason)}"
        return class_name(error)


def shown(url: str) -> str:
    """Return an address without what may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
