"""The liveness file, whose age shows a probe that all worker processes are up."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..guard import get_logger

logger = get_logger("django_asyncq.supervisor")


class LivenessFile:
    """A file that is touched while all is well. A full disk or a folder that vanished must not stop the workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_failing = False

    def check(self) -> None:
        """Make sure that the file can be touched, and leave it as it is. Raises: OSError."""
        try:
            os.close(os.open(self.path, os.O_WRONLY))
        except FileNotFoundError:
            # Only `touch` says that processes are up, so another file shows that the folder takes one.
            with tempfile.TemporaryFile(dir=self.path.parent):
                pass

    def touch(self) -> None:
        """Touch the file; log once when that begins to fail, and once when it works again."""
        try:
            self.path.touch()
        except OSError as error:
            if not self._is_failing:
                logger.warning("the liveness file cannot be touched: %s", error)
            self._is_failing = True
        else:
            if self._is_failing:
                logger.info("the liveness file %s is touched again", self.path)
            self._is_failing = False
