"""Terms of locks: numbers from the database that rise with each holder, so what an older one writes is refused.

Redis may forget a lock, and a clock may stand still; the number of the latest term does neither. All of it is on
the database that `LockTerm` is written to, and protects writes to that database only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import router, transaction
from django.db.models import F
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from ..exceptions import LockLost
from ..models import LockTerm

MOST_CHARACTERS = 200


def database() -> str:
    """Return the alias of the database with the terms."""
    return str(router.db_for_write(LockTerm))


def begin(name: str, holder: str) -> int:
    """Begin a new term of a lock, which ends the one before it; return its number.

    Waits for a transaction that has fenced the older term. holder: readable text, such as host and pid.
    Raises: RuntimeError inside a transaction, for a number that is rolled back would be given out twice.
    """
    alias = database()
    rows = LockTerm.objects.using(alias)
    name, holder = _row_name(name), holder[:MOST_CHARACTERS]
    while True:
        # The first statement is the write: SQLite could not turn a read into one while others write.
        with transaction.atomic(using=alias, durable=True):
            if rows.filter(name=name).update(number=F("number") + 1, holder=holder, begun_at=timezone.now()):
                return rows.values_list("number", flat=True).get(name=name)
        # Apart from the update: two whose insert was refused would deadlock over the row on MySQL.
        rows.bulk_create([LockTerm(name=name)], ignore_conflicts=True)


def fence(name: str, number: int) -> None:
    """Prove that a term is current, and keep it so until the transaction ends: a newer one has to wait.

    Raises: LockLost; TransactionManagementError outside a transaction. Source: Kleppmann, How to do distributed
    locking (fencing tokens).
    """
    alias = database()
    if not transaction.get_connection(alias).in_atomic_block:
        raise TransactionManagementError("a term can only be fenced inside transaction.atomic()")
    # An update that changes nothing locks the row on every database; select_for_update does nothing on SQLite.
    rows = LockTerm.objects.using(alias).filter(name=_row_name(name), number=number)
    if not rows.update(holder=F("holder")):
        raise LockLost(name, number)


@contextmanager
def fenced(name: str, number: int) -> Iterator[None]:
    """Run the body in a transaction that is fenced. Raises: LockLost, then nothing is written."""
    with transaction.atomic(using=database()):
        fence(name, number)
        yield


def _row_name(name: str) -> str:
    """Return a name that the column can hold, for any name of a lock."""
    if len(name) <= MOST_CHARACTERS:
        return name
    return name[:135] + "-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
