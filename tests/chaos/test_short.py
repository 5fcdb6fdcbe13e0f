"""The short form of the cases, and the proof that each notices when its guard is taken out.

Each runs as `python -m tests.chaos` does, in a process of its own. ASYNCQ_CHAOS_SEED gives a failing seed again;
ASYNCQ_CHAOS_LONG=1 also runs what takes long: the cases below that are not short, and the mutants that wait for what
does not come.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.db import connection

from tests.workers import ROOT, environment

from .cases import CASES, Case
from .cluster import is_available

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]
SEED = os.environ.get("ASYNCQ_CHAOS_SEED", "7")
IS_LONG = bool(os.environ.get("ASYNCQ_CHAOS_LONG"))
# 8 measures milliseconds; 14 and 23 wait for sweeps and reconnections, 5, 11, 16, 18 and 21 take half a minute each; 2,
# whose kills `test_crash.py` does one by one in every run, starts some dozen fleets.
LONG_CASES = {"2", "5", "8", "11", "14", "16", "18", "21", "23"}
SHORT_MUTANTS = {("17", "check-then-add"), ("3", "no-fence")}


def run(case: Case, *more: str) -> subprocess.CompletedProcess[str]:
    """Run one case on this test's database."""
    if connection.vendor not in ("sqlite", "postgresql"):
        pytest.skip("no witness for this database yet")
    if case.needs_cluster and not is_available():
        pytest.skip("no PostgreSQL to start, or no psycopg")
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--short", "--case", case.number, "--seed", SEED, *more],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("number", CASES)
def test_holds(number: str) -> None:
    """Every goal of the case is reached."""
    if number in LONG_CASES and not IS_LONG:
        pytest.skip("only with ASYNCQ_CHAOS_LONG=1")
    done = run(CASES[number])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("number", "mutant"), [(case.number, mutant) for case in CASES.values() for mutant in case.mutants]
)
def test_notices_the_missing_guard(number: str, mutant: str) -> None:
    """With the guard taken out a goal is missed: it is reached because of the guard."""
    if (number, mutant) not in SHORT_MUTANTS and not IS_LONG:
        pytest.skip("only with ASYNCQ_CHAOS_LONG=1")
    done = run(CASES[number], "--mutant", mutant)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "**missed**" in done.stdout, f"{done.stdout}\n{done.stderr}"
