"""Read huey's periodic tasks from the project's source: they exist in code alone. Source: huey 3.5, `api.crontab`.

Nothing is imported and nothing is run, so this works after huey is gone, on a commit that still has the decorators.
Only what stands in the decorator as a literal is understood.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings

from ..doctor.files import parse, read_text
from ..doctor.findings import Unreadable
from .clocks import FIELDS, Crontab, each_time, values_of, zone_called
from .old import CannotImport, Found, NothingToImport, OldSchedule, Rule, read_safely, shown

DECORATORS = {"periodic_task", "db_periodic_task"}
# Parameters of `crontab`, in its order, and their places in ours.
PARAMETERS = ("minute", "hour", "day", "month", "day_of_week")
READY_MADE = {"hourly": {"minute": "0"}, "daily": {"minute": "0", "hour": "0"}}
WITHOUT_MEANING = {"name", "strict"}
# Sunday is 0 and 7.
ANY_WEEKDAY = FIELDS[4]._replace(most=7, words={})
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read() -> Found:
    """Return the periodic tasks of the installed apps of the project. Raises: NothingToImport when there is none."""
    folders = list(_folders())
    found = [each for name, folder in folders for each in _of_folder(name, folder)]
    if not found:
        names = ", ".join(name for name, _ in folders) or "none"
        raise NothingToImport(
            f"No app of this project has a function that huey's periodic_task or db_periodic_task decorates. Looked at "
            f"the source of: {names}. Run this on a commit that still has them."
        )
    return Found(f"the source of {', '.join(sorted({each.key.split('/')[0] for each in found}))}", found)


def _folders() -> Iterator[tuple[str, Path]]:
    """Yield the names and folders of the apps that are not installed packages."""
    packages = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    for config in apps.get_app_configs():
        folder = Path(config.path).resolve()
        if config.name != "django_asyncq" and not any(folder.is_relative_to(each) for each in packages):
            yield config.name, folder


def _of_folder(name: str, folder: Path) -> Iterator[OldSchedule]:
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder.parent).as_posix()
        read = read_text(folder.parent, file)
        if isinstance(read, str) and not ("huey" in read and "periodic_task" in read):
            continue
        tree = parse(file, read) if isinstance(read, str) else read
        if isinstance(tree, Unreadable):
            place = f"{file}:{tree.line}" if tree.line else file
            text = f"its source cannot be read: {tree.error}"
            yield OldSchedule(key=place, name=place, task="", is_code=True, refusal=text)
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join([name, *(part for part in parts if part != "__init__")])
        yield from _of_module(module, tree, file)


def _of_module(module: str, tree: ast.Module, file: str) -> Iterator[OldSchedule]:
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and _called(decorator, aliases) in DECORATORS:
                path = f"{module}.{node.name}"
                plain = OldSchedule(key=f"{file}:{node.lineno}", name=path, task=path, is_code=True)
                yield read_safely(_of_decorator, plain, decorator, aliases)


def _called(call: ast.Call, aliases: Mapping[str, str]) -> str:
    """Return the last name of what is called, as its module has it."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return aliases.get(name, name)


def _of_decorator(plain: OldSchedule, call: ast.Call, aliases: Mapping[str, str]) -> OldSchedule:
    """Return the schedule of a decorated function. Raises: CannotImport."""
    given = {each.arg: each.value for each in call.keywords}
    when = call.args[0] if call.args else given.pop("validate_datetime", None)
    differences = []
    if others := sorted(str(name) for name in given if name not in WITHOUT_MEANING):
        differences.append(f"its options {', '.join(others)} are not passed on: declare them on the task")
    fields = _fields(when, aliases)
    written = [fields[name] for name in PARAMETERS]
    *values, weekdays = (
        values_of(field, text) for field, text in zip((*FIELDS[:4], ANY_WEEKDAY), written, strict=True)
    )
    crontab = Crontab.of([*values, frozenset(each % 7 for each in weekdays)], written)
    zone = _zone()
    rule = Rule(each_time(crontab.walls, zone_called(zone), at_change=False), cron=crontab.expression(), zone=zone)
    # A consumer that was stopped makes up for nothing.
    return replace(
        plain,
        written=f"{' '.join(map(str, written))} ({zone})",
        rule=rule,
        missed="skip",
        differences=tuple(differences),
    )


def _fields(when: ast.expr | None, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of a call of `crontab`. Raises: CannotImport when they are computed."""
    fields: dict[str, Any] = dict.fromkeys(PARAMETERS, "*")
    name = _called(when, aliases) if isinstance(when, ast.Call) else ""
    if not isinstance(when, ast.Call) or name not in ("crontab", *READY_MADE):
        text = "" if when is None else f": {shown(ast.unparse(when))}"
        raise CannotImport(f"its times are computed in code, not by crontab(…){text}")
    given = dict(zip(PARAMETERS, when.args, strict=False)) | {str(each.arg): each.value for each in when.keywords}
    for parameter, value in given.items():
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str | int):
            raise CannotImport(f"its times are computed in code: {shown(ast.unparse(when))}")
        fields[parameter] = value.value
    return fields | READY_MADE.get(name, {})


def _zone() -> str:
    """Return the zone in which huey reads crontabs: UTC, unless its setting turns that off."""
    configured: Any = getattr(settings, "HUEY", None)
    utc = configured.get("utc", True) if isinstance(configured, Mapping) else getattr(configured, "utc", True)
    return "UTC" if utc else str(settings.TIME_ZONE or "UTC")
