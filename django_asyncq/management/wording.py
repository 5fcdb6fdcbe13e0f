"""Words that several commands print: numbers with their nouns, and which database is meant."""

from __future__ import annotations

from typing import Any

from django.db import connections

from ..models import TaskRecord
from ..storage.routing import writing_database


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
