"""A virtual environment for each peer, from its pinned requirements, kept under a hash of them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_SECONDS = 900


class NotInstalled(RuntimeError):
    """A peer's packages could not be installed; the message is pip's."""


def requirements_of(name: str) -> str:
    """Return the pinned requirements of this name: `pip freeze` of an environment in which it was tried."""
    return (REQUIREMENTS / f"{name}.txt").read_text()


def unpinned(requirements: str) -> list[str]:
    """Return the lines that leave the version open."""
    return [line for line in requirements.splitlines() if line.strip() and "==" not in line]


def digest(requirements: str) -> str:
    """Return a hash of the requirements and of this interpreter, the name of the environment's folder."""
    return hashlib.sha256(f"{sys.executable}\n{sys.version}\n{requirements}".encode()).hexdigest()[:12]


def ensure(name: str, folder: Path) -> Path:
    """Return the environment of these requirements; create it if it does not exist.

    Its last step writes a marker file, so that an interrupted installation is repeated.
    Raises: NotInstalled.
    """
    requirements = requirements_of(name)
    home = folder / f"{name}-{digest(requirements)}"
    if (home / "complete").exists():
        return home
    shutil.rmtree(home, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [*pip, "-r", str(REQUIREMENTS / f"{name}.txt")],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(str(error)) from error
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
            raise NotInstalled(said[-1][:500] if said else f"{command[0]} ended with {done.returncode}")
    (home / "complete").touch()
    return home


def versions(home: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Return what is installed of these packages, as the environment itself says."""
    program = "import importlib.metadata as m, sys; [print(n, m.version(n)) for n in sys.argv[1:]]"
    command = [str(home / "bin" / "python"), "-c", program, *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())
