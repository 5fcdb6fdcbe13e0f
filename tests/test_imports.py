"""The shape of the project, read from its code: imports point one way, and one door leads to a task's state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "django_asyncq"

# Lowest first; a module imports only from ranks below its own, or from its own folder.
RANKS = [
    {"exceptions", "compat", "django_internals", "failpoints", "conf"},
    {"definitions"},
    {"context", "models", "signals"},
    {"broker", "storage"},
    {"gates", "leadership"},
    {"lifecycle"},
    {"registry"},
    {"tasks"},
    {"results"},
    {"scheduling", "worker"},
    {"maintenance"},
    {"supervisor"},
    {"apps", "checks", "receivers", "admin", "backend", "testing", "management"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
# User code imports `tasks` and the backend before the models can be loaded.
MAY_DEFER = {"tasks", "leadership.coordinator", "backend", "apps", "worker.bootstrap", "testing", "__init__"}
USES_REDIS = {"broker", "gates", "leadership"}
TASK_FIELDS = {"state"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module by its dotted name within the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "migrations" in path.parts:
            continue
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text(), str(path))


MODULES = dict(modules())
PACKAGES = {".".join(path.parent.relative_to(PACKAGE).parts) for path in PACKAGE.rglob("__init__.py")}


def imported(name: str, tree: ast.AST) -> Iterator[tuple[str, ast.ImportFrom]]:
    """Yield what a module imports from the package when it runs, as the top-level part of the target."""
    parts = name.split(".")
    base = parts if name in PACKAGES else parts[:-1]
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in only_types:
            target = base[: len(base) - node.level + 1] + (node.module.split(".") if node.module else [])
            if target:
                yield target[0], node
            else:
                for alias in node.names:
                    yield alias.name, node


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("", "__init__")])
def test_imports_point_one_way(name: str) -> None:
    """No module imports from its own rank or above."""
    top = name.split(".")[0]
    for target, _ in imported(name, MODULES[name]):
        if target == top:
            continue
        allowed = RANK[target] < RANK[top]
        allowed = allowed or (RANK[top] == len(RANKS) - 1 and top == "apps")
        assert allowed, f"{name} imports {target}: it points the wrong way"


@pytest.mark.parametrize("name", list(MODULES))
def test_imports_stand_at_the_top(name: str) -> None:
    """Only what must be importable before the models may defer an import."""
    if name in MAY_DEFER or name == "":
        return
    for function in ast.walk(MODULES[name]):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not inner, f"{name}.{function.name} imports inside a function"


@pytest.mark.parametrize("name", list(MODULES))
def test_redis_is_imported_where_it_belongs(name: str) -> None:
    """Only the broker, the gate and the coordinator know Redis."""
    if name.split(".")[0] in USES_REDIS:
        return
    for node in ast.walk(MODULES[name]):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not any(found.split(".")[0] in ("redis", "django_redis") for found in names), name


@pytest.mark.parametrize("name", list(MODULES))
def test_only_lifecycle_changes_a_state(name: str) -> None:
    """No assignment to `.state` and no `update(state=…)` anywhere else."""
    if name.split(".")[0] == "lifecycle":
        return
    for node in ast.walk(MODULES[name]):
        targets = node.targets if isinstance(node, ast.Assign) else []
        assert not any(isinstance(target, ast.Attribute) and target.attr in TASK_FIELDS for target in targets), name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keywords = {keyword.arg for keyword in node.keywords}
            is_write = node.func.attr in ("update", "create", "aupdate", "acreate", "update_or_create")
            assert not (is_write and keywords & TASK_FIELDS), name


@pytest.mark.parametrize("name", list(MODULES))
def test_functions_and_modules_fit_in_a_head(name: str) -> None:
    """Functions under 50 lines, modules under 450."""
    tree = MODULES[name]
    last = tree.body[-1].end_lineno if tree.body else 0
    assert (last or 0) < 450, name
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno
            assert length < 50, f"{name}.{node.name}: {length} lines"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.lua")), ids=lambda path: path.stem)
def test_scripts_are_short_and_say_what_they_promise(path: Path) -> None:
    """A header with purpose, KEYS, ARGV, returns and invariant; under 60 lines; no JSON."""
    lines = path.read_text().splitlines()
    header = "\n".join(line for line in lines if line.startswith("--"))
    assert len(lines) < 60
    assert "cjson" not in path.read_text()
    for word in ("KEYS", "ARGV", "Returns"):
        assert word in header, word


def test_checker_sees_a_wrong_arrow() -> None:
    """The test above can fail: a broker that imported `lifecycle` would be found."""
    tree = ast.parse("from ..lifecycle import enqueue\nfrom .. import tasks")
    assert [target for target, _ in imported("broker.clients", tree)] == ["lifecycle", "tasks"]
    assert RANK["lifecycle"] > RANK["broker"]
