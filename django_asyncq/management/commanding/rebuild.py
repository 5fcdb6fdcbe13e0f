"""`asyncq rebuild`: push every waiting task that Redis does not know."""

from __future__ import annotations

import time
from typing import Any

from django.db.models import Q

from ...broker import Broker
from ...core.aliases import DEFAULT_ALIAS
from ...fleet.reconciler import Reconciler
from ...models import FailureReason, TaskRecord, TaskState
from ...models.tasks import IS_READY
from ...observe.inspector import Inspector
from ...storage.routing import rows_of
from ..reading import counted
from .printing import DRY_RUN, Printer, Verb, flag

TARGETS = ("pending", "scheduled", "retry")


def _rebuild(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    """Push what Redis lacks, and print how many tasks of each queue."""
    broker = Broker("worker", DEFAULT_ALIAS)
    broker.ping()
    # What waits at a gate is a row alone; what asks it later has a time.
    pushed = Q(IS_READY, state=TaskState.QUEUED, reason=FailureReason.NONE, after_id=None)
    waiting = pushed | Q(state__in=(TaskState.QUEUED, TaskState.FAILED), retry_at__isnull=False)
    progress = printer.progress(rows_of(TaskRecord).filter(waiting).count())
    begun_at = time.monotonic()
    rebuilt = Reconciler(broker, on_page=progress.add).rebuild(dry_run=options["dry_run"])
    seconds = time.monotonic() - begun_at
    progress.close()
    found = sorted(rebuilt.queues.items())
    queues = [
        {"alias": alias, "queue": queue, **{target: counts[target] for target in TARGETS}}
        for (alias, queue), counts in found
    ]
    gates = {name: drift._asdict() for name, drift in rebuilt.gates.items()}
    printer.document({"dry_run": options["dry_run"], "rows": progress.done, "queues": queues, "gates": gates})
    printer.queues(
        ["alias", "queue", *TARGETS], [[*name, *(counts[target] for target in TARGETS)] for name, counts in found]
    )
    printer.table(["gate", "slots added", "slots removed"], [[name, *drift] for name, drift in rebuilt.gates.items()])
    total = sum(counts.total() for counts in rebuilt.queues.values())
    done = f"{counted(total, 'task')} {'would be ' if options['dry_run'] else ''}pushed to Redis"
    printer.line(f"{counted(progress.done, 'row')} checked in {seconds:.1f} s; {done}.")


YES = flag("--yes", "has no effect: a rebuild asks no question")
VERBS = Verb(_rebuild, arguments=[DRY_RUN, YES], has_backend=False)
