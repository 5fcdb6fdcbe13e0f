"""Mask secrets in what is shown: admin pages and log lines. Never change what is stored.

A key is secret when the regular expression `ASYNCQ["SENSITIVE_KEYS"]` matches any part of it, in any case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .. import conf

MASK = "••••••"

# Possessive quantifiers allow one way to match only, so a hostile text is scanned in linear time: 1 MB of "token="
# takes 0.3 s.
_PAIR = re.compile(r"(?<![\w.-])(?P<key>[\w.-]++)[\"']?[ \t]{0,3}(?:=>|=(?!=)|:(?!//))[ \t]{0,3}")
_VALUE = re.compile(
    r"""
    b?"(?:[^"\\\n]|\\.)*+"?                                # a quoted text, or a truncated one
    | b?'(?:[^'\\\n]|\\.)*+'?
    | (?:(?:basic|bearer|digest|negotiate|token)[ ]+)?[^\s,;&"'()\[\]{}<>]++
    """,
    re.VERBOSE | re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"(?<=://)(?P<user>[^\s/:@\"']{0,100}+):[^\s/@\"']{1,500}+@")


def is_sensitive(key: str) -> bool:
    """Whether the value of this key is a secret."""
    return _pattern(conf.current().sensitive_keys).search(key) is not None


def mask(value: Any) -> Any:
    """Return a copy of a JSON value with the value of each secret key replaced by `MASK`."""
    if isinstance(value, dict):
        return {key: MASK if is_sensitive(str(key)) else mask(item) for key, item in value.items()}
    if isinstance(value, list):
        return [mask(item) for item in value]
    return value


def mask_positional(values: Any, names: Sequence[str]) -> Any:
    """Mask the arguments whose parameter has a secret name, and the secrets inside the others.

    names: the function's parameters in order; the list may be shorter than `values`.
    """
    if not isinstance(values, list):
        return mask(values)
    named = [*names, *[""] * len(values)]
    return [MASK if is_sensitive(name) else mask(item) for item, name in zip(values, named, strict=False)]


def mask_text(text: str) -> str:
    """Mask secrets in free text, such as a traceback or a log line: `token=…`, `"password": "…"`, `://user:…@`.

    This cannot find every secret, because a text has no structure: a secret without a key beside it is not recognised.
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
