"""What the package says of itself to a package index is what was run, and what its archives have."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from typing import Any

import pytest

import django_asyncq

from .test_docs import ROOT, read

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]


def versions_in(prefix: str) -> set[str]:
    """Return the versions of the classifiers that begin so."""
    names = (each.removeprefix(f"{prefix} :: ") for each in PROJECT["classifiers"] if each.startswith(f"{prefix} :: "))
    return {name for name in names if re.fullmatch(r"\d+\.\d+", name)}


def test_classifiers_are_the_versions_that_were_run() -> None:
    """Those of the page, without the ones that it says nobody has tried."""
    page = read("reference/supported.md")
    untried = set(re.findall(r"Python (\d\.\d+)", page.partition("## Not tried yet")[2]))
    for name, prefix in (("Python", "Programming Language :: Python"), ("Django", "Framework :: Django")):
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        supported = set(re.findall(r"\b\d\.\d+\b", row.split("|")[2]))
        assert versions_in(prefix) == supported - (untried if name == "Python" else set())


def test_extras_for_users_have_their_names() -> None:
    """The words by which a project asks for them; a renamed one would be ignored by pip with a warning."""
    own = PROJECT["optional-dependencies"].keys() - {"test", "dev", "demo"}
    assert own == {"backport", "docs", "postgres", "mysql", "hiredis", "otel", "prometheus", "sentry"}


def test_every_extra_that_a_text_names_exists() -> None:
    """In docs, errors and docstrings."""
    named: set[str] = set()
    for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "django_asyncq").rglob("*.py")]:
        for words in re.findall(r"django[_-]asyncq\[([\w,]+)\]", path.read_text()):
            named |= set(words.split(","))
    assert {"backport", "mysql", "otel", "postgres", "test"} <= named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("prometheus", "prometheus_client", "prometheus"),
        ("otel.tracing", "opentelemetry", "otel"),
        ("sentry", "sentry_sdk", "sentry"),
    ],
)
def test_a_module_without_its_library_names_the_extra(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own error names a package that the reader may never have heard of."""
    name = f"django_asyncq.contrib.{module}"
    for each in [each for each in sys.modules if each == name or each.startswith((f"{name}.", f"{library}."))]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"^django_asyncq\.contrib\.{extra} needs .*pip install .*\[{extra}\]$"):
        import_module(name)


def test_the_page_on_dependencies_has_each_of_them_with_its_range() -> None:
    """Those of the package and of its extras, by the first requirement that names each."""
    wanted: dict[str, str] = {}
    for requirement in [
        *PROJECT["dependencies"],
        *(each for some in PROJECT["optional-dependencies"].values() for each in some),
        *PYPROJECT["build-system"]["requires"],
    ]:
        name, bounds = re.match(r"([\w.-]+)(?:\[[^]]*\])?([^;]*)", requirement).groups()  # type: ignore[union-attr]
        if name != "django_asyncq":
            wanted.setdefault(name, bounds.strip())
    rows = re.findall(r"^\| ([\w.-]+) \| `([^`]+)` \|", read("reference/dependencies.md"), re.MULTILINE)
    assert dict(rows) == wanted and len(rows) == len(wanted)


# Each is untrue once there is a release.
BEFORE_A_RELEASE = {
    "CHANGELOG.md": "not released yet",
    "README.md": "there has been no release yet",
    "SECURITY.md": "Until the first release",
    "docs/explanation/when-not-to-use.md": "there has been no release yet",
}


def test_pages_say_that_there_is_no_release_until_there_is_one() -> None:
    """A tag is a release."""
    if not (ROOT / ".git").exists():
        pytest.skip("an archive of the sources has no history")
    tags = subprocess.run(["git", "tag"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    saying = {page for page, text in BEFORE_A_RELEASE.items() if text in (ROOT / page).read_text()}
    assert saying == (set() if tags else BEFORE_A_RELEASE.keys())


def test_versions_agree() -> None:
    """Of the package, its metadata and the changelog, whose first section has at most 60 lines."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    assert newest.split()[0] == PROJECT["version"]
    assert len(newest.splitlines()) <= 60
    assert django_asyncq.__version__ == PROJECT["version"]
