"""`asyncq health`: whether tasks are being run, for people and by the exit code for monitors."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from ...observe.inspector import Inspector
from ..reading import counted, duration, whole_number
from .printing import Printer, Verb, option

# A supervisor reports each BEAT_SECONDS (5).
MOST_SILENCE_SECONDS = 60.0


def _health(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    """Print what is wrong. Raises: CommandError, so that the exit code is 1, when anything is."""
    health = inspector.health(
        max_age_seconds=options["max_age"],
        max_waiting=options["max_waiting"],
        max_silence_seconds=options["max_silence"],
    )
    printer.document(health)
    if not health.is_healthy:
        raise CommandError(f"unhealthy: {'; '.join(health.problems)}")
    # Not known where no alias uses Redis.
    running = "" if health.supervisors is None else f", {counted(health.supervisors, 'supervisor')} running"
    if health.supervisors == 0 and health.silence_seconds is not None:
        # They may be about to be replaced, as in a deployment.
        running += f" (none has reported for {health.silence_seconds:.0f} s; limit {options['max_silence']:g} s)"
    printer.line(f"healthy: {counted(health.waiting or 0, 'task')} waiting{running}")


AGE = option("--max-age", "TIME", "report a problem when a task has been due for longer, such as 5m", duration)
WAITING = option("--max-waiting", "N", "report a problem when more than N tasks are due", whole_number(0))
SILENCE_HELP = "a supervisor must have reported within this time (default: 1m)"
SILENCE = option("--max-silence", "TIME", SILENCE_HELP, duration, MOST_SILENCE_SECONDS)
VERBS = Verb(_health, arguments=[AGE, WAITING, SILENCE])
