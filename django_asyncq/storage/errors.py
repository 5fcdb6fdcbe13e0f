"""Class the errors of a database by their codes, so that each kind is answered in the one way that helps.

Django's classes do not tell them apart: a full disk, a missing table and a locked row are all `OperationalError` on one
database or another. PostgreSQL has SQLSTATEs, MySQL and MariaDB have numbers, SQLite has result codes. An error without
a known code counts as UNAVAILABLE, since waiting loses nothing. This module only names the kind; it changes nothing.
Source: PostgreSQL manual, appendix A; MySQL and MariaDB server error references; https://sqlite.org/rescode.html.
"""

from __future__ import annotations

import enum
import logging
import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from django.db import DataError, IntegrityError, OperationalError
from django.db import Error as DatabaseError

from ..core.guard import GuardedLogger, class_name, is_a
from ..core.payload import text_of
from ..exceptions import BrokerMisconfigured, BrokerUnavailable, DatabaseNotSetUp, LockLost


class ErrorKind(enum.Enum):
    """What an error of the database means, and so what to do.

    UNAVAILABLE: no statement can succeed now; wait. AGAIN: the same statement may succeed at once. NOT_SET_UP: no
    statement can succeed until a person has done something. ROW: a value of one row is at fault; other rows are fine.
    """

    UNAVAILABLE = "unavailable"
    AGAIN = "again"
    NOT_SET_UP = "not set up"
    ROW = "row"


# What Python raises for a value that cannot be read or bound: `datetime`, `uuid`, `json` and Django's converters, which
# get None where a date could not be read.
DECODE_ERRORS = (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, RecursionError)

# The first of these that a SQLSTATE begins with decides, so exceptions stand before their class.
SQLSTATES: dict[str, ErrorKind] = {
    "57014": ErrorKind.AGAIN,  # statement_timeout, or cancelled by a person
    "55P03": ErrorKind.AGAIN,  # lock_timeout
    "55006": ErrorKind.AGAIN,  # in use
    "40": ErrorKind.AGAIN,  # serialization failure, deadlock
    "72": ErrorKind.AGAIN,  # snapshot too old
    "0A000": ErrorKind.AGAIN,  # "cached plan must not change result type", after a migration
    "26000": ErrorKind.AGAIN,  # a prepared statement that a connection pool has lost
    "42P05": ErrorKind.AGAIN,  # a prepared statement of another client of a connection pool
    "42": ErrorKind.NOT_SET_UP,  # no such table or column, permission denied
    "28": ErrorKind.NOT_SET_UP,  # wrong role or password
    "3D": ErrorKind.NOT_SET_UP,  # no such database
    "3F": ErrorKind.NOT_SET_UP,  # no such schema
    "22": ErrorKind.ROW,  # a value that does not fit
    "23": ErrorKind.ROW,  # a constraint
    "21": ErrorKind.ROW,  # one value expected, several found
    "44": ErrorKind.ROW,  # the condition of a view
    "54": ErrorKind.ROW,  # too large or too deep for the server
    "P0001": ErrorKind.ROW,  # a trigger refuses
    "XX001": ErrorKind.ROW,  # a damaged page or value
}

# Numbers of MySQL and MariaDB.
MYSQL_AGAIN = {
    1020,  # the row has changed since it was read (MariaDB)
    1205,  # lock wait timeout
    1213,  # deadlock
    1317,  # interrupted
    1615,  # a prepared statement must be prepared again
    1969,  # max_statement_time (MariaDB)
    3024,  # max_execution_time
    3572,  # NOWAIT met a lock
}
MYSQL_NOT_SET_UP = {
    1044,  # access to the database denied
    1045,  # wrong user or password
    1049,  # no such database
    1054,  # no such column
    1064,  # a statement that this server does not understand
    1136,  # number of columns
    1142,  # command denied
    1143,  # command denied for a column
    1146,  # no such table
    1227,  # a privilege is missing
    1305,  # no such function
    1364,  # a column without a default that the code does not know
    1370,  # a routine denied
    1698,  # access denied without a password
}
MYSQL_ROW = {
    1048,  # NULL in a column that refuses it
    1062,  # duplicate key
    1118,  # the row is too large
    1153,  # the packet is too large
    1216,  # foreign keys
    1217,
    1264,  # out of range
    1265,  # truncated
    1292,  # not a date, or not a number
    1366,  # not a value of the column's type
    1406,  # too long
    1451,  # foreign keys
    1452,
    1644,  # a trigger refuses
    1690,  # out of range
    3140,  # not JSON
    3141,
    3144,
    3157,  # JSON too deep
    3819,  # a check constraint (MySQL)
    4025,  # a check constraint (MariaDB)
}

# Primary result codes of SQLite. SQLITE_ERROR (1) stands for many things, so its text decides.
SQLITE_AGAIN = {5, 6, 9, 17}  # BUSY, LOCKED, INTERRUPT, SCHEMA
SQLITE_NOT_SET_UP = {3, 23}  # PERM, AUTH
SQLITE_ROW = {18, 19, 20, 25}  # TOOBIG, CONSTRAINT, MISMATCH, RANGE
SQLITE_SET_UP_TEXT = re.compile(r"no such (table|column|function)|has no column|syntax error")
SQLITE_ROW_TEXT = re.compile(r"malformed JSON|integer overflow|Could not decode|string or blob too big")

# A refused connection has no SQLSTATE in psycopg. Its text is English, except where `lc_messages` is set.
REFUSED_CONNECTION = re.compile(
    r"FATAL: +(database|role) .* does not exist|authentication failed|no pg_hba\.conf entry|permission denied for"
)
# Nor has one that was refused because all are taken. 53300 and the numbers come when a server says so later.
CONNECTION_LIMIT_SQLSTATE = "53300"
MYSQL_CONNECTION_LIMIT = {
    1040,  # too many connections
    1203,  # max_user_connections
    1226,  # the same, set for the user
}
# PostgreSQL, and PgBouncer's `max_client_conn` and `query_wait_timeout`.
CONNECTION_LIMIT_TEXT = re.compile(
    r"too many (clients|connections)|remaining connection slots|no more connections allowed|query_wait_timeout"
)
# psycopg_pool's, which has no code either; named, because the package need not be there.
POOL_ERRORS = {"PoolTimeout", "TooManyRequests"}
UNBINDABLE = re.compile(r"[Ee]rror binding parameter|cannot adapt|can't adapt")


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of an error that a statement, or the reading of its rows, raised.

    error: of `django.db` or one of DECODE_ERRORS. An error of any other class counts as UNAVAILABLE.
    """
    if not is_a(error, DatabaseError):
        return ErrorKind.ROW if is_a(error, DECODE_ERRORS) else ErrorKind.UNAVAILABLE
    # The driver's own error has the codes; Django's has its arguments and it as the cause.
    original = error.__cause__ or error
    for kind in (_of_sqlstate(original), _of_sqlite(original), _of_mysql(error)):
        if kind is not None:
            return kind
    return _of_text(error)


def is_connection_limit(error: BaseException) -> bool:
    """Return whether a connection was refused because all are taken: those of the server, or of the pool.

    A pool says the same when no server can be reached.
    """
    if not is_a(error, OperationalError):
        return False
    original: Any = error.__cause__ or error
    kind = type(original)
    if kind.__module__.partition(".")[0] == "psycopg_pool":
        return kind.__name__ in POOL_ERRORS
    if (getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)) == CONNECTION_LIMIT_SQLSTATE:
        return True
    code = error.args[0] if error.args else None
    return code in MYSQL_CONNECTION_LIMIT if type(code) is int else bool(CONNECTION_LIMIT_TEXT.search(str(error)))


def _of_sqlstate(original: Any) -> ErrorKind | None:
    """Return the kind that the SQLSTATE of psycopg 3 or 2 means; None for an error without one."""
    code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if not isinstance(code, str):
        return None
    return next((kind for prefix, kind in SQLSTATES.items() if code.startswith(prefix)), ErrorKind.UNAVAILABLE)


def _of_sqlite(original: Any) -> ErrorKind | None:
    """Return the kind that the result code of SQLite means; None for an error without one."""
    code = getattr(original, "sqlite_errorcode", None)
    if not isinstance(code, int):
        return None
    primary = code & 0xFF  # the other bits say more of the same
    if primary in SQLITE_AGAIN:
        return ErrorKind.AGAIN
    if primary in SQLITE_ROW or (primary == 1 and SQLITE_ROW_TEXT.search(str(original))):
        return ErrorKind.ROW
    if primary in SQLITE_NOT_SET_UP or (primary == 1 and SQLITE_SET_UP_TEXT.search(str(original))):
        return ErrorKind.NOT_SET_UP
    return ErrorKind.UNAVAILABLE


def _of_mysql(error: BaseException) -> ErrorKind | None:
    """Return the kind that the number of mysqlclient or PyMySQL means; None for an error without one."""
    code = error.args[0] if error.args else None
    if type(code) is not int:
        return None
    if code in MYSQL_AGAIN:
        return ErrorKind.AGAIN
    if code in MYSQL_NOT_SET_UP:
        return ErrorKind.NOT_SET_UP
    return ErrorKind.ROW if code in MYSQL_ROW else ErrorKind.UNAVAILABLE


def _of_text(error: BaseException) -> ErrorKind:
    """Return the kind of an error without a code, which a driver has raised by itself."""
    text = str(error)
    # psycopg: "timestamp too large (after year 10K)", "text fields cannot contain NUL".
    if is_a(error, (DataError, IntegrityError)) or SQLITE_ROW_TEXT.search(text) or UNBINDABLE.search(text):
        return ErrorKind.ROW
    return ErrorKind.NOT_SET_UP if REFUSED_CONNECTION.search(text) else ErrorKind.UNAVAILABLE


MIGRATE = "run `manage.py migrate` with the code that runs here, and start the workers again"


def remedy_of(error: BaseException) -> str:
    """Return what a person must do about an error of the kind NOT_SET_UP; in one sentence without a full stop."""
    original = error.__cause__ or error
    code = str(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or (error.args or [""])[0])
    text = str(error).lower()
    if "denied" in text or "authentication" in text or "privilege" in text or code.startswith(("28", "42501")):
        return (
            "give the user in DATABASES the right password, and SELECT, INSERT, UPDATE and DELETE on the tables "
            "whose names begin with django_asyncq_"
        )
    if "unknown database" in text or code.startswith("3D") or re.search(r"(database|role) .* does not exist", text):
        return "create the database and the user that DATABASES names"
    return MIGRATE


# --- One place for an error in a loop: log it once, say how long to pause, and let the loop go on.
#
# Loops catch STORE_ERRORS and ask here what they mean; nobody else judges an error of the database (a test reads
# the code to make sure). `attempt` keeps the parts of one round apart, so that each repair, queue, gate or row
# fails alone.

PAUSE_SECONDS = 1.0
# An error of the kind AGAIN is tried again at once this often in a row; then it counts as an outage.
MOST_AGAIN = 5
LONGEST_AGAIN_SECONDS = 0.1
# One error may come from a deployment whose migration has just finished; the next look decides.
NOT_SET_UP_LOOKS = 3

STORE_ERRORS = (BrokerUnavailable, DatabaseError)

Value = TypeVar("Value")
Item = TypeVar("Item")


class Outages:
    """Which loop says for all loops of a process that a store is unreachable: the first that finds it so."""

    def __init__(self) -> None:
        self._speakers: dict[str, object] = {}

    def is_speaker(self, loop: object, store: str) -> bool:
        """Return whether this loop says it; of two at the same time, one does."""
        return self._speakers.setdefault(store, loop) is loop

    def note_end(self, loop: object) -> None:
        """Note that a loop reaches its stores again. If others still do not, the next of them says so."""
        for store in [store for store, speaker in self._speakers.copy().items() if speaker is loop]:
            del self._speakers[store]


class Parts:
    """The parts of the rounds of one loop, each of which fails alone. Used by one thread."""

    def __init__(self, logger: GuardedLogger) -> None:
        self._logger = logger
        self._apart: set[str] = set()

    def attempt(self, what: str, act: Callable[[], Value], default: Value) -> Value:
        """Do one part of a round; after an error that is its own, log it once and return the default.

        Raises: BrokerUnavailable, LockLost, and errors of the database of other kinds than ROW: they concern all parts.
        """
        try:
            value = act()
        except (BrokerUnavailable, LockLost):
            raise
        except Exception as error:
            if is_a(error, DatabaseError) and kind_of(error) is not ErrorKind.ROW:
                raise
            if what not in self._apart:
                self._apart.add(what)
                self._logger.exception("%s failed and is tried again: %s", what, one_line(error))
            return default
        self._apart.discard(what)
        return value


class Faults(Parts):
    """The errors of one loop. Used by one thread.

    text: of the log line while a store is unreachable, such as "leases cannot be renewed"; the error follows it.
    over: of the line when the loop works again, such as "leases are renewed again"; how long it took follows it.
    values: for the placeholders of the texts. failed: the text for all other errors. outages: of the loops that share
    one line about an unreachable store; without it, this loop says it in any case.
    """

    def __init__(
        self,
        logger: GuardedLogger,
        text: str,
        *values: object,
        over: str,
        failed: str = "",
        outages: Outages | None = None,
    ) -> None:
        super().__init__(logger)
        self._outages = Outages() if outages is None else outages
        self._text = text
        self._over = over
        self._failed = failed or text
        self._values = values
        self._error: Exception | None = None
        self._in_a_row = 0
        self._since = 0.0
        self._again = 0
        self._looks = 0
        self._logged: set[str] = set()

    @property
    def is_failing(self) -> bool:
        """Whether the last round failed."""
        return self._in_a_row > 0

    @property
    def not_set_up(self) -> DatabaseNotSetUp | None:
        """The error to end with, when several rounds in a row have found that nothing can work without a person."""
        return as_not_set_up(self._error) if self._error and self._looks >= NOT_SET_UP_LOOKS else None

    def note(self, error: Exception, *, quiet_first: bool = False) -> float:
        """Note that a round failed, log it unless it was logged in this outage, and return how long to pause.

        quiet_first: say nothing of a first failure, which may be that of a connection that had died.
        """
        if not self._in_a_row:
            self._since = time.monotonic()
        self._in_a_row += 1
        self._error = error
        kind = kind_of(error) if is_a(error, DatabaseError) else None
        is_quiet = quiet_first and self._in_a_row == 1
        self._looks = self._looks + 1 if kind is ErrorKind.NOT_SET_UP else 0
        if kind is ErrorKind.AGAIN and self._again < MOST_AGAIN:
            self._again += 1
            return random.uniform(0.0, LONGEST_AGAIN_SECONDS)  # noqa: S311
        if kind is ErrorKind.NOT_SET_UP:
            self._once("not set up", logging.ERROR, self._failed + ": %s; %s", one_line(error), remedy_of(error))
        elif kind is ErrorKind.ROW or not is_a(error, STORE_ERRORS):
            text = f"{class_name(error)}: {text_of(error)}"
            self._once(text, logging.ERROR, self._failed + ": %s", one_line(error), error=error)
        elif is_a(error, BrokerMisconfigured):
            # A line of its own, also when the outage began as another one.
            self._once("misconfigured", logging.ERROR, self._text + ": %s", one_line(error))
        elif not is_quiet and self._outages.is_speaker(self, "database" if kind else "Redis"):
            self._once("unreachable", logging.WARNING, self._text + ": %s", one_line(error))
        return PAUSE_SECONDS

    def clear(self) -> None:
        """Note that a round succeeded; log it if a failure had been logged."""
        if not self._in_a_row:
            return
        self._outages.note_end(self)
        self._in_a_row = self._again = self._looks = 0
        if self._logged:
            self._logged.clear()
            self._logger.info(self._over + ", after %.1f s", *self._values, time.monotonic() - self._since)

    def _once(self, key: str, level: int, text: str, *values: object, error: Exception | None = None) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self._logger.log(level, text, *self._values, *values, exc_info=error)


def in_turn(items: Iterable[Item], act: Callable[[Item], object]) -> None:
    """Call `act` with each item, also with those behind one that fails.

    Raises: at once, what concerns all items, as `attempt` does; at the end, the first of the other errors.
    """
    failed: Exception | None = None
    for item in items:
        try:
            act(item)
        except (BrokerUnavailable, LockLost):
            raise
        except Exception as error:
            if is_a(error, DatabaseError) and not concerns_one_row(error):
                raise
            failed = failed or error
    if failed is not None:
        raise failed


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line, or its class where it has none."""
    return " ".join(text_of(error).split()) or class_name(error)


def as_not_set_up(error: BaseException) -> DatabaseNotSetUp | None:
    """Return the error to end with, if an error means that nothing can work until a person has acted."""
    if is_a(error, DatabaseError) and kind_of(error) is ErrorKind.NOT_SET_UP:
        found = DatabaseNotSetUp(one_line(error), remedy_of(error))
        found.__cause__ = error
        return found
    return None


def concerns_one_row(error: BaseException) -> bool:
    """Return whether an error is that of one row, so that the others need not wait."""
    return is_a(error, DatabaseError) and kind_of(error) is ErrorKind.ROW
