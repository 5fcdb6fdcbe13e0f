"""A name of another task queue, or of another module of ours, is answered wherever the package is asked for it."""

from __future__ import annotations

import copy
import doctest
import inspect
import pkgutil
import re
import traceback
from importlib import import_module
from types import FrameType
from typing import Any

import pytest
from django.utils.module_loading import import_string

import django_asyncq
from django_asyncq.core.foreign_imports import ELSEWHERE, NAMES, OF_OTHERS, no_name


def error_of(statement: str) -> BaseException:
    """Return what a statement raises."""
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {"django_asyncq": django_asyncq})  # a statement of this file
    return caught.value


def last_line(error: BaseException) -> str:
    """Return how Python shows an error."""
    return "".join(traceback.format_exception_only(error)).strip()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_answered(name: str) -> None:
    """In an import and as an attribute, with the line to write; `hasattr` is False. Python adds no guess of its own."""
    imported, read = error_of(f"from django_asyncq import {name}"), error_of(f"django_asyncq.{name}")
    assert (type(imported), type(read)) == (ImportError, AttributeError)
    assert last_line(imported) == f"ImportError: cannot import name {name!r} from 'django_asyncq': {NAMES[name]}"
    assert last_line(read) == f"AttributeError: module 'django_asyncq' has no attribute {name!r}: {NAMES[name]}"
    assert not hasattr(django_asyncq, name)


def test_the_answer_stands_in_what_a_reader_sees() -> None:
    """The traceback of an import ends in the reader's line and in the answer, without frames of the import system."""
    shown = "".join(traceback.format_exception(error_of("from django_asyncq import task, shared_task")))
    assert "importlib" not in shown
    assert shown.endswith("write from django_asyncq import task, and @task above the function\n")


def test_an_import_of_several_names_and_by_a_string() -> None:
    """The first missing name is answered; Django's `import_string` has the answer as the cause of its error."""
    assert "has no" not in str(error_of("from django_asyncq import task, chain, crontab as every_day"))
    with pytest.raises(ImportError) as caught:
        import_string("django_asyncq.chord")
    assert NAMES["chord"] in str(caught.value.__cause__)


def test_an_optional_import_takes_its_other_branch() -> None:
    """As code that supports two queues does."""
    try:
        from django_asyncq import shared_task as found  # type: ignore[attr-defined]
    except ImportError:
        found = None
    assert found is None
    assert getattr(django_asyncq, "shared_task", "nothing") == "nothing"


@pytest.mark.parametrize("name", ["tsk", "no_such_name", "__wrapped__", "_private"])
def test_other_names_have_the_errors_of_python(name: str) -> None:
    """With its guess in an import, where it makes one."""
    said = f"cannot import name '{name}' from 'django_asyncq' ({django_asyncq.__file__})"
    assert str(error_of(f"from django_asyncq import {name}")) == said
    assert str(error_of(f"django_asyncq.{name}")) == f"module 'django_asyncq' has no attribute {name!r}"
    assert not hasattr(django_asyncq, name)


def test_tools_see_the_package_as_before() -> None:
    """Those that ask a module for names which it may not have."""
    assert inspect.getdoc(django_asyncq) and inspect.getsourcefile(django_asyncq)
    assert inspect.unwrap(django_asyncq) is django_asyncq  # type: ignore[arg-type]
    assert "task" in dict(inspect.getmembers(django_asyncq))
    assert [test.examples for test in doctest.DocTestFinder().find(django_asyncq) if test.examples] == []
    namespace: dict[str, Any] = {}
    exec("from django_asyncq import *", namespace)  # a statement of this file
    assert set(django_asyncq.__all__) <= set(namespace)
    with pytest.raises(TypeError, match="module"):
        copy.deepcopy(django_asyncq)


def test_without_frames_the_error_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python has no frames: an AttributeError, which an import replaces by an ImportError of its own."""

    def no_frame() -> FrameType | None:
        return None

    monkeypatch.setattr(inspect, "currentframe", no_frame)
    assert isinstance(no_name("django_asyncq", "shared_task"), AttributeError)
    assert str(error_of("from django_asyncq import shared_task")).startswith("cannot import name 'shared_task' from")


def test_no_name_is_one_of_the_package() -> None:
    """Nor a module of it, which an import would find. Those of other modules are there, and are no word of others."""
    modules = {module.name for module in pkgutil.iter_modules(django_asyncq.__path__)}
    assert not set(NAMES) & (set(django_asyncq.__all__) | modules)
    assert not set(OF_OTHERS) & set(ELSEWHERE)
    for name, answer in ELSEWHERE.items():
        module, found = re.findall(r"from (\S+) import (\w+)", answer)[0]
        assert found == name
        assert hasattr(import_module(module), name), answer


def test_the_lines_to_write_are_right() -> None:
    """What they say to import is there: after the module, or in front of it."""
    found = set()
    for answer in set(OF_OTHERS.values()):
        for module, name in re.findall(r"from (django_asyncq[\w.]*) import (\w+)", answer):
            found.add(name)
            assert hasattr(import_module(module), name), answer
        if answer.endswith("from django_asyncq"):
            used = set(re.findall(r"\b(?:chain|group|previous|cron|every|Discard)\b", answer))
            found |= used
            assert used and used <= set(django_asyncq.__all__), answer
    assert found >= {"task", "group", "previous", "every", "Discard", "SoftTimeout", "current_task", "run_ended"}
