"""One place for an error in a loop: log it once, say how long to pause, and let the loop go on.

Loops catch STORE_ERRORS and ask here what they mean; nobody else judges an error of the database (a test reads the code
to make sure). `attempt` keeps the parts of one round apart, so that each repair, queue, gate or row fails alone.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from django.db import Error as DatabaseError

from .definitions.exception_text import text_of
from .exceptions import BrokerMisconfigured, BrokerUnavailable, DatabaseNotSetUp, LockLost
from .guard import GuardedLogger, class_name, is_a
from .storage.errors import ErrorKind, kind_of, remedy_of

PAUSE_SECONDS = 1.0
# An error of the kind AGAIN is tried again at once this often in a row; then it counts as an outage.
MOST_AGAIN = 5
LONGEST_AGAIN_SECONDS = 0.1
# One error may come from a deployment whose migration has just finished; the next look decides.
NOT_SET_UP_LOOKS = 3

STORE_ERRORS = (BrokerUnavailable, DatabaseError)

Value = TypeVar("Value")
Item = TypeVar("Item")


class Outages:
    """Which loop says for all loops of a process that a store is unreachable: the first that finds it so."""

    def __init__(self) -> None:
        self._speakers: dict[str, object] = {}

    def is_speaker(self, loop: object, store: str) -> bool:
        """Return whether this loop says it; of two at the same time, one does."""
        return self._speakers.setdefault(store, loop) is loop

    def note_end(self, loop: object) -> None:
        """Note that a loop reaches its stores again. If others still do not, the next of them says so."""
        for store in [store for store, speaker in self._speakers.copy().items() if speaker is loop]:
            del self._speakers[store]


class Parts:
    """The parts of the rounds of one loop, each of which fails alone. Used by one thread."""

    def __init__(self, logger: GuardedLogger) -> None:
        self._logger = logger
        self._apart: set[str] = set()

    def attempt(self, what: str, act: Callable[[], Value], default: Value) -> Value:
        """Do one part of a round; after an error that is its own, log it once and return the default.

        Raises: BrokerUnavailable, LockLost, and errors of the database of other kinds than ROW: they concern all parts.
        """
        try:
            value = act()
        except (BrokerUnavailable, LockLost):
            raise
        except Exception as error:
            if is_a(error, DatabaseError) and kind_of(error) is not ErrorKind.ROW:
                raise
            if what not in self._apart:
                self._apart.add(what)
                self._logger.exception("%s failed and is tried again: %s", what, one_line(error))
            return default
        self._apart.discard(what)
        return value


class Faults(Parts):
    """The errors of one loop. Used by one thread.

    text: of the log line while a store is unreachable, such as "leases cannot be renewed"; the error follows it.
    over: of the line when the loop works again, such as "leases are renewed again"; how long it took follows it.
    values: for the placeholders of the texts. failed: the text for all other errors. outages: of the loops that share
    one line about an unreachable store; without it, this loop says it in any case.
    """

    def __init__(
        self,
        logger: GuardedLogger,
        text: str,
        *values: object,
        over: str,
        failed: str = "",
        outages: Outages | None = None,
    ) -> None:
        super().__init__(logger)
        self._outages = Outages() if outages is None else outages
        self._text = text
        self._over = over
        self._failed = failed or text
        self._values = values
        self._error: Exception | None = None
        self._in_a_row = 0
        self._since = 0.0
        self._again = 0
        self._looks = 0
        self._logged: set[str] = set()

    @property
    def is_failing(self) -> bool:
        """Whether the last round failed."""
        return self._in_a_row > 0

    @property
    def not_set_up(self) -> DatabaseNotSetUp | None:
        """The error to end with, when several rounds in a row have found that nothing can work without a person."""
        return as_not_set_up(self._error) if self._error and self._looks >= NOT_SET_UP_LOOKS else None

    def note(self, error: Exception, *, quiet_first: bool = False) -> float:
        """Note that a round failed, log it unless it was logged in this outage, and return how long to pause.

        quiet_first: say nothing of a first failure, which may be that of a connection that had died.
        """
        if not self._in_a_row:
            self._since = time.monotonic()
        self._in_a_row += 1
        self._error = error
        kind = kind_of(error) if is_a(error, DatabaseError) else None
        is_quiet = quiet_first and self._in_a_row == 1
        self._looks = self._looks + 1 if kind is ErrorKind.NOT_SET_UP else 0
        if kind is ErrorKind.AGAIN and self._again < MOST_AGAIN:
            self._again += 1
            return random.uniform(0.0, LONGEST_AGAIN_SECONDS)  # noqa: S311
        if kind is ErrorKind.NOT_SET_UP:
            self._once("not set up", logging.ERROR, self._failed + ": %s; %s", one_line(error), remedy_of(error))
        elif kind is ErrorKind.ROW or not is_a(error, STORE_ERRORS):
            text = f"{class_name(error)}: {text_of(error)}"
            self._once(text, logging.ERROR, self._failed + ": %s", one_line(error), error=error)
        elif is_a(error, BrokerMisconfigured):
            # A line of its own, also when the outage began as another one.
            self._once("misconfigured", logging.ERROR, self._text + ": %s", one_line(error))
        elif not is_quiet and self._outages.is_speaker(self, "database" if kind else "Redis"):
            self._once("unreachable", logging.WARNING, self._text + ": %s", one_line(error))
        return PAUSE_SECONDS

    def clear(self) -> None:
        """Note that a round succeeded; log it if a failure had been logged."""
        if not self._in_a_row:
            return
        self._outages.note_end(self)
        self._in_a_row = self._again = self._looks = 0
        if self._logged:
            self._logged.clear()
            self._logger.info(self._over + ", after %.1f s", *self._values, time.monotonic() - self._since)

    def _once(self, key: str, level: int, text: str, *values: object, error: Exception | None = None) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self._logger.log(level, text, *self._values, *values, exc_info=error)


def in_turn(items: Iterable[Item], act: Callable[[Item], object]) -> None:
    """Call `act` with each item, also with those behind one that fails.

    Raises: at once, what concerns all items, as `attempt` does; at the end, the first of the other errors.
    """
    failed: Exception | None = None
    for item in items:
        try:
            act(item)
        except (BrokerUnavailable, LockLost):
            raise
        except Exception as error:
            if is_a(error, DatabaseError) and not concerns_one_row(error):
                raise
            failed = failed or error
    if failed is not None:
        raise failed


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line, or its class where it has none."""
    return " ".join(text_of(error).split()) or class_name(error)


def as_not_set_up(error: BaseException) -> DatabaseNotSetUp | None:
    """Return the error to end with, if an error means that nothing can work until a person has acted."""
    if is_a(error, DatabaseError) and kind_of(error) is ErrorKind.NOT_SET_UP:
        found = DatabaseNotSetUp(one_line(error), remedy_of(error))
        found.__cause__ = error
        return found
    return None


def concerns_one_row(error: BaseException) -> bool:
    """Return whether an error is that of one row, so that the others need not wait."""
    return is_a(error, DatabaseError) and kind_of(error) is ErrorKind.ROW
