"""`asyncq health`: whether tasks are being run, for people and by the exit code for monitors."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ...inspector import Inspector
from ..reading import duration, whole_number
from ..wording import counted
from .printing import Printer, add_backend, add_json

# A supervisor reports each BEAT_SECONDS (5).
MOST_SILENCE_SECONDS = 60.0


def add(parser: ArgumentParser) -> None:
    """Add the options."""
    add_json(parser)
    add_backend(parser)
    parser.add_argument(
        "--max-age", type=duration, metavar="TIME", help="a problem is a task that was due for longer, such as 5m"
    )
    parser.add_argument(
        "--max-waiting", type=whole_number(0), metavar="N", help="a problem are more tasks that are due"
    )
    parser.add_argument(
        "--max-silence",
        type=duration,
        default=MOST_SILENCE_SECONDS,
        metavar="TIME",
        help="a supervisor must have reported within this time (default: 1m)",
    )


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Print what is wrong. Raises: CommandError, so that the exit code is 1, when anything is."""
    health = Inspector(options["backend"]).health(
        max_age_seconds=options["max_age"],
        max_waiting=options["max_waiting"],
        max_silence_seconds=options["max_silence"],
    )
    if printer.as_json:
        printer.document(health)
    elif health.is_healthy:
        waiting = counted(health.waiting or 0, "task")
        # Not known where no alias uses Redis.
        running = "" if health.supervisors is None else f", {counted(health.supervisors, 'supervisor')} running"
        printer.line(f"healthy: {waiting} waiting{running}")
    if not health.is_healthy:
        raise CommandError(f"unhealthy: {'; '.join(health.problems)}")
