"""Indexes that cover only some rows where the database can, and all rows on MySQL and MariaDB.

Django omits an index with a condition on MySQL, and its checks warn about it. These have no `condition` for the checks,
and are created as Django creates its own.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q


class PartialIndex(models.Index):
    """An index on the rows for which `where` holds."""

    def __init__(self, *, where: Q, **options: Any) -> None:
        super().__init__(**options)
        self.where = where

    def deconstruct(self) -> Any:
        """Add `where` for migrations."""
        path, expressions, options = super().deconstruct()
        return path, expressions, {**options, "where": self.where}

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **options: Any) -> Any:
        """Return the CREATE INDEX, with the condition where the database has such indexes."""
        condition = self.where if schema_editor.connection.features.supports_partial_indexes else None
        created = models.Index(fields=self.fields, name=self.name, condition=condition)
        return created.create_sql(model, schema_editor, using, **options)


class UniqueUnlessNull(models.UniqueConstraint):
    """A unique constraint on one nullable column, whose index does not hold the rows that have no value.

    An `INSERT … ON CONFLICT` must name the condition: `(column) WHERE column IS NOT NULL`. On MySQL the index holds all
    rows; several NULLs are distinct there too.
    """

    def __init__(self, *, field: str, name: str) -> None:
        super().__init__(fields=[field], name=name)

    def deconstruct(self) -> Any:
        """Return the arguments of this class for migrations."""
        path, expressions, _options = super().deconstruct()
        return path, expressions, {"field": self.fields[0], "name": self.name}

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the constraint for CREATE TABLE, or have the index created after it."""
        return self._created(schema_editor).constraint_sql(model, schema_editor)

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that adds it to a table."""
        return self._created(schema_editor).create_sql(model, schema_editor)

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that removes it."""
        return self._created(schema_editor).remove_sql(model, schema_editor)

    def _created(self, schema_editor: Any) -> models.UniqueConstraint:
        is_partial = schema_editor.connection.features.supports_partial_indexes
        condition = Q(**{f"{self.fields[0]}__isnull": False}) if is_partial else None
        return models.UniqueConstraint(fields=self.fields, name=self.name, condition=condition)
