"""A wrong setting of Redis is named with its remedy, by the check and by whatever runs in spite of the check."""

from __future__ import annotations

import logging
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
import redis
import redis.sentinel
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import CommandError
from redis.cluster import RedisCluster

from django_asyncq.broker import Broker, clients
from django_asyncq.broker.startup_checks import tls_mismatch
from django_asyncq.core.guard import get_logger
from django_asyncq.exceptions import BrokerMisconfigured, BrokerUnavailable, GateUnavailable
from django_asyncq.management.commands.runworkers import Command
from django_asyncq.models import TaskRecord
from django_asyncq.storage.errors import Faults
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.testing.redis_server import free_port

from .. import tasks
from ..redis_settings import POOL, RIGHT, SECRET, WRONG, cache, django_cache, named

pytestmark = pytest.mark.django_db(transaction=True)


def names(case: tuple[Any, ...]) -> str:
    """A name for the parameters of one case."""
    return re.sub(r"\W+", "-", f"{case[0]} {case[1]}".replace("django_redis.cache.RedisCache", ""))[:90]


def redis_messages() -> list[checks.CheckMessage]:
    """The messages of the check of Redis."""
    from django_asyncq.checks import check_redis_alias

    return list(check_redis_alias())


def use(settings: Any, caches: dict[str, Any], asyncq: dict[str, Any]) -> None:
    """Set CACHES, and ASYNCQ beside the keys of the suite."""
    settings.ASYNCQ = {**django_settings.ASYNCQ, "CLIENT_FACTORY": "", **asyncq}
    settings.CACHES = caches


# --- the check, and what runs in spite of it


@pytest.mark.parametrize("case", WRONG, ids=names)
def test_check_names_the_setting_and_the_remedy_without_the_password(case: Any, settings: Any) -> None:
    """Each wrong setting has one message with its id and a hint, and no part of a password."""
    caches, asyncq, id, text = case
    use(settings, caches, asyncq)
    (found,) = redis_messages()
    assert (found.id, text in found.msg) == (f"asyncq.{id}", True), found.msg
    assert found.hint and re.match(r"CACHES\['default'\]|ASYNCQ\['(CLIENT_FACTORY|REDIS)'\]", found.msg)
    assert not [part for part in ("s3cret", "w0rd", "p4ss") if part in found.msg]


@pytest.mark.parametrize("case", RIGHT, ids=names)
def test_valid_settings_of_each_kind_pass_the_check(case: Any, settings: Any) -> None:
    """Addresses, sentinels, clusters and factories that can be right give no message; nothing is connected."""
    use(settings, *case)
    assert redis_messages() == []


@pytest.mark.parametrize(
    ("case", "is_asked"),
    [
        (cache(), False),
        (cache(CLIENT_CLASS="django_redis.client.DefaultClient"), False),
        (named("rediss://ann:s3cret%2Fw0rd@redis.example:6380/15"), False),
        (django_cache("redis://localhost"), False),
        (cache(PASSWORD=SECRET), True),
        (django_cache(CLIENT_CLASS="x"), True),
        (named("redis://127.0.0.1?db=2"), True),
        (named("redis://127.0.0.1, redis://127.0.0.2"), True),
        (named("unix:///run/redis.sock"), True),
        (cache(["redis://127.0.0.1:7000"]), True),
    ],
)
def test_check_builds_no_client_for_a_plain_address(
    case: Any, is_asked: bool, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of it; and what would be asked says nothing either."""
    use(settings, *(case if isinstance(case, tuple) else (case, {})))
    asked = []
    monkeypatch.setattr("django_asyncq.checks.SETTING_FAULTS", lambda: asked.append(1) or iter(()))
    assert redis_messages() == []
    assert bool(asked) == is_asked
    assert is_asked or list(clients.setting_faults()) == []


def test_check_builds_a_client_with_a_factory_of_the_project(settings: Any) -> None:
    """It may put anything into the options of a plain address."""
    use(settings, cache(), {})
    settings.DJANGO_REDIS_CONNECTION_FACTORY = "nowhere.Factory"
    assert [each.id for each in redis_messages()] == ["asyncq.E051"]


@pytest.mark.parametrize("case", WRONG, ids=names)
def test_enqueue_and_runworkers_raise_the_same_improperly_configured(case: Any, settings: Any) -> None:
    """Nothing is written, no worker starts, and the message is that of the check."""
    caches, asyncq, _id, text = case
    use(settings, caches, asyncq)
    (found,) = redis_messages()
    with pytest.raises(ImproperlyConfigured) as enqueued:
        tasks.add.enqueue(1, 2)
    with pytest.raises(ImproperlyConfigured) as started:
        call_command("runworkers", burst=True, skip_checks=True)
    with pytest.raises(ImproperlyConfigured) as asked:
        clients.client("worker")
    assert {str(each.value) for each in (enqueued, started, asked)} == {f"{found.msg} {found.hint}"}
    assert text in str(enqueued.value) and TaskRecord.objects.count() == 0


def test_settings_are_checked_once_and_again_after_a_change(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`enqueue` pays for the check once in a process."""
    looks = []
    faults = clients.faults
    monkeypatch.setattr(clients, "faults", lambda make: (looks.append(1), faults(make))[1])
    settings.ASYNCQ = dict(django_settings.ASYNCQ)
    for _ in range(3):
        clients.require_valid_settings()
    assert len(looks) == 1
    settings.ASYNCQ = dict(django_settings.ASYNCQ)
    clients.require_valid_settings()
    assert len(looks) == 2


# --- errors of a server


@pytest.fixture
def guarded() -> Any:
    """A server with a password."""
    with EmbeddedRedis() as server:
        redis.Redis(port=server.port).config_set("requirepass", SECRET)
        yield server


def address(server: EmbeddedRedis, *, password: str = "", database: str = "0", scheme: str = "redis") -> str:
    """The address of a server."""
    return f"{scheme}://{f':{password}@' if password else ''}127.0.0.1:{server.port}/{database}"


QUOTED = SECRET.replace("/", "%2F")
REFUSALS = [
    ({}, "refuses the user name or password (AuthenticationError: Authentication required.)", "user name and password"),
    (
        {"password": "wr0ng"},
        "refuses the user name or password (AuthenticationError: invalid",
        "user name and password",
    ),
    ({"password": QUOTED, "database": "99"}, "has no such database (", "the database number in"),
]


@pytest.mark.parametrize(("parts", "text", "remedy"), REFUSALS)
def test_fault_of_configuration_names_server_cause_and_setting(
    parts: dict[str, str], text: str, remedy: str, guarded: EmbeddedRedis, settings: Any
) -> None:
    """A wrong password, database or TLS is a BrokerMisconfigured; `runworkers` exits with it instead of waiting."""
    use(settings, cache(address(guarded, **parts)), {})
    with pytest.raises(BrokerMisconfigured) as raised:
        Broker("producer").eviction_policy()
    message = str(raised.value)
    assert message.startswith(f"Redis at 127.0.0.1:{guarded.port}/{parts.get('database', 0)} {text}"), message
    assert remedy in message and "CACHES['default']" in message
    assert not [part for part in ("s3cret", "wr0ng") if part in message]
    with pytest.raises(CommandError) as exited:
        call_command("runworkers", burst=True)
    assert (str(exited.value), exited.value.returncode) == (message.replace("producer", "worker"), 1)


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with TLS, whose certificate nobody trusts."""
    if not (binary := shutil.which("redis-server")) or not shutil.which("openssl"):
        pytest.skip("no redis-server with TLS and openssl found")
    folder = tmp_path_factory.mktemp("tls")
    made = "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    subprocess.run(["openssl", *made.split()], cwd=folder, check=True, capture_output=True)
    port = free_port()
    options = f"--port 0 --tls-port {port} --tls-cert-file cert.pem --tls-key-file key.pem --tls-auth-clients no"
    server = subprocess.Popen([binary, *options.split(), "--save", ""], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        lines.append(line)
        if "Ready to accept connections" in line:
            break
    else:
        pytest.skip(f"redis-server has no TLS: {''.join(lines)[-300:]}")
    yield port
    server.kill()
    server.wait()
    server.stdout.close()


def test_worker_with_tls_does_not_start_at_a_server_without(redis_client: redis.Redis, settings: Any) -> None:
    """The handshake only times out, so the server is asked once without TLS, and the remedy names the scheme."""
    port = redis_client.connection_pool.connection_kwargs["port"]
    use(settings, cache(f"rediss://127.0.0.1:{port}/0"), {})
    with pytest.raises(CommandError) as exited:
        call_command("runworkers", burst=True)
    assert f"Redis at 127.0.0.1:{port}/0 does not use TLS, and this client does" in str(exited.value)
    assert "LOCATION or OPTIONS of CACHES['default']: write redis://" in str(exited.value)


def test_worker_without_tls_does_not_start_at_a_server_with(tls_server: int, settings: Any) -> None:
    """The server only resets the connection, so it is asked once with TLS."""
    use(settings, cache(f"redis://127.0.0.1:{tls_server}/0"), {})
    with pytest.raises(CommandError) as exited:
        call_command("runworkers", burst=True)
    assert f"Redis at 127.0.0.1:{tls_server}/0 uses TLS, and this client does not" in str(exited.value)


def test_certificate_that_is_not_trusted_is_a_fault_of_configuration(tls_server: int, settings: Any) -> None:
    """The reason of the TLS library is in the message."""
    use(settings, cache(f"rediss://127.0.0.1:{tls_server}/0"), {})
    with pytest.raises(BrokerMisconfigured) as raised:
        Broker("producer").eviction_policy()
    assert "do not agree about TLS (ConnectionError: " in str(raised.value)
    assert "CERTIFICATE_VERIFY_FAILED" in str(raised.value)
    with pytest.raises(CommandError, match="do not agree about TLS"):
        call_command("runworkers", burst=True)


def test_nothing_is_said_about_tls_where_no_server_answers() -> None:
    """An outage stays an outage, whichever the scheme."""
    port = free_port()
    for scheme in ("redis", "rediss"):
        assert tls_mismatch(redis.Redis.from_url(f"{scheme}://127.0.0.1:{port}/0")) is None
    assert tls_mismatch(redis.Redis(unix_socket_path="/nowhere")) is None


def test_moved_reply_to_a_plain_client_says_that_the_server_is_a_cluster() -> None:
    """The remedy is the client factory."""
    with pytest.raises(BrokerMisconfigured) as raised, clients.broker_errors(None):
        raise redis.exceptions.MovedError("866 10.0.0.7:6379")
    assert "is a node of a Redis Cluster" in str(raised.value)
    assert "ASYNCQ['CLIENT_FACTORY'] to 'django_asyncq.broker.cluster.client'" in str(raised.value)


def test_unreachable_server_says_host_port_database_class_and_text(settings: Any) -> None:
    """The cause is in the message, and the password is not, even where the error has it."""
    free = free_port()
    use(settings, cache(f"redis://ann:{QUOTED}@127.0.0.1:{free}/3"), {})
    with pytest.raises(BrokerUnavailable) as raised:
        Broker("producer").eviction_policy()
    assert not isinstance(raised.value, BrokerMisconfigured)
    assert str(raised.value).startswith(f"Redis at 127.0.0.1:{free}/3 is unreachable (ConnectionError: Error ")
    assert "Connection refused" in str(raised.value)
    for secret in (SECRET, QUOTED, "ann"):
        with pytest.raises(BrokerUnavailable) as masked, clients.broker_errors(clients.client("producer")):
            raise redis.exceptions.ConnectionError(f"no way to reach {secret}")
        assert str(masked.value).endswith("(ConnectionError: no way to reach ***)")


@pytest.mark.parametrize("place", ["PASSWORD", POOL, "SENTINEL_KWARGS"])
def test_password_in_any_option_is_masked(place: str, settings: Any) -> None:
    """Wherever django-redis reads a password from."""
    options = {place: SECRET if place == "PASSWORD" else {"password": SECRET}}
    use(settings, cache(**options), {})
    assert clients.safe_text(ValueError(f"it is {SECRET}")) == "ValueError: it is ***"


def test_gate_that_cannot_be_asked_says_why(guarded: EmbeddedRedis, settings: Any) -> None:
    """A gated `enqueue` names the cause and the setting too, and writes nothing."""
    use(settings, cache(address(guarded)), {})
    with pytest.raises(GateUnavailable) as raised:
        tasks.gated_tally.enqueue()
    assert "Authentication required" in str(raised.value) and "CACHES['default']" in str(raised.value)
    assert TaskRecord.objects.count() == 0


def test_password_that_changes_while_a_worker_runs_is_an_outage_with_its_reason(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop logs one line for the outage before, one with the reason, and one when it is over; it never exits."""
    with EmbeddedRedis() as server:
        use(settings, cache(address(server)), {})
        broker, faults = Broker("worker"), Faults(get_logger("tests"), "the loop waits", over="it goes on")
        admin = redis.Redis(port=server.port)
        broker.eviction_policy()
        admin.config_set("requirepass", SECRET)
        clients.drop_idle_connections()
        assert faults.note(BrokerUnavailable("Redis is unreachable")) > 0
        for _ in range(3):
            with pytest.raises(BrokerMisconfigured) as raised:
                broker.eviction_policy()
            assert faults.note(raised.value) > 0 and faults.not_set_up is None
        admin.config_set("requirepass", "")
        assert broker.eviction_policy() == "noeviction"
        caplog.set_level(logging.INFO, "tests")
        faults.clear()
    lines = [record.getMessage() for record in caplog.records if record.name == "tests"]
    assert len(lines) == 3 and "Authentication required" in lines[1] and lines[2].startswith("it goes on, after ")


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.RedisClusterException("no node answers"),
        redis.exceptions.SlotNotCoveredError("slot 7"),
        redis.exceptions.ClusterError("TTL exhausted."),
        redis.exceptions.ResponseError("max number of clients + cluster connections reached"),
        redis.exceptions.ConnectionError("max number of clients reached"),
        redis.exceptions.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
        redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        redis.exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis.exceptions.ClusterDownError("Hash slot not served"),
        redis.exceptions.MasterDownError("Link with MASTER is down"),
        redis.exceptions.ConnectionError("Error -2 connecting to redis:6379. Name or service not known."),
        redis.sentinel.MasterNotFoundError("No master found for 'mymaster'"),
        redis.exceptions.TimeoutError("Timeout connecting to server"),
    ],
    ids=lambda error: re.sub(r"\W+", "-", f"{type(error).__name__} {error}")[:60],
)
def test_outage_of_any_kind_is_retried_and_ends_no_worker(error: Exception) -> None:
    """None of them is a fault of the configuration, and none passes as an error of its own."""
    with pytest.raises(BrokerUnavailable) as raised, clients.broker_errors(None):
        raise error
    assert not isinstance(raised.value, BrokerMisconfigured)


@pytest.mark.parametrize(
    ("text", "is_outage"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", False),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", False),
        ("[SSL: TLSV1_ALERT_INTERNAL_ERROR] tlsv1 alert internal error", True),
        ("_ssl.c:989: The handshake operation timed out", True),
        ("[SSL: APPLICATION_DATA_AFTER_CLOSE_NOTIFY] application data after close notify", True),
    ],
)
def test_tls_that_breaks_is_an_outage_and_tls_that_is_set_wrongly_is_not(text: str, is_outage: bool) -> None:
    """A server that is busy or restarts ends handshakes too."""
    with pytest.raises(BrokerUnavailable) as raised, clients.broker_errors(None):
        raise redis.exceptions.ConnectionError(text) from ssl.SSLError(1, text)
    assert isinstance(raised.value, BrokerMisconfigured) is not is_outage


def test_slot_that_moves_is_an_outage_for_the_client_of_a_cluster() -> None:
    """A wait for a push is told of it; the client finds the node when it tries again."""
    found = RedisCluster.__new__(RedisCluster)
    with pytest.raises(BrokerUnavailable) as raised, clients.broker_errors(found):
        raise redis.exceptions.MovedError("866 10.0.0.7:6379")
    assert not isinstance(raised.value, BrokerMisconfigured)


def test_worker_starts_while_no_node_of_the_cluster_answers(settings: Any) -> None:
    """It says so, and waits; nothing else is raised."""
    port = free_port()
    use(settings, cache(f"redis://:s3cret@127.0.0.1:{port}"), {"CLIENT_FACTORY": clients.CLUSTER_FACTORY})
    stderr = StringIO()
    Command(stderr=stderr)._check_redis("default")
    assert f"the Redis cluster at 127.0.0.1:{port}/0 is unreachable (" in stderr.getvalue()
    assert "workers start and wait for Redis" in stderr.getvalue() and "s3cret" not in stderr.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "Invalid URL redis://ann:w0rd/s3cret@host:6379/0",
        "redis://host/0?username=x&password=s3cret&db=1",
        "Connection.__init__() got {'host': 'h', 'password': 's3cret'}",
        "it is s3cret",
    ],
)
def test_password_is_masked_wherever_an_address_may_have_it(text: str, settings: Any) -> None:
    """Also that of an address which only a factory of the project knows, and one behind the question mark."""
    use(settings, cache("redis://127.0.0.1:6379/0?password=s3cret"), {})
    found = clients.safe_text(ValueError(text))
    assert "***" in found and not [part for part in ("s3cret", "w0rd", "ann") if part in found]
    use(settings, cache("redis://127.0.0.1:6379/0"), {})
    assert text == "it is s3cret" or "s3cret" not in clients.safe_text(ValueError(text))
