"""`asyncq alerts check`: look what is wrong with the fleet, and say it; for cron on another host."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError

from ... import conf
from ...core.policies import setting_faults
from ...observe.alerts import Alerter
from ...observe.inspector import Inspector
from ...storage.errors import as_not_set_up
from ...storage.routing import check_tables
from ..reading import counted
from .printing import Printer, Verb, flag


def _check(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    """Look, and send if asked to. Raises: CommandError when anything is wrong and not sent."""
    for fault in setting_faults(conf.current().alerts):
        raise CommandError(f"ASYNCQ['ALERTS']{fault.text}. {fault.hint}")
    try:
        check_tables()
    except DatabaseError as error:
        # A database that is unreachable is what the look finds.
        if not_set_up := as_not_set_up(error):
            raise not_set_up from error
    alerter, sends = Alerter(), options["send"]
    if sends and not alerter.has_listeners:
        raise CommandError("ASYNCQ['ALERTS'] has neither 'mail' nor 'webhook', so there is nobody to send to: set one.")
    look = alerter.looker.look()
    # Nothing can note that the database is unreachable, so this command would send it at every call.
    failed = alerter.say(look) if sends and not look.database else []
    problems = list(look.problems.values())
    printer.document({"alerts": [each._asdict() for each in problems], "not_sent": failed})
    printer.lines(*([f"{each.text}; see: {each.command}" for each in problems] or ["no alerts"]))
    if failed:
        raise CommandError("; ".join(f"not sent by {text}" for text in failed))
    if sends and look.database:
        raise CommandError(f"{look.database.text}, so nothing is sent")
    # What is sent is no failure of the command: cron would send its own mail about it, each time.
    if problems and not sends:
        raise CommandError(counted(len(problems), "alert"))


SEND = flag("--send", "send what is new and what is over, as the leader does")
VERBS = (Verb(_check, "check", "look what is wrong, and say it by the exit code", [SEND], has_backend=False),)
