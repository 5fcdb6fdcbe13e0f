"""The docs say what the code does: settings, options, errors, checks, links, commands, files."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import django
import pytest
from django.conf import global_settings
from django.core.management import get_commands
from django.utils.module_loading import import_string

from django_asyncq import checks, conf, exceptions
from django_asyncq.broker import keys
from django_asyncq.core import compat
from django_asyncq.core.logs import RUN_LOGGER
from django_asyncq.management.commands.asyncq import Command as AsyncqCommand
from django_asyncq.management.commands.runworkers import Command as RunworkersCommand
from django_asyncq.tasks import Task

ROOT = Path(__file__).parent.parent.parent
INDEX = ROOT / "docs" / "README.md"
# These two are of the site alone, which has no README.
OF_SITE = {ROOT / "docs" / "index.md", ROOT / "docs" / "changelog.md"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
READ_BY_DEVELOPERS = ROOT / "tests" / "benchmarks" / "README.md"
GUIDES = [page for page in PAGES if page.parent == ROOT / "docs" / "guides"]
# What has the form of a setting in the docs and is another's: of Django's databases and caches, of other queues, or of
# the environment.
OTHERS_SETTINGS = {
    "CELERY_BEAT_SCHEDULE",
    "RQ_QUEUES",
    "ASYNCQ_CRASH",
    "ASYNCQ_CRASH_MARK",
    "ASYNCQ_TEST_REDIS_URL",
    "CONNECTION_POOL_KWARGS",
    "CONN_HEALTH_CHECKS",
    "ATOMIC_REQUESTS",
    "CONN_MAX_AGE",
    "DATABASE_URL",
    "DISABLE_SERVER_SIDE_CURSORS",
    "SHARED_APPS",
    "TENANT_APPS",
}


def each_of(pages: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of one that looks at a page: it looks at all, and fails with what is wrong on each."""

    def decorated(look: Callable[[Path], None]) -> Callable[[], None]:
        def looks() -> None:
            found = []
            for page in pages:
                try:
                    look(page)
                except (AssertionError, AttributeError, ImportError, SyntaxError) as error:
                    found.append(f"{page.relative_to(ROOT)}: {type(error).__name__}: {error}")
            if found:
                pytest.fail("\n".join(found), pytrace=False)

        looks.__name__, looks.__doc__ = look.__name__, look.__doc__
        return looks

    return decorated


ALL_PAGES = each_of(PAGES)


def read(page: str) -> str:
    """Return a page of the docs."""
    return (ROOT / "docs" / page).read_text()


def links_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the relative links of a page: the file ("" for the page itself) and the heading ("" for none)."""
    yield from re.findall(r"\]\(((?!https?:)[^)#]*)(?:#([^)]*))?\)", page.read_text())


def all_blocks_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the code of each block, without its indentation."""
    for indent, language, code in re.findall(r"^( *)```(\w+)\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield language, "\n".join(line.removeprefix(indent) for line in code.splitlines())


def blocks_of(page: Path, *languages: str) -> Iterator[str]:
    """Yield the code blocks of some languages, without their indentation."""
    return (code for language, code in all_blocks_of(page) if language in languages)


def spans_of(page: Path) -> list[str]:
    """Return what stands between backticks in the prose of a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def command_lines(page: Path) -> Iterator[str]:
    """Yield what a reader would type, from blocks and from the prose."""
    for block in blocks_of(page, "sh", "ini"):
        yield from block.replace("\\\n", " ").splitlines()
    yield from spans_of(page)


# --- links


@ALL_PAGES
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture is there."""
    for target, _ in links_of(page):
        # An archive of the sources is without pictures.
        if "images/" in target and not (ROOT / "docs" / "images").exists():
            continue
        assert (page.parent / target).exists(), target


def anchors_of(page: Path) -> set[str]:
    """Return what GitHub names a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@ALL_PAGES
def test_links_lead_to_headings(page: Path) -> None:
    """A link to a part of a page names a heading of it."""
    for target, anchor in links_of(page):
        if anchor:
            assert anchor in anchors_of(page.parent / target if target else page), f"{target}#{anchor}"


def test_the_index_lists_every_page() -> None:
    """The index of the docs links to each page, and the README to the index."""
    linked = {(INDEX.parent / target).resolve() for target, _ in links_of(INDEX)}
    assert {page for page in PAGES if (ROOT / "docs") in page.parents and page != INDEX} - linked == OF_SITE
    assert "docs/README.md" in {target for target, _ in links_of(ROOT / "README.md")}


def test_no_page_cites_a_paper_that_is_not_here() -> None:
    """What a reader needs stands in the docs."""
    for page in [*PAGES, READ_BY_DEVELOPERS]:
        assert not re.search(r"DESIGN|asynq-wire|capabilities\.md|wire-plan|crash-blame|\bpaper\b", page.read_text()), (
            page
        )


def test_a_package_index_shows_the_readme_without_broken_links() -> None:
    """The long description has no relative link or picture, and all of the README's sections."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    shown = readme = (ROOT / "README.md").read_text()
    for each in hook["substitutions"]:
        shown = re.sub(each["pattern"], each["replacement"], shown)
    assert re.search(r"\]\((?!https?:)", readme)
    assert not re.search(r"\]\((?!https?:)", shown)
    assert re.findall(r"^#+ .*", shown, re.MULTILINE) == re.findall(r"^#+ .*", readme, re.MULTILINE)


# --- code


@ALL_PAGES
def test_python_in_the_docs_is_python(page: Path) -> None:
    """Examples can be read by Python, and what they import from this package exists."""
    for block in blocks_of(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "django_asyncq":
                for alias in node.names:
                    import_string(f"{node.module}.{alias.name}")


@cache
def files() -> list[str]:
    """Return all files and folders of the project."""
    return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if ".git" not in path.parts]


@ALL_PAGES
def test_files_named_in_the_docs_exist(page: Path) -> None:
    """A path or a file name of this repository is there, by its end."""
    own = ("django_asyncq/", "tests/", "docs/", "example_project/", "lifecycle/", "broker/", "worker/", "maintenance/")
    for span in spans_of(page):
        is_file = re.fullmatch(r"[\w./-]+\.(?:py|lua|md)", span) and (page.parent.name == "explanation" or "/" in span)
        if (is_file and not span.startswith("shop/")) or (re.fullmatch(r"[\w/-]+/", span) and span.startswith(own)):
            name = span.rstrip("/")
            assert any(file == name or file.endswith(f"/{name}") for file in files()), span


@ALL_PAGES
def test_dotted_names_in_the_docs_exist(page: Path) -> None:
    """A name of this package can be imported; a logger's is that of a package or a module."""
    for span in spans_of(page):
        if re.fullmatch(r"django_asyncq(?:\.\w+)+", span) and span.split(".")[1] not in PERMISSIONS:
            module = ROOT / span.replace(".", "/")
            if not (module.is_dir() or module.with_suffix(".py").exists() or span == RUN_LOGGER):
                import_string(span)


PERMISSIONS = {
    f"{verb}_{model}"
    for verb in ("add", "change", "delete", "view", "retry", "run")
    for model in ("taskrecord", "task", "gate", "rate", "schedule", "startuprun", "bulkaction")
} | {"cancel_task", "enqueue_task", "view_payload", "pause_queue", "drain_worker", "release_slot"}


# --- versions

# What the package needs itself: SKIP LOCKED, and RETURNING.
OWN_MINIMA = {"MariaDB": (10, 6), "SQLite": (3, 35)}


def minima(vendor: str) -> list[tuple[int, ...]]:
    """Return the oldest versions that a backend of Django supports. From its source: importing it needs a driver."""
    source = (Path(django.__file__).parent / "db" / "backends" / vendor / "features.py").read_text()
    (text,) = re.findall(r"\bminimum_database_version(?: = .*|\(self\):\n(?: {8,}.*\n)+)", source)
    return [tuple(map(int, found.split(", "))) for found in re.findall(r"\((\d+(?:, \d+)*),?\)", text)]


def test_the_oldest_databases_are_those_of_django() -> None:
    """Or newer ones where the package needs more; the row of the Django that runs here."""
    page, version = read("reference/supported.md"), f"{django.VERSION[0]}.{django.VERSION[1]}"
    (head,) = re.findall(r"^\| Django (\| PostgreSQL.+) \|$", page, re.MULTILINE)
    (row,) = re.findall(rf"^\| {version} (\|[ \d.|]+) \|$", page, re.MULTILINE)
    names, cells = (line.strip("| ").split(" | ") for line in (head, row))
    written = {name: tuple(map(int, cell.split("."))) for name, cell in zip(names, cells, strict=True)}
    of_mariadb, of_mysql = minima("mysql")
    (of_postgresql,), (of_sqlite,) = minima("postgresql"), minima("sqlite3")
    of_django = {"PostgreSQL": of_postgresql, "MySQL": of_mysql, "MariaDB": of_mariadb, "SQLite": of_sqlite}
    assert written == {name: max(oldest, OWN_MINIMA.get(name, oldest)) for name, oldest in of_django.items()}


# --- commands


def test_readme_commands_are_what_ci_runs() -> None:
    """The two commands of the README stand in `.ci/run`, and the files they name exist."""
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for extra, command in (("demo", "python example_project/manage.py demo"), ("test", "python runtests.py")):
        assert f'pip install -e ".[{extra}]" && {command}' in readme
        assert f'".[{extra}]"' in ci
        assert command in ci
        assert (ROOT / command.split()[1]).exists()


def options_of(command: RunworkersCommand | AsyncqCommand) -> dict[str, set[str]]:
    """Return the options of a command by sub-command, and by noun and verb; those of the command itself under ""."""
    parser = ArgumentParser()
    command.add_arguments(parser)
    found: dict[str, set[str]] = {}

    def look(words: str, parser: ArgumentParser) -> None:
        found[words] = {option for action in parser._actions for option in action.option_strings}
        for action in parser._actions:
            for name, sub in (action.choices or {}).items() if isinstance(action.choices, dict) else ():
                look(f"{words} {name}".strip(), sub)

    look("", parser)
    return found


RUNWORKERS = options_of(RunworkersCommand())
ASYNCQ = options_of(AsyncqCommand())


# Commands of other projects: the example's, and the one that a page has its reader write.
OF_PROJECTS = {"demo", "both_queues"}


@each_of([*PAGES, READ_BY_DEVELOPERS])
def test_commands_in_the_docs_exist(page: Path) -> None:
    """Commands of `manage.py`, their sub-commands and options, and modules that are run, are there."""
    own = {"runworkers": RUNWORKERS, "asyncq": ASYNCQ}
    for line in command_lines(page):
        words = line.split("#")[0].split()
        for options in (words[index + 1 :] for index, word in enumerate(words) if word.endswith("manage.py")):
            if not options or not re.fullmatch(r"\w+", options[0]):
                continue
            name, *rest = options
            assert name in own or name in get_commands() or name in OF_PROJECTS, line
            if name in own:
                sub = rest[0] if name == "asyncq" and rest else ""
                sub = f"{sub} {rest[1]}" if len(rest) > 1 and f"{sub} {rest[1]}" in own[name] else sub
                assert sub in own[name], line
                assert {word for word in rest if word.startswith("--")} <= own[name][sub], line
        for module in re.findall(r"python -m (tests[\w.]*)", line):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), line
            sources = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else path.glob("*.py")
            text = "".join(source.read_text() for source in sources)
            for option in re.findall(r"--[a-z][a-z0-9-]+", line):
                assert f'"{option}"' in text, line


def test_the_commands_of_a_process_manager_can_be_read() -> None:
    """Commands in lists, as of containers, have options that exist."""
    for page in [*PAGES, *(ROOT / "docs" / "deployment").iterdir()]:
        for words in re.findall(r'\["python", "manage.py", "runworkers", (.*?)\]', page.read_text()):
            options = {word for word in shlex.split(words.replace(",", " ")) if word.startswith("--")}
            assert options <= RUNWORKERS[""], words


def test_every_option_of_runworkers_is_documented() -> None:
    """And no other."""
    documented = set(re.findall(r"--[a-z][a-z-]+", read("reference/runworkers.md")))
    assert documented == RUNWORKERS[""] - {"-h", "--help"}


def test_every_sub_command_and_option_of_asyncq_is_documented() -> None:
    """Each in the chapter of its noun, and no other; where the noun has verbs, for each verb."""
    pages = [read("reference/asyncq.md"), read("reference/asyncq-health.md")]
    chapters = [chapter for page in pages for chapter in re.split(r"^## ", page, flags=re.MULTILINE)[1:]]
    documented = {chapter.split()[0]: chapter for chapter in chapters}
    nouns = {name.split()[0] for name in ASYNCQ if name}
    assert documented.keys() == nouns
    for noun, chapter in documented.items():
        rows = [line for line in chapter.splitlines() if line.startswith("| `--")]
        verbs = {name.split()[1] for name in ASYNCQ if name.startswith(f"{noun} ")}
        for verb in verbs or {""}:
            # The second column names the verbs that have the option.
            own = [row for row in rows if not verb or {verb, "all"} & set(re.findall(r"[\w-]+", row.split("|")[2]))]
            options = {option for row in own for option in re.findall(r"--[a-z][a-z-]+", row.split("|")[1])}
            assert options == ASYNCQ[f"{noun} {verb}".strip()] - {"-h", "--help"}, (noun, verb)
        assert verbs == set(re.findall(r"^\| `([\w-]+)[ `]", chapter, re.MULTILINE)) & verbs, noun


# --- settings, options, errors


def test_every_setting_is_documented_with_its_default() -> None:
    """Name, default and check stand in one row."""
    page, defaults = read("reference/settings.md"), conf.Settings()
    for key, name in conf.FIELD_NAMES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{key}` |"))
        assert checks.RULES[key].id in row
        assert repr(getattr(defaults, name)) in row.replace("\\|", "|")


@ALL_PAGES
def test_settings_named_in_the_docs_exist(page: Path) -> None:
    """What looks like a setting is one: of this package, of Django, or one of the few others."""
    text = page.read_text()
    named = {span for span in spans_of(page) if re.fullmatch(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+", span)}
    for name in named - OTHERS_SETTINGS:
        assert name in conf.FIELD_NAMES or hasattr(global_settings, name), name
    for key in re.findall(r"ASYNCQ\[['\"](\w+)['\"]\]", text):
        assert key in conf.FIELD_NAMES, key
    for block in [*blocks_of(page, "python"), *spans_of(page)]:
        if re.search(r"\bASYNCQ = \{", block):
            (assigned,) = (node for node in ast.walk(ast.parse(block)) if is_assigned_to(node, "ASYNCQ"))
            assert isinstance(assigned.value, ast.Dict)
            keys = {key.value for key in assigned.value.keys if isinstance(key, ast.Constant)}
            assert keys <= conf.FIELD_NAMES.keys(), keys


def is_assigned_to(node: ast.AST, name: str) -> bool:
    """Whether a statement assigns to this name."""
    return isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)


def test_every_option_of_a_task_is_documented() -> None:
    """The table of options has each option of `@task` that is not Django's own name for a function or an alias."""
    table = read("guides/tasks.md").split("## Options")[1].split("## Retries")[0]
    documented = {name for row in table.splitlines() if row.startswith("| `") for name in spans_in(row.split("|")[1])}
    own = {field.name for field in fields(Task)} - {field.name for field in fields(compat.Task)}
    assert documented == own | {"priority", "takes_context"}


def spans_in(text: str) -> list[str]:
    """Return what stands between backticks in a piece of a page."""
    return re.findall(r"`(\w+)`", text)


def test_every_error_and_check_is_documented() -> None:
    """Each class of the error tree, each id of a check."""
    errors = {name for name, value in vars(exceptions).items() if isinstance(value, type) and name != "AsyncqError"}
    for name in errors:
        assert f"`{name}`" in read("reference/errors.md"), name
    sources = (ROOT / "django_asyncq" / "checks.py").read_text() + (ROOT / "django_asyncq" / "backend.py").read_text()
    for id in set(re.findall(r"asyncq\.[EW]\d+", sources)):
        # An id of a single setting stands with the setting.
        assert id in read("reference/checks.md") + read("reference/settings.md"), id


def test_redis_keys_named_in_the_docs_exist() -> None:
    """Each key in the page on asynq is one of `broker/keys.py`, except two of asynq's that are not written."""
    own = keys.keys_of("q")
    found = {own.runs(), *(getattr(own, field.name) for field in fields(own))} - {own.base, own.queue, own.alias}
    makers = [maker for name, maker in vars(keys).items() if name.endswith(("_key", "_channel"))]
    # What has a default is the alias, which is not named here.
    own_arguments = [maker.__code__.co_argcount - len(maker.__defaults__ or ()) for maker in makers]
    found |= {maker(*["<"] * count) for maker, count in zip(makers, own_arguments, strict=True)}
    # The tests have a prefix of their own; a part in angle brackets stands for any text.
    known = tuple(key.replace(keys.prefix(), "asynq", 1).split("<")[0] for key in found)
    for span in spans_of(ROOT / "docs" / "explanation" / "asynq.md"):
        if span.startswith(("asynq:", "{asynq:")) and span not in ("asynq:servers", "asynq:workers"):
            assert span.startswith(known), span


# --- words that a newcomer does not know


@each_of(GUIDES)
def test_a_guide_explains_a_gate_where_it_first_names_one(page: Path) -> None:
    """A gate is an admission limit; who has not read the guide to gates learns it there."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)
    if first := re.search(r"\bgates?\b", prose, re.IGNORECASE):
        around = prose[max(first.start() - 300, 0) : first.end() + 300]
        assert "admission" in around, around


def test_architecture_can_be_read_in_one_sitting() -> None:
    """At most 250 lines with one diagram; what a task costs has about two pages."""
    page = read("explanation/architecture.md")
    assert len(page.splitlines()) <= 250
    assert page.count("```") == 2
    assert len(read("explanation/performance.md").splitlines()) <= 110
