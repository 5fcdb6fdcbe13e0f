"""`asyncq adopt`: give the Redis prefixes of the project to this database."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from django.core.management.base import CommandError

from ... import lifecycle
from ...broker import Broker, ownership
from ...broker.inspection import Inspection
from ...control import stop_bulk
from ...core.aliases import one_alias_per_prefix, owned_prefixes
from ...exceptions import BrokerUnavailable
from ...fleet.leader import in_words
from ...models import BulkAction, BulkState
from ...observe.inspector import Inspector
from ...storage import identity
from ...storage.routing import rows_of
from ..reading import counted
from .printing import Printer, Verb, either, flag, usage_error, yes

BY = "manage.py asyncq adopt"


def _adopt(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    if (options["cancel_waiting"] or options["keep_waiting"]) and not options["new_identity"]:
        raise usage_error("--cancel-waiting and --keep-waiting are for --new-identity.")
    database = identity.ensure()
    if options["new_identity"]:
        _renew_identity(printer, database, options)
        return
    entries = _count_entries()
    found = {prefix: ownership.note_supervisor(database, prefix=prefix) for prefix in owned_prefixes()}
    foreign = {prefix: each for prefix, each in found.items() if each.owner not in (None, database)}
    for prefix, each in foreign.items():
        printer.line(
            f"The Redis prefix {prefix!r} belongs to another database ({each.owner}). This database is "
            f"{database}. {counted(each.supervisors, 'supervisor')} of the other one running; "
            f"{counted(entries[prefix], 'entry', 'entries')} in Redis."
        )
    if any(each.supervisors for each in foreign.values()) and not options["force"]:
        raise CommandError(
            "Workers of the other database are running, or were within the last 15 seconds. Stop them first, or "
            "give --force: they then exit by themselves. Nothing was adopted."
        )
    if foreign:
        what = "the prefix" if len(foreign) == 1 else f"these {len(foreign)} prefixes"
        printer.ask(f"Give {what} to this database?", "adopt", "adopted")
    # Asked again within the script: a supervisor may have started since.
    replaces: ownership.Replaces = "always" if options["force"] else "unused"
    for prefix in found:
        found[prefix] = ownership.note_supervisor(database, prefix=prefix, may_take=True, replaces=replaces)
        if found[prefix].owner != database:
            raise CommandError(
                f"A supervisor of the other database has just started. The prefix {prefix!r} was not adopted."
            )
    prefixes = [
        {
            "prefix": prefix,
            "former_owner": str(each.former) if each.former else None,
            "former_supervisors": each.supervisors,
            "entries": entries[prefix],
        }
        for prefix, each in found.items()
    ]
    printer.document({"database": str(database), "prefixes": prefixes})
    for prefix, each in found.items():
        if each.former in (None, database):
            printer.line(f"The Redis prefix {prefix!r} belongs to this database ({database}).")
    if any(each.former not in (None, database) for each in found.values()):
        printer.line("Adopted. Entries without a row in this database are archived in Redis, with a text.")


def _renew_identity(printer: Printer, database: Any, options: dict[str, Any]) -> None:
    if not options["force"]:
        _refuse_where_workers_run(database)
    waiting = lifecycle.count_waiting()
    keeps = bool(options["keep_waiting"])
    question = f"Give this database a new identity in place of {database}? Workers that run on it stop."
    printer.ask(question, "give a new one", "changed")
    if waiting.total and not (printer.yes or keeps or options["cancel_waiting"]):
        question = f"{in_words(waiting)}: cancel them, or keep them, so that they run here too? [C/k] "
        keeps = printer.answer(question, "cancel them").lower() in ("k", "keep")
    # First what fires, then what waits, and the identity last: until then an interrupted command is simply repeated.
    identity.pause_schedules()
    running = list(rows_of(BulkAction).filter(state=BulkState.RUNNING))
    for action in running:
        stop_bulk(action)
    progress = printer.progress(waiting.total)
    for count in [] if keeps else lifecycle.close_copied(BY):
        progress.add(count)
    progress.close()
    new = identity.renew()
    printer.document(
        {
            "database": str(new),
            "former_identity": str(database),
            "cancelled": progress.done,
            "kept": waiting.total if keeps else 0,
            "stopped_bulk_actions": len(running),
            "schedules_paused": True,
        }
    )
    printer.lines(
        f"{counted(waiting.total, 'task')} kept: workers of this database run them."
        if keeps
        else f"{counted(progress.done, 'task')} cancelled.",
        f"{counted(len(running), 'bulk action')} stopped." if running else "",
        "All schedules are paused. To resume them: manage.py asyncq schedules resume --all",
        f'This database is {new} now, not {database}. Give it an ASYNCQ["KEY_PREFIX"] or a Redis of its own.',
    )


def _refuse_where_workers_run(database: Any) -> None:
    """Refuse on what may be the original. Raises: CommandError."""
    # The copy may have no Redis yet.
    with suppress(BrokerUnavailable):
        for prefix in owned_prefixes():
            if ownership.read_owner(prefix) == database and ownership.has_supervisor(prefix):
                raise CommandError(
                    f"Workers of this identity run at the Redis prefix {prefix!r}, or did within the last 15 seconds. "
                    "Either this database is the original, or the copy's settings still name the original's Redis: "
                    "give the copy one of its own first. If they are the copy's own workers, stop them, or give "
                    "--force: they then exit by themselves. Nothing was changed."
                )


def _count_entries() -> Counter[str]:
    """Return how many entries are under each prefix."""
    count = Counter[str]()
    for alias in one_alias_per_prefix():
        inspection = Inspection("worker", alias)
        for queue in Broker("worker", alias).queues():
            count[inspection.prefix] += sum(inspection.sizes(queue).values())
    return count


NEW = flag("--new-identity", "make this database, a copy, another one than its original")
WAITING = either(
    flag("--cancel-waiting", "with --new-identity: cancel the tasks that wait in the copy (default)"),
    flag("--keep-waiting", "with --new-identity: keep them, so that they run here too"),
)
FORCE = flag("--force", "adopt although workers of the other database run")
VERBS = Verb(_adopt, arguments=[NEW, WAITING, yes("adopt"), FORCE], has_backend=False)
