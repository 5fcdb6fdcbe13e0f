"""Read a cron expression, refuse one that would not do what it says, and say in words when it fires.

`cronsim` parses it. What it accepts although nobody can mean it is refused here: a step that never takes a second
value, and days that do not exist.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from cronsim import CronSim, CronSimError

from ..exceptions import InvalidTiming

# The limit of the field of `Schedule`.
MAX_EXPRESSION_LENGTH = 200

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class CronField(NamedTuple):
    """A field of an expression. size: how many different values it has. attribute: its values in `CronSim`."""

    name: str
    allowed: str
    size: int
    attribute: str


CRON_FIELDS = [
    CronField("minute", "0 to 59", 60, "minutes"),
    CronField("hour", "0 to 23", 24, "hours"),
    CronField("day of month", "1 to 31, L (the last day), LW (the last weekday)", 31, "days"),
    CronField("month", "1 to 12, JAN to DEC", 12, "months"),
    CronField(
        "day of week",
        "0 to 7 (0 and 7: Sunday), SUN to SAT, 5L (the last Friday), 1#2 (the second Monday)",
        7,
        "weekdays",
    ),
]
FOREIGN_TO_CRON = re.compile(r"[^A-Za-z0-9*,/#@ -]")
ANY_DAY = datetime(2000, 1, 1)


def _wrong_cron(expression: str, trouble: str) -> InvalidTiming:
    return InvalidTiming(f"cron expression {expression!r}: {trouble}", field="cron")


@lru_cache(maxsize=1024)
def read_expression(expression: str) -> str:
    """Return the expression as five fields. Raises: InvalidTiming, naming the field and what is allowed there."""
    if not isinstance(expression, str) or len(expression) > MAX_EXPRESSION_LENGTH:
        allowed = f"at most {MAX_EXPRESSION_LENGTH} characters of text"
        raise InvalidTiming(f"the cron expression is wrong: give {allowed}, such as '30 2 * * *'", field="cron")
    if foreign := FOREIGN_TO_CRON.search(expression):
        allowed = "letters, digits, spaces and * , - / # (for ? write *)"
        raise _wrong_cron(expression, f"{foreign[0]!r} has no meaning; allowed are {allowed}")
    fields = expression.split()
    if fields and fields[0].startswith("@"):
        if len(fields) > 1 or fields[0].lower() not in ALIASES:
            known = ", ".join(ALIASES)
            trouble = f"unknown name; the known names are {known}"
            raise _wrong_cron(expression, f"{trouble}. For 'every …' give an interval instead")
        return ALIASES[fields[0].lower()]
    if len(fields) != len(CRON_FIELDS):
        names = ", ".join(field.name for field in CRON_FIELDS)
        trouble = f"{len(fields)} fields instead of five; give {names}, such as '30 2 * * *'"
        raise _wrong_cron(expression, f"{trouble}. Cron has no field for seconds: give an interval instead")
    for number, field in enumerate(CRON_FIELDS):
        try:
            _values(number, fields[number])
        except CronSimError as error:
            forms = "* for every one, lists (1,2), ranges (1-5, not 5-1), steps (*/5)"
            trouble = f"{field.name} {fields[number]!r} is wrong; allowed are {field.allowed}; {forms}"
            raise _wrong_cron(expression, trouble) from error
        for term in fields[number].split(","):
            if trouble := _step_trouble(number, term):
                raise _wrong_cron(expression, f"{field.name} {fields[number]!r} is wrong: {trouble}")
    _check_fires(" ".join(fields))
    return " ".join(fields)


def _values(number: int, field: str) -> set[int]:
    """Return the values that a field names. Raises: CronSimError."""
    alone = ["*"] * number + [field] + ["*"] * (len(CRON_FIELDS) - 1 - number)
    found: set[int] = getattr(CronSim(" ".join(alone), ANY_DAY), CRON_FIELDS[number].attribute)
    return found


def _step_trouble(number: int, term: str) -> str:
    """Say why the step in a part of a field would not do what it says; "" when it would.

    A step as long as the field, such as `*/60` or `0-59/60`, does: it takes the same value every time.
    """
    base, _, step_text = term.partition("/")
    name, _, size, _ = CRON_FIELDS[number]
    step = int(step_text or 1)
    if base.upper() in ("L", "LW"):
        return f"a step has no meaning after {base}; remove it" if step_text else ""
    if step > size:
        length = "7 days" if name == "day of week" else f"{size} values"
        return f"the step {step} is longer than the field, which has {length}; {_step_remedy(number)}"
    if not step_text or base == "*" or ("-" not in base and step in (1, size)):
        return ""
    # Without an end, the range goes to the end of the field. cronsim reads 5-5/1 as 5/1, too.
    covered = len(_values(number, base if "-" in base else f"{base}/1"))
    if covered <= step and covered < size:
        return f"the step {step} takes only the first value of its range; {_step_remedy(number)}"
    return ""


def _step_remedy(number: int) -> str:
    """Say what to give instead. Only minutes and hours have intervals."""
    return "give a shorter one, or no step" + ("" if number > 1 else ", or an interval instead of a cron expression")


def _check_fires(expression: str) -> None:
    """Refuse an expression without an occurrence in 50 years.

    The longest time between two occurrences is 40 years, for a weekday on 29 February.
    """
    cause: CronSimError | None = None
    try:
        fires = next(CronSim(expression, ANY_DAY), None) is not None
    except CronSimError as error:
        fires, cause = False, error
    if not fires:
        trouble = "never fires: no date has such a day of month, month and day of week"
        raise _wrong_cron(expression, f"{trouble}; give days that exist (L is the last of a month)") from cause


def follows_wall_clock(expression: str) -> bool:
    """Return whether an expression fires whenever the clock shows its times. expression: as five fields."""
    minute, hour, *_ = expression.split()
    return minute.startswith("*") or hour.startswith("*")


def has_either_day(expression: str) -> bool:
    """Return whether an expression fires on days that match one of the two fields for days, as in Debian's cron.

    It does when both are given and neither begins with `*`; otherwise both must match. expression: as five fields.
    """
    _, _, day, _, weekday = expression.split()
    return not day.startswith("*") and not weekday.startswith("*")


def in_words(expression: str) -> str:
    """Describe in English when an expression fires. expression: as five fields."""
    minute, hour, day, month, weekday = expression.split()
    if not has_either_day(expression):
        return _explained(expression)
    if len(_values(2, day)) == 31 or {each % 7 for each in _weekday_numbers(weekday)} == set(range(7)):
        # One of the two matches every day.
        return _explained(f"{minute} {hour} * {month} *")
    # cronsim says "on the 13th day of month and on Friday", which is understood as a Friday the 13th.
    on_weekday = _explained(f"0 0 * * {weekday}").removeprefix("At 00:00 ")
    return _explained(expression).replace(f" and {on_weekday}", f" or {on_weekday}")


def _weekday_numbers(weekday: str) -> list[int]:
    """Return the days of the week that a field names in every week: not `5L`, not `1#2`."""
    return [each for each in _values(4, weekday) if isinstance(each, int)]


def _explained(expression: str) -> str:
    return CronSim(expression, ANY_DAY).explain()
