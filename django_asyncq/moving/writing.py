"""Write schedules: as rows, all in one transaction and each name once; or one as the line of code that declares it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..models import Missed, Schedule
from ..storage.routing import rows_of, transaction_of


def write(rows: Iterable[Schedule]) -> set[str]:
    """Insert schedules that are not there; return the names of those that were inserted.

    In one transaction of the database that the routers give for writing: if it fails, nothing was written. A name that
    somebody else has taken meanwhile stays theirs, so two imports at once write each schedule once. In the order of
    the names, so that they do not wait for each other in a circle.
    """
    written: set[str] = set()
    with transaction_of(Schedule):
        for row in sorted(rows, key=lambda each: each.name):
            columns = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}
            _, is_new = rows_of(Schedule).get_or_create(name=columns.pop("name"), defaults=columns)
            if is_new:
                written.add(row.name)
    return written


def line_of(row: Schedule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return `@task(schedule=…)` for a row. args, kwargs: its arguments as they are to be shown.

    It needs `from datetime import UTC, datetime`.
    """
    options: dict[str, str] = {}
    if row.cron:
        options["timezone"] = repr(row.zone)
    options["name"] = repr(row.name)
    if args:
        options["args"] = repr(list(args))
    if kwargs:
        options["kwargs"] = repr(dict(kwargs))
    for name, moment in (("starts_at", row.starts_at), ("ends_at", row.ends_at)):
        if moment is not None:
            options[name] = _moment(moment)
    if row.missed != Missed.SKIP:
        options["missed"] = repr(str(row.missed))
    first = f"cron({row.cron!r}" if row.cron else f"every(seconds={row.interval_seconds}"
    return f"@task(schedule={first}, {', '.join(f'{name}={text}' for name, text in options.items())}))"


def _moment(moment: datetime) -> str:
    found = moment.astimezone(UTC)
    parts = [found.year, found.month, found.day, found.hour, found.minute]
    if found.second or found.microsecond:
        parts.append(found.second)
    if found.microsecond:
        parts.append(found.microsecond)
    return f"datetime({', '.join(map(str, parts))}, tzinfo=UTC)"
