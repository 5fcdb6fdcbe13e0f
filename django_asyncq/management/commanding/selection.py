"""Which tasks a verb is meant for: ids on the command line, or filters."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from ...inspector import Inspector, TaskFilter
from ...inspector.known_names import check_queue_of_any
from ...inspector.selecting import STATES
from ...storage import database_clock
from ..reading import moment_or_ago
from .printing import usage_error

FILTERS = ("state", "task", "queue", "gate", "error", "since", "id_prefix")
# Shorter beginnings are those of the time, and alike for all tasks of some minutes.
FEWEST_DIGITS = 8


def add_filters(parser: ArgumentParser) -> None:
    """Add the options that choose tasks by what they have in common."""
    add = parser.add_argument_group("filters").add_argument
    add("--state", action="append", choices=list(STATES), help="in this state; may be given several times")
    add("--task", metavar="NAME", help="of this task: its whole path, or the function's name")
    add("--queue", metavar="NAME", help="in this queue")
    add("--gate", metavar="NAME", help="of this gate")
    add("--error", metavar="CLASS", help="whose last error is of this class: its whole path, or its name")
    add("--since", type=moment_or_ago, metavar="TIME", help="enqueued since a time, or since 30m, 2h, 1d ago")
    add("--id-prefix", metavar="DIGITS", help="whose id begins so")


def filter_of(options: dict[str, Any], *, states: Sequence[str] = ()) -> TaskFilter:
    """Return the filter that the options describe. states: those that the verb can change; () for all."""
    wanted = tuple(options["state"] or states)
    if impossible := sorted(set(wanted) - set(states or STATES)):
        raise usage_error(f"--state {impossible[0]}: this verb changes tasks that are {', '.join(states)}")
    return TaskFilter(
        states=wanted,
        name=options["task"] or "",
        queue=options["queue"] or "",
        gate=options["gate"] or "",
        error=options["error"] or "",
        since=_since(options["since"]),
        id_prefix=options["id_prefix"] or "",
    )


def _since(value: datetime | timedelta | None) -> datetime | None:
    return database_clock.now() - value if isinstance(value, timedelta) else value


class Selection:
    """The tasks that a verb is meant for. count: how many there are.

    Raises: CommandError when nothing chooses tasks, when both ids and filters do, or for an id that is none.
    """

    def __init__(self, inspector: Inspector, options: dict[str, Any], *, states: Sequence[str]) -> None:
        self._inspector = inspector
        self._ids: list[UUID] | None = None
        has_filters = any(options[name] for name in FILTERS)
        chosen = [bool(options["ids"]), has_filters or options["all"]]
        if sum(chosen) != 1:
            raise usage_error("Give ids, or filters such as --task and --error, or --all for every task; not both.")
        if options["ids"]:
            self._ids = list(dict.fromkeys(one_id(inspector, text) for text in options["ids"]))
            self.count = len(self._ids)
        else:
            self._matching = filter_of(options, states=states)
            self.count = inspector.tasks.count(self._matching)
            if not self.count and options["queue"]:
                check_queue_of_any(options["queue"], options["backend"])

    def pages(self) -> Iterator[list[UUID]]:
        """Yield the ids, the oldest first when filters chose them."""
        if self._ids is not None:
            yield self._ids
        else:
            yield from self._inspector.tasks.ids(self._matching)


def add_selection(parser: ArgumentParser) -> None:
    """Add ids, filters and --all to a verb that changes tasks."""
    parser.add_argument("ids", nargs="*", metavar="ID", help="an id, or the beginning of one")
    add_filters(parser)
    parser.add_argument("--all", action="store_true", help="every task that the verb can change")


def one_id(inspector: Inspector, text: str) -> UUID:
    """Return the id of a task: the text, or the only id that begins with it. Raises: CommandError."""
    digits = text.replace("-", "").lower()
    if not re.fullmatch(rf"[0-9a-f]{{{FEWEST_DIGITS},32}}", digits):
        raise usage_error(f"{text!r} is no id: give its 32 hexadecimal digits, or at least the first {FEWEST_DIGITS}.")
    if len(digits) == 32:
        return UUID(digits)
    found = inspector.tasks.page(TaskFilter(id_prefix=digits), most=2).tasks
    if len(found) != 1:
        count = "No task has" if not found else "Several tasks have"
        raise CommandError(f"{count} an id that begins with {text}. Give more of it; `asyncq tasks list` shows ids.")
    return found[0].id
