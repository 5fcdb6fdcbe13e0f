"""Fencing tokens: each leadership term has a higher number, so that writes of an older term are refused.

Redis may forget a lock, and a clock may stand still, but the number of the latest term is in the database. It is in the
database that `LockTerm` is written to, and protects writes to that database only.
Source: Kleppmann, How to do distributed locking (fencing tokens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction
from django.db.models import F
from django.db.transaction import TransactionManagementError

from ..exceptions import LockLost
from ..models import LockTerm
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of, writing_database

MOST_CHARACTERS = 200


def database() -> str:
    """Return the alias of the database that holds the terms."""
    return writing_database(LockTerm)


def begin(name: str, holder: str) -> int:
    """Begin a new term of a lock, which replaces the older one; return its number.

    Waits for a transaction that has fenced the older term. holder: text for people, such as host and pid.
    Raises: RuntimeError inside a transaction, because a number that is rolled back would be used twice.
    """
    rows = rows_of(LockTerm)
    name, holder = _row_name(name), holder[:MOST_CHARACTERS]
    while True:
        begun_at = database_clock.now(database())
        # The first statement is a write: SQLite cannot upgrade a read transaction while others write.
        with transaction_of(LockTerm, durable=True):
            if rows.filter(name=name).update(number=F("number") + 1, holder=holder, begun_at=begun_at):
                return rows.values_list("number", flat=True).get(name=name)
        # In a transaction of its own: on MySQL, two refused inserts would deadlock over the row.
        rows.bulk_create([LockTerm(name=name)], ignore_conflicts=True)


def fence(name: str, number: int) -> None:
    """Check that a term is the latest, and make newer terms wait until the transaction finishes.

    Raises: LockLost when it is not; TransactionManagementError outside a transaction.
    """
    if not transaction.get_connection(database()).in_atomic_block:
        raise TransactionManagementError("a term can only be fenced inside transaction.atomic()")
    # An update that changes nothing locks the row on every database; select_for_update has no effect on SQLite.
    rows = rows_of(LockTerm).filter(name=_row_name(name), number=number)
    if not rows.update(holder=F("holder")):
        raise LockLost(name, number)


@contextmanager
def fenced(name: str, number: int) -> Iterator[None]:
    """Run the body in a fenced transaction. Raises: LockLost; then nothing is written."""
    with transaction_of(LockTerm):
        fence(name, number)
        yield


def _row_name(name: str) -> str:
    """Return a name that fits into the column, for any name of a lock."""
    if len(name) <= MOST_CHARACTERS:
        return name
    return name[:135] + "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
