"""Import a module when something of it is first called: one mechanism for what a web process may never need.

Django asks an app for its receivers, checks, admin pages and template tags when a process starts. Each is given as a
`Late` then, and what it names costs nothing until it is called. `tests/shape.py` lists the modules that may do so, and
counts the name in a `Late` as an import.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from django.utils.module_loading import import_string


class Late:
    """A function or class of this package that is imported at its first call. path: dotted, within the package.

    name: the same with the name of the package before it.
    """

    def __init__(self, path: str) -> None:
        self.name = f"django_asyncq.{path}"

    @cached_property
    def target(self) -> Any:
        """What the path names, imported at the first use."""
        return import_string(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.target(*args, **kwargs)
