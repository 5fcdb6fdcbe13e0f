"""The cases, and the proof that each notices when its guard is taken out.

Each runs as `python -m tests.chaos` does, in a process of its own. ASYNCQ_CHAOS_SEED repeats a failing seed.
`-m faults` runs the cases and mutants that are short at their short scale; `-m long` runs the others at that scale, and
then every case at full scale, which takes hours.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.workers import ROOT, environment

from .cases import CASES, Case
from .cluster import is_available

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]
SEED = os.environ.get("ASYNCQ_CHAOS_SEED", "7")
# 8 measures milliseconds; 14 and 23 wait for sweeps and reconnections; 5, 11, 16, 18 and 21 take half a minute each; 2
# starts some dozen fleets, and `test_crash.py` makes its kills one by one; 36 waits until bodies run.
LONG_CASES = {"2", "5", "8", "11", "14", "16", "18", "21", "23", "36"}
SHORT_MUTANTS = {("17", "check-then-add"), ("3", "no-fence")}


SHORT_SECONDS, FULL_SECONDS = 280, 4 * 3600


def run(case: Case, *more: str, seconds: float = SHORT_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run one case on this test's database."""
    if case.needs_cluster and not is_available():
        pytest.skip("needs PostgreSQL's server programs and psycopg")
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--case", case.number, "--seed", SEED, *more],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def marks(is_short: bool) -> list[pytest.MarkDecorator]:
    """Mark as `long` what is not short."""
    return [] if is_short else [pytest.mark.long]


@pytest.mark.parametrize("number", [pytest.param(number, marks=marks(number not in LONG_CASES)) for number in CASES])
def test_holds(number: str) -> None:
    """Every goal of the case is reached."""
    done = run(CASES[number], "--short")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("number", "mutant"),
    [
        pytest.param(case.number, mutant, marks=marks((case.number, mutant) in SHORT_MUTANTS))
        for case in CASES.values()
        for mutant in case.mutants
    ],
)
def test_notices_the_missing_guard(number: str, mutant: str) -> None:
    """Without the guard a goal is missed, and the code that replaced the guard was called."""
    done = run(CASES[number], "--short", "--mutant", mutant)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "**missed**" in done.stdout, f"{done.stdout}\n{done.stderr}"


@pytest.mark.long
@pytest.mark.timeout(FULL_SECONDS + 60)
@pytest.mark.parametrize("number", CASES)
def test_holds_at_full_scale(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every goal of the case is reached at its full size; its row of the table is printed."""
    done = run(CASES[number], seconds=FULL_SECONDS)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
