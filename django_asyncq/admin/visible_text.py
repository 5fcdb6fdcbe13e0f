"""Show characters that a page would hide: those that reverse a line, that have no width, or that control a terminal.

A name with U+202E in it reads backwards, and looks like another one. So each such character of a page is shown by its
number. Fields keep theirs: what a form sends back must be what it was given.
"""

from __future__ import annotations

import re
from typing import TypeVar

from django.http import HttpResponse
from django.template.response import TemplateResponse

# Not U+200C and U+200D, which join letters and emoji; not U+200B, U+200E and U+200F, which translations of Django have.
HIDDEN = [
    *range(0x09),
    0x0B,
    0x0C,
    *range(0x0E, 0x20),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2060, 0x2065),
    *range(0x2066, 0x206A),
    0xFEFF,
]
SHOWN = {number: f"⟨U+{number:04X}⟩" for number in HIDDEN}
FIELDS = re.compile(r"(<textarea\b.*?</textarea>|<(?:input|option)\b[^>]*>)", re.DOTALL | re.IGNORECASE)

Answer = TypeVar("Answer", bound=HttpResponse)


def visible_text(text: str) -> str:
    """Return a text with the number of each hidden character in its place."""
    return text.translate(SHOWN)


def visible(answer: Answer) -> Answer:
    """Have the hidden characters of a page be shown when it is rendered; anything else is as it was."""
    if isinstance(answer, TemplateResponse):
        answer.add_post_render_callback(_show)
    return answer


def _show(answer: HttpResponse) -> None:
    parts = FIELDS.split(answer.content.decode(answer.charset))
    # Every second part is a field.
    parts[::2] = [visible_text(part) for part in parts[::2]]
    answer.content = "".join(parts).encode(answer.charset)
