"""A TCP relay in front of a server that can lose replies: faults between a command and its reply."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType


class Proxy:
    """Relays a free loopback port (`port`) to `upstream`; usable as a context manager.

    `drop = n` swallows the next n replies, each with its connection; the server has run the commands.
    `hold()` keeps all data back until `resume()`: the server is reachable and silent.
    `go_away()` breaks every connection, also new ones, until `come_back()`: the server is unreachable.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.drop = 0
        self._upstream = upstream
        self._flows = threading.Event()
        self._flows.set()
        self._is_closed = False
        self._is_away = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def host(self) -> str:
        """The address it listens on."""
        return "127.0.0.1"

    def url(self, database: int = 0) -> str:
        """The address for a client of this relay."""
        return f"redis://{self.host}:{self.port}/{database}"

    def hold(self) -> None:
        """Keep all data back from now on."""
        self._flows.clear()

    def resume(self) -> None:
        """Let data flow again, first what was kept back."""
        self._flows.set()

    def cut(self) -> None:
        """Break every connection; new ones are accepted."""
        with self._lock:
            for end in self._sockets:
                _shut(end)

    def go_away(self) -> None:
        """Break every connection, and each new one at once."""
        with self._lock:
            self._is_away = True
        self.cut()

    def come_back(self) -> None:
        """Relay new connections again."""
        self._is_away = False

    def close(self) -> None:
        """Break every connection, stop listening, and wait for the threads."""
        self._is_closed = True
        _shut(self._listener)
        self._listener.close()
        self.resume()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._upstream, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                is_refused = self._is_away
                if not is_refused:
                    self._sockets |= {client, server}
            if is_refused:
                client.close()
                server.close()
                continue
            self._start(self._relay, client, server)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        """Relay both directions of one connection, then close both sockets."""
        backwards = threading.Thread(target=self._pipe, args=(server, client, True), daemon=True)
        backwards.start()
        self._pipe(client, server, False)
        backwards.join()
        with self._lock:
            self._sockets -= {client, server}
            client.close()
            server.close()

    def _pipe(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(65536):
                self._flows.wait()
                if is_reply and self._swallows():
                    break
                sink.sendall(data)
        except OSError:
            pass
        _shut(source)
        _shut(sink)

    def _swallows(self) -> bool:
        with self._lock:
            if self.drop <= 0:
                return False
            self.drop -= 1
            return True


def _shut(end: socket.socket) -> None:
    """Wake the thread that reads from or accepts on a socket; closing alone does not."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
