"""The texts of an exception of the project's code, which may be hostile.

Its `__str__`, `__notes__`, `__class__` or its metaclass may raise anything, and its text may be huge. None of that may
end the thread that writes the row.
"""

from __future__ import annotations

import traceback

from ..guard import attempt, class_name
from .payload import MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS, storable_text

NAME_CHARACTERS = 512


def class_path(exception: BaseException) -> str:
    """Return the dotted path of its class."""
    kind = type(exception)
    path = attempt(lambda: f"{kind.__module__}.{kind.__qualname__}").value
    return storable_text(path if path is not None else class_name(exception), NAME_CHARACTERS)


def text_of(exception: BaseException) -> str:
    """Return its text, or a note that says why there is none."""
    text, error = attempt(str, exception)
    if error is not None:
        return f"<no message: its __str__ raised {class_name(error)}>"
    return storable_text(text, MESSAGE_CHARACTERS)


def traceback_of(exception: BaseException) -> str:
    """Return its traceback with those of its causes, or a note that says why there is none."""
    text, error = attempt(lambda: "".join(traceback.format_exception(exception)))
    if error is not None:
        return f"<no traceback: formatting it raised {class_name(error)}>"
    return storable_text(text, TRACEBACK_CHARACTERS)
