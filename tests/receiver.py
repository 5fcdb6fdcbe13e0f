"""A receiver of webhooks on the loopback: it keeps what it is sent, and answers well or badly as its paths say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Received(NamedTuple):
    """One request. headers: with names in small letters."""

    path: str
    headers: dict[str, str]
    document: Any


class Receiver(ThreadingHTTPServer):
    """Answers 204 to each path but these: `/500…`, `/redirect…`, `/hang…`, `/drip…`, `/huge…`.

    received: all requests, also those that it answers badly. answer: a status for all paths, when it is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[Received] = []
        self.answer = 0
        self.is_closing = threading.Event()

    def url(self, path: str = "/hook") -> str:
        """Return an address of it."""
        return f"http://127.0.0.1:{self.server_port}{path}"

    def documents(self) -> list[Any]:
        """Return what was sent to it, the oldest first."""
        return [each.document for each in list(self.received)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has left."""


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_GET(self) -> None:
        """What a redirect that is followed would send."""
        self._note(None)
        self._answer(204)

    def do_POST(self) -> None:
        """Keep it, and answer."""
        self._note(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        way = self.path.strip("/").partition("/")[0]
        if self.server.answer:
            self._answer(self.server.answer)
        elif way == "hang":
            self.server.is_closing.wait(60)
        elif way == "drip":
            self._drip()
        elif way == "redirect":
            self._answer(307, location=self.server.url("/elsewhere"))
        elif way == "huge":
            self._answer(200, body=b"x" * 5_000_000)
        else:
            self._answer(int(way) if way.isdigit() else 204)

    def _note(self, document: Any) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.received.append(Received(self.path, headers, document))

    def _answer(self, status: int, location: str = "", body: bytes = b"") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _drip(self) -> None:
        """Send a header one byte at a time: each byte comes before any time-out of the socket."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.server.is_closing.wait(0.2):
            self.wfile.write(b"x")
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Return a receiver that is closed at the end."""
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.is_closing.set()
        server.shutdown()
        with suppress(OSError):
            server.server_close()
        thread.join()
