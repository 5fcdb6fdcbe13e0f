"""Mask secrets in what is shown: admin pages and log lines. Never change what is stored.

A key is secret when the regular expression `ASYNCQ["SENSITIVE_KEYS"]` matches any part of it, in any case. The path of
a task, such as `shop.tasks.reset_password`, is no key: a colon follows it in log lines, and then no secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from .. import conf
from .registry import find

MASK = "••••••"
# A shorter value is in too many words that are none.
SHORTEST_SECRET = 4
MOST_VALUES = 100
DEEPEST = 50

# Possessive quantifiers allow one way to match only, so a hostile text is scanned in linear time: 1 MB of "token="
# takes 0.3 s.
_PAIR = re.compile(r"(?<![\w.-])(?P<key>[\w.-]++)\\{0,7}[\"']?[ \t]{0,3}(?:=>|=(?!=)|:(?!//))[ \t]{0,3}")
_VALUE = re.compile(
    r"""
    \\++"(?:[^"\n]|(?<=\\\\\\)")*+                          # within JSON that is a text itself: \"…\"
    | \\++'(?:[^'\n]|(?<=\\\\\\)')*+
    | b?"(?:[^"\\\n]|\\.)*+"?                                # a quoted text, or a truncated one
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


class Masker:
    """Mask the secrets of one task: those of the setting, and those that its declaration names.

    sensitive: names of parameters, and "return". names: the function's parameters in order. args, kwargs: of the call;
    a text of them that is sensitive is masked wherever it occurs, for instance in an error. task: its path.
    """

    def __init__(
        self,
        sensitive: Collection[str] = (),
        names: Sequence[str] = (),
        args: Any = (),
        kwargs: Any = None,
        task: str = "",
    ) -> None:
        self._task = task
        self._sensitive = frozenset(sensitive)
        self._names = names
        self._values: list[str] = []
        if self._sensitive:
            named = zip(args if isinstance(args, list) else (), names, strict=False)
            found = [value for value, name in named if name in self._sensitive]
            found += (
                [value for key, value in kwargs.items() if key in self._sensitive] if isinstance(kwargs, dict) else []
            )
            texts = {text for value in found for text in _texts_of(value) if len(text) >= SHORTEST_SECRET}
            # The longest first: one may be a part of another.
            self._values = sorted(texts, key=lambda text: (-len(text), text))[:MOST_VALUES]

    def positional(self, values: Any) -> Any:
        """Mask the positional arguments of the call."""
        masked = mask_positional(values, self._names)
        if not isinstance(masked, list):
            return masked
        names = [*self._names, *[""] * len(masked)]
        return [MASK if name in self._sensitive else each for each, name in zip(masked, names, strict=False)]

    def keyword(self, values: Any) -> Any:
        """Mask the keyword arguments of the call."""
        masked = mask(values)
        if not isinstance(masked, dict):
            return masked
        return {key: MASK if key in self._sensitive else value for key, value in masked.items()}

    def result(self, value: Any) -> Any:
        """Mask what the function has returned."""
        return MASK if "return" in self._sensitive else self.data(value)

    def data(self, value: Any) -> Any:
        """Mask a JSON value, such as progress."""
        return _replaced(mask(value), self._values) if self._values else mask(value)

    def text(self, text: str, tasks: Collection[str] = ()) -> str:
        """Mask free text, such as a traceback. tasks: see `mask_text`."""
        for value in self._values:
            text = text.replace(value, MASK)
        return mask_text(text, {self._task, *tasks})


def _texts_of(value: Any, depth: int = 0) -> list[str]:
    """Return the texts in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [str(value)]
    if depth > DEEPEST:
        return []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts_of(part, depth + 1)]


def _replaced(value: Any, secrets: Sequence[str]) -> Any:
    """Return a copy of a JSON value whose texts have no secret in them."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {key: _replaced(item, secrets) for key, item in value.items()}
    return [_replaced(item, secrets) for item in value] if isinstance(value, list) else value


def mask_text(text: str, tasks: Collection[str] = ()) -> str:
    """Mask secrets in free text, such as a traceback or a log line: `token=…`, `"password": "…"`, `://user:…@`.

    tasks: paths of tasks that the text is about, which are no keys; those of declared tasks are known. A name without a
    dot is a key all the same.

    This cannot find every secret, because a text has no structure: a secret without a key beside it is not recognised.
    """
    text = _CREDENTIALS.sub(lambda found: f"{found['user']}:{MASK}@", text)
    pieces: list[str] = []
    position = 0
    for pair in _PAIR.finditer(text):
        if pair.start() < position or not is_sensitive(pair["key"]) or _is_task(pair["key"], tasks):
            continue
        if value := _VALUE.match(text, pair.end()):
            pieces += [text[position : pair.end()], MASK]
            position = value.end()
    return "".join([*pieces, text[position:]])


def _is_task(key: str, tasks: Collection[str]) -> bool:
    """Return whether what looks like a key is the path of a task, declared or among those given."""
    return "." in key and (key in tasks or find(key) is not None)


@lru_cache(maxsize=8)
def _pattern(sensitive_keys: str) -> re.Pattern[str]:
    return re.compile(sensitive_keys, re.IGNORECASE)
