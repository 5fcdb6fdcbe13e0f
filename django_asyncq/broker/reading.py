"""Read many things in few round trips: readers say what they need next, and what several need is sent together.

A reader is a generator. It yields the commands whose replies it needs to go on, gets these, and returns what it has
found. Readers only read, so any of them may be run again.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar

from . import clients, redis_py, scripts
from .clients import Client, Role, broker_errors

T = TypeVar("T")
WITH_SCORES = {"withscores": True}


class Command(NamedTuple):
    """A command in `scripts.TYPES` with one key, or a script with its keys. alias: as of `clients.client`.

    may_fail: the key is another program's. The reply is None where Redis refuses the command.
    """

    name: str
    keys: Sequence[str]
    arguments: Sequence[Any] = ()
    options: Mapping[str, Any] = {}
    alias: str = ""
    may_fail: bool = False


Reader: TypeAlias = Generator[list[Command], list[Any], T]


def read(role: Role, reader: Reader[T]) -> T:
    """Return what a reader finds; each of its steps is one round trip. Raises: BrokerUnavailable."""
    try:
        commands = next(reader)
        while True:
            commands = reader.send(_replies(role, commands))
    except StopIteration as end:
        found: T = end.value
        return found


def asking(*commands: Command) -> Reader[list[Any]]:
    """Read the replies of commands."""
    return (yield list(commands)) if commands else []


def side_by_side(*readers: Reader[Any]) -> Reader[list[Any]]:
    """Run readers beside each other, and return what each has found: they take as many steps as the longest of them."""
    found: list[Any] = [None] * len(readers)
    replies: dict[int, Any] = dict.fromkeys(range(len(readers)))
    while replies:
        wanted: dict[int, list[Command]] = {}
        for number, of_reader in replies.items():
            try:
                wanted[number] = readers[number].send(of_reader)
            except StopIteration as end:
                found[number] = end.value
        if not wanted:
            break
        rest = iter((yield [command for commands in wanted.values() for command in commands]))
        replies = {number: [next(rest) for _ in commands] for number, commands in wanted.items()}
    return found


def _replies(role: Role, commands: Sequence[Command]) -> list[Any]:
    """Return the replies in the order of the commands. Each client is asked once."""
    found: list[Any] = [None] * len(commands)
    of_clients: dict[int, tuple[Client, list[int]]] = {}
    for place, command in enumerate(commands):
        client = clients.client(role, command.alias)
        of_clients.setdefault(id(client), (client, []))[1].append(place)
    for client, places in of_clients.values():
        replies = _exchange(client, [commands[place] for place in places])
        for place, reply in zip(places, replies, strict=True):
            found[place] = reply
    return found


def _exchange(client: Client, commands: Sequence[Command]) -> list[Any]:
    if not isinstance(client, redis_py.Redis):
        # One for a cluster, whose pipelines refuse scripts, or what a test has in its place.
        return [_ask(client, command) for command in commands]
    replies = _pipelined(client, commands)
    unknown = [place for place, reply in enumerate(replies) if isinstance(reply, redis_py.NoScriptError)]
    if unknown:
        loading = _pipelined(client, [commands[place] for place in unknown], with_text=True)
        for place, reply in zip(unknown, loading, strict=True):
            replies[place] = reply
    # What is wrong with one command is put right, or said, where it is sent alone.
    return [
        _ask(client, command) if isinstance(reply, Exception) else reply
        for command, reply in zip(commands, replies, strict=True)
    ]


def _pipelined(client: Client, commands: Sequence[Command], *, with_text: bool = False) -> list[Any]:
    with broker_errors(client), client.pipeline(transaction=False) as pipe:
        for name, keys, arguments, options, *_ in commands:
            if name in scripts.TYPES:
                getattr(pipe, name)(*keys, *arguments, **options)
                continue
            text, digest = scripts.script(name)
            # As `scripts.run` does: names that come from Redis may be no UTF-8.
            words = [
                each.encode("utf-8", "surrogateescape") if type(each) is str else each for each in (*keys, *arguments)
            ]
            (pipe.eval if with_text else pipe.evalsha)(text if with_text else digest, len(keys), *words)
        found: list[Any] = pipe.execute(raise_on_error=False)
        return found


def _ask(client: Client, command: Command) -> Any:
    name, keys, arguments, options, _, may_fail = command
    if may_fail:
        with broker_errors(client), suppress(redis_py.ResponseError):
            return getattr(client, name)(*keys, *arguments, **options)
        return None
    if name in scripts.TYPES:
        return scripts.send(client, name, *keys, *arguments, **options)
    return scripts.run(name, client, keys, arguments)
