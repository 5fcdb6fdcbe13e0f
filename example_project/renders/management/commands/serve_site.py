"""`manage.py serve_site`: serve the site and its static files on the loopback interface only.

It is for the demo and, like `runserver`, not for production. Unlike `runserver` it binds a free port itself and prints
it, so no other process can take the port first.
"""

from __future__ import annotations

import signal
from argparse import ArgumentParser
from pathlib import Path
from types import FrameType
from typing import Any

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.management.base import BaseCommand, CommandError
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler, get_internal_wsgi_application

HOST = "127.0.0.1"


class Command(BaseCommand):
    """Serve until SIGTERM or Ctrl-C."""

    help = "Serve the site on a loopback port until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--port", type=int, default=0, help="port to bind (default: a free one)")
        parser.add_argument(
            "--address-file", type=Path, metavar="PATH", help="file to write the URL to once the site is ready"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Bind the port, publish the URL, serve."""
        try:
            server = ThreadedWSGIServer((HOST, options["port"]), WSGIRequestHandler)
        except (OSError, OverflowError) as error:
            raise CommandError(f"cannot bind port {options['port']}: {error}") from error
        server.set_app(StaticFilesHandler(get_internal_wsgi_application()))
        address = f"http://{HOST}:{server.server_port}"
        if (path := options["address_file"]) is not None:
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(address)
            unfinished.replace(path)
        self.stdout.write(f"serving {address}/")
        self.stdout.flush()
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass
        finally:
            server.server_close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
