"""`asyncq workers`: list worker processes, drain and resume them."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from ...observe.inspector import Inspector, WorkerInfo
from ..reading import counted
from .printing import WAIT, Printer, Verb, arg, yes

HEAD = ("worker", "host", "pid", "slots", "busy", "memory MB", "queues", "version", "started at", "note")


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    workers = inspector.workers.all()
    printer.document({"workers": workers})
    if not workers:
        printer.line("no workers")
    rows = [
        [
            each.id, each.host, each.pid, each.slots, each.busy, each.rss_bytes / 1e6 or None,
            each.queues_text, each.version, each.started_at, _note(each),
        ]
        for each in workers
    ]  # fmt: skip
    printer.table(HEAD, rows)
    for each in workers if options["tasks"] else []:
        for task in each.running:
            printer.line(f"{each.id} runs {task.name} {task.id} since {task.started_at:%Y-%m-%d %H:%M:%S}")


def _note(worker: WorkerInfo) -> str:
    notes = {
        "of another program": not worker.is_ours,
        "leads": worker.is_leader,
        "draining": worker.is_draining,
        "stopped": worker.status == "stopped" and not worker.is_draining,
        "runs suspects only": worker.is_quarantined,
    }
    return ", ".join(text for text, applies in notes.items() if applies)


def _drain(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name = options["name"]
    meant = [each for each in inspector.workers.all() if each.is_ours and name in (each.id, each.host)]
    if not meant:
        raise CommandError(f"No worker and no host is called {name!r}; `asyncq workers list` shows both.")
    printer.ask(f"Drain {counted(len(meant), 'worker process', 'worker processes')}?", "drain", "drained")
    drained = inspector.workers.drain(name, wait=options["wait"])
    printer.document({"name": name, "workers": [each.id for each in drained]})
    count = counted(len(drained), "worker process", "worker processes")
    when = "They take no more tasks from their next beat on, and finish what they have."
    if options["wait"] is not None:
        when = "They have no task and take none."
    printer.line(f"{count} asked to take no more tasks. {when} `asyncq workers resume {name}` ends that.")


def _resume(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name = options["name"]
    changed = inspector.workers.resume(name)
    printer.document({"name": name, "changed": changed})
    text = "takes tasks again with the next beat" if changed else "no request to drain has this name"
    if others := [each for each in inspector.workers.drained_by(name) if each != name]:
        text = f"a request to take no more tasks still holds for {' and '.join(others)}: resume that too"
    printer.line(f"{name}: {text}.")


TASKS = arg("--tasks", action="store_true", help="show what each runs too")
NAME = arg("name", metavar="NAME", help="a worker, or a host for all of it")
VERBS = (
    Verb(_list, "list", "list the worker processes, also those of other programs", [TASKS]),
    Verb(_drain, "drain", "let workers finish what they run, and take no more", [yes("drain"), WAIT, NAME]),
    Verb(_resume, "resume", "let drained workers take tasks again", [NAME]),
)
