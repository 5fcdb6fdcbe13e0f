"""`asyncq dash`: queues, workers, gates and health, refreshed at most once a second until Ctrl-C.

With rich installed the tables are drawn by it; otherwise the screen is cleared and written again. Both use the
terminal's alternate screen, and restore what was there.
"""

from __future__ import annotations

import signal
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from shutil import get_terminal_size
from typing import Any, NamedTuple

from django.core.management.base import OutputWrapper

from ...definitions.printable import visible_line
from ...exceptions import AsyncqError
from ...faults import STORE_ERRORS, one_line
from ...inspector import Inspector
from ..reading import duration
from .printing import Printer, add_backend, add_json, cell, columns_of, head_of_column

LEAST_SECONDS = 1.0
QUEUE_COLUMNS = ("backend", "queue", "queued", "running", "scheduled", "retry", "archived", "processed_today",
                 "failed_today", "oldest_waiting_seconds", "is_paused")  # fmt: skip
WORKER_COLUMNS = ("id", "slots", "busy", "status", "version", "is_draining", "is_leader")
GATE_COLUMNS = ("gate", "limit", "occupancy", "live", "waiting", "is_paused")
NAMES = ("backend", "queue", "id", "gate")
# Of the terminal: the alternate screen and no cursor, and the way back; to the top, clearing all.
ENTER, LEAVE, CLEAR = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H\x1b[2J"


class Section(NamedTuple):
    """A table of the dashboard."""

    title: str
    columns: Sequence[str]
    rows: list[Any]


class Snapshot(NamedTuple):
    """What is shown at once. problems: sentences; none when all is well."""

    sections: list[Section]
    problems: list[str]


def add(parser: ArgumentParser) -> None:
    """Add the options."""
    add_json(parser)
    add_backend(parser)
    parser.add_argument("--once", action="store_true", help="print once, and exit")
    parser.add_argument(
        "--every", type=duration, default=2.0, metavar="TIME", help="how often (default: 2s; at least 1s)"
    )
    parser.add_argument("--plain", action="store_true", help="without rich, also where it is installed")


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Show the dashboard until Ctrl-C; once with --once or --json, and where stdout is no terminal."""
    inspector = Inspector(options["backend"])
    if printer.as_json:
        snapshot = _look(inspector)
        printer.document({"problems": snapshot.problems} | {each.title: each.rows for each in snapshot.sections})
    elif options["once"] or not printer.stdout.isatty():
        printer.line(_text(_look(inspector)))
    else:
        seconds = max(options["every"], LEAST_SECONDS)
        show = _show_plain if options["plain"] or find_spec("rich") is None else _show_with_rich
        with _stoppable():
            show(printer.stdout, lambda: _look(inspector), seconds)


def _look(inspector: Inspector) -> Snapshot:
    """Return what both stores say now; an unreachable store is a problem, and the next look asks again."""
    sections: list[Section] = []
    problems: list[str] = []
    try:
        sections.append(Section("queues", QUEUE_COLUMNS, inspector.queues.all()))
        sections.append(Section("workers", WORKER_COLUMNS, inspector.workers.all()))
        sections.append(Section("gates", GATE_COLUMNS, inspector.gates.all()))
        problems += inspector.health().problems
    except (AsyncqError, *STORE_ERRORS) as error:
        problems.append(one_line(error))
    return Snapshot(sections, problems)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the block, so that the terminal is restored."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell starts a job in the background with that one ignored.
    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _show_plain(stdout: OutputWrapper, look: Callable[[], Snapshot], seconds: float) -> None:
    try:
        stdout.write(ENTER, ending="")
        while True:
            text = _fitting(_text(look()))
            stdout.write(f"{CLEAR}{text}\nCtrl-C ends it.", ending="")
            stdout.flush()
            time.sleep(seconds)
    finally:
        stdout.write(LEAVE, ending="")
        stdout.flush()


def _show_with_rich(stdout: OutputWrapper, look: Callable[[], Snapshot], seconds: float) -> None:
    console = import_module("rich.console").Console(file=stdout)
    with import_module("rich.live").Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_renderable(look()), refresh=True)
            time.sleep(seconds)


def _renderable(snapshot: Snapshot) -> Any:
    """Return the tables for rich. Texts are escaped: a name may hold what rich takes for markup."""
    escape = import_module("rich.markup").escape
    parts: list[Any] = [f"[bold red]{escape(visible_line(problem))}[/]" for problem in snapshot.problems]
    for section in snapshot.sections:
        if not section.rows:
            parts.append(f"no {section.title}")
            continue
        columns = columns_of(section.columns, section.rows)
        # Without borders, eleven columns fit into 80 characters; names keep theirs, and heads are broken by words.
        table = import_module("rich.table").Table(
            title=section.title, title_justify="left", box=None, padding=(0, 1, 0, 0)
        )
        for name in columns:
            table.add_column(head_of_column(name), no_wrap=name in NAMES)
        for row in section.rows:
            table.add_row(*(escape(cell(getattr(row, name))) for name in columns))
        parts.append(table)
    return import_module("rich.console").Group(*parts, "Ctrl-C ends it.")


def _fitting(text: str) -> str:
    """Return what fits on the terminal, from the top: problems come first, and must not be scrolled away."""
    width, height = get_terminal_size()
    lines = [line[start : start + width] for line in text.splitlines() for start in range(0, len(line) or 1, width)]
    room = max(height - 2, 1)
    return "\n".join(lines if len(lines) <= room else [*lines[: room - 1], f"and {len(lines) - room + 1:,} more lines"])


def _text(snapshot: Snapshot) -> str:
    """Return the tables as plain text."""
    stream = OutputWrapper(StringIO())
    printer = Printer(stream, stream, as_json=False)
    for problem in snapshot.problems:
        printer.line(f"problem: {visible_line(problem)}")
    for section in snapshot.sections:
        none = f"no {section.title}"
        printer.rows(section.rows, section.columns, none=none)
    return str(stream.getvalue())
