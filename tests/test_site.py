"""The site of the docs: every page has its place, none is too long, and what is built can be used by everybody.

`sphinx-build -n -W --keep-going docs <folder>` builds it; with ASYNCQ_TEST_SITE=<folder> its pages are opened in a
browser, and checked by axe with ASYNCQ_TEST_AXE.
"""

from __future__ import annotations

import inspect
import os
import re
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from selenium.webdriver import Chrome

from .browsing import DESKTOP, PHONE, browser, in_browser
from .test_browser_pages import AXE, RUN_AXE, TAGS
from .test_public_api import listed

__all__ = ["browser"]
DOCS = Path(__file__).parent.parent / "docs"
SITE = os.environ.get("ASYNCQ_TEST_SITE", "")
# For readers of the repository, who have no side bar.
NOT_ON_THE_SITE = {"README"}
PAGES = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - NOT_ON_THE_SITE
LONGEST_PAGE = 300
# Their docstrings say little beyond the page of public names: settings name them, or Django's own classes explain them.
NOT_FROM_SOURCE = {
    "django_asyncq.backend",
    "django_asyncq.broker.cluster",
    "django_asyncq.contrib.otel",
    "django_asyncq.contrib.prometheus",
    "django_asyncq.contrib.sentry",
    "django_asyncq.logs",
    "django_asyncq.masking",
    "django_asyncq.models",
}


def toctrees() -> dict[str, list[str]]:
    """Return the pages of each part of the side bar, by its caption."""
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    found: dict[str, list[str]] = {}
    for block in blocks:
        options, _, pages = block.partition("\n\n")
        caption = re.search(r":caption: (\w+)", options)
        assert caption
        found[caption[1]] = pages.split()
    return found


def test_every_page_stands_once_in_the_part_of_its_kind() -> None:
    """Guides teach a task, the reference answers, explanations say why; one page is the tutorial."""
    parts = toctrees()
    pages = [page for part in parts.values() for page in part]
    assert sorted(pages) == sorted(PAGES - {"index"})
    for caption, folder in (("Guides", "guides"), ("Reference", "reference"), ("Explanation", "explanation")):
        assert {page.partition("/")[0] for page in parts[caption]} - {"changelog"} == {folder}
    assert parts["Tutorial"] == ["guides/getting-started"]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_no_page_is_long(page: str) -> None:
    """A reader finds a short page faster than a place in a long one."""
    assert len((DOCS / f"{page}.md").read_text().splitlines()) <= LONGEST_PAGE


def test_the_reference_has_the_docstring_of_each_public_class_and_function() -> None:
    """Once, in the module that lists it first."""
    page = (DOCS / "reference/api.md").read_text()
    written = re.findall(r"^\.\. auto(?:class|function):: ([\w.]+)(?:\(.*\))?$", page, re.M)
    things: dict[int, str] = {}
    for module, names in listed().items():
        for name in names if module not in NOT_FROM_SOURCE else ():
            thing = getattr(import_module(module), name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                things.setdefault(id(thing), f"{module}.{name}")
    assert sorted(written) == sorted(things.values())


def test_a_figure_of_the_first_page_stands_where_it_leads() -> None:
    """A number in the text of a link, with the word behind it, is on the page to which it leads."""
    links = re.findall(r"\[([^\]]+)\]\(([\w/.-]+\.md)", (DOCS / "index.md").read_text())
    figures = [(figure, page) for text, page in links for figure in re.findall(r"\b\d[\d,]* \w+", text)]
    assert figures
    for figure, page in figures:
        assert re.search(rf"\b{figure}\b", (DOCS / page).read_text()), (figure, page)


def test_options_in_a_docstring_become_a_list() -> None:
    """Each with its explanation, also where it is continued or stands behind another one; other text stays text."""
    source = """Wait for *args.

        timeout: seconds or a timedelta. queue, name: of the task: its
            own ones.
        It costs nothing: nobody asks.
        Raises: WaitTimeout."""
    assert docstrings().mark_up(inspect.cleandoc(source).splitlines()) == [
        "Wait for \\*args.",
        "",
        "- **timeout**: seconds or a timedelta.",
        "- **queue, name**: of the task: its own ones.",
        "",
        "It costs nothing: nobody asks.",
        "",
        "- **Raises**: WaitTimeout.",
        "",
    ]


def docstrings() -> ModuleType:
    """Import a module of the site's configuration, which is in no package."""
    spec = spec_from_file_location("docstrings", DOCS / "docstrings.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not SITE, reason="ASYNCQ_TEST_SITE names no site")
def test_the_reference_names_nothing_private() -> None:
    """Neither in a heading nor in a signature."""
    page = re.sub(r"<[^>]+>", "", (Path(SITE) / "reference/api.html").read_text())
    assert "Declare a module-level function" in page
    assert set(re.findall(r"\b_[A-Za-z]\w*", page)) == set()


@pytest.mark.skipif(not SITE, reason="ASYNCQ_TEST_SITE names no site")
class TestSite:
    """The site that was built, in a browser."""

    pytestmark = in_browser

    @pytest.mark.parametrize("theme", ["light", "dark"])
    @pytest.mark.parametrize("width", [DESKTOP, PHONE])
    @pytest.mark.parametrize("page", ["index", "guides/gates", "reference/api"])
    def test_a_page_can_be_used_by_everybody(self, browser: Chrome, page: str, width: int, theme: str) -> None:
        """No sideways scroll, no error of the browser, and no violation of WCAG A and AA that axe finds."""
        browser.set_window_size(width, 900)
        browser.get((Path(SITE).resolve() / f"{page}.html").as_uri())
        browser.execute_script("document.body.dataset.theme = arguments[0]", theme)
        assert "django_asyncq" in browser.title
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        assert [each["message"] for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []
        if folder := os.environ.get("ASYNCQ_TEST_PICTURES"):
            browser.save_screenshot(f"{folder}/{page.replace('/', '-')}-{theme}-{width}.png")
        if AXE:
            browser.execute_script(Path(AXE).read_text())
            assert browser.execute_async_script(RUN_AXE, TAGS, []) == []
