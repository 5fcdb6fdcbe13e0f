"""`asyncq queues`: list, show, scale, pause, resume and purge queues."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from django.core.management.base import CommandError

from ...broker import Broker
from ...broker.clients import server_identity
from ...broker.queue_reading import STATES as ENTRY_STATES
from ...exceptions import BrokerUnavailable
from ...guard import attempt
from ...inspector import EntryInfo, Inspector, QueueInfo, RejectedInfo, TaskFilter
from ...inspector.known_names import check_queue, used_queues
from ...inspector.of_queues import MOST_MINUTES
from ...monitoring.scale import TARGET_SECONDS, read_scale
from ...prefixes import DEFAULT_ALIAS, prefix_of
from ...redaction import mask_text
from ...registry import every_task, load_task_modules
from ..reading import duration, whole_number
from ..wording import counted
from .printing import Printer, add_verb, add_yes, usage_error, verbs_of
from .switching import add_switch, switch

COLUMNS = (
    "backend", "queue", "queued", "running", "pending", "priority", "suspects", "active", "scheduled", "retry",
    "archived", "completed", "rejected", "oldest_waiting_seconds", "is_paused",
)  # fmt: skip
ENTRY_COLUMNS = ("state", "id", "type", "row", "at", "retried", "error")
# Which tasks a purge takes.
PURGED = {"waiting": ("queued", "retrying"), "failed": ("failed",), "rejected": ()}


def add(parser: ArgumentParser) -> None:
    """Add the verbs."""
    verbs = verbs_of(parser)
    add_verb(verbs, "list", "list the queues with what both stores hold of them")
    for name, text in (
        ("show", "show all that is known of a queue"),
        ("history", "show how many tasks were processed and failed on each day"),
        ("scale", "show how long until a queue is empty, what holds it back, and how many slots it wants"),
        ("purge", "delete the waiting or failed tasks of a queue, or forget what was rejected"),
    ):
        verb = add_verb(verbs, name, text)
        verb.add_argument("name", metavar="NAME", help="the queue")
        if name == "show":
            verb.add_argument("--rejected", action="store_true", help="list what can be no task, with the reason")
            verb.add_argument("--entries", action="store_true", help="list what Redis holds of it, one by one")
            verb.add_argument("--state", action="append", choices=list(ENTRY_STATES), help="of --entries; repeatable")
            verb.add_argument(
                "--limit", type=whole_number(1, 1000), default=50, metavar="N", help="entries of a state (default: 50)"
            )
            verb.add_argument("--unmasked", action="store_true", help="show secrets in what is listed too")
        elif name == "history":
            verb.add_argument("--days", type=whole_number(1, 90), default=7, metavar="N", help="how many (default: 7)")
            verb.add_argument(
                "--minutes", type=whole_number(1, MOST_MINUTES), metavar="N", help="minutes instead, of 8 days at most"
            )
        elif name == "scale":
            verb.add_argument(
                "--target", type=duration, default=TARGET_SECONDS, metavar="TIME", help="be empty within (default: 1m)"
            )
            verb.add_argument(
                "--max-seconds", type=duration, metavar="TIME", help="exit with 1 if it takes longer, or does not end"
            )
        else:
            verb.add_argument("--state", choices=list(PURGED), default="waiting", help="what (default: waiting)")
            add_yes(verb, "purge")
    add_switch(verbs, "queue", backend=True, does="let no worker take tasks from a queue")


def run(printer: Printer, options: dict[str, Any]) -> None:
    """Do what the verb says. Raises: InvalidOption for a queue that the alias does not have."""
    if options["verb"] != "list":
        check_queue(options["name"], options["backend"] or DEFAULT_ALIAS)
    VERBS[options["verb"]](printer, Inspector(options["backend"]), options)


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = inspector.queues.all()
    if printer.as_json:
        printer.document({"queues": found})
    else:
        printer.rows(found, COLUMNS, none="no queues")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    info = inspector.queues.get(options["name"])
    shown: dict[str, Any] = asdict(info)
    if info.inbox or _takes_documents(info):
        shown["inbox_key"], shown["redis"] = Broker("worker", info.backend).keys(info.queue).inbox, server_identity()
    if options["rejected"]:
        rejected = inspector.queues.rejected(options["name"])
        shown["rejected_items"] = rejected if options["unmasked"] else [_masked(each) for each in rejected]
    if options["entries"]:
        found = inspector.queues.entries(options["name"], states=options["state"] or (), most=options["limit"])
        shown["entries"] = found if options["unmasked"] else [_masked_entry(each) for each in found]
    elif options["state"]:
        raise usage_error("--state is of --entries: give that too.")
    if printer.as_json:
        printer.document(shown)
        return
    items: list[RejectedInfo] = shown.pop("rejected_items", [])
    entries: list[EntryInfo] | None = shown.pop("entries", None)
    printer.fields(shown)
    if entries is not None:
        printer.line("")
        printer.rows(entries, ENTRY_COLUMNS, none="no entries")
    for each in items:
        printer.line(f"\n{each.at:%Y-%m-%d %H:%M:%S} from the {each.source}, id {each.id or '-'}: {each.reason}")
        printer.line(each.data.decode("utf-8", "backslashreplace"))


def _takes_documents(info: QueueInfo) -> bool:
    """Return whether a task is declared with the inbox of a queue, as far as the project's tasks can be imported."""
    attempt(load_task_modules)
    prefix = prefix_of(info.backend)
    return any(
        task.inbox and task.queue_name == info.queue and prefix_of(task.backend) == prefix for task in every_task()
    )


def _masked(each: RejectedInfo) -> RejectedInfo:
    return replace(each, data=mask_text(each.data.decode("utf-8", "backslashreplace")).encode())


def _masked_entry(each: EntryInfo) -> EntryInfo:
    payload = mask_text(each.payload.decode("utf-8", "backslashreplace")).encode()
    return replace(each, payload=payload, error=mask_text(each.error))


def _history(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    if options["minutes"]:
        minutes = inspector.queues.minutes(options["name"], minutes=options["minutes"])
        if printer.as_json:
            printer.document({"queue": options["name"], "minutes": minutes})
        else:
            printer.rows(minutes, ("at", "processed", "failed"), none="no minutes")
        return
    days = inspector.queues.history(options["name"], days=options["days"])
    if printer.as_json:
        printer.document({"queue": options["name"], "days": days})
    else:
        printer.rows(days, ("day", "processed", "failed"), none="no days")


def _scale(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = read_scale(options["name"], options["backend"] or DEFAULT_ALIAS, target_seconds=options["target"])
    if printer.as_json:
        printer.document(found)
    else:
        printer.fields(asdict(found))
    most, seconds = options["max_seconds"], found.seconds_to_empty
    if most is not None and (seconds is None or seconds > most):
        until = "does not get shorter" if seconds is None else f"is empty in {seconds:g} s, not within {most:g} s"
        raise CommandError(f"queue {found.queue} {until}; limited by: {found.limited_by}")


def _purge(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name, state = options["name"], options["state"]
    # A queue is that of an alias: other aliases have their own of the same name.
    matching = TaskFilter(queue=name, backend=options["backend"] or DEFAULT_ALIAS, states=PURGED[state])
    count = inspector.tasks.count(matching) if PURGED[state] else inspector.queues.get(name).rejected
    what = counted(count, f"{state} task" if PURGED[state] else "rejected message")
    if count and not options["yes"]:
        printer.ask(f"Delete {what} of queue {name}? This cannot be undone. [y/N] ", "purge", "purged")
    deleted = 0
    if count and PURGED[state]:
        progress = printer.progress(count)
        change = inspector.tasks.discard if state == "waiting" else inspector.tasks.delete
        for ids in inspector.tasks.ids(matching):
            deleted += len(change(ids).done)
            progress.add(len(ids))
        progress.close()
    elif count:
        deleted = inspector.queues.forget_rejected(name)
    if printer.as_json:
        printer.document({"queue": name, "state": state, "found": count, "deleted": deleted})
    else:
        printer.line(f"{deleted:,} of {what} of queue {name} deleted.")
    if count and not deleted:
        raise CommandError("Nothing was deleted: the tasks have begun, or rows of the project refer to them.")


def _switch(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    # Where QUEUES allows every name, a misspelt one is no error. Asked before, because a pause makes the queue known.
    more = "" if options["verb"] == "resume" or _is_used(options) else "No task has been in this queue yet."
    switch(printer, inspector.queues, "queue", options, more=more)


def _is_used(options: dict[str, Any]) -> bool:
    try:
        return options["name"] in used_queues(options["backend"] or DEFAULT_ALIAS)
    except BrokerUnavailable:
        # A queue can be paused without Redis.
        return True


VERBS: dict[str, Callable[[Printer, Inspector, dict[str, Any]], None]] = {
    "list": _list,
    "show": _show,
    "history": _history,
    "scale": _scale,
    "purge": _purge,
    "pause": _switch,
    "resume": _switch,
}
