"""`manage.py serve_site`: the site with its static files, on the loopback interface only.

For the demo and for looking around; like `runserver`, it is no server for the open network. Unlike it, it
takes a free port by itself and says which, so nobody can take the port between the look and the start.
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
        parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
        parser.add_argument(
            "--address-file", type=Path, metavar="PATH", help="where to write the address once it serves"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Bind, tell the address, serve."""
        try:
            server = ThreadedWSGIServer((HOST, options["port"]), WSGIRequestHandler)
        except (OSError, OverflowError) as error:
            raise CommandError(f"port {options['port']} cannot be used: {error}") from error
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
