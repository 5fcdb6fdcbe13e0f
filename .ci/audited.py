"""Read what pip-audit has found: `python .ci/audited.py audit.json`.

A mirror of PyPI may know nothing of single releases, which pip-audit asks for. Then the page of each package is asked,
which names what is known against its newest release; of an older one that is installed nothing is known. Run it in the
environment that is audited.

Exit codes: 0 nothing is known against the packages, 1 one is vulnerable, 2 nobody knows any of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGE = "https://pypi.org/pypi/{}/json"
SECONDS = 15


def main(report: Path) -> int:
    """Print how many packages are known, and those that are vulnerable; return the exit code."""
    found = json.loads(report.read_text())["dependencies"]
    audited = {each["name"]: each["vulns"] for each in found if "vulns" in each}
    whom = "its service"
    if not audited:
        whom = "its service knows none; the index"
        with ThreadPoolExecutor(8) as pool:
            asked = list(pool.map(known_of_newest, [each["name"] for each in found]))
        audited = {name: known for name, known in asked if known is not None}
    vulnerable = {name: [one["id"] for one in known] for name, known in audited.items() if known}
    print(f"pip-audit: {whom} knows {len(audited)} of {len(found)} packages; vulnerable: {vulnerable or 'none'}")
    return 1 if vulnerable else 0 if audited else 2


def known_of_newest(name: str) -> tuple[str, list[Any] | None]:
    """Return the name and what is known against the package; None when the index does not say it of this version."""
    try:
        with urllib.request.urlopen(PAGE.format(name), timeout=SECONDS) as reply:
            page = json.load(reply)
        is_newest = page["info"]["version"] == importlib.metadata.version(name)
        return name, page["vulnerabilities"] if is_newest else None
    except (OSError, ValueError, KeyError, importlib.metadata.PackageNotFoundError):
        return name, None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
