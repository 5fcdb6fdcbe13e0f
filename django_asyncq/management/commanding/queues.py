"""`asyncq queues`: list, show, scale, pause, resume and purge queues."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from django.core.management.base import CommandError

from ...broker import Broker
from ...broker.clients import server_identity
from ...broker.inspection import STATES as ENTRY_STATES
from ...core.aliases import DEFAULT_ALIAS, prefix_of
from ...core.guard import attempt
from ...core.redaction import mask_text
from ...core.registry import every_task, load_task_modules
from ...exceptions import BrokerUnavailable
from ...observe.inspector import EntryInfo, Inspector, QueueInfo, RejectedInfo, TaskFilter
from ...observe.known_names import check_queue, used_queues
from ...observe.of_queues import MOST_MINUTES
from ...observe.scale import TARGET_SECONDS, read_scale
from ..reading import counted, duration, whole_number
from .printing import Printer, Verb, arg, flag, masked_entry, option, usage_error, yes
from .switching import switch, switch_verbs

COLUMNS = (
    "backend", "queue", "waiting", "queued", "running", "pending", "priority", "suspects", "active", "scheduled",
    "retry", "archived", "completed", "rejected", "oldest_waiting_seconds", "is_paused",
)  # fmt: skip
ENTRY_COLUMNS = ("state", "id", "type", "row", "at", "retried", "error")
# Which tasks a purge takes.
PURGED = {"waiting": ("queued", "retrying"), "failed": ("failed",), "rejected": ()}


def _list(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = inspector.queues.all()
    printer.document({"queues": found})
    printer.rows(found, COLUMNS, none="no queues")


def _show(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name = _checked(options)
    info = inspector.queues.get(name)
    shown: dict[str, Any] = asdict(info)
    if info.inbox or _takes_documents(info):
        shown["inbox_key"], shown["redis"] = Broker("worker", info.backend).keys(info.queue).inbox, server_identity()
    fair = inspector.queues.fair_keys(name)
    fair = fair if options["unmasked"] else [replace(each, key=mask_text(each.key)) for each in fair]
    shown["fair_keys"] = fair
    if options["rejected"]:
        rejected = inspector.queues.rejected(name)
        shown["rejected_items"] = rejected if options["unmasked"] else [_masked(each) for each in rejected]
    if options["entries"]:
        found = inspector.queues.entries(name, states=options["state"] or (), most=options["limit"])
        shown["entries"] = found if options["unmasked"] else [masked_entry(each) for each in found]
    elif options["state"]:
        raise usage_error("--state is of --entries: give that too.")
    printer.document(shown)
    items: list[RejectedInfo] = shown.pop("rejected_items", [])
    entries: list[EntryInfo] | None = shown.pop("entries", None)
    del shown["fair_keys"]
    printer.fields(shown)
    if fair:
        printer.line("")
        printer.rows(fair, ("key", "waiting"), none="")
    if entries is not None:
        printer.line("")
        printer.rows(entries, ENTRY_COLUMNS, none="no entries")
    for each in items:
        printer.line(f"\n{each.at:%Y-%m-%d %H:%M:%S} from the {each.source}, id {each.id or '-'}: {each.reason}")
        printer.line(each.data.decode("utf-8", "backslashreplace"))


def _checked(options: dict[str, Any]) -> str:
    """Return the name of the queue. Raises: InvalidOption for one that the alias does not have."""
    name: str = options["name"]
    check_queue(name, options["backend"] or DEFAULT_ALIAS)
    return name


def _takes_documents(info: QueueInfo) -> bool:
    """Return whether a task is declared with the inbox of a queue, as far as the project's tasks can be imported."""
    attempt(load_task_modules)
    prefix = prefix_of(info.backend)
    declared = [task for task in every_task() if task.inbox is True and task.queue_name == info.queue]
    return any(prefix_of(task.backend) == prefix for task in declared)


def _masked(each: RejectedInfo) -> RejectedInfo:
    return replace(each, data=mask_text(each.data.decode("utf-8", "backslashreplace")).encode())


def _history(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name = _checked(options)
    if options["minutes"]:
        minutes = inspector.queues.minutes(name, minutes=options["minutes"])
        printer.document({"queue": name, "minutes": minutes})
        printer.rows(minutes, ("at", "processed", "failed"), none="no minutes")
    else:
        days = inspector.queues.history(name, days=options["days"])
        printer.document({"queue": name, "days": days})
        printer.rows(days, ("day", "processed", "failed"), none="no days")


def _scale(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    found = read_scale(_checked(options), options["backend"] or DEFAULT_ALIAS, target_seconds=options["target"])
    printer.document(found)
    printer.fields(asdict(found))
    most, seconds = options["max_seconds"], found.seconds_to_empty
    if most is not None and (seconds is None or seconds > most):
        until = "does not get shorter" if seconds is None else f"is empty in {seconds:g} s, not within {most:g} s"
        raise CommandError(f"queue {found.queue} {until}; limited by: {found.limited_by}")


def _purge(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name, state = _checked(options), options["state"]
    # A queue is that of an alias: other aliases have their own of the same name.
    matching = TaskFilter(queue=name, backend=options["backend"] or DEFAULT_ALIAS, states=PURGED[state])
    count = inspector.tasks.count(matching) if PURGED[state] else inspector.queues.get(name).rejected
    what = counted(count, f"{state} task" if PURGED[state] else "rejected message")
    if count:
        printer.ask(f"Delete {what} of queue {name}? This cannot be undone.", "purge", "purged")
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
    printer.document({"queue": name, "state": state, "found": count, "deleted": deleted})
    printer.line(f"{deleted:,} of {what} of queue {name} deleted.")
    if count and not deleted:
        raise CommandError(
            "Nothing was deleted: the tasks have begun, Redis does not say whether they have, or rows of the project "
            "refer to them. They are asked to stop."
        )


def _switch(printer: Printer, inspector: Inspector, options: dict[str, Any]) -> None:
    name, alias, is_used = _checked(options), options["backend"] or DEFAULT_ALIAS, True
    # A queue can be paused without Redis.
    with suppress(BrokerUnavailable):
        is_used = options["verb"] == "resume" or name in used_queues(alias)
    # Where QUEUES allows every name, a misspelt one is no error. Asked before, because a pause makes the queue known.
    switch(printer, inspector.queues, "queue", options, more="" if is_used else "No task has been in this queue yet.")


NAME = arg("name", metavar="NAME", help="the queue")
SHOW = (
    NAME,
    flag("--rejected", "list what can be no task, with the reason"),
    flag("--entries", "list what Redis holds of it, one by one"),
    arg("--state", action="append", choices=list(ENTRY_STATES), help="of --entries; repeatable"),
    option("--limit", "N", "entries of a state (default: 50)", whole_number(1, 1000), 50),
    flag("--unmasked", "show secrets in what is listed too"),
)
DAYS = option("--days", "N", "how many (default: 7)", whole_number(1, 90), 7)
MINUTES = option("--minutes", "N", "minutes instead, of 8 days at most", whole_number(1, MOST_MINUTES))
TARGET = option("--target", "TIME", "be empty within (default: 1m)", duration, TARGET_SECONDS)
MOST = option("--max-seconds", "TIME", "exit with 1 if it takes longer, or does not end", duration)
STATE = arg("--state", choices=list(PURGED), default="waiting", help="what (default: waiting)")
SCALE_HELP = "show how long until a queue is empty, what holds it back, and how many slots it wants"
PURGE_HELP = "delete the waiting or failed tasks of a queue, or forget what was rejected"
VERBS = (
    Verb(_list, "list", "list the queues with what both stores hold of them"),
    Verb(_show, "show", "show all that is known of a queue", SHOW),
    Verb(_history, "history", "show how many tasks were processed and failed on each day", [NAME, DAYS, MINUTES]),
    Verb(_scale, "scale", SCALE_HELP, [NAME, TARGET, MOST]),
    Verb(_purge, "purge", PURGE_HELP, [NAME, STATE, yes("purge")]),
    *switch_verbs("queue", _switch, "let no worker take tasks from a queue", has_backend=True),
)
