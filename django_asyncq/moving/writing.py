"""Write imported schedules: all of them in one transaction, each name once."""

from __future__ import annotations

from collections.abc import Sequence

from ..models import Schedule
from ..storage.routing import rows_of, transaction_of
from .judging import Verdict


def write(verdicts: Sequence[Verdict]) -> set[str]:
    """Insert the schedules that can be written and are not there; return the names of those that were.

    In one transaction of the database that the routers give for writing: if it fails, nothing was written. A name that
    somebody else has taken meanwhile stays theirs, so two imports at once write each schedule once. In the order of
    the names, so that they do not wait for each other in a circle.
    """
    rows = [each.row for each in verdicts if each.row is not None and not each.is_there]
    written: set[str] = set()
    with transaction_of(Schedule):
        for row in sorted(rows, key=lambda each: each.name):
            columns = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}
            _, is_new = rows_of(Schedule).get_or_create(name=columns.pop("name"), defaults=columns)
            if is_new:
                written.add(row.name)
    return written
