"""`asyncq prune`: delete the rows of tasks that finished long ago."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ... import conf
from ...broker import Broker
from ...core.aliases import DEFAULT_ALIAS
from ...fleet.pruner import Pruner, finished_long_ago
from ...models import TaskRecord, TaskState
from ...observe.inspector import Inspector
from ...storage import database_clock
from ...storage.routing import rows_of
from ..reading import MOST_DAYS, counted, whole_number
from .printing import DRY_RUN, Printer, Verb, arg, option, yes

STATES = {"succeeded": TaskState.SUCCEEDED, "failed": TaskState.FAILED}


def _prune(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    states = [STATES[options["state"]]] if options["state"] else list(STATES.values())
    now, keep_for = database_clock.now(), timedelta(days=options["older_than"])
    condition = finished_long_ago(states, now, keep_for)
    found = {name: rows_of(TaskRecord).filter(condition, state=state).count() for name, state in STATES.items()}
    total = sum(found.values())
    what = f"{counted(total, 'task')} that finished more than {counted(options['older_than'], 'day')} ago"
    what += f" ({found['succeeded']:,} succeeded, {found['failed']:,} failed)"
    deleted = 0
    if total and not options["dry_run"]:
        printer.ask(f"Delete {what}? This cannot be undone.", "delete, or --dry-run to count", "deleted")
        deleted = _delete(printer, condition, total)
    printer.document({"dry_run": options["dry_run"], "found": found, "deleted": deleted})
    if options["dry_run"]:
        printer.line(f"{what} would be deleted.{_kept(states, now, keep_for)}")
    else:
        rest = " The others are in use, or rows of the project refer to them." if deleted < total else ""
        printer.line(f"{deleted:,} of {what} deleted.{rest}{_kept(states, now, keep_for)}")


def _kept(states: Sequence[TaskState], now: datetime, keep_for: timedelta) -> str:
    """Return a sentence about the tasks that finished long enough ago but are in use for two leases; or ""."""
    lease = conf.current().lease_seconds
    if keep_for.total_seconds() >= 2 * lease:
        return ""
    # No retry is due: a task that waits for one has not finished.
    finished = rows_of(TaskRecord).filter(state__in=states, retry_at=None, finished_at__lte=now - keep_for)
    count = finished.filter(finished_at__gt=now - timedelta(seconds=2 * lease)).count()
    if not count:
        return ""
    return f" {counted(count, 'task')} stayed that finished within the last two leases ({2 * lease} s)."


def _delete(printer: Printer, condition: Any, total: int) -> int:
    broker = Broker("worker", DEFAULT_ALIAS)
    # Pinged first: failed tasks are also removed from asynq's archive in Redis.
    broker.ping()
    progress = printer.progress(total)
    for count in Pruner(broker).prune_matching(condition):
        progress.add(count)
    progress.close()
    return progress.done


DAYS = whole_number(0, MOST_DAYS)
AGE = option("--older-than", "DAYS", "finished more than DAYS days ago", DAYS, required=True)
STATE = arg("--state", choices=sorted(STATES), help="only tasks in this state (default: both)")
VERBS = Verb(_prune, arguments=[DRY_RUN, yes("delete"), AGE, STATE], has_backend=False)
