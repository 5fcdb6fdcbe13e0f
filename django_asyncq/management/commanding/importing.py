"""`asyncq import`: write the schedules that another queue left behind, or only say what would become of each."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.conf import settings

from ...core.masking import masker_of_call
from ...core.redaction import mask_text
from ...core.registry import load_task_modules
from ...moving import celery_beat, huey, q2, rq
from ...moving.judging import Kind, Verdict, Wish, in_words, judge
from ...moving.old import Found
from ...moving.writing import write
from ...observe.inspector import Inspector
from ...storage import database_clock
from ..reading import counted, moment
from .printing import Printer, Verb, arg, flag, option, usage_error

Reader = Callable[[dict[str, Any], datetime], Found]


def _import(read: Reader, printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    if options.get("database") not in (None, *settings.DATABASES):
        raise usage_error(f"DATABASES has no {options['database']!r}: give one of {', '.join(settings.DATABASES)}.")
    load_task_modules()
    now = database_clock.now()
    wish = Wish(cutover=options["cutover"] or now, now=now, tasks=dict(options["tasks"]), disabled=options["disabled"])
    found = read(options, wish.cutover)
    verdicts = judge(found.schedules, wish)
    rows = [each.row for each in verdicts if each.row is not None and not each.is_there]
    written = write(rows) if options["write"] else set()
    outcomes = [_outcome(each, written, writes=options["write"]) for each in verdicts]
    sums = _sums(verdicts, outcomes)
    printer.document(
        {
            "source": options["verb"],
            "where": found.where,
            "cutover": wish.cutover,
            "dry_run": not options["write"],
            "sums": sums,
            "schedules": [_document(each, outcome) for each, outcome in zip(verdicts, outcomes, strict=True)],
        }
    )
    printer.lines(*_head(found, wish, sums, writes=options["write"]))
    for each, outcome in zip(verdicts, outcomes, strict=True):
        printer.lines(*_lines(each, outcome))
    unused = sorted(set(wish.tasks) - {each.task for each in found.schedules})
    printer.lines(*(f"--map {name}=…: no schedule there has this task." for name in unused))


def _outcome(each: Verdict, written: set[str], *, writes: bool) -> str:
    """Return what became of a schedule: written, to write, there already, or not."""
    if each.row is None:
        return "not"
    if each.is_there or (writes and each.old.name not in written):
        return "there already"
    return "written" if writes else "to write"


def _sums(verdicts: Sequence[Verdict], outcomes: Sequence[str]) -> dict[str, int]:
    kinds, became = Counter(each.kind for each in verdicts), Counter(outcomes)
    return {
        "schedules": len(verdicts),
        "same": kinds[Kind.SAME],
        "same_but": kinds[Kind.BUT],
        "not": kinds[Kind.NOT],
        "there_already": became["there already"],
        "written": became["written"],
    }


def _head(found: Found, wish: Wish, sums: dict[str, int], *, writes: bool) -> list[str]:
    there = f" {sums['there_already']} there already." if sums["there_already"] else ""
    kinds = f"{sums['same']} same, {sums['same_but']} same with a difference, {sums['not']} not"
    return [
        f"{counted(sums['schedules'], 'schedule')} in {found.where}: {kinds}.{there}",
        f"Written: {counted(sums['written'], 'schedule')}."
        if writes
        else "A dry run: nothing was written. --write writes what is the same, also with a difference.",
        f"Cutover: {in_words(wish.cutover)}. The first occurrence here is later than that.",
    ]


def _lines(each: Verdict, outcome: str) -> list[str]:
    """Return what is printed of one schedule: its verdict and name, when it fires, and the reasons."""
    kind = "not, because" if each.kind is Kind.NOT else str(each.kind)
    lines = [f"{each.old.name}: {kind}{'' if outcome == 'not' else f' ({outcome})'}"]
    if each.row is not None:
        timing = f"{each.row.cron} ({each.row.zone})" if each.row.cron else f"every {each.row.interval_seconds} s"
        first = "" if each.first is None else f", first {in_words(each.first)}"
        lines.append(f"  {each.row.task}: {timing}{first}{'' if each.row.enabled else ', disabled'}")
    lines += [f"  - {mask_text(reason)}" for reason in each.reasons]
    lines += [f"  - differs from what is there: {text}" for text in each.differs]
    if each.line and (each.old.is_code or each.kind is Kind.NOT):
        lines.append(f"  {each.line}")
    return lines


def _document(each: Verdict, outcome: str) -> dict[str, Any]:
    row = each.row
    masker = masker_of_call(each.task, list(each.old.args), dict(each.old.kwargs))
    return {
        "name": each.old.name,
        "key": each.old.key,
        "verdict": str(each.kind),
        "outcome": outcome,
        "reasons": [mask_text(reason) for reason in each.reasons],
        "differs": each.differs,
        "old_task": each.old.task,
        "old_timing": each.old.written,
        "task": each.task or None,
        "args": masker.positional(list(each.old.args)),
        "kwargs": masker.keyword(dict(each.old.kwargs)),
        "cron": row.cron if row else None,
        "interval_seconds": row.interval_seconds if row else None,
        "zone": row.zone if row else None,
        "starts_at": row.starts_at if row else None,
        "ends_at": row.ends_at if row else None,
        "enabled": row.enabled if row else None,
        "missed": row.missed if row else None,
        "first": each.first.astimezone(UTC) if each.first else None,
        "line": each.line or None,
    }


def _pair(text: str) -> tuple[str, str]:
    """Read a name there and its name here, such as `shop.tasks.send=shop.jobs.send`."""
    old, equals, new = text.partition("=")
    if not old or not new or not equals:
        raise ArgumentTypeError(f"{text!r}: give OLD=NEW, such as mysite.tasks.send=shop.tasks.send.")
    return old, new


ARGUMENTS = (
    flag("--write", "write them; without it nothing is changed"),
    arg(
        "--map", action="append", dest="tasks", type=_pair, default=[], metavar="OLD=NEW",
        help="the task that is called OLD there is NEW here; may be given several times",
    ),
    flag("--disabled", "write them disabled"),
    option("--cutover", "MOMENT", "fire only what is due later than this moment (default: now)", moment),
)  # fmt: skip
DATABASE = option("--database", "ALIAS", "the database that has the old table (default: default)")
REDIS = option("--redis", "URL", "the Redis of rq (default: as RQ_QUEUES says)")
VERBS = tuple(
    Verb(partial(_import, read), name, text, [*ARGUMENTS, *more], has_backend=False)
    for name, text, read, more in (
        (
            "celery-beat",
            "the schedules of Celery's beat: of django-celery-beat, and of the settings",
            lambda options, cutover: celery_beat.read(options["database"] or "default", cutover),
            [DATABASE],
        ),
        (
            "q2",
            "the schedules of django-q2",
            lambda options, cutover: q2.read(options["database"] or "default"),
            [DATABASE],
        ),
        (
            "rq-scheduler",
            "the schedules of rq-scheduler and of rq's cron scheduler",
            lambda options, cutover: rq.read(options["redis"]),
            [REDIS],
        ),
        ("huey", "the periodic tasks of huey, from the project's source", lambda options, cutover: huey.read(), []),
    )
)
