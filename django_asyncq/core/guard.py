"""Call the project's code without letting it end a thread of this package.

The project's code is called about a task in many places: its backoff, the text of its exceptions, its return values,
receivers of signals, handlers and filters of its logging. It may raise `SystemExit`, `KeyboardInterrupt` or any other
BaseException, which `except Exception` lets pass. Such an error concerns that task alone.

In a process or thread of this package everything is caught. Elsewhere, as in a web server, only an Exception is: there
the others are requests to stop that may arrive at any moment, such as Ctrl-C, gunicorn's `SystemExit` and gevent's
`Timeout`. They pass.
"""

from __future__ import annotations

import contextvars
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar

Kind = TypeVar("Kind", bound=BaseException)

_of_thread = threading.local()
_is_own_process = False


def own_process(*, is_own: bool = True) -> None:
    """Note that this process is a worker or a supervisor: its handlers of signals only set flags.

    is_own: False when a supervisor has finished, and the process goes on as what it was.
    """
    global _is_own_process
    _is_own_process = is_own


def own_thread() -> None:
    """Note that the calling thread was started by this package."""
    _of_thread.is_own = True


def passes(error: BaseException) -> bool:
    """Return whether an error may be a request to stop, which is not for this package to answer."""
    if issubclass(type(error), Exception) or _is_own_process:
        return False
    return not getattr(_of_thread, "is_own", False)


def is_a(error: object, kind: type[Kind] | tuple[type[Kind], ...]) -> TypeGuard[Kind]:
    """Return whether an error is of a class, as `except` decides it.

    `isinstance` also asks for the `__class__` of the object, where a class of the project's may run any code.
    """
    return issubclass(type(error), kind)


class Attempted(NamedTuple):
    """What a call returned, or the error that it raised."""

    value: Any
    error: BaseException | None


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Attempted:
    """Call the project's code; return its value or its error, whatever that is. Raises: what `passes`."""
    try:
        return Attempted(call(*args, **kwargs), None)
    except BaseException as error:
        if passes(error):
            raise
        return Attempted(None, error)


@contextmanager
def outlives(
    logger: logging.LoggerAdapter[Any], text: str, *args: object, extra: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Log whatever the block raises, and go on after it. Raises: what `passes`.

    text, args: of the log line. extra: see `logs.log_extra`.
    """
    try:
        yield
    except BaseException as error:
        if passes(error):
            raise
        logger.exception(text, *args, extra=extra)


def class_name(error: BaseException) -> str:
    """Return the name of an error's class; a metaclass of the project's cannot change it, or raise."""
    name: str = type.__dict__["__qualname__"].__get__(type(error))
    return name


class GuardedLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines cannot end a thread, whatever the project's handlers and filters raise.

    A line that cannot be logged is written to standard error.
    """

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Pass the `extra` of each line on; the adapter of the standard library would replace it."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log one line."""
        try:
            super().log(level, msg, *args, stacklevel=2, **kwargs)
        except BaseException as error:
            if passes(error):
                raise
            _write_to_stderr(level, msg, args, error)


def get_logger(name: str) -> GuardedLogger:
    """Return the logger of a part of this package."""
    return GuardedLogger(logging.getLogger(name), None)


def _write_to_stderr(level: int, msg: object, args: tuple[object, ...], error: BaseException) -> None:
    """Write a line that cannot be logged, and the reason, without the project's code."""
    try:
        text = str(msg) % args if args else str(msg)
        frames = "".join(traceback.format_tb(error.__traceback__)[-1:])
        reason = f"(logging raised {class_name(error)})"
        sys.stderr.write(f"{logging.getLevelName(level)} {text}\n{reason}\n{frames}")
    except BaseException as failure:
        if passes(failure):
            raise
        # Neither logging nor standard error can be written to: nothing is left to say it with.


# --- The one way to start a thread that lives long: none of them dies without a log line.
#
# A thread that dies alone leaves a process that looks well and does not work. So whatever ends a thread is logged,
# and the process does not go on without it. A worker process exits at once with EX_SOFTWARE, and its supervisor
# replaces it. A supervisor shuts down in order and exits with the same code, so that what runs it starts it anew.
#
# Its context is its own. Some builds of Python give a thread a copy of the context of whoever starts it, which may
# be the body of a task.

logger = get_logger("django_asyncq.core.guard")

# "An internal software error has been detected", as in `sysexits.h`; `os.EX_SOFTWARE` is not on every platform.
EX_SOFTWARE = 70
# How long the last log line may take: a handler that hangs must not keep a process that cannot work.
LAST_LINE_SECONDS = 5.0


class LongLivedThread(threading.Thread):
    """A thread that calls `work`, and never dies alone.

    on_death: called in the dying thread, with its name, after the error was logged. is_endless: whether `work` must not
    return either. has_died: whether `work` has raised, or returned although it must not.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        on_death: Callable[[str], object] | None = None,
        is_endless: bool = False,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work = work
        self._on_death = on_death
        self._is_endless = is_endless
        self.has_died = False

    def run(self) -> None:
        """Do the work; log what ends it before its time."""
        contextvars.Context().run(self._run)

    def _run(self) -> None:
        own_thread()
        try:
            self._work()
            if not self._is_endless:
                return
            logger.critical("thread %s has died: its work has returned", self.name)
        except BaseException:
            logger.critical("thread %s has died", self.name, exc_info=True)
        self.has_died = True
        if self._on_death is not None:
            self._on_death(self.name)


def exit_process(last_words: Callable[[], object]) -> NoReturn:
    """End this process at once with EX_SOFTWARE, from any thread. last_words: logs why."""
    timer = threading.Timer(LAST_LINE_SECONDS, contextvars.Context().run, (os._exit, EX_SOFTWARE))
    timer.daemon = True
    try:
        attempt(timer.start)
        attempt(last_words)
        attempt(sys.stderr.flush)
    finally:
        os._exit(EX_SOFTWARE)
