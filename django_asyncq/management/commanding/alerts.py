"""`asyncq alerts`: look what is wrong by the limits of ASYNCQ["ALERTS"], and send it; for cron on another host."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError

from ... import conf
from ...alerts.alerter import Alerter
from ...alerts.local_notes import LocalNotes, file_of_notes
from ...alerts.message import finding_document, finding_line
from ...definitions.alert_settings import setting_faults
from ...faults import as_not_set_up
from ...storage.tables import check_tables
from ..wording import counted
from .printing import Printer, add_verb, verbs_of


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    verbs = verbs_of(parser)
    check = add_verb(verbs, "check", "look what is wrong, and say it by the exit code", backend=False)
    check.add_argument("--send", action="store_true", help="send what is new and what is over, as the leader does")
    add_verb(verbs, "test", "send a message by mail and to the webhook that nothing is wrong", backend=False)


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Do what the verb says. Raises: CommandError when anything is wrong and not sent."""
    for fault in setting_faults(conf.current().alerts):
        raise CommandError(f"ASYNCQ['ALERTS']{fault.text}. {fault.hint}")
    try:
        check_tables()
    except DatabaseError as error:
        # A database that is unreachable is what the look finds.
        if not_set_up := as_not_set_up(error):
            raise not_set_up from error
    # Between two calls only a file knows that the database was unreachable before.
    sends = options["verb"] == "test" or options["send"]
    alerter = Alerter(local=LocalNotes(file_of_notes() if sends else None))
    if sends and not alerter.channels:
        raise CommandError("ASYNCQ['ALERTS'] has neither 'mail' nor 'webhook', so there is nobody to send to: set one.")
    if options["verb"] == "test":
        _test(printer, alerter)
    else:
        _check(printer, alerter, sends=sends)


def _check(printer: Printer, alerter: Alerter, *, sends: bool) -> None:
    findings = alerter.looker.look()
    alerts = findings.alerts()
    failed = alerter.send(findings) if sends else []
    if printer.as_json:
        printer.document({"alerts": [finding_document(each, each.since) for each in alerts], "not_sent": failed})
    else:
        for each in alerts:
            printer.line(finding_line(each, each.since))
        if not alerts:
            printer.line("no alerts")
    _raise_for(failed)
    # What is sent is no failure of the command: cron would send its own mail about it, each time.
    if alerts and not sends:
        raise CommandError(counted(len(alerts), "alert"))


def _raise_for(failed: list[str]) -> None:
    if failed:
        raise CommandError("; ".join(f"not sent by {text}" for text in failed))


def _test(printer: Printer, alerter: Alerter) -> None:
    failed = alerter.send_test()
    sent = [each.sender.name for each in alerter.channels]
    if printer.as_json:
        printer.document({"channels": sent, "not_sent": failed})
    _raise_for(failed)
    if not printer.as_json:
        printer.line(f"Sent by {' and by '.join(sent)}.")
