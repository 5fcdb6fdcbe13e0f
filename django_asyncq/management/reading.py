"""Read the values of options on the command line, and say what is wrong with them."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.management.base import CommandError
from django.db import connections
from django.utils import timezone

from .. import __version__, conf
from ..broker.clients import server_identity
from ..core import compat
from ..core.aliases import prefix_of, uses_redis, written_aliases
from ..models import TaskRecord
from ..storage.routing import writing_database
from ..worker.options import WorkerOptions

# Of an INTEGER in all databases.
LARGEST = 2**31 - 1
# Before that no task was enqueued, and after it no database has a time.
MOST_DAYS = 100_000
SECONDS_OF_UNIT = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


def whole_number(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Return a function that reads whole numbers between two bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ArgumentTypeError(f"{text!r}: give a whole number of at least {least}.")
        if value > most:
            raise ArgumentTypeError(f"{text!r}: give a whole number of at most {most:,}.")
        return value

    return read


def whole_id(text: str) -> UUID:
    """Read an id, such as `0198c5b1-7f3a-7000-8000-0123456789ab`."""
    try:
        return UUID(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: give a whole id, as `asyncq workflows list` shows it.") from None


def duration(text: str) -> float:
    """Read seconds: `90`, `90s`, `5m`, `2h` or `1d`; with fractions."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", text)
    if found is None:
        raise ArgumentTypeError(f"{text!r}: give a duration such as 90s, 5m, 2h or 1d.")
    return float(found[1]) * SECONDS_OF_UNIT[found[2]]


def moment(text: str) -> datetime:
    """Read a time in ISO 8601, such as `2026-11-26T18:00+01:00`; without an offset it is in the project's time zone."""
    try:
        found = datetime.fromisoformat(text)
        return found if timezone.is_aware(found) else timezone.make_aware(found)
    except (ValueError, OverflowError) as error:
        raise ArgumentTypeError(f"{text!r}: give a time such as 2026-11-26T18:00 or 2026-11-26T18:00+01:00.") from error


def moment_or_ago(text: str) -> datetime | timedelta:
    """Read a time in ISO 8601, or how long ago it was, such as `2h`: at most 100,000 days.

    The clock is that of the database, which is not asked here: it may be unreachable.
    """
    if not re.fullmatch(r"[0-9.]+[smhd]?", text):
        return moment(text)
    return timedelta(seconds=min(duration(text), MOST_DAYS * 86_400))


def json_of(kind: type[list[Any]] | type[dict[str, Any]]) -> Callable[[str], Any]:
    """Return a function that reads JSON of one type, a list or an object."""

    def read(text: str) -> Any:
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ArgumentTypeError("it is nested too deeply.") from error
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is not JSON: {error}.") from error
        if not isinstance(found, kind):
            raise ArgumentTypeError(f"{text!r}: give a JSON {'list' if kind is list else 'object'}.")
        return found

    return read


def header(text: str) -> tuple[str, str]:
    """Read a header such as `trace=abc`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"{text!r}: give a header such as trace=abc.")
    return key, value


# --- Words that several commands print: numbers with their nouns, and which database is meant.


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun in the singular or plural: "1 task", "2 tasks". plural: default: with an "s"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def name_of_database() -> str:
    """Return the kind, the alias, the name and the host of the database that has the rows. Connects to nothing."""
    alias = writing_database(TaskRecord)
    connection: Any = connections[alias]
    written = connection.settings_dict
    place = ":".join(str(written[key]) for key in ("HOST", "PORT") if written.get(key))
    name = f"{alias!r}: {written.get('NAME') or '(the default of its server)'}"
    return f"{connection.vendor} {name}" + (f" at {place}" if place else "")


# --- Choose the alias in TASKS, and its queues, that `runworkers` runs; say which there are when the choice is wrong.

EXAMPLE = 'TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"}}'


def chosen_backend(alias: str) -> Any:
    """Return the backend of an alias. Raises: CommandError with the aliases that can be run."""
    if alias not in _written():
        raise CommandError(f"TASKS has no alias {alias!r}. {_remedy()}")
    try:
        backend: Any = compat.task_backends[alias]
    except Exception as error:
        raise CommandError(f"TASKS[{alias!r}] cannot be used: {error}") from error
    kind = type(backend).__qualname__
    if not hasattr(backend, "enqueue_many"):
        raise CommandError(f"TASKS[{alias!r}] has the backend {kind}, whose tasks runworkers does not run. {_remedy()}")
    if not uses_redis(alias):
        raise CommandError(
            f"TASKS[{alias!r}] is a {kind}, whose tasks are not in Redis: run them with "
            f"django_asyncq.testing.run_tasks(backend={alias!r}), or write "
            f"'BACKEND': 'django_asyncq.backend.AsyncqBackend' to have workers run them"
        )
    return backend


def check_queues(backend: Any, names: Collection[str]) -> None:
    """Refuse queues that the alias does not have. Raises: CommandError with the queues there are."""
    unknown = sorted(set(names) - set(backend.queues)) if backend.queues else []
    if unknown:
        raise CommandError(
            f"--queues names {', '.join(map(repr, unknown))}, and TASKS[{backend.alias!r}]['QUEUES'] has only "
            f"{', '.join(map(repr, sorted(backend.queues)))}. Correct the name, or add it to QUEUES."
        )


def check_queue_slots(queue_slots: Mapping[str, int], concurrency: int) -> None:
    """Refuse a queue with more slots than each process has. Raises: CommandError with the remedy."""
    for queue, slots in queue_slots.items():
        if slots > concurrency:
            raise CommandError(
                f"--queues gives the queue {queue!r} {counted(slots, 'slot')}, and each process has only "
                f"{concurrency}. Write {queue}:{concurrency} or less, or give --concurrency {slots} or more."
            )


def _remedy() -> str:
    usable = [alias for alias in sorted(_written()) if _can_be_run(alias)]
    if not usable:
        return f"No alias there has the backend of django_asyncq. Write {EXAMPLE}."
    return f"Give one that runworkers can run: {', '.join(f'--backend {alias}' for alias in usable)}."


def _can_be_run(alias: str) -> bool:
    try:
        backend: Any = compat.task_backends[alias]
    except Exception:  # noqa: BLE001 - a backend of the project may raise anything
        return False
    return hasattr(backend, "enqueue_many") and uses_redis(alias)


def _written() -> dict[str, Any]:
    # Without the setting, Django has one alias with its immediate backend.
    return written_aliases() if hasattr(settings, "TASKS") else {compat.DEFAULT_TASK_BACKEND_ALIAS: {}}


# --- What `runworkers` prints when it starts: where its tasks come from, and how many run at once. No secrets.


def banner(
    options: WorkerOptions, *, processes: int, single_instance: bool | None, names: Sequence[str], with_names: bool
) -> str:
    """Return the text. names: of the registered tasks. with_names: whether to list them, besides their number."""
    settings = conf.current()
    each = " with " if processes == 1 else ", each with "
    slots = counted(processes, "process", "processes") + each + counted(options.concurrency, "slot")
    is_single = settings.single_instance_mode if single_instance is None else single_instance
    parts = {
        "queues": _queues(options),
        "redis": f"{server_identity()}, keys begin with {prefix_of(options.backend)}:",
        "database": name_of_database(),
        "workers": slots,
        "tasks": f"{counted(len(names), 'task')} registered",
        "mode": "single instance (one host)" if is_single else "multi instance (one host or several)",
    }
    lines = [f"django_asyncq {__version__} runs the tasks of TASKS[{options.backend!r}]"]
    lines += [f"  {name:<9}{text}" for name, text in parts.items()]
    if with_names:
        lines += [f"    {name}" for name in names]
    return "\n".join(lines)


def _queues(options: WorkerOptions) -> str:
    if not options.queues:
        return "all that there are"
    limits = {name: f":{slots}" for name, slots in options.queue_slots.items()}
    weights = ", ".join(f"{name}={weight}{limits.get(name, '')}" for name, weight in options.queues.items())
    return f"{weights} (strict: the highest weight first)" if options.strict else weights
