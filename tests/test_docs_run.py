"""Every Python example of the docs runs: those of the guides that are followed as a project, and here all others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .docs_runner import FOLLOWED, ROOT, pages

# Many pages take a second; the process starts a Valkey of its own.
SECONDS = 100


def outcomes() -> Iterator[tuple[str, str]]:
    """Yield each page, and the traceback of its first example that failed; "" for none."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs_runner"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    for line in done.stdout.splitlines():
        if line.startswith('{"page"'):
            found = json.loads(line)
            yield found["page"], found["error"]


def test_every_python_example_of_the_docs_runs() -> None:
    """Page by page, each example knowing those before it."""
    found = dict(outcomes())
    assert found.keys() == pages().keys()
    failed = {page: error for page, error in found.items() if error}
    assert not failed, "\n".join(failed.values())


def test_pages_that_are_not_run_here_are_followed_elsewhere() -> None:
    """By name, in the tests that type them as a project."""
    source = "".join(
        (Path(__file__).parent / name).read_text() for name in ("test_testing_guide.py", "test_coming_from.py")
    )
    for page in FOLLOWED:
        assert f'"{page}.md"' in source
    assert "coming-from" in source
