"""`asyncq stats`: the numbers of queues and gates as both stores see them."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from ...aliases import is_redis_used
from ...broker import Broker
from ...clock_difference import clock_difference_seconds
from ...inspector.counts import gate_stats, queue_stats
from ...prefixes import DEFAULT_ALIAS
from .printing import Printer, add_json, head_of


def add(parser: ArgumentParser) -> None:
    """Add the options."""
    add_json(parser)


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Print the numbers."""
    queues, gates = queue_stats(Broker("worker", DEFAULT_ALIAS)), gate_stats()
    difference = clock_difference_seconds() if is_redis_used() else None
    if printer.as_json:
        printer.document(
            {
                "queues": [each._asdict() for each in queues],
                "gates": [each._asdict() for each in gates],
                "clock_difference_seconds": None if difference is None else round(difference, 3),
            }
        )
        return
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
