"""Refuse to enqueue under a Redis prefix that belongs to another database, whose workers would find no row.

Redis and the database are asked once per process and prefix, at the first `enqueue`. They are asked again after a push
that failed, and when Redis no longer knows a queue, which a process notices within a minute. While the answer is not
known (Redis is unreachable, or no supervisor has taken the prefix yet) tasks are enqueued, and the next `enqueue` after
ASK_AGAIN_SECONDS asks again. So is a refusal, after REFUSED_SECONDS: a person may have run `asyncq adopt`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections

from ..broker import keys, prefix_owner
from ..exceptions import BrokerUnavailable, PrefixTaken
from ..faults import one_line
from ..guard import get_logger
from ..models import TaskRecord
from ..prefixes import prefix_of
from ..storage import identity
from ..storage.routing import transaction_of, writing_database

logger = get_logger("django_asyncq.lifecycle")

ASK_AGAIN_SECONDS = 60.0
REFUSED_SECONDS = 1.0

# Prefix → monotonic seconds before which nothing is asked.
_ask_from: dict[str, float] = {}
# Prefix → the identities of its owner and of this database, which differ.
_refused: dict[str, tuple[UUID, UUID]] = {}


def require_own_prefix(aliases: Iterable[str], *, may_ask: bool) -> None:
    """Check that no other database owns the prefix of one of these aliases, or KEY_PREFIX.

    may_ask: whether Redis may be asked now.
    Raises: PrefixTaken; BrokerUnavailable when that is not known, so the task can be enqueued.
    """
    now = time.monotonic()
    unreachable: BrokerUnavailable | None = None
    for prefix in dict.fromkeys([keys.prefix(), *map(prefix_of, aliases)]):
        if may_ask and unreachable is None and now >= _ask_from.get(prefix, 0.0):
            # First, so that no other thread asks too, or waits for the answer.
            _ask_from[prefix] = now + ASK_AGAIN_SECONDS
            try:
                _ask(prefix, now)
            except BrokerUnavailable as error:
                unreachable = error
        if prefix in _refused:
            owner, database = _refused[prefix]
            raise PrefixTaken(prefix=prefix, owner=owner, database=database)
    if unreachable is not None:
        raise unreachable


def forget() -> None:
    """Ask again at the next `enqueue`: the owner may be another one now."""
    _ask_from.clear()


def adopts_by_itself() -> bool:
    """Return whether a supervisor adopts a prefix that no other supervisor uses: while a project is developed.

    `rm db.sqlite3` and `migrate` make another database.
    """
    return bool(settings.DEBUG)


def _ask(prefix: str, now: float) -> None:
    """Ask both stores. What is refused stays refused until they say otherwise. Raises: BrokerUnavailable."""
    owner = prefix_owner.read_owner(prefix)
    try:
        database = _read_identity() if owner is not None else None
    except DatabaseError as error:
        # If it is more than a table that is missing, the INSERT reports it; so it does in a broken transaction.
        logger.debug("the identity of the database cannot be read: %s", one_line(error))
        return
    if owner is not None and database is not None and owner != database and not _will_adopt(prefix, database):
        _refused[prefix] = owner, database
        _ask_from[prefix] = now + REFUSED_SECONDS
        return
    _refused.pop(prefix, None)
    if owner is not None and owner == database:
        _ask_from[prefix] = math.inf


def _read_identity() -> UUID | None:
    """Read the identity of the database; an error does not break the caller's transaction. Raises: django.db.Error."""
    connection = connections[writing_database(TaskRecord)]
    with transaction_of(TaskRecord) if connection.in_atomic_block else nullcontext():
        return identity.read()


def _will_adopt(prefix: str, database: UUID) -> bool:
    """Return whether the next supervisor of this database will adopt a prefix. Raises: BrokerUnavailable."""
    return adopts_by_itself() and not prefix_owner.note_supervisor(database, prefix=prefix).supervisors
