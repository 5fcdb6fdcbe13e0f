"""A statement for one row by the shortest way: libpq's own calls, past Django's cursor and psycopg's (psycopg 3).

After a pause Python runs slowly, and the two cursors are some sixty functions around one wait. Where nobody listens to
them a lone `enqueue` and a lone claim have no need of them. Not taken in a transaction, which is psycopg's to begin.
Where the project has its statements prepared (`prepare_threshold`), that stays psycopg's: a cursor runs the first few,
and from then on psycopg knows a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from . import conf
from .ahead import HOME
from .cursors import is_replaced, kept_cursor, open_connection
from .wrapping import are_unwrapped

try:
    import psycopg
    from psycopg.adapt import PyFormat, Transformer
    from psycopg.errors import error_from_result
    from psycopg.generators import execute as fetch_results
    from psycopg.pq import ExecStatus, TransactionStatus
except ImportError:
    HAS_WAY = False
else:
    HAS_WAY = True

# Where Django's cursor and psycopg's define how a statement is executed.
EXECUTE_HOMES = ("django.db.backends.utils", "psycopg.cursor")


class Known(NamedTuple):
    """What is known of a connection.

    driver: the driver's connection that it had then. adapter: takes values and gives rows as a cursor of Django's does;
    None where cursors are a tool's, or the project's own. prepares: whether the project has its statements prepared.
    """

    driver: Any = None
    adapter: Any = None
    prepares: bool = False


_known: WeakKeyDictionary[BaseDatabaseWrapper, Known] = WeakKeyDictionary()
NOTHING = Known()


def run(connection: BaseDatabaseWrapper, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]] | None:
    """Run one statement, whose placeholders are `%s`; return its rows, or None: a cursor is to run it.

    Raises: django.db.Error, and in a coroutine SynchronousOnlyOperation, as a cursor does.
    """
    known = _ready(connection)
    if known is None:
        return None
    try:
        return _run(known, sql, parameters)
    except psycopg.Error:
        with connection.wrap_database_errors:
            raise


def _run(known: Known, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]] | None:
    driver, pgconn, adapter = known.driver, known.driver.pgconn, known.adapter
    with driver.lock:
        values = adapter.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
        types, formats = adapter.types, adapter.formats
        if not known.prepares:
            pgconn.send_query_params(_numbered(sql), values, types, formats)
        elif name := _prepared_names(driver).get((_numbered(sql), types)):
            pgconn.send_query_prepared(name, values, formats)
        else:
            return None
        # It waits as for a statement of psycopg's own: with gevent, and until a signal's handler raises.
        *_, result = driver.wait(fetch_results(pgconn))
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, encoding=adapter.encoding)
        return _rows_of(result, adapter) if result.ntuples else []


def _ready(connection: BaseDatabaseWrapper) -> Known | None:
    """Return what is known of the connection when a statement is a transaction by itself, and no one listens."""
    if connection.vendor != "postgresql" or not (HAS_WAY and conf.current().direct_statements):
        return None
    if not connection.autocommit or _has_listeners(connection):
        return None
    open_connection(connection)
    known = _known.get(connection, NOTHING)
    if known.driver is not connection.connection:
        known = _known[connection] = _look_at(connection)
    # Once more: the connection may have been made just now.
    if known.adapter is None or not connection.autocommit:
        return None
    pgconn = known.driver.pgconn
    is_idle = pgconn.transaction_status == TransactionStatus.IDLE and not pgconn.pipeline_status
    return known if is_idle else None


def _look_at(connection: BaseDatabaseWrapper) -> Known:
    driver: Any = connection.connection
    cursor = kept_cursor(connection)
    adapter = Transformer.from_context(cursor) if type(cursor).__module__ == HOME else None
    # A cursor that puts the values into the text prepares nothing, whatever the threshold.
    prepares = driver.prepare_threshold is not None and not isinstance(cursor, psycopg.ClientCursor)
    return Known(driver, adapter, prepares)


def _has_listeners(connection: BaseDatabaseWrapper) -> bool:
    """Whether somebody is to hear of each statement, by whichever of Django's and psycopg's ways."""
    return (
        bool(connection.execute_wrappers)
        or connection.queries_logged
        or is_replaced(connection)
        or not are_unwrapped((CursorWrapper.execute, psycopg.Cursor.execute), EXECUTE_HOMES)
    )


def _prepared_names(driver: Any) -> Any:
    """Return psycopg's names of the statements that it has prepared, by their text and the types of their values.

    They are its own affair: where they are kept elsewhere there are none for us, and cursors run it all.
    """
    return getattr(getattr(driver, "_prepared", None), "_names", {})


def _rows_of(result: Any, adapter: Any) -> list[tuple[Any, ...]]:
    adapter.set_pgresult(result)
    rows: list[tuple[Any, ...]] = adapter.load_rows(0, result.ntuples, tuple)
    adapter.set_pgresult(None)
    return rows


@lru_cache(maxsize=128)
def _numbered(sql: str) -> bytes:
    """Return a statement with the placeholders that PostgreSQL has: $1, $2, …"""
    head, *rest = sql.split("%s")
    return (head + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))).encode()
