"""The tests' relay as a bad connection: it loses replies or requests, delays, or sends small parts, by a seed."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from tests.proxy import Proxy


class LossyProxy(Proxy):
    """Drops each reply with the probability `share`, and its connection; `lost` counts them."""

    def __init__(self, upstream: tuple[str, int], share: float, seed: int) -> None:
        self.share = share
        self.lost = 0
        self.replies = 0
        self._chance = random.Random(seed)
        super().__init__(upstream)

    def _swallows(self) -> bool:
        with self._lock:
            self.replies += 1
            is_lost = self._chance.random() < self.share
            self.lost += is_lost
            return is_lost


class Weather(Proxy):
    """A bad connection: loses a share of requests with their connections, delays replies, or sends small parts."""

    def __init__(self, upstream: tuple[str, int], seed: int) -> None:
        self.request_share = 0.0
        self.delay_seconds = 0.0
        self.is_trickling = False
        self.lost = 0
        self._chance = random.Random(seed)
        super().__init__(upstream)

    def clear(self) -> None:
        """Be reliable again."""
        self.request_share, self.delay_seconds, self.is_trickling = 0.0, 0.0, False

    def _pipe(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(65536):
                if not is_reply and self._loses():
                    break
                time.sleep(self.delay_seconds if is_reply else 0)
                for part in self._parts(data):
                    sink.sendall(part)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _loses(self) -> bool:
        with self._lock:
            is_lost = self._chance.random() < self.request_share
            self.lost += is_lost
            return is_lost

    def _parts(self, data: bytes) -> Iterator[bytes]:
        if not self.is_trickling:
            yield data
            return
        size = max(1, len(data) // 8)
        for start in range(0, len(data), size):
            yield data[start : start + size]
            time.sleep(0.005)


class Switch(Proxy):
    """Can relay to another server, as a host name does after a fail-over."""

    def lead_to(self, upstream: tuple[str, int]) -> None:
        """Relay new connections to this server."""
        self._upstream = upstream
