"""Read what pip-audit has found: `python .ci/audited.py audit.json`.

Exit codes: 0 nothing is known against the packages, 1 one is vulnerable, 2 the service knows none of them, as a mirror
of the index may.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(report: Path) -> int:
    """Print how many packages the service knows, and those that are vulnerable; return the exit code."""
    found = json.loads(report.read_text())["dependencies"]
    vulnerable = {each["name"]: [one["id"] for one in each["vulns"]] for each in found if each.get("vulns")}
    known = sum("vulns" in each for each in found)
    print(f"pip-audit: its service knows {known} of {len(found)} packages; vulnerable: {vulnerable or 'none'}")
    return 1 if vulnerable else 0 if known else 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
