"""The lines that the doctor gives can be written: no option, command, setting or attribute in them is missing."""

from __future__ import annotations

import ast
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import fields

import pytest

import django_asyncq
from django_asyncq import conf, signals
from django_asyncq.context import TaskContext
from django_asyncq.core.foreign_words import OPTIONS, options_of
from django_asyncq.core.options import TaskOptions
from django_asyncq.doctor.vocabulary import Option, Vocabulary
from django_asyncq.management.commands.asyncq import Command as AsyncqCommand
from django_asyncq.management.commands.runworkers import Command as RunworkersCommand
from django_asyncq.models import TaskRecord
from django_asyncq.results import AsyncqResult
from django_asyncq.tasks import Task

from ..project.test_docs import options_of as options_of_command
from .projects import VOCABULARIES
from .test_tables import EACH_QUEUE, findings_by_case

RUNWORKERS = options_of_command(RunworkersCommand())[""]
ASYNCQ = options_of_command(AsyncqCommand())
OF_TASK = {*TaskOptions.__annotations__, "queue_name", "priority", "backend", "takes_context", "batch"}
OF_USING = options_of(Task.using)
# What a line calls that is no name of this package.
OF_PYTHON = {"timedelta", "receiver", "str", "uuid4", "getLogger", "now", "get_default_timezone", "get", "all", "page"}


def texts_of(vocabulary: Vocabulary) -> Iterator[str]:
    """Yield every text of a vocabulary: the forms, what is said, and the same of the options."""
    for use in vocabulary.uses.values():
        yield from (use.write, use.says)
        for option in use.options.values():
            yield from (option.text, option.says)
        for implied in use.implied:
            yield from (implied.option.text, implied.option.says)


def lines_of(queue: str) -> Iterator[str]:
    """Yield every line to write that any case of the tables gives."""
    yield from {each.write for found in findings_by_case(queue).values() for each in found if each.write}


def parsed(line: str) -> ast.AST | None:
    """Return the tree of a line, also of a decorator; None for a command or a text with gaps."""
    try:
        text = line.replace("…", "...")
        return ast.parse(f"{text}\ndef f(): ..." if line.startswith("@") else text)
    except SyntaxError:
        return None


@EACH_QUEUE
def test_options_of_the_lines_are_those_of_the_calls(queue: str) -> None:
    """`@task(…)` and `.using(…)` take each of them, and `cron(…)` and `every(…)` too."""
    known = {"task": OF_TASK, "using": OF_USING, "retry": {"in_", "counted"}, "wait": {"timeout"}}
    for line in lines_of(queue):
        for node in ast.walk(tree) if (tree := parsed(line)) else ():
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in known:
                assert {each.arg for each in node.keywords} <= known[name], line


@EACH_QUEUE
def test_lines_of_python_are_python(queue: str) -> None:
    """Each line is Python, with gaps as `…`, or a command line."""
    for line in lines_of(queue):
        is_command = line.startswith(("python manage.py", "`manage.py", "rate=", "backoff=", "max_attempts=", "after="))
        assert is_command or parsed(line.split("  #")[0]) or " and " in line or "[…]" in line, line


@EACH_QUEUE
def test_attributes_of_a_context_exist(queue: str) -> None:
    """What a text says of `context` is an attribute of it."""
    for text in (*texts_of(VOCABULARIES[queue]), *lines_of(queue)):
        for name in re.findall(r"\bcontext\.(\w+)", text):
            assert hasattr(TaskContext, name) or name in TaskContext.__dataclass_fields__, text


@EACH_QUEUE
def test_columns_of_the_row_exist(queue: str) -> None:
    """What a text says of `context.record` is a field of it."""
    columns = {each.name for each in TaskRecord._meta.get_fields()}
    for text in texts_of(VOCABULARIES[queue]):
        assert set(re.findall(r"\bcontext\.record\.(\w+)", text)) <= columns, text


@EACH_QUEUE
def test_attributes_of_a_result_exist(queue: str) -> None:
    """What a line reads of a result, or calls on it, is there."""
    known = {each for each in dir(AsyncqResult) if not each.startswith("_")}
    known |= {each.name for each in fields(AsyncqResult)}
    for path, use in VOCABULARIES[queue].uses.items():
        if path.startswith(("AsyncResult", "Result.", "Job.")):
            assert set(re.findall(r"\{it\}\.(\w+)", use.write)) <= known, (path, use.write)


@EACH_QUEUE
def test_commands_in_the_texts_exist(queue: str) -> None:
    """`manage.py asyncq` has each noun and verb, `runworkers` each option."""
    for text in (*texts_of(VOCABULARIES[queue]), *lines_of(queue)):
        for noun, verb in re.findall(r"manage\.py asyncq ([a-z-]+)(?: ([a-z-]+))?", text):
            assert noun in ASYNCQ, text
            assert not verb or f"{noun} {verb}" in ASYNCQ or verb in ("whose",), text
        for rest in re.findall(r"manage\.py runworkers([^`;:]*)", text):
            assert set(re.findall(r"--[a-z-]+", rest)) <= RUNWORKERS, text


@EACH_QUEUE
def test_settings_in_the_texts_exist(queue: str) -> None:
    """Each key of ASYNCQ that a text names is one."""
    for text in texts_of(VOCABULARIES[queue]):
        for key in re.findall(r"ASYNCQ\[\"(\w+)\"\]", text) + re.findall(r'ASYNCQ = \{\{?"(\w+)"', text):
            assert key in conf.FIELD_NAMES, text


@EACH_QUEUE
def test_signals_in_the_texts_exist(queue: str) -> None:
    """Each receiver is of a signal of this package."""
    for text in texts_of(VOCABULARIES[queue]):
        for name in re.findall(r"@receiver\((\w+)\)", text):
            assert hasattr(signals, name), text
        for name in re.findall(
            r"\b((?:task|run|worker|fleet)_(?:failed|started|ended|lost|stopping|state_chang\w+))\b", text
        ):
            assert hasattr(signals, name), text


@EACH_QUEUE
def test_names_that_are_imported_from_the_package_exist(queue: str) -> None:
    """A name "from django_asyncq" is there."""
    for use in VOCABULARIES[queue].uses.values():
        if use.says.startswith("from django_asyncq") and "django_asyncq." not in use.says:
            name = re.match(r"\w+", use.write)
            assert name and hasattr(django_asyncq, name[0]), use


def own_option(option: Option) -> set[str]:
    """Return the options of ours that an option of another queue becomes."""
    return set(re.findall(r"(?:^|, )(\w+)=", option.text))


def test_the_doctor_and_the_errors_of_the_package_say_the_same() -> None:
    """A word of another queue that raises an error with a line to write leads to the same option here."""
    compared = 0
    for path, use in ((path, use) for each in VOCABULARIES.values() for path, use in each.uses.items()):
        if path.startswith(("command ", "settings.")):
            continue
        for name, option in use.options.items():
            word = name.partition("=")[0]
            ours = own_option(option) & (OF_TASK | OF_USING)
            if word in OPTIONS and ours and option.slot in ("task", "using"):
                compared += 1
                assert any(re.search(rf"\b{each}\b", OPTIONS[word]) for each in ours), (path, name, OPTIONS[word])
    assert compared > 50


def test_a_schedule_is_one_that_can_be_made() -> None:
    """The cron expressions of the cases are valid: `cron` accepts them."""
    for queue in ("celery", "huey"):
        for line in lines_of(queue):
            for text in re.findall(r'cron\("([^"…{]+)"\)', line):
                django_asyncq.cron(text)


def test_the_parser_of_runworkers_accepts_the_lines_of_commands() -> None:
    """What stands behind `runworkers` can be typed."""
    parser = ArgumentParser()
    RunworkersCommand().add_arguments(parser)
    seen = 0
    for queue in VOCABULARIES:
        for line in lines_of(queue):
            if line.startswith("python manage.py runworkers"):
                seen += 1
                parser.parse_args(line.split()[3:])
    assert seen > 20


@pytest.mark.parametrize("queue", VOCABULARIES)
def test_what_a_line_calls_exists(queue: str) -> None:
    """A plain name that a line calls is of this package, or one of the few of Python and Django."""
    for line in lines_of(queue):
        for node in ast.walk(tree) if (tree := parsed(line)) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                own = hasattr(django_asyncq, name) or name in ("Inspector", "current_task")
                assert own or name in OF_PYTHON or name in ("work", "Celery", "shared_task", "seven", "group", "f"), (
                    line
                )
