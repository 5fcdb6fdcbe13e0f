"""The application of django-tasks-db's measures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import django
from django.apps import apps

if not apps.ready:
    django.setup()

import kinds
from django.db.transaction import atomic as transaction
from django.tasks import task


@task
def noop(n: int, s: str) -> None:
    """Do nothing. The worker looks a task up by its path, so each must stand in this module."""
    kinds.noop(n, s)


@task
def stamp(n: int) -> None:
    """Note when it began."""
    kinds.stamp(n)


@task
def nap(n: int) -> None:
    """Sleep 10 ms."""
    kinds.nap(n)


@task
def short(n: int) -> None:
    """Sleep 1 ms."""
    kinds.short(n)


@task
def long(n: int) -> None:
    """Sleep 1 s."""
    kinds.long(n)


TASKS: dict[str, Any] = {"noop": noop, "stamp": stamp, "nap": nap, "short": short, "long": long}


def enqueue(kind: str, number: int) -> None:
    """One task."""
    TASKS[kind].enqueue(**kinds.arguments(kind, number))


def fill(kind: str, numbers: Iterable[int]) -> None:
    """In one transaction: there is no bulk call."""
    with transaction():
        for number in numbers:
            enqueue(kind, number)
