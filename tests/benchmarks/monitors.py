"""What OpenTelemetry and Sentry cost a task that does nothing: `python -m tests.benchmarks.monitors`.

Each has a process of its own, which enqueues and runs tasks as `tests.calls` does and sends to a receiver here. What is
measured is the CPU time of that process, its threads that send included. The processes take turns. Figures of a busy
machine are too high, also those of CPU time: the load is printed too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any

TURNS = 5
ROUNDS = 6


@contextmanager
def timed(flush: Callable[[], object]) -> Iterator[list[float]]:
    """Measure the CPU time of the block, and of sending what it left."""
    found: list[float] = []
    began_at = time.process_time()
    yield found
    flush()
    found.append(time.process_time() - began_at)


def begin_otel(address: str) -> Callable[[], object]:
    """Have spans sent in batches, as the guide has it."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"http://{address}/v1/traces")))
    trace.set_tracer_provider(provider)
    from django_asyncq.contrib.otel import tracing

    tracing.instrument()
    return provider.force_flush


def begin_sentry(address: str, traces_sample_rate: float | None = None) -> Callable[[], object]:
    """Begin a client with all that Sentry's SDK turns on by itself."""
    import sentry_sdk

    from django_asyncq.contrib.sentry import AsyncqIntegration

    sentry_sdk.init(
        f"http://key@{address}/1",
        integrations=[AsyncqIntegration()],
        traces_sample_rate=traces_sample_rate,
        # No event is dropped because another one is being sent.
        transport_queue_size=1_000,
    )
    return sentry_sdk.flush


MONITORS: dict[str, Callable[[str], Callable[[], object]]] = {
    "none": lambda address: lambda: None,
    "OpenTelemetry": begin_otel,
    "Sentry, errors": begin_sentry,
    "Sentry, errors and all traces": lambda address: begin_sentry(address, 1.0),
}


def measure(monitor: str, address: str) -> list[float]:
    """Return the milliseconds of CPU time for each task, of each round. Called in a process of its own."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    settings.ASYNCQ = {**getattr(settings, "ASYNCQ", {}), "PUSH_BATCH_SECONDS": 0}
    django.setup()
    flush = MONITORS[monitor](address)
    call_command("migrate", verbosity=0)
    from sentry_sdk import start_transaction

    from .. import calls

    found = []
    for _ in range(ROUNDS):
        # As in a request. Without a client it does nothing.
        with start_transaction():
            enqueued = calls.enqueued(lambda: timed(flush))
        ran = calls.ran(lambda: timed(flush))
        found.append((enqueued[0] + ran[0]) * 1_000 / calls.TASKS)
    # In the first one all is made that is made once for each process.
    return found[1:]


class Receiver(BaseHTTPRequestHandler):
    """Takes what monitors send."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read and forget it."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def main() -> None:
    """Print the median of each monitor, and what it adds."""
    from django_asyncq.testing.redis_server import EmbeddedRedis

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found: dict[str, list[float]] = {monitor: [] for monitor in MONITORS}
    for monitor in list(MONITORS) * TURNS:
        with EmbeddedRedis() as redis, tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {
                "ASYNCQ_TEST_REDIS_URL": redis.url,
                "DATABASE_URL": f"sqlite:///{folder}/tasks.sqlite3",
                "DJANGO_SETTINGS_MODULE": "tests.settings",
            }
            call = [sys.executable, "-m", "tests.benchmarks.monitors", monitor, f"127.0.0.1:{server.server_port}"]
            output = subprocess.run(call, env=environment, check=True, stdout=subprocess.PIPE).stdout
            found[monitor] += json.loads(output)
    print(f"load {os.getloadavg()[0]:.1f}; CPU time for each task, its enqueueing and its run:")
    without = median(found["none"])
    for monitor, each in found.items():
        added = median(each) - without
        print(f"{monitor:30} {median(each):6.2f} ms ({min(each):.2f} to {max(each):.2f}), {added:+.2f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
