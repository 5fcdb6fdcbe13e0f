"""The last lines that one run of a task has logged: collected by a handler, cut, and free of secrets.

The handler takes the lines that the project's LOGGING lets through, and changes nothing of where else they go. It is
added to the root logger, and to each logger that does not propagate, when the first run begins that keeps lines.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from uuid import UUID

from ..exceptions import TaskCancelled, TaskTimeout
from .logs import RUN_LOGGER
from .redaction import mask_text

# Of a line with its traceback: the message and the innermost frames, so that the lines of a run stay small.
MOST_LINE_BYTES = 2_048
LOGGER_CHARACTERS = 200
MOST_LEVEL = 32_767
# The lines of these are about the run itself: those of this package, of Django's tasks, and of their backport.
ABOUT_RUNS = {RUN_LOGGER, "django.tasks", "django_tasks"}
# `redaction` finds a password in a URL by what follows it, which may be beyond the cut.
MARGIN_CHARACTERS = 1_024
CUT = "…"
SEEN = "is_in_run_log"

_formatter = logging.Formatter()
# What begins with ESC: colours and moves of the cursor, titles of windows, and the rest.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*+[ -/]*+[@-~]|\][^\x07\x1b\n]*+(?:\x07|\x1b\\)?|[ -/]*+[0-Z\\^-~])?")
_ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Line(NamedTuple):
    """One line. number: within its run, from 1. logged_at: Unix seconds, by the clock of the host."""

    number: int
    logged_at: float
    level: int
    logger: str
    text: str


class RunLog:
    """The last lines of one run. Used by every thread that works for it.

    id: of the task. fence, attempt: of the run. most: how many lines are kept. mask: masks the secrets of a text; given
    where the task has others than those of the setting.
    """

    def __init__(self, id: UUID, fence: int, attempt: int, most: int, mask: Callable[[str], str] | None = None) -> None:
        self.id = id
        self.fence = fence
        self.attempt = attempt
        self._mask = mask
        self._lines: deque[Line] = deque(maxlen=most)
        self._count = 0
        self._is_closed = False
        self._lock = threading.Lock()

    @classmethod
    def of_lines(cls, id: UUID, fence: int, attempt: int, lines: Sequence[Sequence[Any]]) -> RunLog:
        """Return the log of a run that has finished in another process. lines: the values of each `Line`."""
        log = cls(id, fence, attempt, len(lines))
        log._lines.extend(Line(*each) for each in lines)
        log._is_closed = True
        return log

    def add(self, record: logging.LogRecord) -> None:
        """Keep a line, unless the run has finished: a thread that it has left behind may still log."""
        text = line_text(record, self._mask)
        level = min(max(record.levelno, 0), MOST_LEVEL)
        with self._lock:
            if not self._is_closed:
                self._count += 1
                name = clean(record.name)[:LOGGER_CHARACTERS]
                self._lines.append(Line(self._count, record.created, level, name, text))

    def close(self) -> None:
        """Keep no more lines: the run has finished."""
        with self._lock:
            self._is_closed = True

    @property
    def lines(self) -> list[Line]:
        """The lines that are kept, oldest first, with their secrets masked; none until the run has finished."""
        if not self._is_closed:
            return []
        return [line._replace(text=cut(line.text, MOST_LINE_BYTES)) for line in self._lines]


# --- the handler


_log: ContextVar[RunLog | None] = ContextVar("django_asyncq_run_log", default=None)


def keep_in(log: RunLog) -> None:
    """Keep the lines that are logged in this context from now on, and in those copied from it."""
    _log.set(log)
    _install()


# The child of a fork keeps no lines: its parent would not see them, and another thread may have held the lock.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _log.set(None))


class RunLogHandler(logging.Handler):
    """Keeps the lines of the run that the calling thread or coroutine works for."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of a run. One about the run itself is not the body's."""
        log = _log.get()
        if log is not None and record.name not in ABOUT_RUNS and not hasattr(record, SEEN):
            # It arrives twice from a logger that propagates again, after it did not when a run began.
            setattr(record, SEEN, True)
            try:
                log.add(record)
            except (TaskTimeout, TaskCancelled):
                raise  # an isolated function is interrupted, perhaps at this moment
            except Exception:  # noqa: BLE001 - as each handler of `logging` does it
                self.handleError(record)
        if logging.lastResort is not None and record.levelno >= logging.lastResort.level and _is_only_handler(record):
            # `logging` prints a warning that reaches no handler, and this one must not silence it.
            logging.lastResort.handle(record)


_handler = RunLogHandler()


def _install() -> None:
    """Add the handler to each logger at which lines arrive last. Tests exchange handlers, so each run looks anew."""
    others = [each for each in logging.root.manager.loggerDict.copy().values() if isinstance(each, logging.Logger)]
    for logger in (logging.root, *(each for each in others if not each.propagate)):
        if _handler not in logger.handlers:
            logger.addHandler(_handler)


def _is_only_handler(record: logging.LogRecord) -> bool:
    """Return whether a line reaches no other handler."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if any(each is not _handler for each in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True


# --- the text


def line_text(record: logging.LogRecord, mask: Callable[[str], str] | None = None) -> str:
    """Return the text of a line with its traceback, cut to MOST_LINE_BYTES.

    mask: masks the secrets of the task. Of a long message the beginning is kept, of a long traceback the end. What is
    cut has its secrets masked before.
    """
    # Not `Formatter.format`, which leaves its traceback in the record, for the handlers that come later.
    parts = [record.getMessage()]
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(_formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(record.stack_info)
    if mask is not None:
        parts = [mask(part) for part in parts]
    if sum(map(len, parts)) * 4 + len(parts) <= MOST_LINE_BYTES:
        return clean("\n".join(parts))
    if len(parts) == 1:
        return cut(parts[0], MOST_LINE_BYTES)
    message = cut(parts[0], MOST_LINE_BYTES // 2)
    end = _end_of("\n".join(parts[1:]), MOST_LINE_BYTES - len(message.encode()) - 1)
    return f"{message}\n{end}"


def cut(text: str, most_bytes: int) -> str:
    """Return the beginning of a text with its secrets masked; `…` says that more followed."""
    text = str.__str__(text)
    # Cleaned first: a colour between a key and its value would hide that they belong together.
    encoded = mask_text(clean(text[: most_bytes + MARGIN_CHARACTERS])).encode()
    if len(encoded) <= most_bytes and len(text) <= most_bytes + MARGIN_CHARACTERS:
        return encoded.decode()
    return encoded[: most_bytes - len(CUT.encode())].decode(errors="ignore") + CUT


def clean(text: str) -> str:
    """Return a text without colours and control characters: every database can store it, and no terminal obeys it."""
    if _ODD.search(text) is None:
        return text
    text = _ESCAPE.sub("", text).replace("\r\n", "\n")
    return _ODD.sub("\N{REPLACEMENT CHARACTER}", text)


def _end_of(text: str, most_bytes: int) -> str:
    """Return the last lines of a text. It begins with a whole line: a secret's key stands before it in its line."""
    encoded = clean(text).encode()
    if len(encoded) <= most_bytes:
        return encoded.decode()
    end = encoded[-most_bytes:].partition(b"\n")[2]
    return end.decode() or cut(text.rpartition("\n")[2], most_bytes)
