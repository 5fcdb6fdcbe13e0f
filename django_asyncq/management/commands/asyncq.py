"""`manage.py asyncq <noun> <verb>`: operate tasks, queues, workers, schedules, gates.

It only finds the module of a noun in `management/commanding/`, and turns errors of the stores into sentences.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError

from ...core.names import visible
from ...exceptions import AsyncqError, BrokerUnavailable, DatabaseNotSetUp, GateUnavailable
from ...observe.inspector import Inspector
from ...storage.errors import STORE_ERRORS, as_not_set_up, concerns_one_row, one_line
from ...storage.routing import check_tables
from ..commanding.printing import Printer, Verb, add_verbs, usage_error
from ..reading import name_of_database

# The module of each has the same name, with "_" for "-". The help stands here, so that `--help` imports none of them.
NOUNS = {
    "tasks": "list, show, enqueue, run, retry, cancel, delete, pause and resume tasks",
    "workflows": "list, show, retry and cancel workflows",
    "queues": "list, show, pause, resume and purge queues",
    "workers": "list, drain and resume worker processes",
    "groups": "list the groups that wait to be aggregated",
    "schedules": "list, run, enable and disable schedules",
    "gates": "list, show, repair, set, pause and resume gates",
    "rates": "list and show rates of starts",
    "alerts": "look what is wrong by the limits of the settings, and send it",
    "health": "say whether tasks are being run, by the exit code too",
    "check-deploy": "say whether this code can run what waits, by the exit code too",
    "doctor": "read a project with another queue, and say what each use becomes here",
    "stats": "show the numbers of queues and gates in the database and Redis",
    "rebuild": "push every waiting task that Redis does not know; removes no task",
    "prune": "delete the rows of tasks that finished long ago",
    "bulk": "retry, cancel or delete every task that matches, in the background",
    "adopt": "give the Redis prefix to this database",
    "import": "say what becomes of another queue's schedules here, and write them",
}
# A keyword of Python names no module.
MODULES = {"import": "importing"}
# As a shell says it of a program that Ctrl-C has ended.
INTERRUPTED = 130
# Of JSON, which says itself what is wrong.
ANY_TEXT = ("positional", "named")
MAY_BE_EMPTY = ("reason", "note")
READING_NOUNS = ("check-deploy", "doctor", "health", "stats")
# What these write is one transaction.
ALL_OR_NOTHING = ("import",)
# Of whatever noun.
READING_VERBS = ("failures", "history", "list", "scale", "show", "unknown")
# Of these the first two find out themselves what is wrong, and the doctor needs no store.
WITHOUT_TABLES = ("alerts", "health", "doctor")


class Command(BaseCommand):
    """Operate tasks, queues, workers, schedules and gates."""

    help = "Show and operate tasks, queues, workers, schedules and gates; rebuild Redis from the database."

    # Those whose modules are imported. Python code may call any of them; a command line names the one it needs.
    wanted = frozenset(NOUNS)

    def run_from_argv(self, argv: list[str]) -> None:
        """Import only the modules of nouns that the command line names."""
        self.wanted = frozenset(NOUNS).intersection(argv[2:])
        if self.wanted.issubset(WITHOUT_TABLES):
            # Django's checks of JSON fields ask the database, which may be what is wrong, or not be there yet.
            self.requires_system_checks = []
        super().run_from_argv(argv)

    def add_arguments(self, parser: ArgumentParser) -> None:
        nouns = parser.add_subparsers(dest="noun", required=True, metavar="NOUN", title="nouns")
        for noun, text in NOUNS.items():
            of_noun = nouns.add_parser(noun, help=text, description=f"{text[0].upper()}{text[1:]}.")
            if noun in self.wanted:
                add_verbs(of_noun, _verbs_of(noun))

    def check(self, *args: Any, **options: Any) -> None:
        """Run the system checks; Django's own of JSON fields ask the database. Raises: CommandError."""
        try:
            super().check(*args, **options)
        except DatabaseError as error:
            raise _refusal(error, as_not_set_up(error)) from error

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the noun's verb. Raises: CommandError when a store is unreachable, or when the verb is refused."""
        try:
            self._run(options)
        except KeyboardInterrupt as error:
            stays = "" if _has_changed_nothing(options) else " Changes made so far stay."
            raise CommandError(f"Interrupted.{stays}", returncode=INTERRUPTED) from error
        except CommandError as error:
            # The texts of errors come from other programs too.
            raise CommandError(visible(str(error)), returncode=error.returncode) from error

    def _run(self, options: dict[str, Any]) -> None:
        as_json, yes = options.get("as_json", False), options.get("yes", False)
        printer = Printer(self.stdout, self.stderr, as_json=as_json, yes=yes)
        try:
            _check_texts(options)
            if options["noun"] not in WITHOUT_TABLES:
                # First, because without the tables nothing else that may be wrong matters.
                check_tables()
            found = _verbs_of(options["noun"])
            verb = found if isinstance(found, Verb) else next(each for each in found if each.name == options["verb"])
            verb.do(printer, Inspector(options["backend"] if verb.has_backend else None), options)
        except (BrokerUnavailable, GateUnavailable) as error:
            text = str(error).removesuffix(".")
            stays = "" if _has_changed_nothing(options) else " Changes made so far stay; run the command again."
            raise CommandError(f"{text}.{stays}") from error
        except AsyncqError as error:
            raise CommandError(str(error)) from error
        except STORE_ERRORS as error:
            raise _refusal(error, as_not_set_up(error)) from error


def _has_changed_nothing(options: dict[str, Any]) -> bool:
    """Return whether a command that is interrupted has changed nothing in either store."""
    is_read = options["noun"] in READING_NOUNS or options.get("verb") in READING_VERBS
    return is_read or bool(options.get("dry_run")) or options["noun"] in ALL_OR_NOTHING


def _refusal(error: Exception, not_set_up: DatabaseNotSetUp | None) -> CommandError:
    """Return what to say of an error of the database: one line, with the database and the remedy."""
    if not_set_up:
        return CommandError(str(not_set_up))
    if concerns_one_row(error):
        return CommandError(f"A row cannot be used: {one_line(error)}")
    text = one_line(error).removesuffix(".")
    return CommandError(
        f"The database is unreachable ({name_of_database()}): {text}. Start it, or correct DATABASES; then run the "
        "command again."
    )


def _check_texts(options: dict[str, Any]) -> None:
    """Refuse texts that no store can hold, and empty names: such as of a shell's variable that is not set.

    A filter without a value would choose every task. Raises: CommandError.
    """
    for name, value in options.items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or name in ANY_TEXT:
                continue
            if not text and name not in MAY_BE_EMPTY:
                raise usage_error(f"{name.replace('_', '-')} is empty: give a value, or leave it out.")
            if "\x00" in text or not _is_utf_8(text):
                raise usage_error(f"{name.replace('_', '-')} {visible(text)} is not valid: it must be text in UTF-8.")


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _verbs_of(noun: str) -> Verb | Sequence[Verb]:
    verbs: Verb | Sequence[Verb] = import_module(
        f"...commanding.{MODULES.get(noun, noun.replace('-', '_'))}", __name__
    ).VERBS
    return verbs
