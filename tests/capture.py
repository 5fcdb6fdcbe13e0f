"""Make the captures of what our own steps leave in Redis anew: `python -m tests.capture [words of pytest's -k]`."""

from __future__ import annotations

import os
import sys

from runtests import main


def make_anew(words: list[str]) -> int:
    """Run the steps and write their captures; return pytest's exit code. words: which steps; none for all."""
    os.environ["ASYNCQ_TEST_CAPTURE"] = "1"
    chosen = ["-k", " or ".join(words)] if words else []
    return main(["-q", "-n", "0", *chosen, "tests/broker/test_left_behind.py"])


if __name__ == "__main__":
    sys.exit(make_anew(sys.argv[1:]))
