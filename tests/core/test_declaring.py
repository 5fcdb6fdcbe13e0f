"""A task's name means one function, which a worker finds: any other declaration is refused with its reason."""

from __future__ import annotations

import code
import doctest
import functools
import importlib
import io
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from django_asyncq import cron, startup_task, task
from django_asyncq.core import registry, schedules
from django_asyncq.core.compat import InvalidTask
from django_asyncq.exceptions import InvalidOption

from .. import tasks

NAME = "asyncq_declared_sample"
HEAD = "from django_asyncq import task\n"


class Home:
    """A class with functions."""

    def method(self) -> None:
        """A method."""

    @staticmethod
    def static() -> None:
        """A function, but not one of the module."""

    def __call__(self) -> None:
        """What makes an object callable."""


def nested() -> Callable[[], None]:
    """Return a function that no import defines."""

    def inner() -> None: ...

    return inner


def plain() -> None:
    """A function of this module."""


def named(module: str | None) -> Callable[[], None]:
    """Return a function of another module."""
    function = eval(compile("lambda: None", __file__, "eval"))
    function.__qualname__ = function.__name__ = "named"
    function.__module__ = module
    return function  # type: ignore[no-any-return]


def from_text() -> Callable[[], None]:
    """Return a function that `exec` has made."""
    namespace: dict[str, Any] = {"__name__": __name__}
    exec("def made(): pass", namespace)
    return namespace["made"]  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare nothing for other tests."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that can be imported and edited."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)


def imported(file: Path, *bodies: str) -> Any:
    """Write a module with these lines after the import of `task`, and import it for the first time."""
    file.write_text(HEAD + "\n".join(bodies))
    importlib.invalidate_caches()
    sys.modules.pop(NAME, None)
    return importlib.import_module(NAME)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "a lambda has no name"),
        (nested(), "within another function"),
        (Home.method, "in a class"),
        (Home.static, "in a class"),
        (Home().method, "a method belongs to an object"),
        (functools.partial(plain), "functools.partial"),
        (Home(), "it is of type Home"),
        (Home, "it is a class"),
        (len, "not a function"),
        (None, "not a function"),
        (named("__main__"), "the script or the shell"),
        (named("__mp_main__"), "the script or the shell"),
        (named("__console__"), "the script or the shell"),
        (named(None), "its module is None"),
        (named(""), "its module is ''"),
        (named("<run_path>"), "<run_path>"),
        (named("a.b-c"), "a.b-c"),
        (from_text(), "its code is from <string>"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"schedule": cron("* * * * *")}, {"takes_context": True}])
def test_what_no_worker_finds_by_its_name_is_no_task(function: Any, reason: str, options: Any) -> None:
    """The declaration is refused, with the reason and the remedy, before any option is looked at."""
    before = registry.registered_names()
    declare = task(**options)
    with pytest.raises(InvalidTask, match="(?s)" + reason + ".*such as the tasks.py"):
        declare(function)
    assert registry.registered_names() == before


def test_two_functions_of_one_name_are_refused(module_file: Path) -> None:
    """The error names both lines, and the first stays the task."""
    with pytest.raises(InvalidTask, match=rf"task {NAME}\.send is declared twice.*line 2 and another in line 4"):
        imported(module_file, "@task", "def send(): return 1", "@task", "def send(): return 2")
    assert registry.registered(f"{NAME}.send").func() == 1


def test_a_wrapped_function_is_told_from_another_that_the_same_decorator_wraps(module_file: Path) -> None:
    """Both wrappers are the same lines of the decorator."""
    decorator = "import functools\ndef quiet(f):\n  @functools.wraps(f)\n  def run(): return f()\n  return run"
    with pytest.raises(InvalidTask, match="declared twice"):
        imported(module_file, decorator, "@task\n@quiet\ndef send(): pass", "@task\n@quiet\ndef send(): pass")
    imported(module_file, decorator, "@task\n@quiet\ndef receive(): pass")
    importlib.reload(sys.modules[NAME])


def test_a_module_may_be_loaded_again(module_file: Path) -> None:
    """By a reload or by another import: the newest function is the task, and a copy of the old one changes nothing."""
    body = ["@task", "def send(): return 1", "@task(priority=3)", "def receive(): return 1"]
    module = imported(module_file, *body)
    first = module.send
    newest = importlib.reload(module).send
    assert newest.func is not first.func
    assert registry.registered(f"{NAME}.send") is newest
    assert first.using(priority=5).priority == 5
    assert registry.registered(f"{NAME}.send") is newest
    again = imported(module_file, *body)
    assert registry.registered(f"{NAME}.send") is again.send
    module.__spec__.loader.exec_module(module)
    assert registry.registered(f"{NAME}.send") is module.send


def test_a_module_that_was_edited_may_be_loaded_again(module_file: Path) -> None:
    """Its functions then stand in other lines. Two of one name are still refused."""
    module = imported(module_file, "@task", "def send(): return 1")
    module_file.write_text(HEAD + "# A new line.\n\n@task\ndef send(): return 2")
    importlib.reload(module)
    assert registry.registered(f"{NAME}.send").func() == 2
    module_file.write_text(HEAD + "@task\ndef send(): return 3\n@task\ndef send(): return 4")
    with pytest.raises(InvalidTask, match="declared twice"):
        importlib.reload(module)


def test_two_modules_of_one_name_are_refused(
    module_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker imports one of the two files."""
    imported(module_file, "@task", "def send(): return 1")
    (tmp_path / "other").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "other")
    with pytest.raises(InvalidTask, match=rf"(?s){NAME}\.py, line 2, the other in .*other"):
        imported(tmp_path / "other" / f"{NAME}.py", "@task", "def send(): return 1")


def test_one_function_may_be_declared_twice() -> None:
    """For two aliases, for instance."""
    first = task(plain)
    second = task(priority=3)(plain)
    assert registry.registered(first.module_path) is first
    assert (first.module_path, second.priority) == (f"{__name__}.plain", 3)


def test_task_in_a_doctest_is_refused() -> None:
    """Its name is that of a module which has no such function."""
    text = ">>> from django_asyncq import task\n>>> @task\n... def shown(): pass\n"
    example = doctest.DocTestParser().get_doctest(text, {"__name__": __name__}, "example", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    output: list[str] = []
    assert runner.run(example, out=output.append).failed == 1
    assert "its code is from <doctest example" in "".join(output)


def test_task_in_a_console_is_refused() -> None:
    """As `manage.py shell` without IPython starts it."""
    console = code.InteractiveConsole({"task": task})
    with redirect_stderr(io.StringIO()) as output:
        for line in ("@task", "def typed(): pass", ""):
            console.push(line)
    assert "InvalidTask" in output.getvalue()
    assert "its module is None" in output.getvalue()


@pytest.mark.django_db
def test_task_in_manage_py_shell_is_refused() -> None:
    """The code of `--command` runs in the namespace of Django's own module."""
    with pytest.raises(InvalidTask, match="its code is from <string>"):
        call_command("shell", command="from django_asyncq import task\n@task\ndef typed(): pass", verbosity=0)


def test_task_in_a_script_is_refused(tmp_path: Path) -> None:
    """The worker's `__main__` is another module."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import django
            django.setup()
            from django_asyncq import task
            @task
            def sent(): pass
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "__main__.sent cannot be a task" in done.stderr
    assert "such as the tasks.py of an installed app" in done.stderr


def test_two_lambdas_are_no_start_up_task_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would silently replace the first; the same function may be declared again."""
    monkeypatch.setattr(schedules, "_startup_tasks", {})
    startup_task("warm")(lambda: 1)
    with pytest.raises(InvalidOption, match="has this name"):
        startup_task("warm")(lambda: 2)
    startup_task("plain")(plain)
    startup_task("plain", every_start=True)(plain)
    assert [each.name for each in schedules.startup_tasks()] == ["warm", "plain"]


def test_tasks_of_the_suite_are_registered_under_their_paths() -> None:
    """The rules refuse none of them."""
    assert registry.registered("tests.tasks.add") is tasks.add
