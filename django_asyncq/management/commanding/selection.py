"""Which tasks a verb is meant for: ids on the command line, or filters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from ...exceptions import BrokerUnavailable
from ...observe.inspector import EntryDetails, Inspector, TaskFilter
from ...observe.known_names import check_queue_of_any
from ...observe.of_tasks import STATES
from ...storage import database_clock
from ..reading import counted, moment_or_ago, whole_id
from .printing import arg, usage_error

FILTERS = ("state", "task", "queue", "gate", "error", "workflow", "since", "id_prefix")
# Shorter beginnings are those of the time, and alike for all tasks of some minutes.
FEWEST_DIGITS = 8
WHOLE = 32
# Of what a message names.
MOST_NAMED = 10


def add_filters(parser: Any) -> None:
    """Add the options that choose tasks by what they have in common."""
    add = parser.add_argument_group("filters").add_argument
    add("--state", action="append", choices=list(STATES), help="in this state; may be given several times")
    add("--task", metavar="NAME", help="of this task: its whole path, or the function's name")
    add("--queue", metavar="NAME", help="in this queue")
    add("--gate", metavar="NAME", help="of this gate")
    add("--error", metavar="CLASS", help="whose last error is of this class: its whole path, or its name")
    add("--workflow", type=whole_id, metavar="ID", help="of the workflow with this id")
    add("--since", type=moment_or_ago, metavar="TIME", help="enqueued since a time, or since 30m, 2h, 1d ago")
    add("--id-prefix", metavar="DIGITS", help="whose id begins so")


AN_ID = "an id, the beginning of one, or what another program calls a task"
# Of a verb that changes tasks.
SELECTION = (
    arg("ids", nargs="*", metavar="ID", help=AN_ID),
    add_filters,
    arg("--all", action="store_true", help="every task that the verb can change"),
)


def filter_of(options: dict[str, Any], *, states: Sequence[str] = ()) -> TaskFilter:
    """Return the filter that the options describe. states: those that the verb can change; () for all."""
    wanted = tuple(options["state"] or states)
    if impossible := sorted(set(wanted) - set(states or STATES)):
        raise usage_error(f"--state {impossible[0]}: this verb changes tasks that are {', '.join(states)}")
    since: datetime | timedelta | None = options["since"]
    return TaskFilter(
        states=wanted,
        name=options["task"] or "",
        queue=options["queue"] or "",
        gate=options["gate"] or "",
        error=options["error"] or "",
        workflow=options["workflow"],
        since=database_clock.now() - since if isinstance(since, timedelta) else since,
        id_prefix=options["id_prefix"] or "",
    )


class Selection:
    """The tasks that a verb is meant for. count: how many there are. entries: those of them that have no row.

    Raises: CommandError when nothing chooses tasks, when both ids and filters do, or for an id that is none.
    """

    def __init__(self, inspector: Inspector, options: dict[str, Any], *, states: Sequence[str]) -> None:
        self._inspector = inspector
        self._ids: list[UUID] | None = None
        self.entries: list[EntryDetails] = []
        has_filters = any(options[name] for name in FILTERS)
        chosen = [bool(options["ids"]), has_filters or options["all"]]
        if sum(chosen) != 1:
            raise usage_error("Give ids, or filters such as --task and --error, or --all for every task; not both.")
        if options["ids"]:
            self._ids, self.entries = tasks_called(inspector, options["ids"])
            self.count = len(self._ids) + len(self.entries)
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


def tasks_called(inspector: Inspector, texts: Sequence[str]) -> tuple[list[UUID], list[EntryDetails]]:
    """Return the tasks that texts name: the ids of rows, and entries of other programs that have no row.

    A text is an id or the beginning of one, what another program calls a task, or its queue, a slash and that. The id
    of no task is returned too: the verb says that it has no row. Raises: CommandError for any other text that names no
    task, or several.
    """
    whole = {text: UUID(_digits(text)) for text in texts if len(_digits(text)) == WHOLE}
    known = inspector.tasks.known(whole.values())
    found = [whole[text] if whole.get(text) in known else _called(inspector, text) for text in texts]
    entries = {(each.backend, each.queue, each.id): each for each in found if not isinstance(each, UUID)}
    return list(dict.fromkeys(each for each in found if isinstance(each, UUID))), list(entries.values())


def one_row(inspector: Inspector, text: str) -> UUID:
    """Return the id of the task that a text names. Raises: CommandError, also for one without a row."""
    ids, _ = tasks_called(inspector, [text])
    if not ids:
        raise CommandError(f"{text!r} is a message of another program, and has no row yet.")
    return ids[0]


def _digits(text: str) -> str:
    """Return the digits of what may be an id, or the beginning of one; "" for another text."""
    digits = text.replace("-", "").lower()
    return digits if re.fullmatch(rf"[0-9a-f]{{{FEWEST_DIGITS},{WHOLE}}}", digits) else ""


def _called(inspector: Inspector, text: str) -> UUID | EntryDetails:
    """Return what a text names that is not the id of a row. Raises: CommandError, BrokerUnavailable."""
    digits, entries = _digits(text), list[EntryDetails]()
    rows = {row.id: row for row in inspector.tasks.called(text)}
    begun = inspector.tasks.page(TaskFilter(id_prefix=digits), most=MOST_NAMED).tasks if digits else []
    if rows or not begun:
        try:
            entries = inspector.entries.find(text)
        except BrokerUnavailable:
            # The rows are known all the same.
            if not rows:
                raise
    ids = list(dict.fromkeys([*(row.id for row in begun), *rows, *(each.row for each in entries if each.row)]))
    without = [each for each in entries if each.row is None]
    if len(ids) + len(without) == 1:
        return ids[0] if ids else without[0]
    if ids or without:
        named = [*map(str, ids), *(f"{each.queue}/{each.id} without a row, {each.state}" for each in without)]
        more = f" and {len(named) - MOST_NAMED:,} more" if len(named) > MOST_NAMED else ""
        listed = ", ".join(named[:MOST_NAMED])
        raise CommandError(f"Several tasks are called {text!r}: {listed}{more}. Give one of these ids.")
    if len(digits) == WHOLE:
        return UUID(digits)
    queues = [queue for _, queue in inspector.entries.queues()]
    raise CommandError(
        f"No task is called {text!r}: no row has an id that begins so, which takes {FEWEST_DIGITS} hexadecimal digits, "
        f"no other program calls one so, and Redis has no entry with this id in {counted(len(queues), 'queue')}"
        f"{': ' if queues else ''}{', '.join(queues[:MOST_NAMED])}. `asyncq tasks list` shows ids."
    )
