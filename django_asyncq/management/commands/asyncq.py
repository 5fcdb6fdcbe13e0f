"""`manage.py asyncq`: what an operator does by hand: look, rebuild, prune."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from django.core.management.base import BaseCommand, CommandError, OutputWrapper
from django.db import Error as DatabaseError
from django.db.models import Q
from django.utils import timezone

from ...broker import Broker
from ...exceptions import BrokerUnavailable, GateUnavailable
from ...maintenance.inspector import gate_stats, queue_stats
from ...maintenance.pruner import Pruner, ended_condition
from ...maintenance.reconciler import Reconciler
from ...models import TaskRecord, TaskState
from .runworkers import whole_number

STATES = {"succeeded": TaskState.SUCCEEDED, "failed": TaskState.FAILED}
PLACES = ("pending", "scheduled", "retry")
# A log that nobody watches needs no line for each page.
SECONDS_PER_LINE = 5.0


class Progress:
    """Says on stderr how far a long command has come: over and over in one line of a terminal, else now and then.

    `str` in place of the stream's own style, which is that of errors.
    """

    def __init__(self, stream: OutputWrapper, total: int) -> None:
        self.stream = stream
        self.total = total
        self.done = 0
        self._is_terminal = bool(stream.isatty())
        self._line_at = time.monotonic() + SECONDS_PER_LINE

    def add(self, count: int) -> None:
        """Note that so many more are done."""
        self.done += count
        text = f"{self.done:,} of {max(self.total, self.done):,} rows"
        if self._is_terminal:
            self.stream.write(f"\r{text}", str, "")
            self.stream.flush()
        elif time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + SECONDS_PER_LINE
            self.stream.write(text, str)

    def close(self) -> None:
        """Leave the line of the terminal."""
        if self._is_terminal and self.done:
            self.stream.write("", str)


class Command(BaseCommand):
    """Look at the queues, build Redis again from the rows, delete old rows."""

    help = "Look at queues and gates, build Redis again from the rows, delete tasks that ended long ago."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the sub-commands."""
        commands = parser.add_subparsers(dest="action", required=True, metavar="rebuild | prune | stats")
        rebuild = commands.add_parser("rebuild", help="put what the rows say back into Redis; removes no task")
        prune = commands.add_parser("prune", help="delete the rows of tasks that ended long ago")
        stats = commands.add_parser("stats", help="show how queues and gates stand in both stores")
        for each in (rebuild, prune):
            each.add_argument("--dry-run", action="store_true", help="only count; nothing is changed")
        rebuild.add_argument("--yes", action="store_true", help="accepted for scripts; a rebuild asks nothing")
        prune.add_argument("--yes", action="store_true", help="do not ask")
        prune.add_argument(
            "--older-than", type=whole_number(0), required=True, metavar="DAYS", help="ended so long ago"
        )
        prune.add_argument("--state", choices=sorted(STATES), help="only these; default: both")
        for each in (rebuild, prune, stats):
            each.add_argument("--json", action="store_true", dest="as_json", help="one JSON object on stdout")

    def handle(self, *args: Any, **options: Any) -> None:
        """Do it. Raises: CommandError when a store is away."""
        try:
            getattr(self, f"_{options['action']}")(options)
        except (BrokerUnavailable, GateUnavailable) as error:
            raise CommandError(
                f"Redis is needed and away: {error}. What was done by then stays; run it again."
            ) from error
        except DatabaseError as error:
            raise CommandError(f"The database is needed and cannot be asked: {str(error).strip()}") from error

    # --- rebuild

    def _rebuild(self, options: dict[str, Any]) -> None:
        broker = Broker("worker")
        broker.ping()
        waits = Q(state=TaskState.QUEUED) | Q(state=TaskState.FAILED, retry_at__isnull=False)
        progress = Progress(self.stderr, TaskRecord.objects.filter(waits).count())
        begun_at = time.monotonic()
        rebuilt = Reconciler(broker, looked_at=progress.add).rebuild(dry_run=options["dry_run"])
        seconds = time.monotonic() - begun_at
        progress.close()
        if options["as_json"]:
            queues = {name: {place: counts[place] for place in PLACES} for name, counts in rebuilt.queues.items()}
            gates = {name: drift._asdict() for name, drift in rebuilt.gates.items()}
            self._print({"dry_run": options["dry_run"], "rows": progress.done, "queues": queues, "gates": gates})
            return
        put = "would be put" if options["dry_run"] else "put"
        if rebuilt.queues:
            self._table(
                ["queue", *PLACES],
                [[name, *(counts[place] for place in PLACES)] for name, counts in sorted(rebuilt.queues.items())],
            )
        if rebuilt.gates:
            self._table(
                ["gate", "slots added", "slots removed"], [[name, *drift] for name, drift in rebuilt.gates.items()]
            )
        total = sum(counts.total() for counts in rebuilt.queues.values())
        self.stdout.write(f"{progress.done:,} rows looked at in {seconds:.1f} s; {total:,} {put} into Redis.")

    # --- prune

    def _prune(self, options: dict[str, Any]) -> None:
        states = [STATES[options["state"]]] if options["state"] else list(STATES.values())
        now, keep = timezone.now(), timedelta(days=options["older_than"])
        over = ended_condition(states, now, keep)
        found = {name: TaskRecord.objects.filter(over, state=state).count() for name, state in STATES.items()}
        total = sum(found.values())
        what = f"{total:,} tasks that ended more than {options['older_than']} days ago"
        what += f" ({found['succeeded']:,} succeeded, {found['failed']:,} failed)"
        deleted = 0
        if total and not options["dry_run"]:
            if not options["yes"]:
                self._ask(f"Delete {what}? This cannot be undone. [y/N] ")
            deleted = self._delete(over, total)
        if options["as_json"]:
            self._print({"dry_run": options["dry_run"], "found": found, "deleted": deleted})
        elif options["dry_run"]:
            self.stdout.write(f"{what} would be deleted.")
        else:
            left = " The others are referred to by rows of the project, or in use." if deleted < total else ""
            self.stdout.write(f"{deleted:,} of {what} deleted.{left}")

    def _delete(self, over: Any, total: int) -> int:
        broker = Broker("worker")
        # Asked first, because what failed also leaves asynq's archive.
        broker.ping()
        progress = Progress(self.stderr, total)
        for count in Pruner(broker).prune_over(over):
            progress.add(count)
        progress.close()
        return progress.done

    def _ask(self, question: str) -> None:
        if not sys.stdin.isatty():
            raise CommandError("Nobody can be asked here: give --yes to delete, or --dry-run to look.")
        if input(question).strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was deleted.")

    # --- stats

    def _stats(self, options: dict[str, Any]) -> None:
        queues, gates = queue_stats(Broker("worker")), gate_stats()
        if options["as_json"]:
            self._print({"queues": [each._asdict() for each in queues], "gates": [each._asdict() for each in gates]})
            return
        self._tuples(queues, "no queue")
        self._tuples(gates, "no gate")

    # --- printing

    def _tuples(self, rows: Sequence[NamedTuple], nothing: str) -> None:
        if not rows:
            self.stdout.write(nothing)
            return
        self._table([name.replace("_", " ") for name in rows[0]._fields], rows)

    def _table(self, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Write columns, names to the left and numbers to the right, then an empty line."""
        cells = [list(head), *([_cell(value) for value in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            first, *others = (
                cell.ljust(width) if not n else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            self.stdout.write("  ".join([first, *others]).rstrip())
        self.stdout.write("")

    def _print(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, ensure_ascii=False))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
