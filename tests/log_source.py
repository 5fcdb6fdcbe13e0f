"""The log lines of the package, read from its source: for the tests that compare them with the docs.

A template is written as the docs do: "…" stands for a value, and what `pluralize` adds is an "s".

Only calls of `logger` and `_logger` are read, so what logs in another way is an error here, not a line that is missed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "django_asyncq"
METHODS = {
    "debug": "DEBUG",
    "info": "INFO",
    "warning": "WARNING",
    "warn": "WARNING",
    "error": "ERROR",
    "exception": "ERROR",
    "critical": "CRITICAL",
    "fatal": "CRITICAL",
}
LOGGERS = ("logger", "_logger")
FUNCTIONS = {"*", "getLogger", "warn", "warn_explicit", "log", *METHODS}
# Where `logging.getLogger` may be called; the others ask `guard.get_logger`. They log nothing themselves.
MAY_ASK_LOGGING = {"guard.py", "stderr_log.py", "run_log.py"}
# What has a method of the same name as a logger and is none: the module (or a folder), and what it is called there.
NO_LOGGERS = {
    ("admin/", "messages"),
    ("broker/__init__.py", "client"),
    ("guard.py", "super"),
    ("maintenance/startup_tasks.py", "run"),
    # The command prints these.
    ("management/commands/runworkers.py", "self"),
    ("worker/execute/executors.py", "coroutine"),
    ("worker/forks.py", "sys"),
}
# What these log is given by those that call them; each call is read instead.
PASS_TEXTS_ON = {("guard.py", "outlives"), ("guard.py", "log"), ("faults.py", "clear"), ("faults.py", "_once")}
ANY_LOGGER = "any"


class LogLine(NamedTuple):
    """A line that the package may log. text: with "…" for values. logger: `ANY_LOGGER` where a helper logs."""

    text: str
    level: str
    logger: str
    place: str


class Unreadable(Exception):
    """A text, a level or a logger that is not found in the source; write it where it is logged, or in a name beside it.

    Or a warning of `warnings`, which no operator sees: log it instead.
    """


@cache
def read_lines(package: Path = PACKAGE) -> list[LogLine]:
    """Return all lines of the package. Raises: Unreadable."""
    return [
        line
        for path in sorted(package.rglob("*.py"))
        for line in lines_of(path.relative_to(package).as_posix(), path.read_text())
    ]


def lines_of(name: str, source: str) -> Iterator[LogLine]:
    """Yield the lines of one module. Raises: Unreadable."""
    tree = ast.parse(source)
    logger = logger_of(tree)
    refuse_other_ways(name, tree)
    for scope in scopes_of(tree):
        if (name, getattr(scope, "name", "")) in PASS_TEXTS_ON:
            continue
        for call in calls_in(scope):
            place = f"{name}:{call.lineno}"
            for text, level, owner in logged_by(call, scope, tree, place):
                yield LogLine(as_written(text), level, owner or logger, place)


def refuse_other_ways(name: str, tree: ast.Module) -> None:
    """Refuse what logs or warns and is not read. Raises: Unreadable."""
    read_here = {id(use) for node in ast.walk(tree) if isinstance(node, ast.Call) for use in uses_of_methods(node)}
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = import_of_function(node)
        elif isinstance(node, ast.Attribute):
            found = use_of_module(node, name) or ("" if id(node) in read_here else alias_of_method(node))
        elif isinstance(node, ast.Call):
            found = call_of_other(node, name)
        if found:
            raise Unreadable(f"{name}:{getattr(node, 'lineno', 0)}: {found}")


def import_of_function(node: ast.Import | ast.ImportFrom) -> str:
    """Return what an import takes out of `logging` or `warnings`, or "": by another name it would not be found."""
    names = {each.name for each in node.names}
    if isinstance(node, ast.Import):
        renamed = {each.name for each in node.names if each.asname} & {"logging", "warnings"}
        return f"{min(renamed)} by another name" if renamed else ""
    taken = names & FUNCTIONS if node.module in ("logging", "warnings") else set()
    return f"{', '.join(sorted(taken))} of {node.module}" if taken else ""


def use_of_module(node: ast.Attribute, name: str) -> str:
    """Return which function of `logging` or `warnings` is used where it may not be, or ""."""
    if node.attr == "getLogger" and name not in MAY_ASK_LOGGING:
        return "logging.getLogger, in place of get_logger"
    if named(node.value) == "warnings" and node.attr in ("warn", "warn_explicit"):
        return f"warnings.{node.attr}"
    return ""


def alias_of_method(node: ast.Attribute) -> str:
    """Return which method of a logger is passed on or given another name, or ""."""
    is_method = named(node.value) in LOGGERS and node.attr in {*METHODS, "log"}
    return f"{node.attr} of a logger, by another name" if is_method else ""


def call_of_other(call: ast.Call, name: str) -> str:
    """Return which object other than `logger` has a method called that logs, unless it is known to be none; or ""."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in {*METHODS, "log"}:
        return ""
    value = call.func.value
    if isinstance(value, ast.Call):
        owner = named(value.func)
    elif (owner := named(value)) in LOGGERS:
        return ""
    if any(name.startswith(module) and owner == known for module, known in NO_LOGGERS):
        return ""
    return f"{call.func.attr} of {owner or 'an expression'}, which may be a logger"


def uses_of_methods(call: ast.Call) -> list[ast.expr]:
    """Return the expressions of a call that `logged_by` reads as the method that logs."""
    return [call.func, *(call.args[:1] if named(call.func) == "partial" else [])]


def logged_by(call: ast.Call, scope: ast.AST, tree: ast.Module, place: str) -> Iterator[tuple[str, str, str]]:
    """Yield text, level and logger ("" for that of the module) of what a call, or one of `partial`, logs."""
    if named(call.func) == "partial" and isinstance(call.args[0], ast.Attribute):
        call = ast.Call(call.args[0], call.args[1:], call.keywords)
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = named(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if owner in LOGGERS and called in {*METHODS, "log"}:
        logger = ANY_LOGGER if owner == "_logger" else ""
        is_log = called == "log"
        levels = levels_of(call.args[0], scope, place) if is_log else {METHODS[called]}
        for text in texts_of(call.args[1 if is_log else 0], scope, tree, place):
            yield from ((text, level, logger) for level in sorted(levels))
    elif called == "outlives":
        yield from ((text, "ERROR", "") for text in texts_of(call.args[1], scope, tree, place))
    elif called == "Faults":
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        (unreachable,) = texts_of(call.args[1], scope, tree, place)
        (failed,) = texts_of(given.get("failed", call.args[1]), scope, tree, place)
        (over,) = texts_of(given["over"], scope, tree, place)
        yield f"{unreachable}: %s", "WARNING", ""
        # A misconfigured Redis is no outage that passes by itself; a missing table has its remedy in the text.
        yield f"{unreachable}: %s", "ERROR", ""
        if failed != unreachable:
            yield f"{failed}: %s", "ERROR", ""
        yield f"{over}, after %.1f s", "INFO", ""


def texts_of(found: ast.expr, scope: ast.AST, tree: ast.Module, place: str) -> list[str]:
    """Return the texts that an argument may be: a literal, a name that is assigned one, or a parameter."""
    if isinstance(found, ast.Constant) and isinstance(found.value, str):
        return [found.value]
    if isinstance(found, ast.Name):
        assigned = [value for value in assigned_to(found.id, scope) if isinstance(value, ast.Constant)]
        texts = [value.value for value in assigned if isinstance(value.value, str)]
        texts += texts_given(found.id, scope, tree)
        if texts:
            return texts
    raise Unreadable(f"{place}: the text of a log line")


def texts_given(parameter: str, scope: ast.AST, tree: ast.Module) -> list[str]:
    """Return the texts that the module passes to a function for one of its parameters."""
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    names = [each.arg for each in scope.args.args]
    if parameter not in names:
        return []
    return [
        text
        for caller in scopes_of(tree)
        for call in calls_in(caller)
        if named(call.func) == scope.name and len(call.args) > names.index(parameter)
        for text in texts_of(call.args[names.index(parameter)], caller, tree, f"line {call.lineno}")
    ]


def levels_of(found: ast.expr, scope: ast.AST, place: str) -> set[str]:
    """Return the names of the levels that an argument may be."""
    values = assigned_to(found.id, scope) if isinstance(found, ast.Name) else [found]
    levels = {
        node.attr
        for value in values
        for node in ast.walk(value)
        if isinstance(node, ast.Attribute) and named(node.value) == "logging"
    }
    if not levels:
        raise Unreadable(f"{place}: the level of a log line")
    return levels


def assigned_to(name: str, scope: ast.AST) -> list[ast.expr]:
    """Return what a scope assigns to a name, alone or in a tuple."""
    found: list[ast.expr] = []
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if named(target) == name:
                found.append(node.value)
            elif isinstance(target, ast.Tuple) and name in (names := [named(each) for each in target.elts]):
                is_pair = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(names)
                found.append(node.value.elts[names.index(name)] if is_pair else node.value)
    return found


def scopes_of(tree: ast.Module) -> list[ast.AST]:
    """Return the module and each of its functions."""
    return [tree, *(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))]


def calls_in(scope: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of one scope, those of the functions in it excluded."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from calls_in(child)


def logger_of(tree: ast.Module) -> str:
    """Return the name of the logger of a module: the argument of `get_logger`; a constant is named by its value."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and named(node.value.func) == "get_logger":
            (argument,) = node.value.args
            return str(argument.value) if isinstance(argument, ast.Constant) else "django_asyncq.runs"
    return ANY_LOGGER


def named(node: ast.expr) -> str:
    """Return the last part of a name such as `self._logger`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def as_written(text: str) -> str:
    """Return a template as the docs write it."""
    text = re.sub(r"(%d (?:[\w-]+ )*\w+)%s", r"\1s", text)
    text = re.sub(r"(?:%(?:\.\d+)?[sdgfar])+", "…", text).replace("%%", "%")
    return text.split("\n")[0].rstrip(":")
