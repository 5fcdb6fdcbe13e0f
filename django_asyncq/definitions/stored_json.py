"""The JSON text of the columns that hold a user's values. Every database returns it with type and sign.

PostgreSQL keeps the numbers of its `jsonb` as `numeric`, which knows neither exponents nor a negative zero. So `1e+16`
comes back as `10000000000000000`, an int, and `-0.0` as `0.0`. Only such numbers are spelled otherwise here. Every
reader of JSON reads the same number, so nothing has to be undone.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

# A text, which is left as it is, or a float that PostgreSQL would change. Python writes an exponent from 1e16 on.
_TEXT_OR_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-0\.0(?!\d)|-?\d[\d.]*e\+\d+')
# Smaller than every float but 0, so that it is read as the float -0.0, while `numeric` keeps its sign.
_NEGATIVE_ZERO = "-1e-400"


class StoredJSONEncoder(json.JSONEncoder):
    """Encode JSON so that every database returns the same types and numbers."""

    def encode(self, o: Any) -> str:
        """Encode a value."""
        text = super().encode(o)
        # Nearly no text has either; looking for them takes 0.1 µs.
        if "e+" in text or "-0.0" in text:
            return _TEXT_OR_NUMBER.sub(_respelled, text)
        return text


def _respelled(match: re.Match[str]) -> str:
    found = match[0]
    if found[0] == '"':
        return found
    return _NEGATIVE_ZERO if found == "-0.0" else f"{Decimal(found):f}.0"
