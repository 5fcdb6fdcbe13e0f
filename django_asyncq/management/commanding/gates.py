"""`asyncq gates`: list, show, repair, set, pause and resume gates."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...observe.inspector import Inspector
from ...observe.known_names import check_gate, no_gate
from ..reading import counted, duration
from .printing import DRY_RUN, Printer, Verb, arg, usage_error
from .switching import switch, switch_verbs

COLUMNS = ("gate", "limit", "occupancy", "live", "waiting", "expected_seconds", "is_paused")


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = inspector.gates.all()
    printer.document({"gates": found})
    printer.rows(found, COLUMNS, none="no gate has a row, a slot or a waiting task")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    gate = inspector.gates.get(options["name"])
    if gate is None:
        raise no_gate(options["name"], [each.gate for each in inspector.gates.all()])
    slots = [{"id": id, "until": until} for id, until in gate.slots]
    shown = {**asdict(gate), "slots": slots}
    printer.document(shown)
    printer.fields({name: value for name, value in shown.items() if name not in ("slots", "waiters")})
    for slot in slots:
        printer.line(f"slot of {slot['id']} until {slot['until']:%Y-%m-%d %H:%M:%S}")
    for id in gate.waiters:
        printer.line(f"{id} waits")


def _audit(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    check_gate(options["name"])
    drift = inspector.gates.audit(options["name"], dry_run=options["dry_run"])
    printer.document({"gate": options["name"], "dry_run": options["dry_run"], **asdict(drift)})
    would = "would be " if options["dry_run"] else ""
    printer.line(f"{counted(drift.added, 'slot')} {would}added, {drift.removed:,} {would}removed.")


def _set(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    if options["limit"] is None and options["expected"] is None:
        raise usage_error("Give --limit or --expected, or both.")
    gate = inspector.gates.set(options["name"], limit=options["limit"], expected_seconds=options["expected"])
    printer.document(gate)
    limit = "no limit" if gate.limit is not None and gate.limit <= 0 else f"limit {gate.limit}"
    printer.line(f"{gate.gate}: {limit}, a task is expected to take {gate.expected_seconds:g} s.")


def _switch(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    switch(printer, inspector.gates, "gate", options)


NAME = arg("name", metavar="NAME", help="the gate")
LIMITS = (
    arg("--limit", type=int, metavar="N", help="0 or less means no limit"),
    arg("--expected", type=duration, metavar="TIME", help="how long a task takes, such as 90s"),
)
VERBS = (
    Verb(_list, "list", "list the gates with their limits and how many slots are taken", has_backend=False),
    Verb(_show, "show", "show who holds the slots of a gate, and who waits", [NAME], has_backend=False),
    Verb(_audit, "audit", "make the slots of a gate agree with the rows", [NAME, DRY_RUN], has_backend=False),
    Verb(_set, "set", "set the limit of a gate; it takes effect at once", [NAME, *LIMITS], has_backend=False),
    *switch_verbs("gate", _switch, "let a gate admit nothing new"),
)
