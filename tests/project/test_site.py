"""The site of the docs: every page has its place, none is too long, and what is built can be used by everybody.

`sphinx-build -n -W --keep-going docs <folder>` builds it; with ASYNCQ_TEST_SITE=<folder> its pages are opened in a
browser, and three of them are checked by axe with ASYNCQ_TEST_AXE. Without these the tests are skipped.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from html import unescape
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType
from urllib.parse import urljoin

import pytest
from selenium.webdriver import Chrome

from ..admin.test_browser_pages import violations, with_axe
from ..browsing import DESKTOP, PHONE, browser, in_browser
from .test_public_api import listed

__all__ = ["browser"]
DOCS = Path(__file__).parent.parent.parent / "docs"
SITE = os.environ.get("ASYNCQ_TEST_SITE", "")
# For readers of the repository, who have no side bar.
NOT_ON_THE_SITE = {"README"}
PAGES = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - NOT_ON_THE_SITE
# Lines; what a test of a project needs stands on one page, with its examples.
LONGEST_PAGE, LONGER_PAGES = 300, {"guides/testing": 400}
NEAR_HEAD = 14
SCROLLS = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
# The second heads of the tables that are wider than their boxes.
CUT = """
    const boxes = Array.from(document.querySelectorAll(".table-wrapper"));
    const cut = boxes.filter((box) => box.scrollWidth > box.clientWidth);
    return cut.map((box) => box.querySelectorAll("th")[1].innerText);
"""
# Those of short cells: figures, versions.
FIGURES = {"django_asyncq", "drain, tasks/s", "PostgreSQL", "files"}
# The pages with the most kinds of content, in each way they may be shown.
LOOKS = list(product(["index", "guides/gates", "reference/public-api"], [DESKTOP, PHONE], ["light", "dark"]))


def toctrees() -> dict[str, list[str]]:
    """Return the pages of each part of the side bar, by its caption."""
    found = re.findall(r"^:caption: (.+)\n\n([^`]+)```", (DOCS / "index.md").read_text(), re.MULTILINE)
    return {caption: pages.split() for caption, pages in found}


def test_every_page_stands_once_in_the_part_of_its_kind() -> None:
    """Guides stand in groups, by what a reader wants to do: the reference answers, explanations say why."""
    parts = toctrees()
    pages = [page for part in parts.values() for page in part]
    assert sorted(pages) == sorted(PAGES - {"index"})
    assert parts.pop("Tutorial") == ["guides/getting-started"]
    for caption, folder in (("Reference", "reference"), ("Explanation", "explanation")):
        assert {page.partition("/")[0] for page in parts.pop(caption)} - {"changelog"} == {folder}
    assert list(parts) == ["Write tasks", "Limit", "Operate", "Test", "Deploy", "Other programs", "Move"]
    assert parts["Write tasks"][0] == "guides/options"
    rows = re.findall(r"^\| ([^|]+) \| (.+guides/.+) \|$", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert {name: re.findall(r"\((guides/[\w/-]+)\.md\)", row) for name, row in rows} == parts


def test_a_guide_begins_with_the_smallest_case_that_works() -> None:
    """A block of code stands near its head. A comparison with another queue begins with when to stay."""
    for page in sorted(DOCS.glob("guides/*.md")):
        head = "\n".join(page.read_text().splitlines()[:NEAR_HEAD])
        assert "\n```" in "".join(re.split(r"^## ", head, flags=re.MULTILINE)[:2]), page.name


@pytest.mark.parametrize("page", sorted(PAGES))
def test_no_page_is_long(page: str) -> None:
    """A reader finds a short page faster than a place in a long one."""
    assert len((DOCS / f"{page}.md").read_text().splitlines()) <= LONGER_PAGES.get(page, LONGEST_PAGE)


def test_the_reference_has_the_docstring_of_each_public_class_and_function() -> None:
    """Once, in the module that lists it first."""
    page = docstrings().with_docstrings((DOCS / "reference/public-api.md").read_text())
    written = re.findall(r"^\.\. auto(?:class|function):: ([\w.]+)(?:\(.*\))?$", page, re.M)
    things: dict[int, str] = {}
    for module, names in listed().items():
        for name in names:
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


def test_the_tests_that_the_first_page_names_make_its_pictures() -> None:
    """Each picture is saved by one of them under its name, without the theme and the width."""
    page = (DOCS / "index.md").read_text()
    sources = "".join((DOCS.parent / file).read_text() for file in re.findall(r"`(tests/[\w/]+\.py)`", page))
    pictures = re.findall(r"!\[[^\]]+\]\(images/(?:\w+/)?([\w-]+?)(?:-(?:light|dark)-\d+)?\.png\)", page)
    assert len(pictures) == page.count("![")
    assert [name for name in pictures if f'"{name}"' not in sources] == []


def test_the_side_bar_links_the_versions_that_lie_beside_this_one(tmp_path: Path) -> None:
    """From every page of either, to the first page of both; a site that knows no others has no links."""
    pytest.importorskip("furo", reason="furo is not installed, so no site can be built")
    source = tmp_path / "source"
    (source / "guides").mkdir(parents=True)
    (source / "index.md").write_text("# First\n\n```{toctree}\nguides/second\n```\n")
    (source / "guides/second.md").write_text("# Second\n")
    names = ["0.2", "0.1"]
    for name in names:
        build(source, tmp_path / "site" / name, "0.2 0.1")
    pages = ["index.html", "guides/second.html", "search.html"]
    for page in (tmp_path / "site" / name / page for name in names for page in pages):
        links = version_links(page)
        assert list(links) == names
        for name, link in links.items():
            assert urljoin(page.as_uri(), link) == (tmp_path / "site" / name / "index.html").as_uri()
    build(source, tmp_path / "alone", "")
    assert version_links(tmp_path / "alone/index.html") == {}


def build(source: Path, folder: Path, versions: str) -> None:
    """Build a site of a few pages as the docs are built."""
    line = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "-c", str(DOCS), str(source), str(folder)]
    environment = {**os.environ, "ASYNCQ_DOCS_VERSIONS": versions, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def version_links(page: Path) -> dict[str, str]:
    """Return where the links of the side bar's list of versions lead, by their texts."""
    (part,) = re.findall(r'<div class="sidebar-tree" aria-label="Versions">(.*?)</div>', page.read_text(), re.DOTALL)
    return {text: link for link, text in re.findall(r'<a [^>]*href="([^"]+)">([^<]+)</a>', part)}


def test_a_table_in_a_docstring_becomes_a_table() -> None:
    """Its first row is the head; what "null: " explains in the text beside it is no option."""
    source = """States.

        | state  | number |
        |--------|--------|
        | QUEUED | 0      |

        until: when it is over; null: never."""
    assert docstrings().mark_up(inspect.cleandoc(source).splitlines()) == [
        "States.",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
        "   * - state",
        "     - number",
        "   * - QUEUED",
        "     - 0",
        "",
        "- **until**: when it is over; null: never.",
        "",
    ]


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
    page = re.sub(r"<[^>]+>", "", (Path(SITE) / "reference/public-api.html").read_text())
    assert "Declare a module-level function" in page
    assert set(re.findall(r"\b_[A-Za-z]\w*", page)) == set()


@pytest.mark.skipif(not SITE, reason="ASYNCQ_TEST_SITE names no site")
def test_the_reference_shows_what_a_column_may_hold() -> None:
    """The columns of a model, the table of its states, and the values of choices."""
    page = unescape(re.sub(r"<[^>]+>", "", (Path(SITE) / "reference/public-api.html").read_text()))
    assert "Columns: id, name, backend, queue_name, state" in page
    assert "RETRYING = " not in page and "the name of FAILED with retry_at" in page
    assert "SUCCEEDED = 2: Succeeded" in page
    assert "MultipleObjectsReturned" not in page


@pytest.mark.skipif(not SITE, reason="ASYNCQ_TEST_SITE names no site")
class TestSite:
    """The site that was built, in a browser."""

    pytestmark = in_browser

    @pytest.mark.parametrize(("page", "width", "theme"), LOOKS)
    def test_a_page_is_sound(self, browser: Chrome, page: str, width: int, theme: str) -> None:
        """No sideways scroll, and no error of the browser."""
        show(browser, page, width, theme)
        assert "django_asyncq" in browser.title
        assert not scrolls_sideways(browser, width)
        assert [each["message"] for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []
        if folder := os.environ.get("ASYNCQ_TEST_PICTURES"):
            browser.save_screenshot(f"{folder}/{page.replace('/', '-')}-{theme}-{width}.png")

    @with_axe
    @pytest.mark.parametrize(("page", "width", "theme"), LOOKS)
    def test_a_page_can_be_used_by_everybody(self, browser: Chrome, page: str, width: int, theme: str) -> None:
        """No violation of WCAG A and AA that axe finds."""
        show(browser, page, width, theme)
        assert violations(browser, []) == []

    @pytest.mark.parametrize("width", [DESKTOP, PHONE])
    def test_every_page_and_table_fits(self, browser: Chrome, width: int) -> None:
        """No sideways scroll of a page as it is loaded. On a phone a table of figures may scroll in its box."""
        pages = sorted(page.relative_to(SITE).with_suffix("").as_posix() for page in Path(SITE).rglob("*.html"))
        assert set(pages) > PAGES
        wide = []
        for page in pages:
            show(browser, page, width, "light")
            cut = [head for head in browser.execute_script(CUT) if width == DESKTOP or head not in FIGURES]
            if cut or scrolls_sideways(browser, width):
                wide.append((page, cut))
        assert wide == []


def show(browser: Chrome, page: str, width: int, theme: str) -> None:
    """Open a page of the site in a window of this width."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get((Path(SITE).resolve() / f"{page}.html").as_uri())
    browser.execute_script("document.body.dataset.theme = arguments[0]", theme)


def scrolls_sideways(browser: Chrome, width: int) -> bool:
    """Whether the page that is shown is wider than its window, which has this width with its scroll bar."""
    assert browser.execute_script("return window.innerWidth") == width
    return bool(browser.execute_script(SCROLLS))
