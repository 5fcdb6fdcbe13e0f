"""No models: Django imports this module while it sets itself up, before any command begins."""

from __future__ import annotations

import os
import time
from pathlib import Path

if mark := os.environ.get("ASYNCQ_TEST_SLOW_IMPORT"):
    # Stand for an import that takes long; a second word says that it swallows whatever is raised meanwhile.
    path, _, swallows = mark.partition(" ")
    Path(path).touch()
    try:
        time.sleep(30)
    except BaseException:
        if not swallows:
            raise
