"""What is measured: django_asyncq and its peers, one module each."""

from __future__ import annotations

from .base import MEASURES, Peer
from .celery import Celery, CeleryWithResults
from .django_asyncq import DjangoAsyncq
from .django_tasks_db import DjangoTasksDb
from .dramatiq import Dramatiq
from .huey import Huey
from .procrastinate import Procrastinate
from .taskiq import Taskiq

__all__ = ["ALL", "MEASURES", "OURS", "Peer"]

OURS = DjangoAsyncq.name
ALL: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        DjangoAsyncq(),
        CeleryWithResults(),
        Celery(),
        DjangoTasksDb(),
        Procrastinate(),
        Dramatiq(),
        Huey(),
        Taskiq(),
    )
}
