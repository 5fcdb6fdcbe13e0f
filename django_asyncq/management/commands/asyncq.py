"""`manage.py asyncq`: show queues and gates, rebuild Redis from the rows, prune old rows, adopt a Redis prefix."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.core.management.base import BaseCommand, CommandError, OutputWrapper
from django.db.models import Q

from ... import conf
from ...broker import Broker, prefix_owner
from ...broker.inspection import Inspection
from ...exceptions import BrokerUnavailable, GateUnavailable
from ...faults import STORE_ERRORS, as_not_set_up, concerns_one_row, one_line
from ...maintenance.clock_check import clock_difference_seconds
from ...maintenance.inspector import gate_stats, queue_stats
from ...maintenance.pruner import Pruner, finished_long_ago
from ...maintenance.reconciler import Reconciler
from ...models import TaskRecord, TaskState
from ...prefixes import DEFAULT_ALIAS, one_alias_per_prefix, owned_prefixes
from ...storage import database_clock, identity
from ...storage.routing import rows_of
from ...storage.tables import check_tables
from ..banner import counted
from .runworkers import whole_number

STATES = {"succeeded": TaskState.SUCCEEDED, "failed": TaskState.FAILED}
TARGETS = ("pending", "scheduled", "retry")
# In a log, a line for each page would be too much.
SECONDS_PER_LINE = 5.0


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


class Command(BaseCommand):
    """Show the queues, rebuild Redis from the rows, delete old rows, adopt a Redis prefix."""

    help = "Show queues and gates, rebuild Redis from the database, delete tasks that finished long ago."

    def add_arguments(self, parser: ArgumentParser) -> None:
        commands = parser.add_subparsers(dest="action", required=True, metavar="rebuild | prune | stats | adopt")
        rebuild = commands.add_parser(
            "rebuild", help="push every waiting task that Redis does not know; removes no task"
        )
        prune = commands.add_parser("prune", help="delete the rows of tasks that finished long ago")
        stats = commands.add_parser("stats", help="show the numbers of queues and gates in the database and Redis")
        self._add_adopt(commands.add_parser("adopt", help="give the Redis prefix to this database"))
        for each in (rebuild, prune):
            each.add_argument("--dry-run", action="store_true", help="only count; change nothing")
        rebuild.add_argument("--yes", action="store_true", help="has no effect: a rebuild asks no question")
        prune.add_argument("--yes", action="store_true", help="delete without asking")
        prune.add_argument(
            "--older-than", type=whole_number(0), required=True, metavar="DAYS", help="finished more than DAYS days ago"
        )
        prune.add_argument("--state", choices=sorted(STATES), help="only tasks in this state (default: both)")
        for each in (rebuild, prune, stats):
            each.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")

    @staticmethod
    def _add_adopt(adopt: ArgumentParser) -> None:
        adopt.add_argument(
            "--new-identity", action="store_true", help="make this database, a copy, another one than its original"
        )
        adopt.add_argument("--yes", action="store_true", help="adopt without asking")
        adopt.add_argument("--force", action="store_true", help="adopt although workers of the other database run")
        adopt.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the sub-command. Raises: CommandError when a store is unreachable."""
        try:
            # First, because without the tables nothing else that may be wrong matters.
            check_tables()
            getattr(self, f"_{options['action']}")(options)
        except (BrokerUnavailable, GateUnavailable) as error:
            text = str(error).removesuffix(".")
            raise CommandError(f"{text}. Changes made so far stay; run the command again.") from error
        except STORE_ERRORS as error:
            if not_set_up := as_not_set_up(error):
                raise CommandError(str(not_set_up)) from error
            what = "A row cannot be used" if concerns_one_row(error) else "The database is unreachable"
            raise CommandError(f"{what}: {one_line(error)}") from error

    # --- rebuild

    def _rebuild(self, options: dict[str, Any]) -> None:
        broker = Broker("worker", DEFAULT_ALIAS)
        broker.ping()
        waiting = Q(state=TaskState.QUEUED) | Q(state=TaskState.FAILED, retry_at__isnull=False)
        progress = Progress(self.stderr, rows_of(TaskRecord).filter(waiting).count())
        begun_at = time.monotonic()
        rebuilt = Reconciler(broker, on_page=progress.add).rebuild(dry_run=options["dry_run"])
        seconds = time.monotonic() - begun_at
        progress.close()
        if options["as_json"]:
            queues = [
                {"alias": alias, "queue": queue, **{target: counts[target] for target in TARGETS}}
                for (alias, queue), counts in sorted(rebuilt.queues.items())
            ]
            gates = {name: drift._asdict() for name, drift in rebuilt.gates.items()}
            self._print_json({"dry_run": options["dry_run"], "rows": progress.done, "queues": queues, "gates": gates})
            return
        if rebuilt.queues:
            self._print_queues(
                ["alias", "queue", *TARGETS],
                [[*name, *(counts[target] for target in TARGETS)] for name, counts in sorted(rebuilt.queues.items())],
            )
        if rebuilt.gates:
            self._print_table(
                ["gate", "slots added", "slots removed"], [[name, *drift] for name, drift in rebuilt.gates.items()]
            )
        total = sum(counts.total() for counts in rebuilt.queues.values())
        done = f"{counted(total, 'task')} {'would be ' if options['dry_run'] else ''}pushed to Redis"
        self.stdout.write(f"{counted(progress.done, 'row')} checked in {seconds:.1f} s; {done}.")

    # --- prune

    def _prune(self, options: dict[str, Any]) -> None:
        states = [STATES[options["state"]]] if options["state"] else list(STATES.values())
        now, keep_for = database_clock.now(), timedelta(days=options["older_than"])
        condition = finished_long_ago(states, now, keep_for)
        found = {name: rows_of(TaskRecord).filter(condition, state=state).count() for name, state in STATES.items()}
        total = sum(found.values())
        what = f"{counted(total, 'task')} that finished more than {counted(options['older_than'], 'day')} ago"
        what += f" ({found['succeeded']:,} succeeded, {found['failed']:,} failed)"
        deleted = 0
        if total and not options["dry_run"]:
            if not options["yes"]:
                self._ask(f"Delete {what}? This cannot be undone. [y/N] ", "delete, or --dry-run to count", "deleted")
            deleted = self._delete(condition, total)
        if options["as_json"]:
            self._print_json({"dry_run": options["dry_run"], "found": found, "deleted": deleted})
        elif options["dry_run"]:
            self.stdout.write(f"{what} would be deleted.{self._kept(states, now, keep_for)}")
        else:
            rest = " The others are in use, or rows of the project refer to them." if deleted < total else ""
            self.stdout.write(f"{deleted:,} of {what} deleted.{rest}{self._kept(states, now, keep_for)}")

    def _kept(self, states: Sequence[TaskState], now: datetime, keep_for: timedelta) -> str:
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

    def _delete(self, condition: Any, total: int) -> int:
        broker = Broker("worker", DEFAULT_ALIAS)
        # Pinged first: failed tasks are also removed from asynq's archive in Redis.
        broker.ping()
        progress = Progress(self.stderr, total)
        for count in Pruner(broker).prune_matching(condition):
            progress.add(count)
        progress.close()
        return progress.done

    def _ask(self, question: str, to_do: str, done: str) -> None:
        if not sys.stdin.isatty():
            raise CommandError(f"There is no terminal to ask on: give --yes to {to_do}.")
        if input(question).strip().lower() not in ("y", "yes"):
            raise CommandError(f"Nothing was {done}.")

    # --- adopt

    def _adopt(self, options: dict[str, Any]) -> None:
        database = identity.ensure()
        if options["new_identity"]:
            self._renew_identity(database, options)
            return
        entries = self._count_entries()
        found = {prefix: prefix_owner.note_supervisor(database, prefix=prefix) for prefix in owned_prefixes()}
        foreign = {prefix: each for prefix, each in found.items() if each.owner not in (None, database)}
        if not options["as_json"]:
            for prefix, each in foreign.items():
                self.stdout.write(
                    f"The Redis prefix {prefix!r} belongs to another database ({each.owner}). This database is "
                    f"{database}. {counted(each.supervisors, 'supervisor')} of the other one running; "
                    f"{counted(entries[prefix], 'entry', 'entries')} in Redis."
                )
        if any(each.supervisors for each in foreign.values()) and not options["force"]:
            raise CommandError(
                "Workers of the other database are running, or were within the last 15 seconds. Stop them first, or "
                "give --force: they then exit by themselves. Nothing was adopted."
            )
        if foreign and not options["yes"]:
            what = "the prefix" if len(foreign) == 1 else f"these {len(foreign)} prefixes"
            self._ask(f"Give {what} to this database? [y/N] ", "adopt", "adopted")
        # Asked again within the script: a supervisor may have started since.
        replaces: prefix_owner.Replaces = "always" if options["force"] else "unused"
        for prefix in found:
            found[prefix] = prefix_owner.note_supervisor(database, prefix=prefix, may_take=True, replaces=replaces)
            if found[prefix].owner != database:
                raise CommandError(
                    f"A supervisor of the other database has just started. The prefix {prefix!r} was not adopted."
                )
        self._print_adopted(database, found, entries, options)

    def _print_adopted(
        self, database: Any, found: dict[str, prefix_owner.Ownership], entries: Counter[str], options: dict[str, Any]
    ) -> None:
        if options["as_json"]:
            prefixes = [
                {
                    "prefix": prefix,
                    "former_owner": str(each.former) if each.former else None,
                    "former_supervisors": each.supervisors,
                    "entries": entries[prefix],
                }
                for prefix, each in found.items()
            ]
            self._print_json({"database": str(database), "prefixes": prefixes})
            return
        for prefix, each in found.items():
            if each.former in (None, database):
                self.stdout.write(f"The Redis prefix {prefix!r} belongs to this database ({database}).")
        if any(each.former not in (None, database) for each in found.values()):
            self.stdout.write("Adopted. Entries without a row in this database are archived in Redis, with a text.")

    def _renew_identity(self, database: Any, options: dict[str, Any]) -> None:
        if not options["yes"]:
            self._ask(
                f"Give this database a new identity in place of {database}? Workers that run on it stop. [y/N] ",
                "give a new one",
                "changed",
            )
        new = identity.renew()
        if options["as_json"]:
            self._print_json({"database": str(new), "former_identity": str(database)})
            return
        self.stdout.write(
            f'This database is {new} now, not {database}. Give it an ASYNCQ["KEY_PREFIX"] or a Redis of its own.'
        )

    @staticmethod
    def _count_entries() -> Counter[str]:
        """Return how many entries are under each prefix."""
        count = Counter[str]()
        for alias in one_alias_per_prefix():
            inspection = Inspection("worker", alias)
            for queue in Broker("worker", alias).queues():
                count[inspection.prefix] += sum(inspection.sizes(queue).values())
        return count

    # --- stats

    def _stats(self, options: dict[str, Any]) -> None:
        queues, gates = queue_stats(Broker("worker", DEFAULT_ALIAS)), gate_stats()
        difference = clock_difference_seconds()
        if options["as_json"]:
            self._print_json(
                {
                    "queues": [each._asdict() for each in queues],
                    "gates": [each._asdict() for each in gates],
                    "clock_difference_seconds": round(difference, 3),
                }
            )
            return
        if queues:
            self._print_queues(_head(queues), queues)
        else:
            self.stdout.write("no queues")
        if gates:
            self._print_table(_head(gates), gates)
        else:
            self.stdout.write("no gates")
        self.stdout.write(f"The clocks of the database and of Redis differ by {abs(difference):.1f} s.\n")

    # --- printing

    def _print_queues(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table of queues, with the column of the alias only where a project has more than one."""
        if {alias for alias, *_ in rows} <= {DEFAULT_ALIAS}:
            head, rows = head[1:], [row[1:] for row in rows]
        self._print_table(head, rows)

    def _print_table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print columns, names aligned left and numbers right, then an empty line."""
        cells = [list(head), *([_cell(value) for value in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        are_names = [isinstance(value, str) for value in rows[0]]
        for row in cells:
            aligned = [
                cell.ljust(width) if is_name else cell.rjust(width)
                for cell, width, is_name in zip(row, widths, are_names, strict=True)
            ]
            self.stdout.write("  ".join(aligned).rstrip())
        self.stdout.write("")

    def _print_json(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, ensure_ascii=False))


def _head(rows: Sequence[NamedTuple]) -> list[str]:
    return [name.replace("_", " ") for name in rows[0]._fields]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
