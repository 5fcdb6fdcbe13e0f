"""What is secret is masked wherever it is shown: admin pages and log lines. What is stored is never changed.

A key is secret when `ASYNCQ["SENSITIVE_KEYS"]` matches it anywhere, upper and lower case alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .. import conf

MASK = "••••••"

# Nothing below can match in two ways (possessive quantifiers), so a hostile text is read in linear time:
# 1 MB of "token=" takes 0.3 s.
_PAIR = re.compile(r"(?<![\w.-])(?P<key>[\w.-]++)[\"']?[ \t]{0,3}(?:=>|=(?!=)|:(?!//))[ \t]{0,3}")
_VALUE = re.compile(
    r"""
    b?"(?:[^"\\\n]|\\.)*+"?                                # a quoted text, or what is left of one
    | b?'(?:[^'\\\n]|\\.)*+'?
    | (?:(?:basic|bearer|digest|negotiate|token)[ ]+)?[^\s,;&"'()\[\]{}<>]++
    """,
    re.VERBOSE | re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"(?<=://)(?P<user>[^\s/:@\"']{0,100}+):[^\s/@\"']{1,500}+@")


def is_sensitive(key: str) -> bool:
    """Say whether what stands under this key is a secret."""
    return _pattern(conf.current().sensitive_keys).search(key) is not None


def mask(value: Any) -> Any:
    """Return a copy of a JSON value in which whatever stands under a secret key is replaced by `MASK`."""
    if isinstance(value, dict):
        return {key: MASK if is_sensitive(str(key)) else mask(item) for key, item in value.items()}
    if isinstance(value, list):
        return [mask(item) for item in value]
    return value


def mask_positional(values: Any, names: Sequence[str]) -> Any:
    """Mask positional arguments: those whose parameter has a secret name, and what is inside the others.

    names: of the function's parameters, in order; it may be shorter than `values`.
    """
    if not isinstance(values, list):
        return mask(values)
    named = [*names, *[""] * len(values)]
    return [MASK if is_sensitive(name) else mask(item) for item, name in zip(values, named, strict=False)]


def mask_text(text: str) -> str:
    """Mask secrets in free text, such as a traceback or a log line: `token=…`, `"password": "…"`, `://user:…@`.

    A text is no data structure, so this is a net with holes: a secret that stands alone is not recognised.
    """
    text = _CREDENTIALS.sub(lambda found: f"{found['user']}:{MASK}@", text)
    pieces: list[str] = []
    position = 0
    for pair in _PAIR.finditer(text):
        if pair.start() < position or not is_sensitive(pair["key"]):
            continue
        if value := _VALUE.match(text, pair.end()):
            pieces += [text[position : pair.end()], MASK]
            position = value.end()
    return "".join([*pieces, text[position:]])


@lru_cache(maxsize=8)
def _pattern(sensitive_keys: str) -> re.Pattern[str]:
    return re.compile(sensitive_keys, re.IGNORECASE)
