"""The peer of the tests does what the captures of real servers show (`test_fixtures.py` holds ours to the same)."""

from __future__ import annotations

import pytest
import redis

from ..go_peer import GoPeer


@pytest.fixture
def peer(redis_client: redis.Redis, key_prefix: str) -> GoPeer:
    return GoPeer(redis_client, "go", key_prefix)


def test_life_of_a_task(peer: GoPeer) -> None:
    """A run leaves a kept task in completed, another one nowhere; an error costs a retry, the last one archives."""
    kept, gone = peer.enqueue("a", retention=60), peer.enqueue("a", retention=0)
    first = peer.take()
    assert first is not None
    assert (first.id, peer.state(kept), peer.ids("lease")) == (kept, "active", [kept])
    peer.succeed(first, b"5")
    second = peer.take()
    assert second is not None
    peer.succeed(second)
    assert (peer.state(kept), peer.state(gone), peer.ids("completed")) == ("completed", "", [kept])
    with pytest.raises(redis.ResponseError, match="NOT FOUND"):
        peer.done(second)
    failing = peer.enqueue("a", retry=1)
    for place in ("retry", "archived"):
        taken = peer.take()
        assert taken is not None
        peer.fail(taken, "no")
        assert (peer.ids(place), peer.message(failing).retried) == ([failing], 1)
        peer.forward(at=peer.now() + 60)
    assert peer.inspector_run(failing) == 1
    assert peer.inspector_archive(failing) == 1
    assert peer.inspector_delete(failing) == 1
    assert peer.state(failing) == ""


def test_locks_groups_and_recovery(peer: GoPeer) -> None:
    """A lock refuses a second task, a member waits in its group, a lost task is retried."""
    one = peer.enqueue_unique("u", b"1")
    with pytest.raises(KeyError, match="duplicate"):
        peer.enqueue_unique("u", b"1")
    member = peer.add_to_group("g", "m")
    assert (peer.state(member), peer.ids("g:g")) == ("aggregating", [member])
    assert peer.take() is not None
    assert peer.recover() == []
    assert peer.recover(at=peer.now() + 61) == [one]
    assert peer.message(one).error_msg == "asynq: task lease expired"
    peer.pause()
    peer.forward(at=peer.now() + 61)
    assert peer.take() is None
    peer.unpause()
    taken = peer.take()
    assert taken is not None
    peer.requeue(taken)
    assert peer.ids("pending") == [one]
