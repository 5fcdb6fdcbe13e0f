"""Run the Lua scripts: one file per operation under `lua/`, sent once, then called by digest.

Other parts keep their scripts here too: `gate_*.lua` are those of the gates, `lock_*.lua` those of the coordinator.
Those in SHARED hold functions for all: with them, no key of a wrong type and no odd value in a hash can stop a script.
"""

from __future__ import annotations

import hashlib
import pkgutil
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from ..exceptions import BrokerUnavailable
from . import redis_py
from .clients import Client, broker_errors
from .keys import odd_channel, over_channel

# What scripts share. Each one begins with the functions that it uses, and no others: making one takes 0.2 µs.
SHARED = ("prelude", "waking", "values", "counters", "waiting", "waited", "noting", "reused", "groups", "lines")
NAMED = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)


class Script(NamedTuple):
    """Hold a script's text, and the SHA-1 by which Redis calls it."""

    text: str
    digest: str


def script(name: str) -> Script:
    """Return the script of `lua/<name>.lua`, behind what it uses: shared functions, and the channels to announce on."""
    return _script(name, odd_channel(), over_channel())


@lru_cache(maxsize=1024)
def _script(name: str, odd: str, over: str) -> Script:
    text = _read(name)
    for block in reversed(_shared()):
        # A shared function may use those that come before it, so the last one is looked at first.
        if any(re.search(rf"\b{word}\b", text) for word in NAMED.findall(block)):
            text = block + text
    # Written into the text: a script gets no other word of the project, and each call would have to carry it.
    for word, channel in (("ODD_CHANNEL", odd), ("OVER_CHANNEL", over)):
        if re.search(rf"\b{word}\b", text):
            text = f"local {word} = '{channel}'\n{text}"
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def _shared() -> list[str]:
    """Return the shared functions with what they need, without the headers of their files."""
    texts = [_read(name).partition("\nlocal ") for name in SHARED]
    return [block.strip() + "\n" for _, _, rest in texts for block in f"local {rest}".split("\n\n")]


def _read(name: str) -> str:
    # Not `importlib.resources`, which imports more than the rest of this folder; Django uses `pkgutil` itself.
    found = pkgutil.get_data(__package__, f"lua/{name}.lua")
    if found is None:
        raise FileNotFoundError(f"{__package__}/lua/{name}.lua: the loader of this package cannot read files")
    return found.decode()


def run(name: str, client: Client, keys: Sequence[str], arguments: Sequence[Any] = ()) -> Any:
    """Run a script, and send its text when the server does not have it (new, restarted or flushed).

    keys: all in the cluster slot of the first. Returns the raw reply, text as bytes.
    Raises: BrokerUnavailable.
    """
    text, digest = script(name)
    # Names that come from Redis may be no UTF-8, which redis-py would refuse to send.
    words = [word.encode("utf-8", "surrogateescape") if type(word) is str else word for word in (*keys, *arguments)]
    with broker_errors(client, name, keys):
        try:
            return client.evalsha(digest, len(keys), *words)
        except redis_py.NoScriptError:
            return client.eval(text, len(keys), *words)


def run_in_parts(
    name: str, client: Client, keys: Sequence[str], head: Sequence[Any], items: Sequence[Sequence[Any]], size: int
) -> list[Any]:
    """Run a script that answers with a list, `size` items a call; return all that it answers. items: arguments of each.

    Raises: BrokerUnavailable.
    """
    found: list[Any] = []
    for start in range(0, len(items), size):
        part = [argument for item in items[start : start + size] for argument in item]
        found += run(name, client, keys, [*head, *part])
    return found


# --- Send a plain command, one that is no script: a key of a wrong type is set aside first, as the scripts do it.

# The type of key that each command takes.
TYPES = {
    "get": "string",
    "getrange": "string",
    "lrange": "list",
    "llen": "list",
    "hget": "hash",
    "hmget": "hash",
    "hdel": "hash",
    "hexists": "hash",
    "hgetall": "hash",
    "sadd": "set",
    "smembers": "set",
    "srem": "set",
    "zrange": "zset",
    "zrank": "zset",
    "zrangebyscore": "zset",
    "zcard": "zset",
    "zscore": "zset",
    "zcount": "zset",
    "zadd": "zset",
    "zrem": "zset",
}


def send(client: Client, command: str, key: str, *arguments: Any, **more: Any) -> Any:
    """Return the reply of a command that redis-py has as a method; if the key has another type, set it aside first.

    command: one of TYPES. Raises: BrokerUnavailable.
    """
    method = getattr(client, command)
    try:
        with broker_errors(client):
            return method(key, *arguments, **more)
    except redis_py.ResponseError as error:
        if not is_wrong_type(error):
            raise
    run("check_type", client, [key], [TYPES[command]])
    try:
        with broker_errors(client):
            return method(key, *arguments, **more)
    except redis_py.ResponseError as error:
        raise BrokerUnavailable(f"a key is given a wrong type again and again: {key!r}") from error


def is_wrong_type(error: redis_py.ResponseError) -> bool:
    """Return whether Redis says that the key has another type."""
    return "WRONGTYPE" in str(error)
