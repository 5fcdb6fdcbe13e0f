"""`docs/reference/public-api.md` lists the public names, and the guides import no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from django.apps import apps

ROOT = Path(__file__).parent.parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A page of its own documents each of these.
DOCUMENTED_ELSEWHERE = {"django_asyncq.admin", "django_asyncq.contrib"}


def listed() -> dict[str, list[str]]:
    """Return the names on the page by their module."""
    page = (ROOT / "docs" / "reference" / "public-api.md").read_text()
    _, *chapters = re.split(r"^## ", page, flags=re.MULTILINE)
    first_cells = {
        chapter.split()[0]: re.findall(r"^\| (`.+?`) \| \S.* \|$", chapter, re.MULTILINE) for chapter in chapters
    }
    return {module: re.findall(r"`(\w+)`", ", ".join(cells)) for module, cells in first_cells.items()}


def public_names(module: ModuleType) -> set[str]:
    """Return a module's `__all__`, else its functions, classes and signals whose names have no underscore in front."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    assert module.__file__ is not None
    found: set[str] = set()
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name) and target.id.islower()}
    return {name for name in found if not name.startswith("_")} - {"logger"}


@pytest.mark.parametrize("name", sorted(listed()))
def test_page_lists_the_public_names_of_a_module(name: str) -> None:
    """All of them, each once. Of the leadership package only the coordinator is public."""
    names = listed()[name]
    assert len(names) == len(set(names))
    if name == "django_asyncq.leadership":
        assert names == ["StartupTaskCoordinator"]
        assert hasattr(import_module(name), "StartupTaskCoordinator")
    else:
        assert set(names) == public_names(import_module(name))


def test_public_columns_are_columns() -> None:
    """Of each model that has any, so that none is renamed without a deprecation."""
    page = (ROOT / "docs" / "reference" / "public-api.md").read_text()
    found = dict(re.findall(r"^- \*\*(\w+)\*\*: ((?:.|\n  )+)", page, re.MULTILINE))
    assert found.keys() >= {"TaskRecord", "TaskLogLine", "Gate", "Schedule", "Occurrence", "StartupRun"}
    for name, written in found.items():
        names = re.findall(r"`(\w+)`", written)
        model = apps.get_model("django_asyncq", name)
        assert names == [field.name for field in model._meta.concrete_fields if field.name in names], name


def test_page_lists_the_public_modules() -> None:
    """The package and its public modules."""
    modules = [
        "backend",
        "context",
        "control",
        "observe.inspector",
        "models",
        "contrib.otel",
        "contrib.prometheus",
        "contrib.sentry",
        "signals",
        "exceptions",
        "testing",
        "views",
        "leadership",
        "broker.cluster",
    ]
    assert set(listed()) == {"django_asyncq", *(f"django_asyncq.{module}" for module in modules)}


def imports(page: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of this package in the Python examples of a page."""
    for indent, block in re.findall(r"^( *)```python\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
        source = "\n".join(line.removeprefix(indent) for line in block.splitlines())
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django_asyncq"):
                yield from ((node.module or "", alias.name) for alias in node.names)


def test_examples_import_public_names() -> None:
    """What a guide tells people to import is on the page."""
    names = listed()
    assert [
        f"{page.name}: {module}.{name}"
        for page in DOCS
        for module, name in imports(page)
        if ".".join(module.split(".")[:2]) not in DOCUMENTED_ELSEWHERE and name not in names.get(module, [])
    ] == []
