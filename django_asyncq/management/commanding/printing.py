"""What the commands print: tables, JSON, progress, questions."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.core.management.base import CommandError, OutputWrapper

from ...definitions.printable import visible, visible_line
from ...prefixes import DEFAULT_ALIAS

# In a log, a line for each page would be too much.
SECONDS_PER_LINE = 5.0
USAGE = 2
NOT_ASCII = re.compile(r"[^\x00-\x7e]")


def add_json(parser: ArgumentParser) -> None:
    """Add the option that every sub-command has."""
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document")


def add_backend(parser: ArgumentParser) -> None:
    """Add the option that names an alias."""
    parser.add_argument("--backend", metavar="ALIAS", help="only of this alias in TASKS (default: of all)")


def verbs_of(parser: ArgumentParser) -> Any:
    """Return what the verbs of a noun are added to."""
    return parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")


def add_verb(verbs: Any, name: str, text: str, *, backend: bool = True) -> ArgumentParser:
    """Add a verb with the options that each has, and return its parser. text: what it does."""
    parser: ArgumentParser = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_json(parser)
    if backend:
        add_backend(parser)
    return parser


def add_yes(parser: ArgumentParser, what: str) -> None:
    """Add the option that answers the question of a sub-command that cannot be undone. what: as "delete"."""
    parser.add_argument("--yes", action="store_true", help=f"{what} without asking")


def usage_error(text: str) -> CommandError:
    """Return the error of a command that was called wrongly: it exits with code 2."""
    return CommandError(text, returncode=USAGE)


class Progress:
    """Print on stderr how far a long command has come: on a terminal in one line that changes, otherwise now and then.

    `str` replaces the stream's own style, which is that of errors.
    """

    def __init__(self, stream: OutputWrapper, total: int) -> None:
        self.stream = stream
        self.total = total
        self.done = 0
        self._is_terminal = bool(stream.isatty())
        self._next_line_at = time.monotonic() + SECONDS_PER_LINE

    def add(self, count: int) -> None:
        """Count further rows as done, and print the total."""
        self.done += count
        text = f"{self.done:,} of {max(self.total, self.done):,} rows"
        if self._is_terminal:
            self.stream.write(f"\r{text}", str, "")
            self.stream.flush()
        elif time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + SECONDS_PER_LINE
            self.stream.write(text, str)

    def close(self) -> None:
        """End the line on the terminal."""
        if self._is_terminal and self.done:
            self.stream.write("", str)


class Printer:
    """Prints what a command has to say: for people, or as one JSON document.

    as_json: whether --json was given; then a command prints nothing on stdout besides `document`.
    """

    def __init__(self, stdout: OutputWrapper, stderr: OutputWrapper, *, as_json: bool) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.as_json = as_json

    def document(self, value: Any) -> None:
        """Print a JSON value; a dataclass as an object, a datetime in ISO 8601, other unknown types as their text."""
        text = json.dumps(value, ensure_ascii=False, default=_json_value)
        # JSON may hold these as they are, but a terminal would obey some of them.
        self.stdout.write(NOT_ASCII.sub(lambda found: _json_character(found[0]), text))

    def line(self, text: str) -> None:
        """Print a text that people read, and end the line. What a terminal would obey is shown as an escape."""
        self.stdout.write(visible(text))

    def queues(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table of queues, with the column of the alias only where a project has more than one."""
        if {alias for alias, *_ in rows} <= {DEFAULT_ALIAS}:
            head, rows = head[1:], [row[1:] for row in rows]
        self.table(head, rows)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print columns, texts aligned left and numbers right, then an empty line. rows: at least one."""
        cells = [list(head), *([cell(value) for value in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        are_texts = [
            all(value is None or not isinstance(value, int | float) for value in column)
            for column in zip(*rows, strict=True)
        ]
        for row in cells:
            aligned = [
                cell.ljust(width) if is_text else cell.rjust(width)
                for cell, width, is_text in zip(row, widths, are_texts, strict=True)
            ]
            self.stdout.write("  ".join(aligned).rstrip())
        self.stdout.write("")

    def rows(self, found: Sequence[Any], columns: Sequence[str], *, none: str) -> None:
        """Print dataclasses as a table, some of their fields, or the text `none`."""
        if not found:
            self.line(none)
            return
        columns = columns_of(columns, found)
        self.table(
            [head_of_column(name) for name in columns], [[getattr(each, name) for name in columns] for each in found]
        )

    def fields(self, pairs: Mapping[str, Any]) -> None:
        """Print names with their values, one on each line; those without a value are skipped."""
        shown = {
            name.replace("_", " "): cell(value) for name, value in pairs.items() if value not in (None, "", [], {})
        }
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            self.line(f"{name:<{width}}  {value}")

    def progress(self, total: int) -> Progress:
        """Return a progress on stderr."""
        return Progress(self.stderr, total)

    def ask(self, question: str, to_do: str, done: str) -> None:
        """Ask on the terminal. Raises: CommandError when there is none, or when the answer is not yes.

        question: ends with "[y/N] ". to_do and done: as "delete" and "deleted".
        """
        if not sys.stdin.isatty():
            raise CommandError(f"There is no terminal to ask on: give --yes to {to_do}.")
        try:
            # With --json, stdout holds the document alone.
            with redirect_stdout(sys.stderr):
                answer = input(visible_line(question))
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError(f"Nothing was {done}.")


def head_of(rows: Sequence[NamedTuple]) -> list[str]:
    """Return the heads of the columns of a table of NamedTuples; at least one row."""
    return [name.replace("_", " ") for name in rows[0]._fields]


def columns_of(columns: Sequence[str], rows: Sequence[Any]) -> list[str]:
    """Return the columns to show: that of the alias only where a project has more than one."""
    has_one = {getattr(row, "backend", DEFAULT_ALIAS) for row in rows} <= {DEFAULT_ALIAS}
    return [name for name in columns if name != "backend" or not has_one]


def head_of_column(name: str) -> str:
    """Return the head of the column of a field."""
    return name.removeprefix("is_").replace("_", " ")


def _json_character(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def cell(value: Any) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}"
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    return f"{value:,}" if isinstance(value, int) else visible_line(str(value))
