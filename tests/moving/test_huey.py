"""The verdicts on huey's periodic tasks, which are read from the project's source."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError

from ..old_queues import by_name, run

pytestmark = pytest.mark.django_db(transaction=True)

CUTOVER = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
AT = ("huey", "--cutover", CUTOVER.isoformat())
SOURCE = """
from huey import crontab as when
from huey.contrib.djhuey import db_periodic_task as periodic
from huey.contrib import djhuey as huey

raise RuntimeError("nothing runs this")

@periodic(when(minute="0", hour="6"))
def daily(): ...

@huey.periodic_task(when(minute="*/10"), retries=2)
def often(): ...

@periodic(when.hourly())
def hourly(): ...

@periodic(when("5", "4", day_of_week="7"))
async def sundays(): ...

@periodic(when(minute=0, hour=6, day="1-7", day_of_week="1"))
def first_monday(): ...

@periodic(when(minute="0", hour="6", day="13", day_of_week="5"))
def friday_the_13th(): ...

@periodic(lambda moment: moment.hour == 6)
def computed(): ...

@periodic(when(minute=str(5)))
def computed_field(): ...

@periodic(when(minute="61"))
def wrong(): ...

@huey.task()
def no_schedule(): ...
"""


@pytest.fixture(autouse=True)
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed app whose module has the source; it is never imported. Other modules are no Python, or empty."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "tasks.py").write_text(SOURCE)
    (folder / "broken.py").write_text("from huey import periodic_task\n@periodic_task(")
    (folder / "binary.py").write_bytes(b"\xff huey periodic_task")
    config = SimpleNamespace(name="shop", path=str(folder))
    installed = apps.get_app_configs()
    monkeypatch.setattr(
        "django_asyncq.moving.huey.apps",
        SimpleNamespace(get_app_configs=lambda: [config, *(each for each in installed if each.name != "tests")]),
    )
    return folder


def mapped(*names: str) -> list[str]:
    """Return the options that map huey's tasks to ours."""
    return [f"--map=shop.tasks.{name}=tests.tasks.tidy" for name in names]


NAMES = (
    "daily",
    "often",
    "hourly",
    "sundays",
    "first_monday",
    "friday_the_13th",
    "computed",
    "computed_field",
    "wrong",
)


def test_each_verdict() -> None:
    """Its kind, its reason and its expression; huey reads crontabs in UTC."""
    found = by_name(*AT, *mapped(*NAMES))
    # A file that cannot be read may hide some, so it is named.
    unread = {name: found.pop(name)["reasons"] for name in ("shop/broken.py:2", "shop/binary.py")}
    assert all("its source cannot be read: " in reasons[0] for reasons in unread.values()), unread
    assert {name.rpartition(".")[2]: (each["verdict"], each["cron"]) for name, each in found.items()} == {
        "daily": ("same", "0 6 * * *"),
        "often": ("same, but", "*/10 * * * *"),
        "hourly": ("same", "0 * * * *"),
        "sundays": ("same", "5 4 * * 0"),
        "first_monday": ("same", "0 6 * * 1#1"),
        **dict.fromkeys(("friday_the_13th", "computed", "computed_field", "wrong"), ("not", None)),
    }
    assert {each["zone"] for each in found.values()} == {"UTC", None}
    assert "its options retries are not passed on" in found["shop.tasks.often"]["reasons"][0]
    assert "computed in code" in found["shop.tasks.computed"]["reasons"][0]
    assert found["shop.tasks.daily"]["key"] == "shop/tasks.py:9"
    assert found["shop.tasks.daily"]["missed"] == "skip"


def test_without_a_map_the_line_to_write_is_printed() -> None:
    """The task is still huey's, so it is not one of ours."""
    text = run(*AT)
    assert "shop.tasks.daily: not, because" in text
    assert "for another name here give --map shop.tasks.daily=…" in text
    assert "@task(schedule=cron('0 6 * * *', timezone='UTC', name='shop.tasks.daily', starts_at=" in text


@pytest.mark.parametrize("configured", [{"utc": False}, SimpleNamespace(utc=False)])
def test_the_zone_of_the_settings(configured: Any, settings: Any) -> None:
    """With utc=False huey reads them in the project's zone, and follows its clock in the nights of the change."""
    settings.HUEY, settings.TIME_ZONE = configured, "Europe/Berlin"
    found = by_name(*AT, *mapped(*NAMES))
    assert found["shop.tasks.daily"]["zone"] == "Europe/Berlin"
    assert found["shop.tasks.daily"]["verdict"] == "same"
    assert found["shop.tasks.hourly"]["verdict"] == "same"


def test_nothing_to_import_is_said(app: Path) -> None:
    """With the apps that were looked at."""
    for path in app.iterdir():
        path.unlink()
    with pytest.raises(CommandError, match=r"No app of this project has .* Looked at the source of: shop"):
        run("huey")
