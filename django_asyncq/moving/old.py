"""What a schedule of another queue is: who it calls, with what, and when it would fire next.

The modules that read them know nothing of this project's tasks, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from ..core import payload
from ..core.guard import class_name
from ..core.payload import text_of
from ..core.time import LATEST_MOMENT
from ..exceptions import AsyncqError

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
# What a row may hold: far more than the old queues' forms take.
MOST_BYTES = 1_000_000
# Of one that fires once. Nothing depends on it, since it ends with its first occurrence.
ONCE_SECONDS = 86_400
# From here intervals count of which nothing says when they fired last.
ANY_ANCHOR = datetime(2000, 1, 1, tzinfo=UTC)

# Yields when the old queue fires after a moment, ascending, in UTC and rounded up to what ours can name.
Occurrences = Callable[[datetime], Iterator[datetime]]


class CannotImport(Exception):
    """Why a schedule cannot be written here, as what follows "not, because"."""


class NothingToImport(AsyncqError):
    """The old queue left nothing where it was looked for; the message says where, and what to give."""


class Rule(NamedTuple):
    """When a schedule fires. cron or interval_seconds: as ours would have it. old: when the old queue would."""

    old: Occurrences
    cron: str = ""
    interval_seconds: int | None = None
    zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldSchedule:
    """A schedule of another queue.

    key: what the old queue calls it, such as the id of a row. task: the name there. written: its timing in the old
    queue's words. rule: None for one that has a refusal. is_once: it ends with its first occurrence. count: after so
    many more occurrences it ends; None for never. missed: what the old queue does with missed occurrences, in our
    words. differences: what is otherwise here, a sentence each without a full stop. refusal: why it cannot be written
    here; "" when it can. is_code: it stands in code, so that it has no row to disable.
    """

    key: str
    name: str
    task: str
    written: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rule: Rule | None = None
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    is_once: bool = False
    count: int | None = None
    enabled: bool = True
    missed: str = "once"
    differences: tuple[str, ...] = ()
    refusal: str = ""
    is_code: bool = False


class Found(NamedTuple):
    """What an old queue left behind. where: the places that were read, in words."""

    where: str
    schedules: list[OldSchedule]


def read_safely(build: Callable[..., OldSchedule], plain: OldSchedule, *args: Any) -> OldSchedule:
    """Return what `build` makes of a schedule; when it cannot, what is plain about it, with the reason.

    build: called with `plain` and the arguments. What a row holds may break it in any way, and the others go on.
    """
    try:
        return build(plain, *args)
    except CannotImport as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - the row may hold anything
        reason = f"it cannot be read: {class_name(error)}: {text_of(error)}"
    return replace(plain, refusal=reason)


def every(seconds: float, last: datetime, *, first: datetime | None = None) -> Rule:
    """Return the rule of an interval that counts from `last`, or has its first occurrence at `first`.

    Raises: CannotImport when the interval is no whole number of seconds.
    """
    if seconds < 1 or seconds != int(seconds):
        raise CannotImport(f"its interval is {seconds:g} s; an interval here is a whole number of seconds, at least 1")
    step, begin = timedelta(seconds=int(seconds)), last if first is None else first

    def occurrences(after: datetime) -> Iterator[datetime]:
        number = max((after - begin) // step + 1, 0 if first is not None else 1)
        moment = begin + number * step
        while moment <= LATEST_MOMENT:
            yield rounded_up(moment, SECOND)
            moment += step

    return Rule(occurrences, interval_seconds=int(seconds))


def once(at: datetime) -> Rule:
    """Return the rule of what fires at one moment."""

    def occurrences(after: datetime) -> Iterator[datetime]:
        if at > after:
            yield rounded_up(at, SECOND)

    return Rule(occurrences, interval_seconds=ONCE_SECONDS)


def rounded_up(moment: datetime, unit: timedelta) -> datetime:
    """Return the first whole second or minute at or after a moment.

    Up, so that what the old queue has fired at a cutover is not fired here once more, and what it has not is.
    """
    whole = moment.replace(microsecond=0) if unit == SECOND else moment.replace(second=0, microsecond=0)
    return whole if whole == moment else whole + unit


def json_of(text: Any, kind: type[list[Any]] | type[dict[str, Any]], what: str) -> Any:
    """Return a column of JSON; an empty one is an empty list or object. Raises: CannotImport."""
    if text is None or text == "":
        return kind()
    found = payload.UNREADABLE
    if isinstance(text, str | bytes):
        found = payload.loads_untrusted(text, max_bytes=MOST_BYTES, max_depth=payload.MAX_DEPTH)
    if not isinstance(found, kind):
        raise CannotImport(f"its {what} are no JSON {'list' if kind is list else 'object'}: {shown(text)}")
    return found


def shown(value: Any) -> str:
    """Return a value of another program for a sentence, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
