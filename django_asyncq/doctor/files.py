"""Find the files of a project and read them; what cannot be read is said, and no folder is left out in silence."""

from __future__ import annotations

import ast
import os
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from .findings import Unreadable

# What is not the project's own source.
SKIPPED = frozenset(
    [
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        ".tox",
        ".nox",
        ".eggs",
        "__pycache__",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        "node_modules",
        "site-packages",
        "bower_components",
    ]
)
# History that no longer changes; only the names of apps matter in it.
MIGRATIONS = "migrations"
# Texts that start programs, or name packages.
TEXT_NAMES = re.compile(
    r"(?:Procfile|Dockerfile|Containerfile|Makefile|makefile|Justfile|justfile|Pipfile|crontab)(?:[.\-_].*)?"
    r"|.*\.(?:sh|bash|yml|yaml|service|conf|ini|cfg|toml|env|dockerfile|tmpl|tpl|j2|run|nomad|hcl|plist)"
    r"|(?:.*[\-_])?requirements?.*\.(?:txt|in)|supervisord.*|docker-compose.*|\.env.*"
)
REQUIREMENTS = re.compile(r".*requirements?.*\.(?:txt|in)|pyproject\.toml|setup\.(?:cfg|py)|Pipfile|environment\.ya?ml")
IN_REQUIREMENTS_FOLDER = re.compile(r"requirements?|reqs")
# A source of this size is data. Its tree would take a gigabyte.
MOST_BYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a project, by their paths within it. skipped: folders, with how many files each has."""

    root: Path
    python: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    migrations: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.python) + len(self.texts) + len(self.migrations)


def find_files(root: Path) -> Files:
    """Return the files below a folder, or the one file. Links to folders are not followed, so no circle has no end."""
    files = Files(root)
    if root.is_file():
        _add(files, root.name, root)
        return Files(root.parent, files.python, files.texts, files.migrations)
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        for name in sorted(set(folders)):
            if name in SKIPPED or (here / name / "pyvenv.cfg").exists():
                files.skipped[(here / name).relative_to(root).as_posix()] = _count(here / name)
        folders[:] = sorted(each for each in folders if (here / each).relative_to(root).as_posix() not in files.skipped)
        for name in sorted(names):
            if (here / name).is_file() or (here / name).is_symlink():
                _add(files, (here / name).relative_to(root).as_posix(), here / name)
    return files


def _add(files: Files, name: str, path: Path) -> None:
    if path.suffix in (".py", ".pyi"):
        (files.migrations if MIGRATIONS in Path(name).parts[:-1] else files.python).append(name)
    elif TEXT_NAMES.fullmatch(path.name) or (path.suffix in (".txt", ".in") and is_requirements(name)):
        files.texts.append(name)
    elif not path.suffix and path.is_file() and os.access(path, os.R_OK):
        with path.open("rb") as file:
            if file.read(2) == b"#!":
                files.texts.append(name)


def is_requirements(name: str) -> bool:
    """Return whether a file lists packages, by its path."""
    path = Path(name)
    return bool(REQUIREMENTS.fullmatch(path.name) or IN_REQUIREMENTS_FOLDER.fullmatch(path.parent.name))


def _count(folder: Path) -> int:
    return sum(name.endswith(".py") for _, _, names in os.walk(folder) for name in names)


def read_text(root: Path, name: str) -> str | Unreadable:
    """Return the text of a file, in the encoding that a Python source declares, otherwise UTF-8."""
    try:
        if (root / name).stat().st_size > MOST_BYTES:
            return Unreadable(name, 0, f"it is larger than {MOST_BYTES:,} bytes")
        data = (root / name).read_bytes()
        encoding = tokenize.detect_encoding(BytesIO(data).readline)[0] if name.endswith((".py", ".pyi")) else "utf-8"
        return data.decode(encoding).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, SyntaxError, LookupError, ValueError) as error:
        return Unreadable(name, 0, one_line(error))


def parse(name: str, text: str) -> ast.Module | Unreadable:
    """Return the tree of a source, or why there is none."""
    try:
        with warnings.catch_warnings():
            # An escape that Python does not know is not the reader's concern here.
            warnings.simplefilter("ignore")
            return ast.parse(text, name)
    except SyntaxError as error:
        return Unreadable(name, error.lineno or 0, error.msg or "it is no Python")
    except (ValueError, RecursionError, MemoryError) as error:
        return Unreadable(name, 0, one_line(error))


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line, with its class."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def module_names(root: Path, name: str) -> Iterator[str]:
    """Yield the dotted names that a file may be imported by: as its packages say, and from the root that was read."""
    path = root / name
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists() and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    if parts:
        yield ".".join(parts)
    relative = Path(name).with_suffix("").parts
    yield ".".join(relative[:-1] if relative[-1] == "__init__" else relative)
