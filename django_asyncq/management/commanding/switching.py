"""Pause and resume: the same two verbs for queues, tasks and gates."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from .printing import Printer, add_verb

BY = "manage.py asyncq"


def add_switch(verbs: Any, kind: str, *, backend: bool = False, does: str) -> None:
    """Add the verbs. kind: as "queue". does: what happens to it while it is paused."""
    pause = add_verb(verbs, "pause", f"{does} until it is resumed", backend=backend)
    pause.add_argument("--note", default="", metavar="TEXT", help="why, for others to read")
    resume = add_verb(verbs, "resume", f"let a paused {kind} go on", backend=backend)
    parser: ArgumentParser
    for parser in (pause, resume):
        parser.add_argument("name", metavar="NAME", help=f"the {kind}")


def switch(printer: Printer, part: Any, kind: str, options: dict[str, Any], *, more: str = "") -> None:
    """Pause or resume. part: of an `Inspector`, with both methods. more: a sentence for people to print behind."""
    name, is_pause = options["name"], options["verb"] == "pause"
    changed = part.pause(name, by=BY, note=options["note"]) if is_pause else part.resume(name)
    if printer.as_json:
        printer.document({kind: name, "paused": is_pause, "changed": changed})
        return
    word = "paused" if is_pause else "running"
    printer.line(f"{kind} {name}: {'' if changed else 'already '}{word}.{f' {more}' if more else ''}")
