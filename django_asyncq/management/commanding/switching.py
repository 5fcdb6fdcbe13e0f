"""Pause and resume: the same two verbs for queues, tasks and gates."""

from __future__ import annotations

from typing import Any

from ...core.aliases import DEFAULT_ALIAS
from ...exceptions import MOST_IDS_SHOWN, BrokerUnavailable, StillRunning
from ...models import PauseKind
from ...observe.still_running import held_of, wait_paused
from ..reading import counted
from .printing import WAIT, Printer, Verb, arg

BY = "manage.py asyncq"


def switch_verbs(kind: str, do: Any, does: str, *, has_backend: bool = False) -> tuple[Verb, Verb]:
    """Return the two verbs. kind: as "queue". do: calls `switch`. does: what happens to it while it is paused."""
    name = arg("name", metavar="NAME", help=f"the {kind}")
    note = arg("--note", default="", metavar="TEXT", help="why, for others to read")
    return (
        Verb(do, "pause", f"{does} until it is resumed", [note, WAIT, name], has_backend),
        Verb(do, "resume", f"let a paused {kind} go on", [name], has_backend),
    )


def switch(printer: Printer, part: Any, kind: str, options: dict[str, Any], *, more: str = "") -> None:
    """Pause or resume. part: of an `Inspector`, with both methods. more: a sentence for people to print behind.

    Raises: StillRunning, after it has printed what the pause has done.
    """
    name, is_pause, alias = options["name"], options["verb"] == "pause", options.get("backend") or DEFAULT_ALIAS
    changed = part.pause(name, by=BY, note=options["note"]) if is_pause else part.resume(name)
    word = "paused" if is_pause else "running"
    line = f"{kind} {name}: {'' if changed else 'already '}{word}.{f' {more}' if more else ''}"
    document: dict[str, Any] = {kind: name, "paused": is_pause, "changed": changed}
    error: StillRunning | None = None
    if is_pause:
        text = ""
        try:
            if options["wait"] is None:
                document["held"] = sorted(held_of(kind, name, alias))
                text = _held_text(kind, document["held"])
            else:
                wait_paused(kind, name, alias, options["wait"])
                document["held"], text = [], "None of its tasks runs, and none begins."
        except StillRunning as found:
            document["held"], error = found.ids, found
        except BrokerUnavailable:
            if options["wait"] is not None:
                raise
            document["held"], text = None, "Redis is unreachable: workers notice it when Redis is back."
        line = f"{line} {text}".rstrip()
    printer.document(document)
    printer.line(line)
    if error is not None:
        raise error


def _held_text(kind: str, held: list[str]) -> str:
    if not held:
        return ""
    has = "hold a slot" if kind == PauseKind.GATE else "were taken by workers before"
    more = ", …" if len(held) > MOST_IDS_SHOWN else ""
    return (
        f"{counted(len(held), 'task')} {has}, and may still begin or go on: {', '.join(held[:MOST_IDS_SHOWN])}{more}."
    )
