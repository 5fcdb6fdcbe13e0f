"""The catalogues of the admin's texts: each string is in each of them, with its placeholders; the pages use them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import django
import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils.translation import gettext, ngettext, override

from .. import tasks  # noqa: F401 - registers them
from ..admin_cases import LIST, make

PACKAGE = Path(__file__).parent.parent.parent / "django_asyncq"
LANGUAGES = sorted(path.name for path in (PACKAGE / "locale").iterdir())
FORMS = {"de": 2, "ar": 6}
# What a translation must not change.
KEPT = re.compile(r"%\(\w+\)[sd]|\{\w*\}|<[^>]+>|@task\([^)]*\)|manage\.py \w+")
TOOLS = all(shutil.which(name) for name in ("xgettext", "msgfmt", "msguniq", "msgmerge"))

# Their catalogues are merged with ours, and ours may come first.
OF_DJANGO = ("conf", "contrib/admin", "contrib/admindocs", "contrib/auth", "contrib/contenttypes", "contrib/humanize")

Entry = tuple[str, str]


def entries_of(path: Path) -> dict[Entry, list[str]]:
    """Return the entries of a catalogue: context and msgid → the msgid of the plural, if any, and the translations."""
    found: dict[Entry, list[str]] = {}
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        texts: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if match := re.match(r"(msg\w+(?:\[\d\])?) ", line):
                key = match[1]
            texts[key] = texts.get(key, "") + "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', line))
        if texts.get("msgid"):
            plural = [texts["msgid_plural"]] if "msgid_plural" in texts else []
            strings = [text for name, text in sorted(texts.items()) if name.startswith("msgstr")]
            found[texts.get("msgctxt", ""), texts["msgid"]] = [*plural, *strings]
    return found


def catalogue(language: str) -> Path:
    return PACKAGE / "locale" / language / "LC_MESSAGES" / "django.po"


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_word_of_django_is_translated_otherwise(language: str) -> None:
    """It would replace the word on Django's own pages. One with another meaning needs a context."""
    django_path = Path(django.__path__[0])
    wrong = {}
    ours = entries_of(catalogue(language))
    for app in OF_DJANGO:
        theirs = entries_of(django_path / app / "locale" / language / "LC_MESSAGES" / "django.po")
        wrong |= {key: (ours[key], theirs[key]) for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    assert wrong == {}


@pytest.mark.skipif(not TOOLS, reason="gettext's tools are not installed")
def test_each_string_of_the_code_is_in_each_catalogue(tmp_path: Path) -> None:
    """And no catalogue has one that the code has no more."""
    copy = tmp_path / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("locale", "__pycache__"))
    (copy / "locale").mkdir()
    command = [sys.executable, "-m", "django", "makemessages", "-l", "xx", "--no-location"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True)
    wanted = set(entries_of(copy / "locale" / "xx" / "LC_MESSAGES" / "django.po"))
    assert len(wanted) > 600
    for language in LANGUAGES:
        known = set(entries_of(catalogue(language)))
        assert wanted - known == set(), f"{language}: translate these"
        assert known - wanted == set(), f"{language}: the code has no such strings any more"


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_string_is_translated_with_its_placeholders(language: str) -> None:
    """All plural forms, and no fuzzy guess; no character that turns the direction of a line."""
    text = catalogue(language).read_text(encoding="utf-8")
    assert "#, fuzzy" not in text and not re.search("[\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)
    for (_context, msgid), found in entries_of(catalogue(language)).items():
        strings = found[1:] if len(found) > 1 else found
        assert len(strings) == (FORMS[language] if len(found) > 1 else 1), msgid
        for string in strings:
            assert string, msgid
            if len(found) == 1:
                assert sorted(KEPT.findall(string)) == sorted(KEPT.findall(msgid)), msgid
            else:
                assert set(KEPT.findall(string)) <= set(KEPT.findall(found[0])), msgid


@pytest.mark.skipif(not TOOLS, reason="gettext's tools are not installed")
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_compiled_catalogue_is_that_of_the_text(language: str, tmp_path: Path) -> None:
    """`msgfmt` makes it; it is in the repository because an installation compiles nothing."""
    made = tmp_path / "django.mo"
    subprocess.run(
        ["msgfmt", "--check-format", "-o", str(made), str(catalogue(language))], check=True, capture_output=True
    )
    assert made.read_bytes() == catalogue(language).with_suffix(".mo").read_bytes()


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("language", "heading", "direction"),
    [("de", "Übersicht", "ltr"), ("ar", "نظرة عامة", "rtl"), ("fr", "Overview", "ltr")],
)
def test_the_pages_speak_the_language(language: str, heading: str, direction: str) -> None:
    """A language without a catalogue falls back to English as a whole."""
    make()
    user = User.objects.create_superuser("ann")
    client = Client()
    client.force_login(user)
    with override(language):
        for address in ("/admin/django_asyncq/", LIST, f"{LIST}failures/", f"{LIST}queues/", f"{LIST}workers/"):
            page = client.get(address).content.decode()
            assert heading in page and f'dir="{direction}"' in page, address


def test_plurals_follow_the_rules_of_the_language() -> None:
    """Arabic has six forms."""
    with override("ar"):
        found = {
            ngettext("%(count)d task is stuck.", "%(count)d tasks are stuck.", count) for count in (0, 1, 2, 3, 11, 100)
        }
        assert len(found) >= 5 and gettext("Queues") == "قوائم الانتظار"
    with override("de"):
        assert ngettext("%(count)d task is stuck.", "%(count)d tasks are stuck.", 2) == "%(count)d Aufgaben hängen."
