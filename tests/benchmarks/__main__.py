"""`python -m tests.benchmarks compare`; the other measurements are modules of their own."""

from __future__ import annotations

import sys

from . import compare

if __name__ == "__main__":
    if sys.argv[1:2] != ["compare"]:
        sys.exit(f"usage: python -m tests.benchmarks compare [options]\n\n{compare.__doc__}")
    compare.main(sys.argv[2:])
