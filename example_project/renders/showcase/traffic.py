"""Send orders over HTTP, from several clients at once, more than the gates admit."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from ..palettes import PALETTES

CLIENTS = 4
MAX_SENDS = 8
HTTP_SECONDS = 10
# Orders per twenty-one. The slow model comes first, so that its gate of 2 is full at once.
MIX = {
    "reaction": 4,
    "nebula": 3,
    "mandelbrot": 3,
    "julia": 2,
    "newton": 2,
    "fern": 2,
    "attractor": 2,
    "flow": 1,
    "sketch": 1,
    "staircase": 1,
}
FEWEST = 13


@dataclass(slots=True)
class Request:
    """One order. sends: how often it was sent. due_at: monotonic time before which it is not sent."""

    body: dict[str, Any]
    sends: int = 0
    due_at: float = 0.0


@dataclass(slots=True)
class Tally:
    """The answers of the site. accepted: task id → model. seeds: of all orders. unexpected: all other answers."""

    accepted: dict[str, str] = field(default_factory=dict)
    seeds: frozenset[int] = frozenset()
    refused: int = 0
    retry_after_missing: int = 0
    unavailable: int = 0
    given_up: int = 0
    unexpected: list[str] = field(default_factory=list)


def plan(count: int, seed: int) -> list[Request]:
    """Return the orders of a demo: shuffled by the seed, the slow ones first."""
    chance = random.Random(seed)
    slow = max(4, round(count * MIX["reaction"] / sum(MIX.values())))
    others = [name for name in MIX if name != "reaction"]
    # Every model at least once, so that small demos show all of them.
    names = (others + chance.choices(others, [MIX[name] for name in others], k=count))[: count - slow]
    chance.shuffle(names)
    ordered = ["reaction"] * slow + names
    palettes = ["", *PALETTES]
    return [
        Request({"model": name, "seed": chance.randrange(2**31), "palette": chance.choice(palettes)})
        for name in ordered
    ]


class Traffic:
    """The clients: threads that send orders, and send refused orders again after `Retry-After`."""

    def __init__(self, address: str, requests: list[Request], until: float) -> None:
        self.tally = Tally(seeds=frozenset(request.body["seed"] for request in requests))
        self._host = urlsplit(address).netloc
        self._waiting = deque(requests)
        self._until = until
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"client-{n}", daemon=True) for n in range(CLIENTS)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(HTTP_SECONDS + 1)

    @property
    def is_finished(self) -> bool:
        """Whether every order was accepted or given up."""
        return not any(thread.is_alive() for thread in self._threads)

    def snapshot(self) -> Tally:
        """Return a copy of the tally."""
        with self._lock:
            tally = self.tally
            return replace(tally, accepted=dict(tally.accepted), unexpected=list(tally.unexpected))

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if not self._waiting:
                    return
                request = self._waiting.popleft()
            pause = request.due_at - time.monotonic()
            if pause > 0 and self._stop.wait(pause):
                return
            self._send(request)

    def _send(self, request: Request) -> None:
        request.sends += 1
        connection = HTTPConnection(self._host, timeout=HTTP_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/api/renders", json.dumps(request.body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            with self._lock:
                self.tally.unexpected.append(f"{type(error).__name__}: {error}")
            return
        finally:
            connection.close()
        with self._lock:
            self._count(request, response.status, response.getheader("Retry-After"), answer)

    def _count(self, request: Request, status: int, retry_after: str | None, answer: dict[str, Any]) -> None:
        if status == 202:
            self.tally.accepted[answer["id"]] = request.body["model"]
            return
        if status not in (429, 503):
            self.tally.unexpected.append(f"{status}: {answer}")
            return
        self.tally.refused += status == 429
        self.tally.unavailable += status == 503
        if retry_after is None:
            self.tally.retry_after_missing += 1
            return
        request.due_at = time.monotonic() + float(retry_after)
        if request.sends < MAX_SENDS and request.due_at < self._until:
            self._waiting.append(request)
        else:
            self.tally.given_up += 1
