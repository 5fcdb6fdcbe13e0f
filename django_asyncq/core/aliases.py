"""What the backends of the aliases in TASKS need, asked without making one: each thread has backends of its own.

A backend's class may bring the clients of its aliases (`client_factory`), in the place of the Redis that the settings
name. Nobody but this process sees what such a client keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any, cast

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .. import conf
from .compat import DEFAULT_TASK_BACKEND_ALIAS

# All that the tasks framework reads of an alias: that of Django 6.0 and 6.1, and the backport of 5.2.
KEYS = ("BACKEND", "QUEUES", "OPTIONS")


@lru_cache(maxsize=256)
def client_factory_of(alias: str) -> Callable[[str], Any] | None:
    """Return what makes the clients of an alias, by their role; None: the settings name its Redis.

    None also for an alias that TASKS does not name any more.
    """
    return getattr(backend_class(alias), "client_factory", None)


def uses_redis(alias: str) -> bool:
    """Whether the tasks of an alias are where other processes see them: in the Redis that the settings name."""
    return client_factory_of(alias) is None


def is_redis_used() -> bool:
    """Whether any alias in TASKS uses that Redis. Django's own backends do not."""
    return bool(redis_aliases())


@cache
def backend_class(alias: str) -> type | None:
    """Return the class of an alias's backend; None where TASKS names none that can be imported."""
    options = written_aliases().get(alias)
    try:
        return None if options is None else cast("type", import_string(options["BACKEND"]))
    except (ImportError, KeyError, TypeError):
        return None


def written_aliases() -> dict[str, Any]:
    """Return TASKS as the project has written it; an empty dictionary when there is none."""
    found = getattr(settings, "TASKS", {})
    return found if isinstance(found, dict) else {}


def _forget(*, setting: str, **kwargs: Any) -> None:
    """Forget the backends after a test changed them."""
    if setting == "TASKS":
        client_factory_of.cache_clear()
        backend_class.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_asyncq.core.aliases")


# --- The Redis prefix of each alias in TASKS: the first part of the keys of its queues.
#
# The alias `default` uses KEY_PREFIX, every other one `<KEY_PREFIX>:<alias>`, and `prefix` in an alias's OPTIONS
# replaces either. So two aliases may have queues of the same name. An alias that the settings do not name has a
# prefix too: its rows may be older than the settings.

# What KEY_PREFIX and the option may be; `{`, `}` and `*` mean something to Redis.
PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
PREFIX_HINT = "Use 1 to 64 letters, digits, '_', '.', ':' and '-'"
DEFAULT_ALIAS = DEFAULT_TASK_BACKEND_ALIAS
# The option of an alias that replaces its prefix.
OPTION = "prefix"


def is_prefix(value: Any) -> bool:
    """Return whether a value can be a prefix."""
    return isinstance(value, str) and PREFIX.fullmatch(value) is not None


@lru_cache(maxsize=256)
def prefix_of(alias: str) -> str:
    """Return the prefix of an alias."""
    written = options_of(alias).get(OPTION)
    if isinstance(written, str) and written:
        return written
    base = conf.current().key_prefix
    return base if alias == DEFAULT_ALIAS else f"{base}:{alias}"


@lru_cache(maxsize=1)
def redis_aliases() -> tuple[str, ...]:
    """Return the aliases whose tasks are dispatched through Redis, in the order of TASKS."""
    return tuple(alias for alias in written_aliases() if getattr(backend_class(alias), "client_factory", False) is None)


def one_alias_per_prefix(more: Iterable[str] = ()) -> list[str]:
    """Return an alias for each prefix, sorted: of the aliases in TASKS, and of `more`."""
    found: dict[str, str] = {}
    for alias in (*redis_aliases(), *sorted(more)):
        found.setdefault(prefix_of(alias), alias)
    return sorted(found.values())


@lru_cache(maxsize=256)
def aliases_beside(alias: str) -> tuple[str, ...]:
    """Return an alias, and the other ones of TASKS with the same prefix, whose queues are the same."""
    others = (each for each in redis_aliases() if each != alias and prefix_of(each) == prefix_of(alias))
    return (alias, *others)


def owned_prefixes() -> list[str]:
    """Return every prefix that must belong to this database alone: KEY_PREFIX, then those of the aliases in TASKS."""
    return list(dict.fromkeys([conf.current().key_prefix, *map(prefix_of, redis_aliases())]))


def options_of(alias: str) -> dict[str, Any]:
    """Return the OPTIONS of an alias as they are written; an empty dictionary when there are none."""
    written = written_aliases().get(alias)
    options = written.get("OPTIONS") if isinstance(written, dict) else None
    return options if isinstance(options, dict) else {}


def forget_prefixes(*, setting: str, **kwargs: Any) -> None:
    """Forget the prefixes after a test changed the settings."""
    if setting in (conf.NAME, "TASKS"):
        prefix_of.cache_clear()
        redis_aliases.cache_clear()
        aliases_beside.cache_clear()


setting_changed.connect(forget_prefixes, dispatch_uid="django_asyncq.prefixes")
