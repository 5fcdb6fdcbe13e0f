"""Make the first calls of a worker, so that it stops at start when the user of Redis lacks a basic right.

Real calls, which change nothing: asking Redis about rights (`ACL`) is itself a right that hardly any user has.
"""

from __future__ import annotations

from .. import conf
from . import Broker, clients, commands, scripts
from .clients import broker_errors
from .keys import due_channel, names_channel, odd_channel, wake_list_key

# Long enough for any server to accept; 0 would wait forever.
BLOCK_SECONDS = 0.01
# A name that no project gives: its keys do not exist.
NAME = "check-rights"


def check_rights(alias: str) -> None:
    """Call what every worker needs, once: a plain command, a script, locks, gates, what blocks, and the channels.

    alias: whose tasks the worker runs.
    Raises: BrokerPermissionDenied when Redis refuses one of them to its user; BrokerUnavailable.
    """
    broker, settings = Broker("worker", alias), conf.current()
    keys = broker.keys(NAME)
    broker.queues()
    broker.alive_since()
    broker.has_pending(NAME)
    scripts.run("held", broker.client, [keys.held(NAME)], [keys.task_prefix, NAME])
    commands.send(broker.client, "get", f"{settings.lock_prefix}{NAME}")
    commands.send(broker.client, "zcard", f"{settings.gate_prefix}{NAME}")
    broker.notify_due()
    blocking = clients.client("blocking")
    with broker_errors(blocking):
        blocking.blmove(keys.pending, keys.pending, BLOCK_SECONDS, "RIGHT", "RIGHT")
        blocking.blpop([wake_list_key(NAME, alias)], BLOCK_SECONDS)
        subscription = blocking.pubsub()
        try:
            subscription.subscribe(due_channel(), names_channel(alias), odd_channel(), keys.wake)
            subscription.get_message(timeout=clients.TIMEOUTS["blocking"][0])
        finally:
            subscription.close()
