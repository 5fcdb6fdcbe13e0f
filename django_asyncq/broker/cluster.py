"""Redis Cluster, which django-redis does not build: `"CLIENT_FACTORY": "django_asyncq.broker.cluster.client"`."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import RedisClusterException

from . import clients

# redis-py says it in the midst of a sentence.
NO_CLUSTER = "Cluster mode is not enabled"


def client(role: clients.Role) -> RedisCluster:
    """Return a client of the cluster of which the alias's LOCATION names a node, or several.

    Each of them is asked for the others. User, password and TLS are those of the first address, or of OPTIONS.
    Raises: ImproperlyConfigured when the alias is missing, has no LOCATION, or an address is none of a node's; what
    redis-py raises when no node answers.
    """
    urls, written = clients.alias()
    options = clients.factory_options(written, clients.connection_options(role))
    del options["CONNECTION_POOL_KWARGS"]["retry_on_timeout"]  # outdated there; a client without retries has none
    names = {"username": "USERNAME", "password": "PASSWORD"}
    credentials = {word: options[name] for word, name in names.items() if options.get(name)}
    parsed = [_parsed(url) for url in urls]
    nodes = [ClusterNode(each.pop("host"), each.pop("port", 6379)) for each in parsed]  # type: ignore[no-untyped-call]
    try:
        return RedisCluster(startup_nodes=nodes, **{**credentials, **parsed[0], **options["CONNECTION_POOL_KWARGS"]})
    except RedisClusterException as error:
        if NO_CLUSTER not in str(error):
            raise
        raise ImproperlyConfigured(
            "LOCATION names a server that is no node of a cluster: remove ASYNCQ['CLIENT_FACTORY'], or name a node"
        ) from error


def _parsed(url: str) -> dict[str, Any]:
    """Return an address as keywords of redis-py, without the number of a database: a cluster has only 0."""
    found: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    if found.pop("db", 0) or "host" not in found:
        raise ImproperlyConfigured(
            "LOCATION of a cluster: each address must name a host and no database but 0, as redis://10.0.0.1:6379"
        )
    if found.pop("connection_class", None):
        # What `rediss://` says; a cluster's client is told in another word.
        found["ssl"] = True
    return found
