"""Loads the project in a fork server, which imports this module before it forks. Nothing else imports it."""

from __future__ import annotations

import json
import os
import sys
import traceback

from .bootstrap import PRELOAD_VARIABLE, load_to_fork


def _load(message: str) -> None:
    """Load the project. A fork server that cannot do it exits; the next start of a process tries it in another one.

    One that should not fork exits too, but says so: nothing is forked then.
    """
    try:
        wanted = json.loads(message)
        sys.path[:] = wanted["path"]
        load_to_fork(wanted["verbosity"], wanted["obstacle_file"])
    except BaseException:  # noqa: BLE001 - multiprocessing would pass over an ImportError
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if found := os.environ.pop(PRELOAD_VARIABLE, None):
    _load(found)
