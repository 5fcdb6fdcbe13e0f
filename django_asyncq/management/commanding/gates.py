"""`asyncq gates`: list, show, repair, set, pause and resume gates."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ...inspector import Inspector
from ...inspector.known_names import check_gate, no_gate
from ..reading import duration
from ..wording import counted
from .printing import Printer, add_verb, usage_error, verbs_of
from .switching import add_switch, switch

COLUMNS = ("gate", "limit", "occupancy", "live", "waiting", "expected_seconds", "is_paused")


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    verbs = verbs_of(parser)
    add_verb(verbs, "list", "list the gates with their limits and how many slots are taken", backend=False)
    for name, text in (
        ("show", "show who holds the slots of a gate, and who waits"),
        ("audit", "make the slots of a gate agree with the rows"),
        ("set", "set the limit of a gate; it takes effect at once"),
    ):
        verb = add_verb(verbs, name, text, backend=False)
        verb.add_argument("name", metavar="NAME", help="the gate")
        if name == "audit":
            verb.add_argument("--dry-run", action="store_true", help="only count; change nothing")
        if name == "set":
            verb.add_argument("--limit", type=int, metavar="N", help="0 or less means no limit")
            verb.add_argument("--expected", type=duration, metavar="TIME", help="how long a task takes, such as 90s")
    add_switch(verbs, "gate", does="let a gate admit nothing new")


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Do what the verb says."""
    VERBS[options["verb"]](printer, Inspector(), options)


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = inspector.gates.all()
    if printer.as_json:
        printer.document({"gates": found})
    else:
        printer.rows(found, COLUMNS, none="no gate has a row, a slot or a waiting task")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    gate = inspector.gates.get(options["name"])
    if gate is None:
        raise no_gate(options["name"], [each.gate for each in inspector.gates.all()])
    slots = [{"id": id, "until": until} for id, until in gate.slots]
    shown = {**asdict(gate), "slots": slots}
    if printer.as_json:
        printer.document(shown)
        return
    printer.fields({name: value for name, value in shown.items() if name not in ("slots", "waiters")})
    for slot in slots:
        printer.line(f"slot of {slot['id']} until {slot['until']:%Y-%m-%d %H:%M:%S}")
    for id in gate.waiters:
        printer.line(f"{id} waits")


def _audit(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    check_gate(options["name"])
    drift = inspector.gates.audit(options["name"], dry_run=options["dry_run"])
    if printer.as_json:
        printer.document({"gate": options["name"], "dry_run": options["dry_run"], **asdict(drift)})
    else:
        would = "would be " if options["dry_run"] else ""
        printer.line(f"{counted(drift.added, 'slot')} {would}added, {drift.removed:,} {would}removed.")


def _set(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    if options["limit"] is None and options["expected"] is None:
        raise usage_error("Give --limit or --expected, or both.")
    gate = inspector.gates.set(options["name"], limit=options["limit"], expected_seconds=options["expected"])
    if printer.as_json:
        printer.document(gate)
    else:
        limit = "no limit" if gate.limit is not None and gate.limit <= 0 else f"limit {gate.limit}"
        printer.line(f"{gate.gate}: {limit}, a task is expected to take {gate.expected_seconds:g} s.")


def _switch(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    switch(printer, inspector.gates, "gate", options)


VERBS: dict[str, Callable[[Printer, Inspector, dict[str, Any]], None]] = {
    "list": _list,
    "show": _show,
    "audit": _audit,
    "set": _set,
    "pause": _switch,
    "resume": _switch,
}
