"""Run the Lua scripts: one file per operation under `lua/`, sent once, then called by digest.

Other parts keep their scripts here too: `gate_*.lua` are those of the gates, `lock_*.lua` those of the coordinator.
Every script begins with PRELUDE, so no key of a wrong type and no odd value in a hash can stop it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from .clients import Client, broker_errors
from .entries import id_bytes

PRELUDE = ("prelude", "values")
# What else a script begins with.
INCLUDES = {"done": ("counters",), "retry": ("counters",), "archive": ("counters",)}


class Script(NamedTuple):
    """Hold a script's text, and the SHA-1 by which Redis calls it."""

    text: str
    digest: str


@cache
def script(name: str) -> Script:
    """Return the script of `lua/<name>.lua`, behind what it begins with."""
    folder = resources.files(__package__).joinpath("lua")
    names = [*PRELUDE, *INCLUDES.get(name, ()), name]
    text = "".join(folder.joinpath(f"{each}.lua").read_text(encoding="utf-8") for each in names)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def run(name: str, client: Client, keys: Sequence[str], arguments: Sequence[Any] = ()) -> Any:
    """Run a script, and send its text when the server does not have it (new, restarted or flushed).

    keys: all in the cluster slot of the first. Returns the raw reply, text as bytes.
    Raises: BrokerUnavailable.
    """
    text, digest = script(name)
    # Names that come from Redis may be no UTF-8, which redis-py would refuse to send.
    words = [id_bytes(word) if type(word) is str else word for word in (*keys, *arguments)]
    with broker_errors(client):
        try:
            return client.evalsha(digest, len(keys), *words)
        except NoScriptError:
            return client.eval(text, len(keys), *words)
