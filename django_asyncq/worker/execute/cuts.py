"""Find out whether a transaction failed because its connection was cut: by the server, a restart, or the network.

Such a run has left nothing in the database, and its function is not to blame: it is reported as a `Cut`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import Error as DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from ...guard import is_a

# SQLSTATEs with which a server ends a session: connection failures, shutdown, and the two idle timeouts.
CUTTING_SQLSTATES = ("08", "57P0", "25P03", "25P04")
# Numbers with which MySQL, MariaDB and their driver do: shutdown, KILL (1927), a lost connection, the idle timeouts.
CUTTING_NUMBERS = {1053, 1927, 2006, 2013, 2055, 4031}
# Not the attributes of the exception, which a class of the project may have replaced.
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__


def is_cut(error: BaseException, connection: BaseDatabaseWrapper, used: Any) -> bool:
    """Whether an error of the database, or one that it caused, came from a connection that is dead now.

    connection: outside any transaction, in the thread that uses it. used: the driver's connection that was used.
    """
    found = _database_errors(error)
    if not found:
        return False
    # Django drops a connection that cannot roll back, and may already have made a new one.
    is_dropped = connection.connection is None or (used is not None and connection.connection is not used)
    return is_dropped or any(map(_ends_session, found)) or not connection.is_usable()


def reason_of(error: BaseException) -> BaseException:
    """Return the error that says best why the connection was cut: that of the server, else the first."""
    found = _database_errors(error)
    return next(filter(_ends_session, found), found[-1] if found else error)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then what it was raised from, or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = _cause_of(error) or _context_of(error)


def _database_errors(error: BaseException) -> list[BaseException]:
    """Return the errors of the database among the causes of an error, the latest first."""
    return [each for each in causes_of(error) if is_a(each, DatabaseError)]


def _ends_session(error: BaseException) -> bool:
    original: Any = _cause_of(error)
    code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if isinstance(code, str):
        return code.startswith(CUTTING_SQLSTATES)
    number = original.args[0] if is_a(original, Exception) and original.args else None
    return type(number) is int and number in CUTTING_NUMBERS
