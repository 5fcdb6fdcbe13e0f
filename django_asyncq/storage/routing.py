"""The database of this app's rows, as the project's routers name it: the one that is written to, for reads too.

Whatever decides about a task, or shows its state, reads the database that is written to, because a replica lags behind.
All queries and transactions of this package begin here, so that each names its database: a function of
`django.db.transaction` without one means `default`, whatever the routers say. `TaskRecord.objects` stays Django's own,
for the project's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, overload
from uuid import UUID

from django.apps import apps
from django.conf import settings
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.models import BooleanField, Case, F, Model, Q, QuerySet, Value, When

from ..core.guard import get_logger
from ..exceptions import RedisNotForTests
from ..models import Schedule, ScheduleQuerySet, TaskRecord, TaskRecordQuerySet

logger = get_logger("django_asyncq.storage")

AnyModel = TypeVar("AnyModel", bound=Model)


def writing_database(model: type[Model]) -> str:
    """Return the alias of the database that the routers name for writing rows of a model."""
    return str(router.db_for_write(model))


@overload
def rows_of(model: type[TaskRecord]) -> TaskRecordQuerySet: ...


@overload
def rows_of(model: type[Schedule]) -> ScheduleQuerySet: ...


@overload
def rows_of(model: type[AnyModel]) -> QuerySet[AnyModel]: ...


def rows_of(model: type[Any]) -> QuerySet[Any]:
    """Return all rows of a model, read from the database that is written to."""
    found: QuerySet[Any] = model.objects.using(writing_database(model))
    return found


def is_in_transaction(database: str) -> bool:
    """Whether the project's code has a transaction open; that of a Django test case around it does not count.

    A durable block is refused within a transaction, except directly in that of a test case. It is the only public way
    to tell the two apart, and costs no statement.
    """
    if not transaction.get_connection(database).in_atomic_block:
        return False
    try:
        with transaction.atomic(database, savepoint=False, durable=True):
            return False
    except RuntimeError:
        return True


def transaction_of(model: type[Model], *, savepoint: bool = True, durable: bool = False) -> transaction.Atomic:
    """Return a transaction of the database that is written to, for `with`. savepoint, durable: as Django's `atomic`."""
    return transaction.atomic(using=writing_database(model), savepoint=savepoint, durable=durable)


def lock_free_rows(rows: QuerySet[TaskRecord]) -> set[UUID]:
    """Lock those of these tasks that no other transaction has locked, until the caller's is over; return their ids.

    A database that cannot skip locked rows waits for them.
    """
    skip_locked = connections[rows.db].features.has_select_for_update_skip_locked
    return set(_locking(rows, skip_locked=skip_locked).values_list("id", flat=True))


def lock_rows(rows: QuerySet[TaskRecord]) -> list[TaskRecord]:
    """Lock tasks until the caller's transaction is over, in the order of their ids; return them."""
    return list(_locking(rows))


def _locking(rows: QuerySet[TaskRecord], *, skip_locked: bool = False) -> QuerySet[TaskRecord]:
    if not connections[rows.db].features.has_select_for_update:
        # A write that finds no row: this transaction is then SQLite's one writer, and no finished row is written again.
        rows.filter(id=UUID(int=0)).update(fence=F("fence"))
    return rows.select_for_update(skip_locked=skip_locked).order_by("id")


def follow_commit(action: Callable[[], None]) -> None:
    """Do what follows a commit, as a hook of it. Its error is logged.

    It must not turn a committed request into an error, nor skip other hooks.
    Raises: RedisNotForTests, which a developer must see, and Django would only log for a robust hook.
    """
    try:
        action()
    except RedisNotForTests:
        raise
    except Exception:
        logger.exception("what follows a commit has failed")


# --- Conditions that a database checks in rows that it has found by their ids, and never takes for the way to them.


def as_check(*conditions: Q, **lookups: Any) -> Case:
    """Return what `filter(*conditions, **lookups)` means, for statements that name ids or batches as well.

    It is a CASE, which no planner takes for an access path. When the statistics of PostgreSQL are older than a backlog,
    they say that hardly any row is queued; from ids beside a plain condition on the state it would choose the index on
    states, and read every queued row to find a few.
    """
    met = When(Q(*conditions, **lookups), then=Value(True))
    return Case(met, default=Value(False), output_field=BooleanField())


# --- Find out whether the database has the tables and columns of this code, without reading a row.


def check_tables() -> None:
    """Name every column of every model in a query that finds nothing. Raises: django.db.Error.

    A missing table, a missing column and a missing privilege are then errors of the kind NOT_SET_UP.
    """
    for model in apps.get_app_config("django_asyncq").get_models():
        connection = connections[writing_database(model)]
        quote = connection.ops.quote_name
        table = quote(model._meta.db_table)
        # With the table's name, because SQLite takes a quoted column that it does not know for a text.
        columns = ", ".join(f"{table}.{quote(str(field.column))}" for field in model._meta.concrete_fields)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {columns} FROM {table} WHERE 1 = 0")  # noqa: S608 - from models


def is_to_be_migrated() -> bool:
    """Whether there is a table of tasks, and a migration of this code that has not been applied to it yet."""
    connection = connections[writing_database(TaskRecord)]
    if TaskRecord._meta.db_table not in connection.introspection.table_names():
        return False
    loader = MigrationLoader(connection, ignore_no_migrations=True)
    return any(key[0] == "django_asyncq" and key not in loader.applied_migrations for key in loader.disk_migrations)


# --- Whether a transaction sees what others commit while it is open.

# The levels at which each statement sees what was committed before it.
SEEING_LEVELS = {"READ COMMITTED", "READ UNCOMMITTED"}


def sees_commits(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the open transaction of a connection sees what others commit meanwhile; costs one statement.

    A transaction of SQLite never does.
    """
    if connection.vendor == "postgresql":
        statement = "SHOW transaction_isolation"
    elif connection.vendor == "mysql":
        # MariaDB has had the name of MySQL only since 11.1.
        is_mariadb = getattr(connection, "mysql_is_mariadb", False)
        statement = "SELECT @@tx_isolation" if is_mariadb else "SELECT @@transaction_isolation"
    else:
        return False
    with connection.cursor() as cursor:
        cursor.execute(statement)
        (level,) = cursor.fetchone()
    return str(level).upper().replace("-", " ") in SEEING_LEVELS


# --- Say whether an SQLite database takes its write lock early enough for several processes; opens no connection.
#
# SQLite lets one process write at a time. A transaction that begins with a read and writes later is refused at
# once, without waiting for `timeout`, when another process has written in between. An immediate transaction waits
# instead. Source: https://sqlite.org/lang_transaction.html.

# With WAL, readers and the one writer do not block each other.
SQLITE_OPTIONS = {
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
}
EARLY_MODES = ("IMMEDIATE", "EXCLUSIVE")


def late_write_lock(alias: str) -> bool:
    """Return whether a database is an SQLite file whose transactions take the write lock only when they write."""
    connection: Any = connections[alias]
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        return False
    mode = connection.settings_dict.get("OPTIONS", {}).get("transaction_mode")
    return str(mode).upper() not in EARLY_MODES


# --- Return a thread's connections to Django's pools (`OPTIONS["pool"]`) as soon as a piece of work is finished.
#
# A pool is shared by all threads of a process, and a thread that sleeps with one of its connections takes it from
# the tasks. Without a pool a connection stays open between pieces of work, since a new one for each would cost more
# than the work.

# The main thread of a worker process reads what it has claimed, and its reporter writes outcomes.
OWN_THREADS = 2
# psycopg_pool's default of `min_size`, and `max_size` is the same unless it is set.
DEFAULT_SIZE = 4


class SmallPool(NamedTuple):
    """A pool in which tasks wait for each other. text, remedy: a sentence each."""

    text: str
    remedy: str


def is_pooled(database: dict[str, Any]) -> bool:
    """Whether an entry of DATABASES uses a pool of Django's: psycopg's, or Oracle's."""
    return bool(database.get("OPTIONS", {}).get("pool"))


def return_connections() -> None:
    """Return all pooled connections of this thread; leave others, and those within a transaction, as they are.

    Called by each thread of this package between pieces of work. It costs no statement.
    """
    for connection in connections.all(initialized_only=True):
        is_open = connection.connection is not None and not connection.in_atomic_block
        if is_open and is_pooled(connection.settings_dict):
            connection.close()


def small_pools(concurrency: int, processes: int) -> Iterator[SmallPool]:
    """Yield the pools of psycopg that are smaller than what one worker process may use at a time; opens no connection.

    concurrency: the slots of a process. processes: the worker processes of a host.
    """
    own = writing_database(TaskRecord)
    databases: dict[str, Any] = dict(settings.DATABASES)
    for alias, database in databases.items():
        if not is_pooled(database) or "postg" not in str(database.get("ENGINE")):
            continue
        size = _size_of(database["OPTIONS"]["pool"])
        needed = concurrency + (OWN_THREADS if alias == own else 0)
        if size is not None and size < needed:
            threads = f" and {OWN_THREADS} threads of its own" if alias == own else ""
            yield SmallPool(
                f"DATABASES[{alias!r}] has a pool of {size} connections, and a worker process has {concurrency} "
                f"slots{threads} that may use one each: tasks wait for each other",
                f"Set OPTIONS['pool'] = {{'max_size': {needed}}} or more, or lower the concurrency to "
                f"{max(size - needed + concurrency, 1)}; `async def` tasks have as many slots again. Each process has "
                f"a pool of its own: with the supervisor's the server needs {needed * (processes + 1)} connections.",
            )


def _size_of(pool: Any) -> int | None:
    """Return how many connections a pool may have; None when its options are not valid, which Django says."""
    options = pool if isinstance(pool, dict) else {}
    size = options.get("max_size")
    if size is None:
        size = options.get("min_size", DEFAULT_SIZE)
    return size if isinstance(size, int) else None


# --- Reads of a large table of tasks that stay short: counts up to a limit, names by a loose scan.
#
# No function reads all of the table: each says how far it looks. Each sends one statement.

# A page says "about" above that.
MOST_COUNTED = 10_000
# Names of tasks are as many as a project has functions.
MOST_NAMES = 500
STATES = {
    "queued": "state = 0",
    "running": "state = 1",
    "succeeded": "state = 2",
    "failed": "state = 3 AND retry_at IS NULL",
    "retrying": "state = 3 AND retry_at IS NOT NULL",
}


def counts_by_state() -> dict[str, int]:
    """Count the tasks of each state, RETRYING apart, each up to `MOST_COUNTED` + 1.

    Along indexes alone: those that failed for good are all failed ones without those that are retried. Only beside
    very many of these their rows are read.
    """
    most = MOST_COUNTED + 1
    wheres = {**STATES, "failed": "state = 3"}
    counts = [_count(where, 2 * most if state == "failed" else most) for state, where in wheres.items()]
    (row,) = _rows("SELECT " + ", ".join(counts))
    found = dict(zip(STATES, row, strict=True))
    if found["retrying"] < most:
        found["failed"] = min(found["failed"] - found["retrying"], most)
    else:
        ((found["failed"],),) = _rows("SELECT " + _count(STATES["failed"], most))
    return found


def _count(where: str, most: int) -> str:
    text = "(SELECT COUNT(*) FROM (SELECT 1 AS one FROM {{table}} WHERE {where} LIMIT {most}) AS counted)"
    return text.format(where=where, most=most)


def names() -> list[str]:
    """Return the names that tasks have, the first `MOST_NAMES` in order: for each name one look into the index."""
    statement = """
        WITH RECURSIVE found (name, number) AS (
            SELECT MIN(name), 1 FROM {table}
            UNION ALL
            SELECT (SELECT MIN(name) FROM {table} WHERE name > found.name), number + 1
            FROM found WHERE found.name IS NOT NULL AND number < %s
        )
        SELECT name FROM found WHERE name IS NOT NULL
    """
    return [name for (name,) in _rows(statement, MOST_NAMES)]


def ids_called(wire_id: str, most: int = 1_000) -> list[UUID]:
    """Return the ids of the tasks that another program calls so, along their index, in no order.

    Several where the program has used it again. With an order, SQLite and PostgreSQL may walk the primary key instead.
    """
    ids = rows_of(TaskRecord).filter(wire_id=wire_id).order_by().values_list("id", flat=True)
    return list(ids[:most])


def _rows(statement: str, *values: Any) -> list[tuple[Any, ...]]:
    connection = connections[writing_database(TaskRecord)]
    table = connection.ops.quote_name(TaskRecord._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(statement.format(table=table), values)
        found: list[tuple[Any, ...]] = cursor.fetchall()
    return found
