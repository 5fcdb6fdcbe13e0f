"""The formatter of docs/guides/logging.md, taken from there: the tests log with what a reader copies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "logging.md"


def block_with(text: str) -> str:
    """Return the first Python example of the page that has a text."""
    return next(block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if text in block)


def found_in(text: str) -> dict[str, Any]:
    """Return what the first example with a text defines."""
    found: dict[str, Any] = {}
    exec(block_with(text), found)
    return found


JsonFormatter = found_in("class JsonFormatter")["JsonFormatter"]
