"""`asyncq adopt`: give the Redis prefixes of the project to this database."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from typing import Any

from django.core.management.base import CommandError

from ...broker import Broker, prefix_owner
from ...broker.inspection import Inspection
from ...prefixes import one_alias_per_prefix, owned_prefixes
from ...storage import identity
from ..wording import counted
from .printing import Printer, add_json, add_yes


def add(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--new-identity", action="store_true", help="make this database, a copy, another one than its original"
    )
    add_yes(parser, "adopt")
    parser.add_argument("--force", action="store_true", help="adopt although workers of the other database run")
    add_json(parser)


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Ask, adopt, and print the owner of each prefix."""
    database = identity.ensure()
    if options["new_identity"]:
        _renew_identity(printer, database, options)
        return
    entries = _count_entries()
    found = {prefix: prefix_owner.note_supervisor(database, prefix=prefix) for prefix in owned_prefixes()}
    foreign = {prefix: each for prefix, each in found.items() if each.owner not in (None, database)}
    if not printer.as_json:
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
    if foreign and not options["yes"]:
        what = "the prefix" if len(foreign) == 1 else f"these {len(foreign)} prefixes"
        printer.ask(f"Give {what} to this database? [y/N] ", "adopt", "adopted")
    # Asked again within the script: a supervisor may have started since.
    replaces: prefix_owner.Replaces = "always" if options["force"] else "unused"
    for prefix in found:
        found[prefix] = prefix_owner.note_supervisor(database, prefix=prefix, may_take=True, replaces=replaces)
        if found[prefix].owner != database:
            raise CommandError(
                f"A supervisor of the other database has just started. The prefix {prefix!r} was not adopted."
            )
    _print_adopted(printer, database, found, entries)


def _print_adopted(
    printer: Printer, database: Any, found: dict[str, prefix_owner.Ownership], entries: Counter[str]
) -> None:
    if printer.as_json:
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
        return
    for prefix, each in found.items():
        if each.former in (None, database):
            printer.line(f"The Redis prefix {prefix!r} belongs to this database ({database}).")
    if any(each.former not in (None, database) for each in found.values()):
        printer.line("Adopted. Entries without a row in this database are archived in Redis, with a text.")


def _renew_identity(printer: Printer, database: Any, options: dict[str, Any]) -> None:
    if not options["yes"]:
        printer.ask(
            f"Give this database a new identity in place of {database}? Workers that run on it stop. [y/N] ",
            "give a new one",
            "changed",
        )
    new = identity.renew()
    if printer.as_json:
        printer.document({"database": str(new), "former_identity": str(database)})
        return
    printer.line(f'This database is {new} now, not {database}. Give it an ASYNCQ["KEY_PREFIX"] or a Redis of its own.')


def _count_entries() -> Counter[str]:
    """Return how many entries are under each prefix."""
    count = Counter[str]()
    for alias in one_alias_per_prefix():
        inspection = Inspection("worker", alias)
        for queue in Broker("worker", alias).queues():
            count[inspection.prefix] += sum(inspection.sizes(queue).values())
    return count
