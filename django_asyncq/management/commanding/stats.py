"""`asyncq stats`: the numbers of queues and gates as both stores see them."""

from __future__ import annotations

from typing import Any

from ...core.aliases import is_redis_used
from ...observe.counts import gate_stats, queue_stats
from ...observe.inspector import Inspector
from ...observe.soundness import clock_difference_seconds
from .printing import Printer, Verb, head_of


def _stats(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    queues, gates = queue_stats(), gate_stats()
    difference = clock_difference_seconds() if is_redis_used() else None
    printer.document(
        {
            "queues": [each._asdict() for each in queues],
            "gates": [each._asdict() for each in gates],
            "clock_difference_seconds": None if difference is None else round(difference, 3),
        }
    )
    if queues:
        printer.queues(head_of(queues), queues)
    else:
        printer.line("no queues")
    if gates:
        printer.table(head_of(gates), gates)
    else:
        printer.line("no gates")
    if difference is not None:
        printer.line(f"The clocks of the database and of Redis differ by {abs(difference):.1f} s.\n")


VERBS = Verb(_stats, has_backend=False)
