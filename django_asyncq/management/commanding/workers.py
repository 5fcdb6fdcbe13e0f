"""`asyncq workers`: list worker processes, drain and resume them."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ...inspector import Inspector, WorkerInfo
from ..wording import counted
from .printing import Printer, add_verb, add_yes, verbs_of

HEAD = ("worker", "host", "pid", "slots", "busy", "memory MB", "queues", "version", "started at", "note")


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    verbs = verbs_of(parser)
    listing = add_verb(verbs, "list", "list the worker processes, also those of other programs")
    listing.add_argument("--tasks", action="store_true", help="show what each runs too")
    drain = add_verb(verbs, "drain", "let workers finish what they run, and take no more")
    add_yes(drain, "drain")
    resume = add_verb(verbs, "resume", "let drained workers take tasks again")
    for each in (drain, resume):
        each.add_argument("name", metavar="NAME", help="a worker, or a host for all of it")


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Do what the verb says."""
    inspector = Inspector(options["backend"])
    if options["verb"] == "list":
        _list(printer, inspector.workers.all(), with_tasks=options["tasks"])
    elif options["verb"] == "drain":
        _drain(printer, inspector, options)
    else:
        changed = inspector.workers.resume(options["name"])
        if printer.as_json:
            printer.document({"name": options["name"], "changed": changed})
        else:
            printer.line(f"{options['name']}: {'takes tasks again' if changed else 'was not drained'}.")


def _list(printer: Printer, workers: list[WorkerInfo], *, with_tasks: bool) -> None:
    if printer.as_json:
        printer.document({"workers": workers})
        return
    if not workers:
        printer.line("no workers")
        return
    rows = [
        [
            each.id, each.host, each.pid, each.slots, each.busy, each.rss_bytes / 1e6 or None,
            ",".join(sorted(each.queues)), each.version, each.started_at, _note(each),
        ]
        for each in workers
    ]  # fmt: skip
    printer.table(HEAD, rows)
    for each in workers if with_tasks else []:
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
    if not options["yes"]:
        printer.ask(f"Drain {counted(len(meant), 'worker process', 'worker processes')}? [y/N] ", "drain", "drained")
    drained = inspector.workers.drain(name)
    if printer.as_json:
        printer.document({"name": name, "workers": [each.id for each in drained]})
    else:
        count = counted(len(drained), "worker process", "worker processes")
        printer.line(f"{count} asked to finish and to take no more tasks. `asyncq workers resume {name}` ends that.")
