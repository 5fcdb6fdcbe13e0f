"""A client factory for Redis Cluster: `"CLIENT_FACTORY": "django_asyncq.broker.cluster.client"`.

django-redis builds none.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import RedisClusterException, ResponseError

from . import clients
from .clients import DEFAULT_PORT, location

# Part of the text of redis-py's error.
NO_CLUSTER = "Cluster mode is not enabled"


def client(role: clients.Role) -> RedisCluster:
    """Return a client of the cluster that has the nodes in ASYNCQ["REDIS"], or in the LOCATION of the alias there.

    One node is enough: each is asked for the others. User, password and TLS come from the first address or OPTIONS.
    Raises: ImproperlyConfigured when there is no address, or an address is not that of a node; redis-py's own error
    when no node answers.
    """
    found, ours = location(), clients.pool_options(role)
    del ours["retry_on_timeout"]  # deprecated there; a client without retries needs none
    if not found.urls:
        raise ImproperlyConfigured(f"{found.setting} names no node of a cluster")
    parsed = [_parsed(url, found.setting) for url in found.urls]
    nodes = [ClusterNode(each.pop("host"), each.pop("port", DEFAULT_PORT)) for each in parsed]  # type: ignore[no-untyped-call]
    # Every database is 0 there, and the class takes no such argument.
    common = {name: value for name, value in found.connection.items() if name != "db"}
    try:
        return RedisCluster(startup_nodes=nodes, **{**common, **parsed[0], **ours})
    except RedisClusterException as error:
        if denial := _denial_behind(error):
            raise denial from error
        if NO_CLUSTER not in str(error):
            raise
        raise ImproperlyConfigured(
            f"{found.setting} names a server that is not a cluster node: remove ASYNCQ['CLIENT_FACTORY'], or name a "
            "node"
        ) from error


def _denial_behind(error: BaseException) -> ResponseError | None:
    """Return Redis's refusal of a right, which redis-py reports as a server that is no node of a cluster."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, ResponseError) and clients.is_denial(found)):
        found = found.__cause__ or found.__context__
    return found


def _parsed(url: str, setting: str) -> dict[str, Any]:
    """Return an address as keyword arguments for redis-py, without the database number: a cluster has only 0."""
    found: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    if found.pop("db", 0) or "host" not in found:
        raise ImproperlyConfigured(
            f"{setting} of a cluster: each address must name a host, and no database except 0, like "
            "redis://10.0.0.1:6379"
        )
    if found.pop("connection_class", None):
        # The address begins with `rediss://`; a cluster client has another option for that.
        found["ssl"] = True
    return found
