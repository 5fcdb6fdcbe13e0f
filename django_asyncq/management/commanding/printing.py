"""What the commands print: tables, JSON, progress, questions."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from django.core.management.base import CommandError, OutputWrapper

from ...core.aliases import DEFAULT_ALIAS
from ...core.names import visible, visible_line
from ...core.redaction import mask, mask_text
from ...observe.inspector import EntryDetails, EntryInfo
from ..reading import duration

# In a log, a line for each page would be too much.
SECONDS_PER_LINE = 5.0
USAGE = 2
NOT_ASCII = re.compile(r"[^\x00-\x7e]")


Argument = Callable[[Any], Any]
SomeEntry = TypeVar("SomeEntry", bound=EntryInfo)


def arg(*flags: str, **options: Any) -> Argument:
    """Return what adds an argument to a parser, as `add_argument` takes it."""
    return lambda parser: parser.add_argument(*flags, **options)


def flag(name: str, text: str, **more: Any) -> Argument:
    """Return an option without a value. text: its help."""
    return arg(name, action="store_true", help=text, **more)


def option(name: str, metavar: str, text: str, type: Any = None, default: Any = None, **more: Any) -> Argument:
    """Return an option with a value. metavar: the word for the value; type: reads it; text: its help."""
    return arg(name, metavar=metavar, help=text, type=type, default=default, **more)


def either(*arguments: Argument) -> Argument:
    """Return what adds arguments of which one may be given."""

    def add(parser: ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in arguments:
            argument(group)

    return add


def yes(what: str) -> Argument:
    """Return the option that answers the question of a verb that cannot be undone. what: as "delete"."""
    return flag("--yes", f"{what} without asking")


JSON = flag("--json", "print one JSON document", dest="as_json")
BACKEND = option("--backend", "ALIAS", "only of this alias in TASKS (default: of all)")
DRY_RUN = flag("--dry-run", "only count; change nothing")
WAIT_HELP = "return when none of its tasks runs or begins; exit with 1 after this time"
WAIT = option("--wait", "TIME", WAIT_HELP, duration)


class Verb(NamedTuple):
    """A verb of a noun. help: what it does. name and help are empty where the noun has this one alone.

    do: does it, and prints it; called with a `Printer`, an `Inspector` of the alias that is meant, and the options.
    has_backend: whether it has the option that names an alias.
    """

    do: Callable[[Any, Any, dict[str, Any]], None]
    name: str = ""
    help: str = ""
    arguments: Sequence[Argument] = ()
    has_backend: bool = True

    def add_to(self, parser: ArgumentParser) -> None:
        """Add its options, and those that each verb has."""
        for argument in (JSON, *([BACKEND] if self.has_backend else []), *self.arguments):
            argument(parser)


def add_verbs(parser: ArgumentParser, verbs: Verb | Sequence[Verb]) -> None:
    """Add the verbs of a noun to its parser, or the options of the only one."""
    if isinstance(verbs, Verb):
        verbs.add_to(parser)
        return
    parsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    for verb in verbs:
        text = f"{verb.help[0].upper()}{verb.help[1:]}."
        verb.add_to(parsers.add_parser(verb.name, help=verb.help, description=text))


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

    as_json: whether --json was given; then only `document` prints, and otherwise all else does. yes: whether --yes was
    given; then nothing is asked.
    """

    def __init__(self, stdout: OutputWrapper, stderr: OutputWrapper, *, as_json: bool, yes: bool) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.as_json = as_json
        self.yes = yes

    def document(self, value: Any) -> None:
        """Print a JSON value; a dataclass as an object, a datetime in ISO 8601, other unknown types as their text."""
        if not self.as_json:
            return
        text = json.dumps(value, ensure_ascii=False, default=_json_value)
        # JSON may hold these as they are, but a terminal would obey some of them.
        self.stdout.write(NOT_ASCII.sub(lambda found: _json_character(found[0]), text))

    def line(self, text: str) -> None:
        """Print a text that people read, and end the line. What a terminal would obey is shown as an escape."""
        if not self.as_json:
            self.stdout.write(visible(text))

    def lines(self, *texts: str) -> None:
        """Print lines; one that is empty is left out."""
        for text in filter(None, texts):
            self.line(text)

    def queues(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table of queues, with the column of the alias only where a project has more than one."""
        if {alias for alias, *_ in rows} <= {DEFAULT_ALIAS}:
            head, rows = head[1:], [row[1:] for row in rows]
        self.table(head, rows)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print columns, texts aligned left and numbers right, then an empty line; nothing where there are no rows."""
        if self.as_json or not rows:
            return
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
        # The column of the alias only where a project has more than one.
        has_one = {getattr(row, "backend", DEFAULT_ALIAS) for row in found} <= {DEFAULT_ALIAS}
        shown = [name for name in columns if name != "backend" or not has_one]
        head = [name.removeprefix("is_").replace("_", " ") for name in shown]
        self.table(head, [[getattr(each, name) for name in shown] for each in found])

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

        to_do and done: as "delete" and "deleted".
        """
        if not self.yes and self.answer(f"{question} [y/N] ", to_do).lower() not in ("y", "yes"):
            raise CommandError(f"Nothing was {done}.")

    def answer(self, question: str, to_do: str) -> str:
        """Ask on the terminal, and return the answer; "" for none. to_do: what --yes does without asking.

        Raises: CommandError when there is no terminal.
        """
        if not sys.stdin.isatty():
            raise CommandError(f"There is no terminal to ask on: give --yes to {to_do}.")
        try:
            # With --json, stdout holds the document alone.
            with redirect_stdout(sys.stderr):
                return input(visible_line(question)).strip()
        except EOFError:
            return ""


def masked_entry(each: SomeEntry) -> SomeEntry:
    """Return an entry without the secrets of what its message holds: that of another program has no names of ours."""
    payload = mask_text(each.payload.decode("utf-8", "backslashreplace")).encode()
    headers = {"headers": mask(each.headers)} if isinstance(each, EntryDetails) else {}
    return replace(each, payload=payload, error=mask_text(each.error), **headers)


def head_of(rows: Sequence[NamedTuple]) -> list[str]:
    """Return the heads of the columns of a table of NamedTuples; at least one row."""
    return [name.replace("_", " ") for name in rows[0]._fields]


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
