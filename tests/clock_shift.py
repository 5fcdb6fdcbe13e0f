"""Processes whose wall clock is wrong: a library preloaded into them shifts it, for Python, Django and the drivers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shifted_clock.c")


def shifted_clock(seconds: int, folder: Path) -> dict[str, str]:
    """Return the environment of processes whose wall clock is wrong by so much; their monotonic clock is right."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler makes the library that shifts the clock")
    library = folder / "shifted_clock.so"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "ASYNCQ_TEST_CLOCK_SHIFT": str(seconds)}
