"""Write a schedule as the line of code that declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..models import Missed, Schedule


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
