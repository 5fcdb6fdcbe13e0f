"""Serve queues as a Go server does, until SIGTERM.

    python -m tests.foreign URL PREFIX HISTORY QUEUE… -- TYPE=ACTION…

ACTION: `ok` succeeds, `result:TEXT` succeeds with a result, `fail` fails, `once` fails at its first run,
`sleep:SECONDS` succeeds after a while. A type without one fails as asynq does without a handler. Each run is a line in
the file HISTORY: its queue, type and id, and whether the end was written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import redis

from ..go_peer import GoPeer, Taken

# asynq has 1 s.
IDLE_SECONDS = float(os.environ.get("ASYNCQ_TEST_FOREIGN_IDLE", "0.01"))
# asynq has 5 s and 60 s; nothing on the wire depends on it.
UPKEEP_SECONDS = 0.2
RETRY_SECONDS = 1
# asynq has 30 s each. A task must end within its lease, which nothing here extends.
LEASE_SECONDS = 3
GRACE_SECONDS = 4


def act(peer: GoPeer, taken: Taken, actions: dict[str, str]) -> str:
    """Run one task and write how it ended; return how."""
    action = actions.get(taken.message.type)
    if action is None:
        peer.fail_without_handler(taken, delay=RETRY_SECONDS)
        return "no handler"
    word, _, rest = action.partition(":")
    if word == "fail" or (word == "once" and not taken.message.retried):
        peer.fail(taken, "the handler failed", delay=RETRY_SECONDS)
        return "failed"
    if word == "sleep":
        time.sleep(float(rest))
    peer.succeed(taken, rest.encode() if word == "result" else None)
    return "ok"


def look_after(peers: list[GoPeer]) -> None:
    """Do what the loops of a server do beside its workers."""
    for peer in peers:
        peer.forward()
        # Another server may have recovered it first.
        with suppress(redis.ResponseError):
            peer.recover(delay=RETRY_SECONDS)
        peer.delete_expired_completed()


def main(url: str, prefix: str, history: str, *rest: str) -> None:
    """Serve until asked to stop."""
    split = rest.index("--")
    actions = dict(each.rsplit("=", 1) for each in rest[split + 1 :])
    client = redis.Redis.from_url(url, protocol=2)
    times = {"lease_seconds": LEASE_SECONDS, "grace_seconds": GRACE_SECONDS}
    peers = [GoPeer(client, queue, prefix, **times) for queue in rest[:split]]
    stopping: list[Any] = []
    signal.signal(signal.SIGTERM, lambda *arguments: stopping.append(arguments))
    lines = os.open(history, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    looked_at = 0.0
    while not stopping:
        found = False
        for peer in peers:
            taken = peer.take()
            if taken is None:
                continue
            found = True
            line: dict[str, Any] = {"queue": peer.queue, "type": taken.message.type, "id": taken.id}
            try:
                line["end"] = act(peer, taken, actions)
            except redis.ResponseError as error:
                # It was lost to another server, which asynq notices in no other way.
                line["end"] = str(error)
            os.write(lines, json.dumps(line).encode() + b"\n")
        if time.monotonic() - looked_at > UPKEEP_SECONDS:
            looked_at = time.monotonic()
            look_after(peers)
        if not found:
            time.sleep(IDLE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
