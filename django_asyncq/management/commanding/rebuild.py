"""`asyncq rebuild`: push every waiting task that Redis does not know."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any

from django.db.models import Q

from ...broker import Broker
from ...maintenance.reconciler import Reconciler
from ...models import TaskRecord, TaskState
from ...prefixes import DEFAULT_ALIAS
from ...storage.routing import rows_of
from ..wording import counted
from .printing import Printer, add_json

TARGETS = ("pending", "scheduled", "retry")


def add(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--dry-run", action="store_true", help="only count; change nothing")
    parser.add_argument("--yes", action="store_true", help="has no effect: a rebuild asks no question")
    add_json(parser)


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Push what Redis lacks, and print how many tasks of each queue."""
    broker = Broker("worker", DEFAULT_ALIAS)
    broker.ping()
    waiting = Q(state=TaskState.QUEUED, after_id=None) | Q(state=TaskState.FAILED, retry_at__isnull=False)
    progress = printer.progress(rows_of(TaskRecord).filter(waiting).count())
    begun_at = time.monotonic()
    rebuilt = Reconciler(broker, on_page=progress.add).rebuild(dry_run=options["dry_run"])
    seconds = time.monotonic() - begun_at
    progress.close()
    if printer.as_json:
        queues = [
            {"alias": alias, "queue": queue, **{target: counts[target] for target in TARGETS}}
            for (alias, queue), counts in sorted(rebuilt.queues.items())
        ]
        gates = {name: drift._asdict() for name, drift in rebuilt.gates.items()}
        printer.document({"dry_run": options["dry_run"], "rows": progress.done, "queues": queues, "gates": gates})
        return
    if rebuilt.queues:
        printer.queues(
            ["alias", "queue", *TARGETS],
            [[*name, *(counts[target] for target in TARGETS)] for name, counts in sorted(rebuilt.queues.items())],
        )
    if rebuilt.gates:
        printer.table(
            ["gate", "slots added", "slots removed"], [[name, *drift] for name, drift in rebuilt.gates.items()]
        )
    total = sum(counts.total() for counts in rebuilt.queues.values())
    done = f"{counted(total, 'task')} {'would be ' if options['dry_run'] else ''}pushed to Redis"
    printer.line(f"{counted(progress.done, 'row')} checked in {seconds:.1f} s; {done}.")
