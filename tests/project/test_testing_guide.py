"""The guide "Test your tasks" is followed: each of its files is written, each of its commands and tests is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import django
import pytest

from django_asyncq.testing import EmbeddedRedis

from .test_docs import all_blocks_of

ROOT = Path(__file__).parent.parent.parent
GUIDES = ROOT / "docs" / "guides"
# The first line of a block that is a file.
PLACE = re.compile(r"# (?P<path>[\w/]+\.(?:py|toml))(?P<is_added>, at the end)?(?:, on Django (?P<version>[\d.]+))?\n")
ADDRESS = "redis://127.0.0.1:6379"
COMMAND_SECONDS = 110

pytestmark = pytest.mark.skipif(
    not os.environ.get("DATABASE_URL", "sqlite").startswith("sqlite"), reason="the project of the guides uses SQLite"
)


class Project:
    """A new project in a folder, in which pages of the docs are followed."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        """redis_url: what replaces the address of Redis in the pages."""
        self.folder = folder
        self.address = redis_url.rpartition("/")[0]
        ours = ("ASYNCQ_", "DATABASE_URL", "DJANGO_", "PYTEST_", "PYTHON")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            # By its module, because the checkout need not be installed; the entry point would load it a second time.
            "PYTEST_ADDOPTS": "-p no:asyncq -p django_asyncq.testing.pytest_plugin",
        }
        self.files: set[str] = set()
        # Command → what it has printed.
        self.printed: dict[str, str] = {}
        self.run("django-admin startproject mysite .")
        self.run("python manage.py startapp shop")

    def follow(self, page: Path, *, skipped: Collection[str] = ()) -> None:
        """Run each line of the blocks of shell commands, and write the other blocks to files, in the order of the page.

        skipped: languages whose blocks are left alone.
        """
        for language, text in all_blocks_of(page):
            if language == "sh" and language not in skipped:
                for command in text.splitlines():
                    self.run(command)
            elif language not in skipped:
                self.write(text)

    def write(self, text: str) -> None:
        """Write a file, or add to it, as the first line of a block says."""
        place = PLACE.match(text)
        assert place, f"no first line says where this belongs:\n{text}"
        if place["version"] and not django.__version__.startswith(f"{place['version']}."):
            return
        path = self.folder / place["path"]
        before = path.read_text() if place["is_added"] else ""
        path.write_text(f"{before}\n{text}\n".replace(ADDRESS, self.address))
        self.files.add(place["path"])

    def run(self, command: str) -> None:
        """Run a command to its end, which must be a success."""
        done = subprocess.run(
            command.replace(ADDRESS, self.address),
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        self.printed[command] = done.stdout + done.stderr
        assert done.returncode == 0, f"$ {command}\n{self.printed[command]}"

    def never_imported(self) -> set[str]:
        """Return the modules of the pages that no command has imported."""
        modules = [self.folder / name for name in self.files if name.endswith(".py")]
        return {path.name for path in modules if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))}

    def names_of_tests(self) -> tuple[list[str], list[str]]:
        """Return the names of the tests in classes, and of those that are functions, which only pytest runs."""
        text = "\n".join(path.read_text() for path in (self.folder / "shop").glob("test*.py"))
        return re.findall(r"^    (?:async )?def (test_\w+)", text, re.MULTILINE), re.findall(
            r"^(?:async )?def (test_\w+)", text, re.MULTILINE
        )


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project as "Getting started" leaves it."""
    with EmbeddedRedis() as server:
        made = Project(tmp_path, server.url)
        made.follow(GUIDES / "getting-started.md", skipped=("sh", "text"))
        yield made


@pytest.mark.timeout(300)
def test_guide_can_be_followed(project: Project) -> None:
    """Every file is used, every command succeeds, and every test passes, under Django's runner and under pytest."""
    project.follow(GUIDES / "testing.md")
    assert project.never_imported() == set()
    in_classes, functions = project.names_of_tests()
    *_, by_django, by_pytest = project.printed.values()
    assert re.search(rf"Ran {len(in_classes)} tests .*\nOK\n", by_django, re.DOTALL), by_django
    assert f" {len(in_classes) + len(functions)} passed in" in by_pytest, by_pytest


@pytest.mark.parametrize("wrong", ["assert_not_enqueued(send_receipt, 7)", "send_receipt.enqueue(7, 8)"])
def test_wrong_line_fails(project: Project, wrong: str) -> None:
    """A line of a test that does not hold, and one that cannot be run."""
    project.write(f"""# shop/test_wrong.py
from django.test import TestCase
from django_asyncq.testing import assert_not_enqueued

from shop.tasks import send_receipt


class WrongTests(TestCase):
    def test_wrong(self):
        send_receipt.enqueue(7)
        {wrong}
""")
    with pytest.raises(AssertionError, match="FAILED"):
        project.run("python manage.py test shop.test_wrong --settings mysite.test_settings")


def test_block_without_a_place_fails(project: Project) -> None:
    """No example stands on the page without being run."""
    with pytest.raises(AssertionError, match="where this belongs"):
        project.write("from shop.tasks import send_receipt")
