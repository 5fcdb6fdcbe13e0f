"""A column for names that the database compares as Python and Redis do: by case, accents and all.

The collation of a MySQL or MariaDB database usually ignores case. The task `Mail` would then be found as `mail`, and a
gate would count the tasks of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models.expressions import Combinable
from django.db.models.lookups import IContains

# Both exist in each version of MySQL and MariaDB, and need four bytes a character: an index of 200 takes 800 of 3,072.
EXACT = "utf8mb4_bin"
WITHOUT_CASE = "utf8mb4_unicode_ci"

# Django's class cannot be subscripted; only its stubs can.
if TYPE_CHECKING:
    CharField = models.CharField[str | Combinable, str]
else:
    CharField = models.CharField


class ExactCharField(CharField):
    """A CharField whose values are equal only if all their characters are."""

    def db_parameters(self, connection: Any) -> Any:
        """Name the collation on MySQL and MariaDB; PostgreSQL and SQLite compare exactly by themselves."""
        parameters = super().db_parameters(connection)
        return {**parameters, "collation": EXACT} if connection.vendor == "mysql" else parameters


@ExactCharField.register_lookup
class ContainsWithoutCase(IContains):
    """`icontains`, which on MySQL and MariaDB leaves the case to the column's collation."""

    def process_lhs(self, compiler: Any, connection: Any, lhs: Any = None) -> Any:
        """Compare with a collation that ignores case."""
        sql, parameters = super().process_lhs(compiler, connection, lhs)
        return (f"{sql} COLLATE {WITHOUT_CASE}" if connection.vendor == "mysql" else sql), parameters
