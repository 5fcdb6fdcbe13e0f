"""Settings that name Redis wrongly, for the tests of the check and of what runs in spite of it."""

from __future__ import annotations

from typing import Any

import redis

SECRET = "s3cret/w0rd"
BACKEND = "django_redis.cache.RedisCache"
DJANGO_BACKEND = "django.core.cache.backends.redis.RedisCache"
POOL = "CONNECTION_POOL_KWARGS"


def cache(location: Any = "redis://127.0.0.1:6379/0", **options: Any) -> dict[str, Any]:
    """CACHES with one alias."""
    return {"default": {"BACKEND": BACKEND, "LOCATION": location, "OPTIONS": options}}


def django_cache(location: Any = "redis://127.0.0.1:6379/0", **options: Any) -> dict[str, Any]:
    """CACHES with one alias of Django's own backend."""
    return {"default": {"BACKEND": DJANGO_BACKEND, "LOCATION": location, "OPTIONS": options}}


def named(address: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """CACHES and ASYNCQ of a project that names Redis by its address alone."""
    return {}, {"REDIS": address}


SENTINEL = {"CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory"}
CLUSTER = {"CLIENT_FACTORY": "django_asyncq.broker.cluster.client"}
LOCAL_MEMORY = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "redis://a"}}
# (CACHES, ASYNCQ, id of the check, a part of its text)
WRONG: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (cache("127.0.0.1:6379/0"), {}, "E050", "the address has no scheme"),
    (cache(f"ann:{SECRET}@127.0.0.1:6379"), {}, "E050", "the address has no scheme"),
    (cache("http://127.0.0.1:6379"), {}, "E050", "the scheme is none of redis, rediss, unix"),
    (cache("REDIS://127.0.0.1:6379"), {}, "E050", "the scheme is none of redis, rediss, unix"),
    (cache("redis://127.0.0.1:port/0"), {}, "E050", "the port is not a number"),
    (cache("redis://127.0.0.1:99999/0"), {}, "E050", "the port is not a number"),
    (cache("redis://127.0.0.1:0/0"), {}, "E050", "the port is not a number"),
    (cache(f"redis://:{SECRET}@127.0.0.1:6379/0"), {}, "E050", "the port is not a number"),
    (cache("redis://:p4ss#w0rd@127.0.0.1:6379/0"), {}, "E050", "the port is not a number"),
    (cache("redis://127.0.0.1:6379/0#main"), {}, "E050", "behind which nothing is read"),
    (cache("redis://127.0.0.1:6379/main"), {}, "E050", "the database is not a number"),
    (cache("redis://127.0.0.1:6379/-1"), {}, "E050", "the database is not a number"),
    (cache("redis://127.0.0.1:6379?db=main"), {}, "E050", "the value of 'db' behind the '?'"),
    (cache("redis://127.0.0.1:6379?socket_timeout=long"), {}, "E050", "the value of 'socket_timeout' behind the '?'"),
    (cache("redis://[::1:6379/0"), {}, "E050", "the address cannot be read"),
    (cache(["redis://127.0.0.1:6379", "127.0.0.2"]), {}, "E050", "address 2: the address has no scheme"),
    (cache("redis://127.0.0.1,127.0.0.2"), {}, "E050", "address 2: the address has no scheme"),
    (cache(6379), {}, "E050", "an address is a text, not int"),
    (cache(""), {}, "E050", "is missing"),
    (cache([]), {}, "E050", "is missing"),
    (cache(CONNECTION_FACTORY="nowhere.Factory"), {}, "E051", "ModuleNotFoundError: No module named 'nowhere'"),
    (cache(CONNECTION_POOL_CLASS="nowhere.Pool"), {}, "E051", "ModuleNotFoundError"),
    (cache(REDIS_CLIENT_CLASS="nowhere.Client"), {}, "E051", "ModuleNotFoundError"),
    (cache(PARSER_CLASS="redis.connection.Nothing"), {}, "E051", "ImportError"),
    (cache(**{POOL: {"colour": "red"}}), {}, "E051", "unexpected keyword argument 'colour'"),
    (cache(**{POOL: {"ssl": True}}), {}, "E051", "unexpected keyword argument 'ssl'"),
    (cache("rediss://127.0.0.1", **{POOL: {"ssl_cert_reqs": "maybe"}}), {}, "E051", "maybe"),
    (cache(REDIS_CLIENT_KWARGS={"colour": 1}), {}, "E051", "unexpected keyword argument 'colour'"),
    (cache("redis://main/0", **SENTINEL), {}, "E051", "SENTINELS must be provided"),
    (cache("redis://main/0", **SENTINEL, SENTINELS=["10.0.0.1:26379"]), {}, "E051", "is not a list of (host, port)"),
    (cache("redis://main/0", **SENTINEL, SENTINELS=[("10.0.0.1", "x")]), {}, "E051", "is not a list of (host, port)"),
    (cache("redis:///0", **SENTINEL, SENTINELS=[("10.0.0.1", 26379)]), {}, "E050", "names no service"),
    (cache("127.0.0.1:7000"), CLUSTER, "E050", "the address has no scheme"),
    (cache("redis://127.0.0.1:7000/3"), CLUSTER, "E050", "no database except 0"),
    (cache("unix:///run/redis.sock"), CLUSTER, "E050", "must name a host"),
    ({}, CLUSTER, "E010", "is not an alias in CACHES"),
    (*named("localhost"), "E010", "ASYNCQ['REDIS'] = 'localhost' is not an alias in CACHES"),
    (*named(""), "E010", "is not an alias in CACHES"),
    (*named([]), "E050", "ASYNCQ['REDIS'] is missing"),
    (*named(f"ann:{SECRET}@127.0.0.1"), "E050", "ASYNCQ['REDIS']: the address has no scheme"),
    (*named(f"redis:/ann:{SECRET}@127.0.0.1"), "E050", "ASYNCQ['REDIS']: the address has no scheme"),
    (*named(f"redis://ann:{SECRET}@127.0.0.1:6379"), "E050", "ASYNCQ['REDIS']: the port is not a number"),
    (*named("redis://127.0.0.1/x"), "E050", "the database is not a number"),
    (*named(["redis://127.0.0.1", 7]), "E050", "address 2: an address is a text, not int"),
    (*named("redis://127.0.0.1?db=x"), "E050", "the value of 'db' behind the '?'"),
    (*named("redis://:s3cret@127.0.0.1?colour=red"), "E051", "unexpected keyword argument 'colour'"),
    ({}, {"REDIS": "redis://127.0.0.1/3", **CLUSTER}, "E050", "no database except 0"),
    (django_cache("redis://127.0.0.1", db=3), CLUSTER, "E051", "no database except 0"),
    (cache("redis://127.0.0.1", **{POOL: {"db": 3}}), CLUSTER, "E051", "no database except 0"),
    (django_cache("127.0.0.1:6379"), {}, "E050", "CACHES['default']['LOCATION']: the address has no scheme"),
    (django_cache("redis://127.0.0.1;127.0.0.2"), {}, "E050", "address 2: the address has no scheme"),
    (django_cache(pool_class="nowhere.Pool"), {}, "E051", "ModuleNotFoundError: No module named 'nowhere'"),
    (django_cache(parser_class="redis.connection.Nothing"), {}, "E051", "ImportError"),
    (django_cache(password="p4ss", colour="p4ss"), {}, "E051", "unexpected keyword argument 'colour'"),
    (django_cache(SENTINELS=[("10.0.0.1", 26379)]), {}, "E051", "unexpected keyword argument 'SENTINELS'"),
    (LOCAL_MEMORY, {}, "E011", "is a django.core.cache.backends.locmem.LocMemCache, which is not a django-redis cache"),
    (cache(), {"CLIENT_FACTORY": "nowhere.client"}, "E052", "ModuleNotFoundError: No module named 'nowhere'"),
    (cache(), {"CLIENT_FACTORY": "client"}, "E052", "cannot be imported"),
    (cache(), {"CLIENT_FACTORY": "tests.redis_settings.SECRET"}, "E052", "is not callable"),
]
RIGHT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (cache(), {}),
    (cache("redis://localhost"), {}),
    (cache("redis://"), {}),
    (cache("rediss://ann:s3cret%2Fw0rd@redis.example:6380/15?ssl_cert_reqs=none"), {}),
    (cache("unix:///run/redis.sock?db=3"), {}),
    (cache("redis://[::1]:6379/0, redis://127.0.0.1:6380/0"), {}),
    (cache(("redis://127.0.0.1:6379/0",), PASSWORD=SECRET, SOCKET_TIMEOUT=3), {}),
    (cache("redis://127.0.0.1?db=2", **{POOL: {"health_check_interval": 30}}), {}),
    (cache("redis://main/0", **SENTINEL, SENTINELS=[("10.0.0.1", 26379), ("10.0.0.2", "26379")]), {}),
    (cache(["redis://127.0.0.1:7000", "redis://127.0.0.1:7001/0"]), CLUSTER),
    ({}, {"CLIENT_FACTORY": "tests.redis_settings.cache"}),
    named("redis://"),
    named("rediss://ann:s3cret%2Fw0rd@redis.example:6380/15?ssl_cert_reqs=none"),
    named("unix:///run/redis.sock?db=3"),
    named("redis://[::1]:6379/0, redis://127.0.0.1:6380/0"),
    named(("redis://127.0.0.1:6379/0",)),
    ({}, {"REDIS": ["redis://127.0.0.1:7000", "redis://127.0.0.1:7001/0"], **CLUSTER}),
    (django_cache(["redis://127.0.0.1:7000", "redis://127.0.0.1:7001/0"]), CLUSTER),
    (django_cache(), {}),
    (django_cache("redis://127.0.0.1;redis://127.0.0.2"), {}),
    (django_cache(db=3, username="ann", password=SECRET, pool_class="redis.BlockingConnectionPool"), {}),
    (django_cache(parser_class="redis.connection.DefaultParser", serializer="nowhere.Serializer"), {}),
    (django_cache(pool_class=redis.ConnectionPool, health_check_interval=30), {}),
]
