"""Hosts with different SECRET_KEYs are noticed when a supervisor starts, not when an outcome is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from django_asyncq.broker.keys import key_check_key
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.fleet import leader
from django_asyncq.fleet.leader import CHECK_AGAIN_SECONDS, KeyCheck
from django_asyncq.fleet.leader import KEY_CHECK_SECONDS as CHECK_SECONDS
from django_asyncq.lifecycle import spill

from ..workers import wait_until, workers

WARNING = "this host cannot verify what the leader has signed"


def test_same_key_gives_no_warning(caplog: pytest.LogCaptureFixture, redis_client: Any) -> None:
    """The leader writes, and nobody complains; another process writes nothing."""
    assert KeyCheck().tick(is_leader=False) == CHECK_SECONDS
    assert not redis_client.exists(key_check_key())
    assert KeyCheck().tick(is_leader=True) == CHECK_SECONDS
    assert len(redis_client.get(key_check_key())) == spill.SIGNATURE_BYTES
    KeyCheck().tick(is_leader=False)
    assert WARNING not in caplog.text


def test_fallback_key_gives_no_warning(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Both halves of a rotation: the leader has the new key, or still the old one."""
    old = settings.SECRET_KEY
    KeyCheck().tick(is_leader=True)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new", [old]
    KeyCheck().tick(is_leader=True)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = old, ["new"]
    KeyCheck().tick(is_leader=False)
    assert WARNING not in caplog.text


def test_other_key_gives_one_warning_for_each_key(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It names both settings, and is not repeated at each check."""
    KeyCheck().tick(is_leader=True)
    own, settings.SECRET_KEY = settings.SECRET_KEY, "of another host"
    check = KeyCheck()
    check.tick(is_leader=False)
    check.tick(is_leader=False)
    assert caplog.text.count(WARNING) == 1
    assert "SECRET_KEY_FALLBACKS" in caplog.text
    settings.SECRET_KEY = "of a third host"
    KeyCheck().tick(is_leader=True)
    assert caplog.text.count(WARNING) == 2
    settings.SECRET_KEY = own
    check.tick(is_leader=False)
    assert caplog.text.count(WARNING) == 3


@pytest.mark.parametrize("odd", [b"\xff" * 100, b"text", b"x" * 1_000_000])
def test_odd_text_in_redis_is_warned_about_and_replaced(
    odd: bytes, redis_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is, nothing is raised."""
    redis_client.set(key_check_key(), odd)
    check = KeyCheck()
    assert check.tick(is_leader=True) == CHECK_SECONDS
    assert caplog.text.count(WARNING) == 1
    assert len(redis_client.get(key_check_key())) == spill.SIGNATURE_BYTES


def test_key_of_another_type_is_replaced(redis_client: Any) -> None:
    """As all of Redis, it may be anything."""
    redis_client.rpush(key_check_key(), "x")
    assert KeyCheck().tick(is_leader=False) == CHECK_SECONDS
    assert KeyCheck().tick(is_leader=True) == CHECK_SECONDS
    assert redis_client.type(key_check_key()) == b"string"


def test_unreachable_redis_is_left_to_the_other_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is due again soon."""

    def unreachable(*arguments: Any) -> bytes:
        raise BrokerUnavailable("unreachable")

    monkeypatch.setattr(leader, "read_key_check", unreachable)
    assert KeyCheck().tick(is_leader=True) == CHECK_AGAIN_SECONDS


def test_without_a_key_nothing_is_written(settings: Any, redis_client: Any) -> None:
    """A system check reports the missing key."""
    settings.SECRET_KEY = ""
    assert KeyCheck().tick(is_leader=True) == CHECK_SECONDS
    assert not redis_client.exists(key_check_key())


@pytest.mark.django_db(transaction=True)
def test_supervisor_with_another_key_says_so_at_its_start(tmp_path: Path, redis_client: Any) -> None:
    """The first fleet leads; the second one has another key."""
    (tmp_path / "second").mkdir()
    with workers(tmp_path) as first:
        wait_until(lambda: redis_client.exists(key_check_key()), "the leader's signature")
        with workers(tmp_path / "second", ASYNCQ_TEST_SECRET_KEY="of another host") as second:
            wait_until(lambda: WARNING in second.output(), "a warning")
            assert second.stop() == 0
        assert first.stop() == 0
        assert WARNING not in first.output()
