"""The database of this app's rows, as the project's routers name it: the one that is written to, for reads too.

Whatever decides about a task, or shows its state, reads the database that is written to, because a replica lags behind.
All queries and transactions of this package begin here, so that each names its database: a function of
`django.db.transaction` without one means `default`, whatever the routers say. `TaskRecord.objects` stays Django's own,
for the project's code.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

from django.db import router, transaction
from django.db.models import Model, QuerySet

from ..models import Schedule, ScheduleQuerySet, TaskRecord, TaskRecordQuerySet

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
