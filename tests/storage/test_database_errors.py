"""Each code of each database has its kind: one line for each code."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    InternalError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    connection,
    connections,
)

from django_asyncq.models import TaskRecord
from django_asyncq.storage.errors import ErrorKind, is_connection_limit, kind_of, remedy_of

UNAVAILABLE, AGAIN, NOT_SET_UP, ROW = ErrorKind.UNAVAILABLE, ErrorKind.AGAIN, ErrorKind.NOT_SET_UP, ErrorKind.ROW

SQLSTATES = [
    ("08000", UNAVAILABLE, "connection exception"),
    ("08001", UNAVAILABLE, "cannot connect"),
    ("08003", UNAVAILABLE, "connection does not exist"),
    ("08004", UNAVAILABLE, "the server rejects the connection"),
    ("08006", UNAVAILABLE, "connection failure"),
    ("08007", UNAVAILABLE, "transaction resolution unknown"),
    ("08P01", UNAVAILABLE, "protocol violation"),
    ("0A000", AGAIN, "cached plan must not change result type"),
    ("21000", ROW, "cardinality violation"),
    ("22001", ROW, "text too long"),
    ("22003", ROW, "number out of range"),
    ("22007", ROW, "no date"),
    ("22008", ROW, "date out of range"),
    ("22021", ROW, "not in the encoding"),
    ("22023", ROW, "invalid parameter"),
    ("22032", ROW, "invalid JSON"),
    ("22P02", ROW, "no such text for a type"),
    ("22P05", ROW, "untranslatable character"),
    ("23502", ROW, "not null"),
    ("23503", ROW, "foreign key"),
    ("23505", ROW, "unique"),
    ("23514", ROW, "check"),
    ("23P01", ROW, "exclusion"),
    ("25006", UNAVAILABLE, "read-only transaction, after a fail-over"),
    ("25P02", UNAVAILABLE, "in a failed transaction"),
    ("25P03", UNAVAILABLE, "idle in transaction timeout"),
    ("26000", AGAIN, "no such prepared statement"),
    ("28000", NOT_SET_UP, "invalid authorization"),
    ("28P01", NOT_SET_UP, "invalid password"),
    ("3D000", NOT_SET_UP, "no such database"),
    ("3F000", NOT_SET_UP, "no such schema"),
    ("40001", AGAIN, "serialization failure"),
    ("40002", AGAIN, "integrity constraint at commit"),
    ("40003", AGAIN, "statement completion unknown"),
    ("40P01", AGAIN, "deadlock"),
    ("42501", NOT_SET_UP, "permission denied"),
    ("42601", NOT_SET_UP, "syntax"),
    ("42703", NOT_SET_UP, "no such column"),
    ("42883", NOT_SET_UP, "no such function"),
    ("42P01", NOT_SET_UP, "no such table"),
    ("42P05", AGAIN, "duplicate prepared statement"),
    ("44000", ROW, "check option"),
    ("53000", UNAVAILABLE, "insufficient resources"),
    ("53100", UNAVAILABLE, "disk full"),
    ("53200", UNAVAILABLE, "out of memory"),
    ("53300", UNAVAILABLE, "too many connections"),
    ("53400", UNAVAILABLE, "configuration limit"),
    ("54000", ROW, "index row too large"),
    ("54001", ROW, "too deep"),
    ("55000", UNAVAILABLE, "object not in the needed state"),
    ("55006", AGAIN, "object in use"),
    ("55P03", AGAIN, "lock not available"),
    ("57000", UNAVAILABLE, "operator intervention"),
    ("57014", AGAIN, "statement timeout"),
    ("57P01", UNAVAILABLE, "admin shutdown"),
    ("57P02", UNAVAILABLE, "crash shutdown"),
    ("57P03", UNAVAILABLE, "cannot connect now"),
    ("57P04", UNAVAILABLE, "database dropped"),
    ("57P05", UNAVAILABLE, "idle session timeout"),
    ("58000", UNAVAILABLE, "system error"),
    ("58030", UNAVAILABLE, "I/O error"),
    ("72000", AGAIN, "snapshot too old"),
    ("P0001", ROW, "a trigger refuses"),
    ("XX000", UNAVAILABLE, "internal error"),
    ("XX001", ROW, "data corrupted"),
    ("XX002", UNAVAILABLE, "index corrupted"),
    ("99999", UNAVAILABLE, "unknown"),
]

MYSQL = [
    (1020, AGAIN, "the row has changed"),
    (1021, UNAVAILABLE, "disk full"),
    (1040, UNAVAILABLE, "too many connections"),
    (1041, UNAVAILABLE, "out of memory"),
    (1044, NOT_SET_UP, "access to the database denied"),
    (1045, NOT_SET_UP, "access denied"),
    (1048, ROW, "null"),
    (1049, NOT_SET_UP, "unknown database"),
    (1053, UNAVAILABLE, "server shutdown"),
    (1054, NOT_SET_UP, "unknown column"),
    (1062, ROW, "duplicate"),
    (1064, NOT_SET_UP, "syntax"),
    (1114, UNAVAILABLE, "table full"),
    (1118, ROW, "row too large"),
    (1129, UNAVAILABLE, "host blocked"),
    (1136, NOT_SET_UP, "number of columns"),
    (1142, NOT_SET_UP, "command denied"),
    (1143, NOT_SET_UP, "column denied"),
    (1146, NOT_SET_UP, "no such table"),
    (1153, ROW, "packet too large"),
    (1203, UNAVAILABLE, "too many connections of the user"),
    (1205, AGAIN, "lock wait timeout"),
    (1213, AGAIN, "deadlock"),
    (1216, ROW, "foreign key"),
    (1217, ROW, "foreign key"),
    (1226, UNAVAILABLE, "resource limit of the user"),
    (1227, NOT_SET_UP, "privilege missing"),
    (1264, ROW, "out of range"),
    (1265, ROW, "truncated"),
    (1290, UNAVAILABLE, "read only"),
    (1292, ROW, "no date"),
    (1305, NOT_SET_UP, "no such function"),
    (1317, AGAIN, "interrupted"),
    (1364, NOT_SET_UP, "no default"),
    (1366, ROW, "incorrect value"),
    (1370, NOT_SET_UP, "routine denied"),
    (1406, ROW, "too long"),
    (1451, ROW, "foreign key"),
    (1452, ROW, "foreign key"),
    (1615, AGAIN, "prepare again"),
    (1644, ROW, "a trigger refuses"),
    (1690, ROW, "out of range"),
    (1698, NOT_SET_UP, "access denied"),
    (1792, UNAVAILABLE, "read-only transaction"),
    (1836, UNAVAILABLE, "read-only mode"),
    (1927, UNAVAILABLE, "connection killed"),
    (1969, AGAIN, "max_statement_time"),
    (2002, UNAVAILABLE, "cannot connect to the socket"),
    (2003, UNAVAILABLE, "cannot connect"),
    (2005, UNAVAILABLE, "unknown host"),
    (2006, UNAVAILABLE, "server has gone away"),
    (2013, UNAVAILABLE, "lost connection"),
    (3024, AGAIN, "max_execution_time"),
    (3140, ROW, "no JSON"),
    (3141, ROW, "no JSON"),
    (3144, ROW, "no JSON"),
    (3157, ROW, "JSON too deep"),
    (3572, AGAIN, "NOWAIT"),
    (3819, ROW, "check constraint"),
    (4025, ROW, "check constraint"),
    (4031, UNAVAILABLE, "idle timeout"),
    (9999, UNAVAILABLE, "unknown"),
]

SQLITE = [
    ("SQLITE_ERROR", "no such table: django_asyncq_taskrecord", NOT_SET_UP),
    ("SQLITE_ERROR", "no such column: t.reason", NOT_SET_UP),
    ("SQLITE_ERROR", "table x has no column named y", NOT_SET_UP),
    ("SQLITE_ERROR", "no such function: f", NOT_SET_UP),
    ("SQLITE_ERROR", 'near "RETURNING": syntax error', NOT_SET_UP),
    ("SQLITE_ERROR", "malformed JSON", ROW),
    ("SQLITE_ERROR", "integer overflow", ROW),
    ("SQLITE_ERROR", "cannot start a transaction within a transaction", UNAVAILABLE),
    ("SQLITE_PERM", "access permission denied", NOT_SET_UP),
    ("SQLITE_AUTH", "not authorized", NOT_SET_UP),
    ("SQLITE_BUSY", "database is locked", AGAIN),
    ("SQLITE_BUSY_SNAPSHOT", "database is locked", AGAIN),
    ("SQLITE_LOCKED", "database table is locked", AGAIN),
    ("SQLITE_LOCKED_SHAREDCACHE", "database table is locked", AGAIN),
    ("SQLITE_INTERRUPT", "interrupted", AGAIN),
    ("SQLITE_SCHEMA", "database schema has changed", AGAIN),
    ("SQLITE_NOMEM", "out of memory", UNAVAILABLE),
    ("SQLITE_READONLY", "attempt to write a readonly database", UNAVAILABLE),
    ("SQLITE_IOERR", "disk I/O error", UNAVAILABLE),
    ("SQLITE_IOERR_READ", "disk I/O error", UNAVAILABLE),
    ("SQLITE_CORRUPT", "database disk image is malformed", UNAVAILABLE),
    ("SQLITE_FULL", "database or disk is full", UNAVAILABLE),
    ("SQLITE_CANTOPEN", "unable to open database file", UNAVAILABLE),
    ("SQLITE_PROTOCOL", "locking protocol", UNAVAILABLE),
    ("SQLITE_NOTADB", "file is not a database", UNAVAILABLE),
    ("SQLITE_TOOBIG", "string or blob too big", ROW),
    ("SQLITE_CONSTRAINT_UNIQUE", "UNIQUE constraint failed: x.id", ROW),
    ("SQLITE_CONSTRAINT_CHECK", "CHECK constraint failed", ROW),
    ("SQLITE_CONSTRAINT_NOTNULL", "NOT NULL constraint failed", ROW),
    ("SQLITE_MISMATCH", "datatype mismatch", ROW),
    ("SQLITE_RANGE", "column index out of range", ROW),
]

WITHOUT_CODE: list[tuple[BaseException, ErrorKind]] = [
    (DataError("timestamp too large (after year 10K): '20000-01-01 00:00:00+00'"), ROW),
    (DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), ROW),
    (IntegrityError("refused"), ROW),
    (OperationalError("Could not decode to UTF-8 column 'name' with text '\ufffd'"), ROW),
    (ProgrammingError("Error binding parameter 1: type 'object' is not supported"), ROW),
    (ProgrammingError("cannot adapt type 'object' using placeholder '%s' (format: AUTO)"), ROW),
    (ProgrammingError("can't adapt type 'object'"), ROW),
    (OperationalError('connection failed: FATAL:  database "x" does not exist'), NOT_SET_UP),
    (OperationalError('connection failed: FATAL:  role "x" does not exist'), NOT_SET_UP),
    (OperationalError('connection failed: FATAL:  password authentication failed for user "x"'), NOT_SET_UP),
    (OperationalError('connection failed: FATAL:  no pg_hba.conf entry for host "1.2.3.4"'), NOT_SET_UP),
    (OperationalError("connection failed: port 5432 failed: Connection refused"), UNAVAILABLE),
    (OperationalError("failed to resolve host 'db': [Errno -2] Name or service not known"), UNAVAILABLE),
    (OperationalError("server closed the connection unexpectedly"), UNAVAILABLE),
    (OperationalError("consuming input failed: SSL SYSCALL error: EOF detected"), UNAVAILABLE),
    (OperationalError(), UNAVAILABLE),
    (InterfaceError("connection already closed"), UNAVAILABLE),
    (ProgrammingError("Cannot operate on a closed database."), UNAVAILABLE),
    (InternalError("unknown"), UNAVAILABLE),
    (NotSupportedError("unknown"), UNAVAILABLE),
    (DatabaseError("unknown"), UNAVAILABLE),
    (ValueError("badly formed hexadecimal UUID string"), ROW),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ROW),
    (TypeError("fromisoformat: argument must be str"), ROW),
    (AttributeError("'NoneType' object has no attribute 'utcoffset'"), ROW),
    (OverflowError("Python int too large to convert to SQLite INTEGER"), ROW),
    (RecursionError("maximum recursion depth exceeded"), ROW),
    (OSError("unknown"), UNAVAILABLE),
]


class DriverError(Exception):
    """An error of a driver, with the attribute that the driver gives its errors."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("the driver's text")
        self.__dict__.update(attributes)


def wrapped(original: BaseException, *args: Any) -> OperationalError:
    """Return an error as Django raises it for one of a driver."""
    error = OperationalError(*(args or original.args))
    error.__cause__ = original
    return error


@pytest.mark.parametrize("attribute", ["sqlstate", "pgcode"])
@pytest.mark.parametrize(("code", "kind", "meaning"), SQLSTATES, ids=[code for code, *_ in SQLSTATES])
def test_sqlstate(code: str, kind: ErrorKind, meaning: str, attribute: str) -> None:
    """As psycopg 3 and psycopg2 give it, whichever class Django chose."""
    assert kind_of(wrapped(DriverError(**{attribute: code}), meaning)) is kind


@pytest.mark.parametrize(("code", "kind", "meaning"), MYSQL, ids=[str(code) for code, *_ in MYSQL])
def test_number_of_mysql(code: int, kind: ErrorKind, meaning: str) -> None:
    """As mysqlclient and PyMySQL give it: the first argument."""
    assert kind_of(wrapped(DriverError(), code, meaning)) is kind


@pytest.mark.parametrize(("name", "text", "kind"), SQLITE)
def test_code_of_sqlite(name: str, text: str, kind: ErrorKind) -> None:
    """By the extended code; SQLITE_ERROR by its text."""
    original = sqlite3.OperationalError(text)
    original.sqlite_errorcode = getattr(sqlite3, name)
    assert kind_of(wrapped(original)) is kind


@pytest.mark.parametrize(("error", "kind"), WITHOUT_CODE, ids=repr)
def test_error_without_a_code(error: BaseException, kind: ErrorKind) -> None:
    """What drivers, Django and Python raise by themselves."""
    assert kind_of(error) is kind


class PoolTimeout(Exception):
    """Stands in for psycopg_pool's, which has no code: the package need not be installed."""

    __module__ = "psycopg_pool"


class PoolClosed(PoolTimeout):
    """Another error of that package, which means something else."""


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (wrapped(DriverError(sqlstate="53300"), "too many connections for role"), True),
        (wrapped(DriverError(sqlstate="53400"), "configuration limit exceeded"), False),
        (wrapped(DriverError(sqlstate="57014"), "canceling statement"), False),
        (OperationalError("connection failed: FATAL:  sorry, too many clients already"), True),
        (OperationalError('FATAL:  too many connections for role "x"'), True),
        (OperationalError("FATAL:  remaining connection slots are reserved for roles with privileges"), True),
        (OperationalError("FATAL:  no more connections allowed (max_client_conn)"), True),
        (OperationalError("FATAL:  query_wait_timeout"), True),
        (OperationalError("connection refused"), False),
        (wrapped(DriverError(), 1040, "Too many connections"), True),
        (wrapped(DriverError(), 1203, "max_user_connections"), True),
        (wrapped(DriverError(), 1226, "max_user_connections"), True),
        (wrapped(DriverError(), 2006, "server has gone away"), False),
        (wrapped(PoolTimeout("couldn't get a connection after 30.00 sec")), True),
        (wrapped(PoolClosed("the pool 'pool-1' is closed")), False),
        (IntegrityError("too many connections"), False),
        (ValueError("too many connections"), False),
    ],
    ids=str,
)
def test_lack_of_room_for_a_connection(error: BaseException, found: bool) -> None:
    """Of the server, of PgBouncer and of the pool; it is an outage like any other."""
    assert is_connection_limit(error) is found
    if found:
        assert kind_of(error) is UNAVAILABLE


def test_errors_of_psycopg_pool_have_the_names_that_are_looked_for() -> None:
    """The real ones, where the package is installed."""
    psycopg_pool = pytest.importorskip("psycopg_pool")
    assert is_connection_limit(wrapped(psycopg_pool.PoolTimeout("timeout")))
    assert is_connection_limit(wrapped(psycopg_pool.TooManyRequests("full")))
    assert not is_connection_limit(wrapped(psycopg_pool.PoolClosed("closed")))


def no_table() -> None:
    """Read a table that does not exist."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM no_such_table")


def no_column() -> None:
    """Read a column that does not exist."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT no_such_column FROM django_asyncq_taskrecord")


def duplicate() -> None:
    """Insert one id twice."""
    for _ in range(2):
        TaskRecord(id=uuid.UUID(int=1), name="tests.tasks.add").save(force_insert=True)


def closed() -> None:
    """Use a connection after its end."""
    connection.ensure_connection()
    connection.connection.close()
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    finally:
        connection.connection = None  # mysqlclient refuses to close it twice


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("act", "kind"), [(no_table, NOT_SET_UP), (no_column, NOT_SET_UP), (duplicate, ROW), (closed, UNAVAILABLE)]
)
def test_errors_of_the_real_database(act: Callable[[], None], kind: ErrorKind) -> None:
    """The table above agrees with the driver and the database in use."""
    with pytest.raises(DatabaseError if act is not closed else (DatabaseError, InterfaceError)) as caught:
        act()
    connections.close_all()
    assert kind_of(caught.value) is kind


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (wrapped(DriverError(sqlstate="42P01"), 'relation "x" does not exist'), "migrate"),
        (wrapped(DriverError(), 1054, "Unknown column"), "migrate"),
        (wrapped(sqlite3.OperationalError("no such table: x")), "migrate"),
        (wrapped(DriverError(sqlstate="42501"), "permission denied for table x"), "SELECT, INSERT"),
        (wrapped(DriverError(), 1142, "INSERT command denied to user"), "SELECT, INSERT"),
        (OperationalError('FATAL:  password authentication failed for user "x"'), "password"),
        (OperationalError('FATAL:  database "x" does not exist'), "create the database"),
        (wrapped(DriverError(), 1049, "Unknown database 'x'"), "create the database"),
    ],
    ids=str,
)
def test_remedy(error: BaseException, word: str) -> None:
    """What a person must do, for each reason why nothing can work."""
    assert word in remedy_of(error)
