"""The site of the documentation. `sphinx-build -n -W --keep-going docs site` builds it, `.ci/run` does so too.

Sphinx with furo and MyST: the pages stay plain Markdown, which a repository's site shows as well, and Sphinx is kept up
while the latest release of MkDocs is of August 2024.

ASYNCQ_DOCS_VERSIONS: the versions that lie beside this one, the newest first, with blanks between them. Build each
into a folder of its name; the side bar then links them.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.db.models import Choices, Model
from sphinx.pycode import ModuleAnalyzer

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
import docstrings  # noqa: E402

# Errors of each model.
ADDED_BY_DJANGO = {"DoesNotExist", "MultipleObjectsReturned", "NotUpdated"}

# What a project sets at least; nothing here connects to anything.
settings.configure(
    SECRET_KEY="for the documentation",  # noqa: S106
    USE_TZ=True,
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_asyncq"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    TASKS={"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}},
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:6379/1"}},
)
django.setup()

project = "django_asyncq"
copyright = "the django_asyncq authors"
release = installed_version("django_asyncq")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
# The index for readers of the repository; `index.md` includes it.
exclude_patterns = ["README.md"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]
default_role = "literal"
# Names of other packages and of the standard library in signatures are no links.
nitpick_ignore_regex = [(r"py:.*", r".*")]

autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autoclass_content = "class"

html_theme = "furo"
html_title = f"django_asyncq {version}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
templates_path = ["_templates"]
versions = os.environ.get("ASYNCQ_DOCS_VERSIONS", "").split()
html_context = {"versions": versions, "current_version": version}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/versions.html",
        "sidebar/scroll-end.html",
    ]
}


def setup(app: Any) -> None:
    """Have what is written for readers of the files shown right on the site too."""
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", mark_up)
    app.connect("autodoc-process-signature", leave_out_signature)
    app.connect("autodoc-skip-member", skip_what_django_adds)
    # Else the page has its overloads in the place of one plain signature.
    declaring = ModuleAnalyzer.for_module("django_asyncq.tasks")
    declaring.analyze()
    declaring.overloads.pop("task")


def complete(app: Any, page: str, source: list[str]) -> None:
    """Have links to the changelog lead to its page of the site, and the page of public names show their docstrings."""
    source[0] = source[0].replace("](../../CHANGELOG.md", "](../changelog.md")
    if page == "reference/public-api":
        source[0] = docstrings.with_docstrings(source[0])


def mark_up(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Mark up a docstring in place, as Sphinx wants it."""
    lines[:] = docstrings.mark_up(lines)
    if is_of_django(thing):
        lines += columns_or_values(thing)


def is_of_django(thing: Any) -> bool:
    """Return whether it is a model, or what a column of one may hold."""
    return isinstance(thing, type) and issubclass(thing, Model | Choices)


def columns_or_values(thing: Any) -> list[str]:
    """Return the columns of a model, or what a column may hold: docstrings explain only what a name does not say."""
    if issubclass(thing, Model):
        return [f"Columns: {', '.join(f'``{field.attname}``' for field in thing._meta.concrete_fields)}.", ""]
    return [*(f"- ``{each.name}`` = ``{each.value!r}``: {each.label}" for each in thing), ""]


def leave_out_signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, None] | None:
    """Show no arguments of a model or of choices: they are the columns, and nobody calls the choices."""
    return ("", None) if is_of_django(thing) else None


def skip_what_django_adds(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Skip what Django puts into every model."""
    return True if name in ADDED_BY_DJANGO else None
