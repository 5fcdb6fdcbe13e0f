"""Read the values of options on the command line, and say what is wrong with them."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

# Of an INTEGER in all databases.
LARGEST = 2**31 - 1
# Before that no task was enqueued, and after it no database has a time.
MOST_DAYS = 100_000
SECONDS_OF_UNIT = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


def whole_number(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Return a function that reads whole numbers between two bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ArgumentTypeError(f"{text!r}: give a whole number of at least {least}.")
        if value > most:
            raise ArgumentTypeError(f"{text!r}: give a whole number of at most {most:,}.")
        return value

    return read


def duration(text: str) -> float:
    """Read seconds: `90`, `90s`, `5m`, `2h` or `1d`; with fractions."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", text)
    if found is None:
        raise ArgumentTypeError(f"{text!r}: give a duration such as 90s, 5m, 2h or 1d.")
    return float(found[1]) * SECONDS_OF_UNIT[found[2]]


def moment(text: str) -> datetime:
    """Read a time in ISO 8601, such as `2026-11-26T18:00+01:00`; without an offset it is in the project's time zone."""
    try:
        found = datetime.fromisoformat(text)
        return found if timezone.is_aware(found) else timezone.make_aware(found)
    except (ValueError, OverflowError) as error:
        raise ArgumentTypeError(f"{text!r}: give a time such as 2026-11-26T18:00 or 2026-11-26T18:00+01:00.") from error


def moment_or_ago(text: str) -> datetime | timedelta:
    """Read a time in ISO 8601, or how long ago it was, such as `2h`: at most 100,000 days.

    The clock is that of the database, which is not asked here: it may be unreachable.
    """
    if not re.fullmatch(r"[0-9.]+[smhd]?", text):
        return moment(text)
    return timedelta(seconds=min(duration(text), MOST_DAYS * 86_400))


def json_of(kind: type[list[Any]] | type[dict[str, Any]]) -> Callable[[str], Any]:
    """Return a function that reads JSON of one type, a list or an object."""

    def read(text: str) -> Any:
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ArgumentTypeError("it is nested too deeply.") from error
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is not JSON: {error}.") from error
        if not isinstance(found, kind):
            raise ArgumentTypeError(f"{text!r}: give a JSON {'list' if kind is list else 'object'}.")
        return found

    return read


def header(text: str) -> tuple[str, str]:
    """Read a header such as `trace=abc`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"{text!r}: give a header such as trace=abc.")
    return key, value
