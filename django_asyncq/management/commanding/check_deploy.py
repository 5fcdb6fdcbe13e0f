"""`asyncq check-deploy`: whether this code can run what waits, for a step of CI or of a release."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from ...observe.deploying import check_deploy
from ...observe.inspector import Inspector
from ..reading import counted
from .printing import Printer, Verb, flag


def _check(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    """Print what this code cannot run. Raises: CommandError, so that the exit code is 1, when there is anything."""
    found = check_deploy(against_running=options["against_running"])
    mistakes = [each._asdict() for each in found.mistakes]
    printer.document({**found._asdict(), "mistakes": mistakes, "is_safe": not mistakes})
    for each in found.mistakes:
        about = f" ({counted(each.total, 'task')}, such as {each.example})" if each.total else ""
        printer.line(f"{each.kind}: {each.subject}{about}: {each.text}")
    if mistakes:
        raise CommandError(f"not safe to deploy: {counted(len(mistakes), 'mistake')}")
    beside = "" if found.workers is None else f"; {counted(found.workers, 'running worker')} can run what it enqueues"
    tasks, schedules = counted(found.tasks, "live task"), counted(found.schedules, "schedule")
    printer.line(f"safe to deploy: this code can run {tasks} of {counted(found.names, 'name')} and {schedules}{beside}")


RUNNING = flag("--against-running", "also: whether the running workers can run what this code will enqueue")
VERBS = Verb(_check, arguments=[RUNNING], has_backend=False)
