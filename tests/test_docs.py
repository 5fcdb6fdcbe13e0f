"""The docs say what the code does: settings, options, errors, checks, links, commands."""

from __future__ import annotations

import ast
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from django_asyncq import checks, conf, exceptions
from django_asyncq.management.commands.asyncq import Command as AsyncqCommand
from django_asyncq.management.commands.runworkers import Command

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def read(page: str) -> str:
    """A page of the docs."""
    return (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture is there."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def anchors_of(page: Path) -> set[str]:
    """What GitHub names a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    """A link to a part of a page names a heading of it."""
    for target, anchor in re.findall(r"\]\(((?!http)[^)#]*)#([^)]+)\)", page.read_text()):
        assert anchor in anchors_of(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_docs_is_python(page: Path) -> None:
    """Examples can be read by Python."""
    for block in re.findall(r"^( *)```python\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
        ast.parse("\n".join(line.removeprefix(block[0]) for line in block[1].splitlines()))


def test_readme_commands_are_what_ci_runs() -> None:
    """The two commands of the README stand in `.ci/run`, and the files they name exist."""
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for extra, command in (("demo", "python example_project/manage.py demo"), ("test", "python runtests.py")):
        assert f'pip install -e ".[{extra}]" && {command}' in readme
        assert f'".[{extra}]"' in ci
        assert command in ci
        assert (ROOT / command.split()[1]).exists()


def test_every_setting_is_documented_with_its_default() -> None:
    """Name, default and check stand in one row."""
    page, defaults = read("reference/settings.md"), conf.Settings()
    for key, name in conf.FIELD_NAMES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{key}` |"))
        assert checks.RULES[key].id in row
        assert repr(getattr(defaults, name)) in row.replace("\\|", "|")


def test_every_option_of_runworkers_is_documented() -> None:
    """And no other."""
    parser = ArgumentParser()
    Command().add_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    assert set(re.findall(r"--[a-z][a-z-]+", read("reference/runworkers.md"))) == options


def test_every_sub_command_and_option_of_asyncq_is_documented() -> None:
    """Each in the chapter of its sub-command, and no other."""
    parser = ArgumentParser()
    AsyncqCommand().add_arguments(parser)
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    _, *chapters = re.split(r"^## ", read("reference/asyncq.md"), flags=re.MULTILINE)
    documented = {chapter.split()[0]: chapter for chapter in chapters}
    assert documented.keys() == commands.keys()
    for name, command in commands.items():
        options = {option for action in command._actions for option in action.option_strings} - {"-h", "--help"}
        rows = "".join(line for line in documented[name].splitlines() if line.startswith("| `--"))
        assert set(re.findall(r"--[a-z][a-z-]+", rows)) == options, name


def test_every_error_and_check_is_documented() -> None:
    """Each class of the error tree, each id of a check."""
    errors = {name for name, value in vars(exceptions).items() if isinstance(value, type) and name != "AsyncqError"}
    for name in errors:
        assert f"`{name}`" in read("reference/errors.md"), name
    sources = (ROOT / "django_asyncq" / "checks.py").read_text() + (ROOT / "django_asyncq" / "backend.py").read_text()
    for id in set(re.findall(r"asyncq\.[EW]\d+", sources)):
        assert id in read("reference/checks.md"), id
