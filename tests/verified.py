"""Whether what the docs say was run since it last changed: `.ci/verified` holds a digest of all files that it needs.

`python -m tests.verified` exits with 0 if nothing has changed, else with 1: `.ci/run` then runs what is marked `docs`,
and its sections on the site, on new projects and on containers. When they have passed, write the digest and commit it:
`python -m tests.verified --write`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTE = ROOT / ".ci" / "verified"
FILES = [
    "README.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    "runtests.py",
    ".ci",
    "docs",
    "example_project",
    "django_asyncq/management",
    "django_asyncq/__init__.py",
    "tests/docs_*.py",
]


def digest() -> str:
    """Return a digest of the names and contents of the files that git knows, without the note itself."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *FILES], cwd=ROOT, capture_output=True, check=True).stdout
    found = hashlib.sha256()
    for name in sorted(listed.decode().split("\0")):
        path = ROOT / name
        if name and path != NOTE and path.exists():
            found.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def main(arguments: list[str]) -> int:
    """Compare or write the digest."""
    now = digest()
    if arguments == ["--write"]:
        NOTE.write_text(f"{now}\n")
    is_verified = NOTE.exists() and NOTE.read_text().strip() == now
    print("what the docs say", "was run as it is" if is_verified else "has changed since it was run")
    return int(not is_verified)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
