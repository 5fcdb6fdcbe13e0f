"""The payload of a call as a Go program writes it, for what is computed from its bytes, such as asynq's unique lock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .unique_keys import canonical_arguments

# What Go's encoding/json escapes, so that the text can stand in HTML.
ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def wire_payload(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the arguments of a call as a JSON object: compact, its keys sorted, as Go writes a map.

    Arguments that are equal to their defaults are skipped. args, kwargs: as the row keeps them.
    """
    given = json.loads(canonical_arguments(task, args, kwargs))
    text = json.dumps(given, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.translate(ESCAPED).encode()


def lock_digest(payload: bytes) -> str:
    """Return the last part of the name of asynq's unique lock; "" for no payload, as Go does for nil."""
    return hashlib.md5(payload, usedforsecurity=False).hexdigest() if payload else ""
