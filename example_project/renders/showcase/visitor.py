"""A visitor of the site: cancels a render that runs, and orders one picture twice."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from .processes import StageError
from .traffic import HTTP_SECONDS

# A slow render, so that it is still running when it is cancelled.
PICTURE = {"model": "reaction", "size": 128}
TWICE_SEED, CANCELLED_SEED = 1, 2
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Visit:
    """What the site answered. twice, cancelled: ids of the two renders.

    second_answer: status and body of the second order of the same picture. progress: of the render before it was
    cancelled. cancel_answer: of the request to cancel it. stop_seconds: until it was cancelled.
    """

    twice: str
    second_answer: tuple[int, dict[str, Any]]
    cancelled: str
    progress: float
    cancel_answer: str
    stop_seconds: float


class Visitor:
    """Speaks HTTP with the site. Raises: StageError when a render does not get on."""

    def __init__(self, address: str) -> None:
        self._host = urlsplit(address).netloc

    def visit(self) -> Visit:
        """Order a picture, cancel it when it has made some progress; then order another one twice, and wait for it."""
        _, first = self._ask("POST", "/api/renders", {**PICTURE, "seed": CANCELLED_SEED})
        url = first["status_url"]
        progress = self._wait(url, lambda render: render["progress"])["progress"]
        asked_at = time.monotonic()
        _, answer = self._ask("DELETE", url)
        self._wait(url, lambda render: render["state"] == "cancelled")
        stop_seconds = time.monotonic() - asked_at
        _, once = self._ask("POST", "/api/renders", {**PICTURE, "seed": TWICE_SEED})
        second_answer = self._ask("POST", "/api/renders", {**PICTURE, "seed": TWICE_SEED})
        # Later a worker is killed, which must not be one that runs this picture.
        self._wait(once["status_url"], lambda render: render["state"] == "succeeded")
        return Visit(once["id"], second_answer, first["id"], progress, answer["cancel"], stop_seconds)

    def _wait(self, url: str, holds: Any) -> dict[str, Any]:
        """Return a render as soon as this holds of it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds(render := self._ask("GET", url)[1]):
            if time.monotonic() > deadline or render.get("state") in (None, "succeeded", "failed"):
                raise StageError(f"the visitor's render did not get on: {render}")
            time.sleep(0.02)
        return render

    def _ask(self, method: str, path: str, order: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        connection = HTTPConnection(self._host, timeout=HTTP_SECONDS)
        try:
            body = None if order is None else json.dumps(order)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()
