"""Stop requests that arrive while `runworkers` is still importing.

The kernel ignores a signal without a handler if it is sent to the first process of a container. So the handlers come
first, before the project's own modules are imported. The supervisor replaces them when it starts.
Must not import anything that takes time.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_received = 0


def install() -> None:
    """Count the stop requests from now on, and exit with code 0 at the first: nothing has begun yet.

    Main thread only.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _on_signal)


def install_for(command: str) -> None:
    """Do the same if this process is that management command, and not a child of it, which has its arguments too."""
    multiprocessing = sys.modules.get("multiprocessing")
    is_child = multiprocessing is not None and multiprocessing.parent_process() is not None
    if sys.argv[1:2] == [command] and not is_child:
        install()


def received() -> int:
    """Return how many have been received."""
    return _received


def _on_signal(number: int, frame: Any) -> None:
    global _received
    # Counted as well, because an `except BaseException` around an import would swallow the exit.
    _received += 1
    raise SystemExit(0)
