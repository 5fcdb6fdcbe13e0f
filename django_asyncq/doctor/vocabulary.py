"""The tables of the other queues: what a use is called, and what becomes of it.

A use has a *path*. That of a name is where it is imported from, such as "celery.shared_task". A value has the path of
its kind, which begins with a capital, such as "Task" or "App"; `same` says which expressions give one. To a path may be
added:

    .name   an attribute        ()      the value of a call
    @       what a decorated function is      [] an item
    |       the value of an `a | b`           >  the same use behind another one, as in a chain
    :       the type of a parameter or variable

"settings.name" is a setting, "settings.name.key" a key in its dictionary, "settings.name.*" each value in it. "class
celery.Task" is a class that is derived, and "class celery.Task.on_failure" what its body defines. "command worker" is a
command, "package celery" a line of requirements, "app django_q" an entry of INSTALLED_APPS, and "fixture celery_worker"
one of pytest. A path that ends in ".*" stands for all that begin so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .findings import Verdict


class Option(NamedTuple):
    """What becomes of a keyword of a call. text: what it adds to the part `slot` of the line to write.

    says: what differs, or what to do instead. When `text` is "", nothing is written for it.
    """

    verdict: Verdict
    slot: str = ""
    text: str = ""
    says: str = ""


class Implied(NamedTuple):
    """What the other queue does by default when one option is given without another. given, without: words."""

    given: str
    without: str
    option: Option


@dataclass(frozen=True, slots=True)
class Use:
    """What becomes of a use.

    write: the form of the line to write here; see `writing` for its parts. says: what differs, or what to do instead.
    options: by keyword, or by "keyword=value" for one value. positions: the keywords of the positional arguments;
    without any, and with `takes` "function", arguments are those of the function itself. takes: what a keyword is that
    `options` do not have, "" for an unknown one, "function" for an argument, "settings" for a setting. implied: what
    some options mean by themselves.
    """

    verdict: Verdict
    write: str = ""
    says: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    positions: tuple[str, ...] = ()
    takes: str = ""
    implied: tuple[Implied, ...] = ()


class Given(NamedTuple):
    """That a function gets a value of a known kind. at: the place or the name of the parameter.

    if_option: only when the decorator has this option, and it is not False.
    """

    at: int | str
    kind: str
    if_option: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of the other queue. words: a regular expression that finds it in a line.

    use: its name in `uses`, where "{}" stands for the first word of the rest that `verbs` has; without verbs, for what
    was found. has_value: options that are followed by a value.
    """

    words: re.Pattern[str]
    use: str
    verbs: tuple[str, ...] = ()
    has_value: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Vocabulary:
    """All that is known of another queue.

    packages: matches the first part of what is imported from it. uses: what becomes of each path. same: paths that are
    another one, such as old homes of a name, and what values are. inherits: kinds that have all that another one has.
    given: what a decorated function gets. guesses: attributes that may well be of a path, whatever has them; their
    uses are unknown. signs: attributes that only one kind of value has, with that kind.
    setting: returns the name of a setting within "settings", or "" for what is none. words: what a file must mention
    so that it can use the queue by a name of its own.
    """

    name: str
    packages: re.Pattern[str]
    uses: Mapping[str, Use]
    same: Mapping[str, str]
    words: re.Pattern[str]
    setting: Callable[[str], str]
    inherits: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, tuple[Given, ...]] = field(default_factory=dict)
    guesses: Mapping[str, str] = field(default_factory=dict)
    signs: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()
    distributions: re.Pattern[str] = re.compile(r"(?!)")

    def canonical(self, path: str) -> str:
        """Return the path by which the tables know a path."""
        for _ in range(8):
            if path in self.same:
                path = self.same[path]
                continue
            if path in self.uses:
                return path
            for owner, parent in self.inherits.items():
                if path.startswith(owner) and path[len(owner) :].startswith((".", "(", "@", "[", "|")):
                    inherited = self.canonical(f"{parent}{path[len(owner) :]}")
                    if inherited in self.uses or inherited in self.same.values():
                        return inherited
            return path
        return path

    def dotted(self, text: str) -> str:
        """Return the path of a dotted name, as it is reached part by part."""
        path = ""
        for part in text.split("."):
            path = self.canonical(f"{path}.{part}" if path else part)
        return path

    def use_of_call(self, path: str) -> tuple[str, Use | None]:
        """Return what becomes of a call of what has this path: that of a kind has an entry with "()" behind it."""
        for kind in (path, self.inherits.get(path, "")):
            if f"{kind}()" in self.uses:
                return f"{kind}()", self.uses[f"{kind}()"]
        return self.use_of(path)

    def use_of(self, path: str) -> tuple[str, Use | None]:
        """Return what becomes of a path, with the name by which the tables have it; None when they do not."""
        path = path if path in self.uses else self.canonical(path)
        if path in self.uses:
            return path, self.uses[path]
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            if (name := f"{'.'.join(parts[:count])}.*") in self.uses and not name.startswith("settings."):
                return name, self.uses[name]
        return path, None

    def has_more(self, path: str) -> bool:
        """Return whether the tables have something that begins with a path, or say that it is of a kind."""
        return path in self._beginnings

    @cached_property
    def _beginnings(self) -> set[str]:
        """Every path of which the tables know an attribute, a call or an item, and the kinds."""
        paths = [*self.uses, *self.same]
        marks = ((path, found.start()) for path in paths for found in re.finditer(r"\.|\(\)|\[\]|\||@", path))
        return {path[:end] for path, end in marks} | set(self.same.values()) | set(self.inherits)

    def has_keys(self, path: str) -> bool:
        """Return whether the keys of the dictionary at this path are uses of their own."""
        return any(each.startswith(f"{path}.") for each in self.uses)


def each(words: str, use: Use, prefix: str = "") -> dict[str, Use]:
    """Return a part of a table: paths that have the same answer, separated by spaces."""
    return {f"{prefix}{path}": use for path in re.findall(r"(?:(?:class|command) )?\S+", words)}


def options(*rows: tuple[str, Option]) -> dict[str, Option]:
    """Return a table of options. rows: words with the same answer, separated by spaces, and that answer."""
    return {word: option for words, option in rows for word in words.split()}


def maps(write: str = "", says: str = "", **more: object) -> Use:
    """Return a use that maps."""
    return _use(Verdict.MAPS, write, says, more)


def but(write: str, says: str, **more: object) -> Use:
    """Return a use that maps, and behaves differently."""
    return _use(Verdict.BUT, write, says, more)


def lacks(says: str, **more: object) -> Use:
    """Return a use that does not map. says: what to do instead."""
    return _use(Verdict.NOT, "", says, more)


def _use(verdict: Verdict, write: str, says: str, more: Mapping[str, object]) -> Use:
    return Use(verdict, write, says, **more)  # type: ignore[arg-type]  # the names and types are those of Use


def to(slot: str, text: str, says: str = "") -> Option:
    """Return an option that maps to a text in a part of the line to write."""
    return Option(Verdict.MAPS, slot, text, says)


def differs(slot: str, text: str, says: str) -> Option:
    """Return an option that maps, and behaves differently."""
    return Option(Verdict.BUT, slot, text, says)


def drops(says: str) -> Option:
    """Return an option that is not needed here."""
    return Option(Verdict.MAPS, says=says)


def has_none(says: str) -> Option:
    """Return an option that does not map. says: what to do instead."""
    return Option(Verdict.NOT, says=says)
