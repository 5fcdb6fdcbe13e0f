"""The application of django_asyncq's measures; a Django app, so that `tasks.py` is found as in any project."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kinds

tasks: Any
settle: Any
transaction: Any


def open() -> None:
    """Set Django up."""
    import django

    django.setup()
    global settle, tasks, transaction
    from django.db.transaction import atomic as transaction

    from django_asyncq.lifecycle import flush_pushes as settle

    from . import tasks


def enqueue(kind: str, number: int) -> None:
    """One task."""
    tasks.BY_KIND[kind].enqueue(**kinds.arguments(kind, number))


def enqueue_many(kind: str, numbers: Iterable[int]) -> None:
    """Many tasks by one call."""
    task: Any = tasks.BY_KIND[kind]
    task.enqueue_many([kinds.arguments(kind, number) for number in numbers])
