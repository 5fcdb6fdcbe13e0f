"""Print the demo: progress while it runs, tables when it has finished, plain lines in a pipe."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from django_asyncq.models import Gate

from ..catalogue import MODELS
from ..presentation import STATES, state_counts, state_of
from .observation import Observer
from .traffic import MAX_SENDS, Tally
from .verdict import Finding, Outcome
from .visitor import Visit

COLOURS = {
    "queued": "white",
    "running": "blue",
    "retrying": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
}
SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """Show a bar per state on a terminal; elsewhere print a line every two seconds if something has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._printed = ""
        self._print_at = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._stack.enter_context(self._live)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def show(self, counts: dict[str, int], tally: Tally, seconds: float, *, last: bool = False) -> None:
        """Show the current counts."""
        line = f"accepted {len(tally.accepted)}, refused {tally.refused}"
        if self._live is not None:
            self._live.update(Group(self._bars(counts), Text(f"{seconds:5.1f} s   {line}", "dim")))
            return
        line += "".join(f", {STATES[state].lower()} {count}" for state, count in counts.items())
        if line != self._printed and (last or time.monotonic() >= self._print_at):
            self._console.print(f"{seconds:5.1f} s  {line}")
            self._printed, self._print_at = line, time.monotonic() + SECONDS_BETWEEN_LINES

    @staticmethod
    def _bars(counts: dict[str, int]) -> Table:
        table = Table.grid(padding=(0, 2))
        for state, count in counts.items():
            colour = COLOURS[state]
            bar = ProgressBar(
                total=max(sum(counts.values()), 1),
                completed=count,
                width=48,
                complete_style=colour,
                finished_style=colour,
            )
            table.add_row(Text(STATES[state], colour), Text(f"{count:3d}"), bar)
        return table


def figures(tally: Tally, observer: Observer, outcome: Outcome, visit: Visit) -> Table:
    """Return a table of what happened, in numbers."""
    table = Table(title="What happened", title_justify="left", show_header=False, box=SIMPLE_HEAD)
    failed = sum(len(record.errors) for record in outcome.retried)
    rows = [
        ("accepted (202)", len(tally.accepted), "orders that became tasks"),
        ("refused (429)", tally.refused, "a gate was full; the client sent the order again after Retry-After"),
        ("given up", tally.given_up, f"orders still refused after up to {MAX_SENDS} sends"),
        ("retried", len(outcome.retried), _retried_text(failed)),
        ("recovered", len(outcome.recovered), "tasks whose worker was killed; another worker ran them"),
        ("cancelled", 1, f"render that was running; it stopped {visit.stop_seconds:.2f} s after it was asked to"),
        ("ordered twice", 1, f"picture; the second order got {visit.second_answer[0]} while the first was queued"),
        ("samples", observer.samples, "times the demo read the rows and the gate slots"),
        ("seconds", round(observer.seconds), "in total"),
    ]
    for name, number, meaning in rows:
        table.add_row(name, Text(str(number), "bold", justify="right"), meaning)
    return table


def _retried_text(failed: int) -> str:
    attempts = "1 attempt" if failed == 1 else f"{failed} attempts"
    return f"tasks with more than one attempt; {attempts} failed"


def gates(observer: Observer, outcome: Outcome) -> Table:
    """Return a table of each model's renders by state, with the maximum of slots that its gate held at once."""
    limits = dict(Gate.objects.values_list("name", "limit"))
    table = Table(title="By gate, from the database", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("Gate")
    for heading in ("Limit", "Max held", *STATES.values()):
        table.add_column(heading, justify="right")
    by_model: dict[str, Counter[str]] = {name: Counter() for name in MODELS}
    for record in outcome.records:
        by_model[record.args[0]][state_of(record)] += 1
    for name, counts in by_model.items():
        most = max(observer.max_rows[name], observer.max_slots[name])
        numbers = (str(counts[state]) if counts[state] else "" for state in STATES)
        table.add_row(name, str(limits[name]), str(most), *numbers)
    table.add_section()
    totals = state_counts()
    table.add_row(Text("all", "bold"), "", "", *(str(totals[state]) for state in STATES))
    return table


def findings(found: Sequence[Finding]) -> Group:
    """Return the checks, each with the reasons why it failed."""
    lines = []
    for finding in found:
        mark, colour = ("ok", "green") if finding.passed else ("NO", "bold red")
        lines.append(Text.assemble((f"  {mark}  ", colour), finding.statement))
        lines += [Text(f"        {what}", "red") for what in finding.failures[:10]]
    return Group(Text("Checks", "bold italic"), *lines)
