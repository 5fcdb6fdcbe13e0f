"""Odd files end nothing: each is read, or listed with the reason; what is skipped is said; nothing is imported."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from django_asyncq.doctor import files
from django_asyncq.doctor.examination import examine

from .projects import VOCABULARIES, report_on, write

USE = "from celery import shared_task\n\n\n@shared_task\ndef f(): ...\n"


def test_a_file_that_cannot_be_parsed_is_listed(tmp_path: Path) -> None:
    """With its line and its error, beside the uses of the others."""
    texts = {"a.py": USE, "b.py": "def f(:\n", "c.py": b"\x00", "d.py": b"# coding: quux\n", "e.py": b"x = '\xff'\n"}
    report = report_on("celery", tmp_path, texts)
    assert [each.file for each in report.findings] == ["a.py"]
    assert [each.file for each in report.unreadable] == ["b.py", "c.py", "d.py", "e.py"]
    assert report.unreadable[0].line == 1
    assert all(each.error for each in report.unreadable)
    assert report.files == 5


def test_encodings_and_ends_of_lines_are_read(tmp_path: Path) -> None:
    """A mark at the beginning, a declared encoding, and the lines of other systems."""
    texts = {
        "bom.py": b"\xef\xbb\xbf" + USE.encode(),
        "latin.py": b"# coding: latin-1\nname = '\xe4'\n" + USE.encode(),
        "lines.py": USE.replace("\n", "\r\n").encode(),
        "old.py": USE.replace("\n", "\r").encode(),
        "utf16.sh": "celery -A x worker".encode("utf-16"),
    }
    report = report_on("celery", tmp_path, texts)
    assert {each.file: each.line for each in report.findings} == {
        "bom.py": 4,
        "latin.py": 6,
        "lines.py": 4,
        "old.py": 4,
    }
    assert [each.file for each in report.unreadable] == ["utf16.sh"]


@pytest.mark.parametrize(
    "text",
    ["(" * 5000, "x = " + "-" * 20_000 + "1", "x = " + "1+" * 20_000 + "1", "x" + ".a" * 20_000, "f" + "()" * 20_000],
    ids=["parentheses", "signs", "sums", "attributes", "calls"],
)
def test_deep_nesting_ends_nothing(text: str, tmp_path: Path) -> None:
    """It is listed, or read."""
    report = report_on("celery", tmp_path, {"a.py": f"import celery\n{text}\n", "b.py": USE})
    assert "b.py" in {each.file for each in report.findings}
    assert {each.file for each in report.unreadable} <= {"a.py"}


def test_links_in_a_circle_and_special_files_end_nothing(tmp_path: Path) -> None:
    """A link to its own folder, a link to nothing, a link to itself."""
    write(tmp_path, {"shop/a.py": USE})
    (tmp_path / "shop" / "again").symlink_to(tmp_path)
    (tmp_path / "shop" / "gone.py").symlink_to(tmp_path / "nothing.py")
    (tmp_path / "shop" / "self.py").symlink_to(tmp_path / "shop" / "self.py")
    report = examine(VOCABULARIES["celery"], tmp_path)
    assert [each.file for each in report.findings] == ["shop/a.py"]
    assert [each.file for each in report.unreadable] == ["shop/gone.py", "shop/self.py"]


def test_what_is_skipped_is_said(tmp_path: Path) -> None:
    """With how many files it has; an environment by what is in it."""
    texts = {
        "node_modules/x/a.py": USE, "env/pyvenv.cfg": "", "env/lib/b.py": USE, "env/lib/c.py": USE, ".venv/a.py": USE,
        "shop/__pycache__/a.py": USE, "shop/a.py": USE,
    }  # fmt: skip
    report = report_on("celery", tmp_path, texts)
    assert report.skipped == {".venv": 1, "env": 2, "node_modules": 1, "shop/__pycache__": 1}
    assert [each.file for each in report.findings] == ["shop/a.py"]


def test_migrations_are_read_for_the_names_of_apps_alone(tmp_path: Path) -> None:
    """One that depends on an app of the other queue keeps the app installed."""
    text = f"{USE}\ndependencies = [('django_celery_beat', '0001_initial')]\n"
    report = report_on("celery", tmp_path, {"shop/migrations/0002_x.py": text})
    assert [(each.line, each.use) for each in report.findings] == [(1, "migration"), (7, "migration")]


def test_a_file_of_data_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is very large is listed."""
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    report = report_on("celery", tmp_path, {"a.py": "#" * 101, "b.py": USE})
    assert [(each.file, each.error) for each in report.unreadable] == [("a.py", "it is larger than 100 bytes")]


def test_one_file_may_be_read(tmp_path: Path) -> None:
    """In place of a folder."""
    report = examine(VOCABULARIES["celery"], write(tmp_path, {"a.py": USE, "b.py": USE}) / "b.py")
    assert [each.file for each in report.findings] == ["b.py"]


def test_nothing_is_imported(tmp_path: Path) -> None:
    """A module that writes a file and ends the process when it is imported does neither."""
    trap = f"open({str(tmp_path / 'imported')!r}, 'w')\nraise SystemExit\n{USE}"
    before = set(sys.modules)
    report = report_on("celery", tmp_path, {"shop/__init__.py": trap, "shop/tasks.py": trap, "settings.py": trap})
    assert len(report.findings) == 3
    assert not (tmp_path / "imported").exists()
    assert not {"shop", "shop.tasks", "settings", "celery"} & (set(sys.modules) - before)


PIECES = (
    "from celery import *", "from . import x as x", "x = x", "x = y\ny = x", "class A(A): pass",
    "def f(f=f): return f()",
    "from celery import shared_task as x", "x.delay(*x, **x)", "x.apply_async(*[1], **{**x})", "@x\ndef g(x): x()",
    "x | x | x", "x[x][x]()", "with x() as x: x.s(x.s())", "lambda x: x.delay(x)", "x.conf['a'] = x", "x: x = x",
    "from celery import chain as c\nc(*c(c))()", "CELERY_BEAT_SCHEDULE = {**x, 1: {2: 3}, 'a': {**x}, 'b': []}",
    "CELERY_TASK_ROUTES = dict(a=dict(b=1), **x)", "from celery.schedules import crontab as c\nc(*x, **x)", "x.y.z = x",
    "f'{x.delay(x)}'", "'shop.tasks.x.delay'", "async def h(): await x.delay(x)", "del x.delay",
    "x.retry(**x, countdown=x)",
    "match x:\n    case x.delay(): pass", "class B(x.Task, metaclass=x): x = x.Task", "global x", "x += x.delay()",
    "from celery import Celery\nx = Celery()\n@x.task(bind=x, **x)\ndef k(self, x): self.request.x.retry()",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_no_mixture_of_odd_statements_ends_it(seed: int, tmp_path: Path) -> None:
    """Modules of random pieces, which import each other, are read without an error."""
    pick = random.Random(seed)
    texts = {f"m{number}.py": "\n".join(pick.choices(PIECES, k=12)) + "\n" for number in range(4)}
    texts |= {
        f"m{number}.py": f"from m{number - 1} import *\nimport m{3 - number}\n" + texts[f"m{number}.py"]
        for number in (1, 2)
    }
    for queue in VOCABULARIES:
        report = report_on(queue, tmp_path, texts)
        assert all(each.line > 0 for each in report.findings)


@pytest.mark.parametrize("seed", range(20))
def test_no_broken_bytes_end_it(seed: int, tmp_path: Path) -> None:
    """Sources and texts with bytes changed are read or listed."""
    pick = random.Random(seed)
    source = bytearray(USE.encode() * 3 + b"celery -A x worker -c 'a b\n- celery\n- -c\n")
    for _ in range(8):
        source[pick.randrange(len(source))] = pick.randrange(256)
    names = ("a.py", "b.sh", "requirements.txt", "compose.yml", "Procfile", "pyproject.toml", "c/migrations/d.py")
    report = report_on("celery", tmp_path, {name: bytes(source) for name in names})
    assert report.files == len(names)
