"""A Redis prefix belongs to one database: its identity, the supervisors that compare it, the producers that refuse."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import closing
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import conf, interop, lifecycle
from django_asyncq.broker import Broker, Lease, clients, keys
from django_asyncq.broker import ownership as prefix_owner
from django_asyncq.broker.message import decode_message
from django_asyncq.broker.ownership import ALIVE_MS
from django_asyncq.exceptions import PrefixTaken
from django_asyncq.fleet.forwarder import forward_due
from django_asyncq.fleet.leader import PrefixOwnership
from django_asyncq.lifecycle import dispatching
from django_asyncq.models import DatabaseIdentity, Occurrence, Schedule, TaskRecord
from django_asyncq.storage import identity
from django_asyncq.storage.routing import writing_database

from .. import acl, tasks
from ..workers import ROOT, environment, start_workers, wait_until, workers

OTHER = uuid.UUID(int=7)
REMEDIES = ('ASYNCQ["KEY_PREFIX"]', "manage.py asyncq adopt")


def owner(client: Any) -> uuid.UUID | None:
    """The owner of this test's prefix, as Redis has it."""
    found = client.get(keys.owner_key())
    return uuid.UUID(found.decode()) if found else None


def set_owner(client: Any, id: uuid.UUID, *, alive: bool = False) -> None:
    """Give the prefix to a database, and have one of its supervisors alive for a minute."""
    client.set(keys.owner_key(), str(id))
    if alive:
        client.zadd(keys.supervisors_key(), {"other": time.time() * 1000 + 60_000})


def lead(**options: Any) -> PrefixOwnership:
    """Return the ownership of a leader that has read the rows and has checked once."""
    ownership = PrefixOwnership(**options)
    ownership.tick(has_read_rows=True)
    return ownership


# --- the identity


@pytest.mark.django_db(transaction=True)
def test_migrated_database_has_an_identity() -> None:
    """Also after a flush by a process that knew it, which gives back the same one."""
    first = identity.ensure()
    call_command("flush", interactive=False, verbosity=0, database=writing_database(TaskRecord))
    assert DatabaseIdentity.objects.get().value == first
    DatabaseIdentity.objects.all().delete()
    call_command("migrate", verbosity=0, database=writing_database(TaskRecord))
    assert DatabaseIdentity.objects.get().value == first


@pytest.mark.django_db(transaction=True)
def test_flush_by_another_process_leaves_the_identity_to_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the old one, and inserts that."""
    first = identity.ensure()
    with monkeypatch.context() as patch:
        patch.setattr(identity, "_remembered", {})
        call_command("flush", interactive=False, verbosity=0, database=writing_database(TaskRecord))
        assert not DatabaseIdentity.objects.exists()
    assert identity.ensure() == first


@pytest.mark.django_db(transaction=True)
def test_two_that_find_no_identity_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one to insert reads the first one's."""
    DatabaseIdentity.objects.all().delete()
    monkeypatch.setattr(identity, "read", lambda: None)
    first = identity.ensure()
    monkeypatch.setattr(identity, "_remembered", {})
    assert identity.ensure() == first == DatabaseIdentity.objects.get().value


@pytest.mark.django_db(transaction=True)
def test_worker_inserts_no_identity(redis_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a flush by another process: the supervisors that run would stop at one that they do not know."""
    tasks.add.enqueue(1)
    monkeypatch.setattr(identity, "_remembered", {})
    DatabaseIdentity.objects.all().delete()
    assert len(claim_all()) == 1
    assert not DatabaseIdentity.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_identity_is_read_once_by_a_worker() -> None:
    """Later claims send no statement for it."""
    identity.ensure()
    identity._remembered.clear()
    identity.own()
    with CaptureQueriesContext(connections[writing_database(TaskRecord)]) as queries:
        identity.own()
    assert not queries.captured_queries


@pytest.mark.django_db(transaction=True)
def test_table_that_is_gone_gives_no_error_to_migrate(tmp_path: Path) -> None:
    """Whoever migrates the app back to zero, or installs it with MIGRATION_MODULES None, sees no error."""
    url = f"sqlite:///{tmp_path}/other.sqlite3"
    for arguments in (["migrate"], ["migrate", "django_asyncq", "zero"]):
        manage(*arguments, DATABASE_URL=url)
    code = (
        "import django; from django.conf import settings; django.setup();"
        "settings.MIGRATION_MODULES = {'django_asyncq': None};"
        "from django.core.management import call_command; call_command('migrate', run_syncdb=True, verbosity=0);"
        "from django_asyncq.models import DatabaseIdentity; print(DatabaseIdentity.objects.get())"
    )
    done = run_python("-c", code, DATABASE_URL=f"sqlite:///{tmp_path}/unmigrated.sqlite3")
    assert uuid.UUID(done.stdout.strip())


SET_UP = "import django; django.setup(); from django.utils import timezone; from django_asyncq.models import Schedule;"


def manage(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a management command that succeeds."""
    return run_python("-m", "django", *arguments, **more)


def run_python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this test's settings; it succeeds."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment(), "ASYNCQ_TEST_ROUTER": "", **more},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


# --- supervisors


@pytest.mark.django_db(transaction=True)
def test_only_a_leader_that_has_read_the_rows_takes_a_prefix(redis_client: Any) -> None:
    """A supervisor that has not, and a burst, leave it without an owner."""
    ownership = PrefixOwnership()
    ownership.tick()
    lead(may_take=False)
    assert owner(redis_client) is None and not ownership.is_owner and ownership.lost is None
    ownership.tick(has_read_rows=True)
    assert owner(redis_client) == identity.read() and ownership.is_owner
    assert redis_client.zcard(keys.supervisors_key()) == 1
    ownership.release()
    assert not redis_client.exists(keys.supervisors_key())


@pytest.mark.django_db(transaction=True)
def test_supervisor_of_another_database_names_both_remedies(redis_client: Any) -> None:
    """It changes nothing, whether the other's supervisors are alive or not."""
    set_owner(redis_client, OTHER)
    ownership = lead()
    assert all(remedy in str(ownership.lost) for remedy in REMEDIES)
    assert ownership.lost is not None
    assert (ownership.lost.prefix, ownership.lost.owner) == (conf.current().key_prefix, OTHER)
    assert ownership.lost.database == identity.read()
    assert owner(redis_client) == OTHER and not redis_client.exists(keys.supervisors_key())


@pytest.mark.django_db(transaction=True)
def test_running_supervisor_that_loses_the_prefix_stops(settings: Any, redis_client: Any) -> None:
    """Also with DEBUG: two databases must not take it from each other in turns."""
    settings.DEBUG = True
    ownership = lead()
    set_owner(redis_client, OTHER)
    ownership.tick(has_read_rows=True)
    assert ownership.lost is not None and owner(redis_client) == OTHER


@pytest.mark.django_db(transaction=True)
def test_of_two_databases_at_a_prefix_without_owner_one_stops(redis_client: Any) -> None:
    """The first takes it; the other one finds it taken."""
    first = lead()
    redis_client.delete(keys.owner_key())
    other = prefix_owner.note_supervisor(OTHER, "other", alive_ms=ALIVE_MS, may_take=True)
    assert other.owner == OTHER and other.former is None
    first.tick(has_read_rows=True)
    assert first.lost is not None
    assert redis_client.zrange(keys.supervisors_key(), 0, -1) == [b"other"]


@pytest.mark.django_db(transaction=True)
def test_with_debug_an_unused_prefix_is_adopted(
    settings: Any, redis_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """`rm db.sqlite3` and `migrate`: the new database takes it and says so, unless a worker of the old one is alive."""
    settings.DEBUG = True
    set_owner(redis_client, OTHER, alive=True)
    ownership = PrefixOwnership()
    ownership.tick()
    assert ownership.lost is not None and owner(redis_client) == OTHER
    redis_client.zadd(keys.supervisors_key(), {"other": time.time() * 1000 - 1})
    ownership = PrefixOwnership(may_take=False)
    ownership.tick()
    assert ownership.lost is None and owner(redis_client) == identity.read()
    assert f"belonged to another database ({OTHER})" in caplog.text
    # The old database's supervisor, started once more, does not take it back while this one runs.
    assert prefix_owner.note_supervisor(OTHER, "other", replaces="unused").owner == identity.read()


@pytest.mark.django_db(transaction=True)
def test_new_identity_stops_the_supervisors_that_run(redis_client: Any) -> None:
    """The prefix still belongs to the old one."""
    ownership = lead()
    first = identity.read()
    assert identity.renew() != first
    ownership.tick()
    assert ownership.lost is not None and ownership.lost.owner == first


@pytest.mark.django_db(transaction=True)
def test_unreachable_database_decides_nothing(redis_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the identity was read once, nothing is known; afterwards it is remembered."""

    def unreachable() -> uuid.UUID:
        raise DatabaseError("unreachable")

    ownership = PrefixOwnership()
    with monkeypatch.context() as patch:
        patch.setattr(identity, "ensure", unreachable)
        ownership.tick(has_read_rows=True)
        assert owner(redis_client) is None
    known = identity.ensure()
    monkeypatch.setattr(identity, "ensure", unreachable)
    ownership.tick(has_read_rows=True)
    assert owner(redis_client) == known


@pytest.mark.parametrize("odd", [b"", b"text", b"\xff" * 36, b"x" * 36, b"7" * 35])
@pytest.mark.django_db(transaction=True)
def test_odd_owner_is_none(odd: bytes, redis_client: Any) -> None:
    """Whatever is there, the leader replaces it and a producer ignores it."""
    redis_client.set(keys.owner_key(), odd)
    tasks.add.enqueue(1)
    assert lead().lost is None
    assert owner(redis_client) == identity.read()


# --- producers


@pytest.mark.django_db(transaction=True)
def test_producer_of_another_database_writes_nothing(redis_client: Any, settings: Any) -> None:
    """The error names both remedies, and is raised until the prefix is adopted: then within a second."""
    identity.ensure()
    set_owner(redis_client, OTHER)
    for _ in range(2):
        with pytest.raises(PrefixTaken) as caught, transaction.atomic():
            tasks.add.enqueue(1)
        assert all(remedy in str(caught.value) for remedy in REMEDIES)
    assert not TaskRecord.objects.exists() and not redis_client.exists(keys.queues_key())
    set_owner(redis_client, identity.ensure())
    wait_until(accepted, "accepted task", 10)


def accepted() -> bool:
    """Whether a task can be enqueued now."""
    try:
        tasks.add.enqueue(1)
    except PrefixTaken:
        return False
    return True


def gets(client: Any) -> int:
    """How many GET the server has had."""
    count: int = client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]
    return count


@pytest.mark.django_db(transaction=True)
def test_broken_transaction_of_a_caller_ends_no_refusal(redis_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be read in it; what other threads enqueue is still refused."""
    identity.ensure()
    set_owner(redis_client, OTHER)
    with pytest.raises(PrefixTaken):
        tasks.add.enqueue(1)
    dispatching.forget()
    with transaction.atomic(using=writing_database(TaskRecord)):
        transaction.set_rollback(True, using=writing_database(TaskRecord))
        with pytest.raises(PrefixTaken):
            tasks.add.enqueue(1)
    with pytest.raises(PrefixTaken):
        tasks.add.enqueue(1)


@pytest.mark.django_db(transaction=True)
def test_check_costs_one_get_and_one_select_for_each_process(own_redis: Any) -> None:
    """Later tasks cost nothing for it: the first one may learn that the queue is new, which asks once more."""
    client = acl.unrestricted(clients.client("worker"))
    set_owner(client, identity.ensure())
    tasks.add.enqueue(1)
    dispatching.forget()
    counts = []
    for _ in range(3):
        before = gets(client)
        with CaptureQueriesContext(connections[writing_database(TaskRecord)]) as queries:
            tasks.add.enqueue(1)
        about_identity = [each for each in queries.captured_queries if "databaseidentity" in each["sql"]]
        # The script of the push reads no string.
        counts.append((gets(client) - before, len(about_identity)))
    assert counts == [(1, 1), (0, 0), (0, 0)]


@pytest.mark.django_db(transaction=True)
def test_unknown_owner_refuses_nothing_and_is_asked_again(redis_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no supervisor has taken the prefix, each process asks once a minute."""
    identity.ensure()
    tasks.add.enqueue(1)
    set_owner(redis_client, OTHER)
    # Redis did not know the queue before, so the second one asks again.
    with pytest.raises(PrefixTaken):
        tasks.add.enqueue(1)
    redis_client.delete(keys.owner_key())
    wait_until(accepted, "accepted task", 10)
    set_owner(redis_client, OTHER)
    tasks.add.enqueue(1)
    later = time.monotonic() + dispatching.ASK_AGAIN_SECONDS
    monkeypatch.setattr(dispatching.time, "monotonic", lambda: later)
    with pytest.raises(PrefixTaken):
        tasks.add.enqueue(1)


@pytest.mark.django_db(transaction=True)
def test_failed_push_asks_again(own_redis: Any) -> None:
    """Redis may have been replaced by another one meanwhile. While it is unreachable tasks are accepted."""
    set_owner(acl.unrestricted(clients.client("worker")), identity.ensure())
    tasks.add.enqueue(1)
    tasks.add.enqueue(1)
    own_redis.stop()
    assert tasks.add.enqueue(1).id
    assert dispatching._ask_from == {}
    assert tasks.add.enqueue(1).id
    assert TaskRecord.objects.count() == 4


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("in_transaction", [False, True])
def test_error_of_the_database_breaks_no_enqueue(
    in_transaction: bool, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new code is running, and the table is not there yet: the caller's transaction goes on."""
    set_owner(redis_client, OTHER)
    monkeypatch.setattr(DatabaseIdentity._meta, "db_table", "nowhere")
    if in_transaction:
        with transaction.atomic(using=writing_database(TaskRecord)):
            tasks.add.enqueue(1)
    else:
        tasks.add.enqueue(1)
    assert TaskRecord.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_with_debug_a_producer_goes_on_where_a_supervisor_will_adopt(settings: Any, redis_client: Any) -> None:
    """The page that is opened after `rm db.sqlite3` and `migrate` works before the workers are started."""
    identity.ensure()
    set_owner(redis_client, OTHER, alive=True)
    settings.DEBUG = True
    with pytest.raises(PrefixTaken):
        tasks.add.enqueue(1)
    redis_client.delete(keys.supervisors_key())
    wait_until(accepted, "accepted task", 10)
    assert owner(redis_client) == OTHER


@pytest.mark.django_db(transaction=True)
def test_prefix_of_each_alias_belongs_to_one_database(settings: Any, redis_client: Any) -> None:
    """Two projects with a KEY_PREFIX of their own may give one `prefix` to an alias: the second one is refused."""
    backend = {"BACKEND": "django_asyncq.backend.AsyncqBackend"}
    settings.TASKS = {"default": backend, "go": {**backend, "OPTIONS": {"prefix": "asynqgo"}}}
    redis_client.set(keys.owner_key("asynqgo"), str(OTHER))
    ownership = lead()
    assert ownership.lost is not None and ownership.lost.prefix == "asynqgo" and not ownership.is_owner
    assert owner(redis_client) == identity.read()
    with pytest.raises(PrefixTaken, match="asynqgo"):
        tasks.add.using(backend="go").enqueue(1)
    tasks.add.enqueue(1)
    assert [each["prefix"] for each in adopt("--yes")["prefixes"]] == [conf.current().key_prefix, "asynqgo"]
    ownership.tick(has_read_rows=True)
    assert ownership.lost is None and ownership.is_owner
    assert redis_client.zcard(keys.supervisors_key("asynqgo")) == 1
    ownership.release()
    assert not redis_client.exists(keys.supervisors_key("asynqgo"), keys.supervisors_key())
    redis_client.delete(keys.owner_key("asynqgo"))


# --- the command line


@pytest.fixture
def second_database(tmp_path: Path) -> str:
    """The address of a migrated database of another project."""
    url = f"sqlite:///{tmp_path}/second.sqlite3"
    manage("migrate", DATABASE_URL=url)
    return url


@pytest.mark.django_db(transaction=True)
def test_second_project_with_the_same_prefix_does_not_start(
    second_database: str, tmp_path: Path, redis_client: Any
) -> None:
    """Its `runworkers` exits with code 1 and both remedies, also as a burst; the first one goes on."""
    with workers(tmp_path) as first:
        wait_until(lambda: owner(redis_client), "owner")
        for options in ([], ["--burst"]):
            done = start_workers(*options, DATABASE_URL=second_database, ASYNCQ_TEST_ROUTER="")
            assert done.returncode == 1, done.stderr
            assert all(remedy in done.stderr for remedy in REMEDIES)
        assert first.stop() == 0
    assert not redis_client.exists(keys.supervisors_key())


SCHEDULE = {"name": "each second", "task": "tests.tasks.add", "args": [1], "interval_seconds": 1}


@pytest.mark.django_db(transaction=True)
def test_second_project_with_a_prefix_of_its_own_fires_schedules_too(
    second_database: str, tmp_path: Path, redis_client: Any, key_prefix: str
) -> None:
    """Each has a leader."""
    (tmp_path / "second").mkdir()
    own = {"DATABASE_URL": second_database, "ASYNCQ_TEST_ROUTER": "", "ASYNCQ_TEST_PREFIX": f"{key_prefix}-second"}
    run_python("-c", f"{SET_UP} Schedule(**{SCHEDULE}, next_occurrence_at=timezone.now()).save()", **own)
    Schedule(**SCHEDULE, next_occurrence_at=timezone.now()).save()
    with workers(tmp_path) as first, workers(tmp_path / "second", **own) as second:
        with closing(sqlite3.connect(second_database.removeprefix("sqlite:///"), timeout=20)) as rows:
            fired = "SELECT 1 FROM django_asyncq_occurrence"
            wait_until(lambda: rows.execute(fired).fetchone(), "occurrence of the second project")
        wait_until(Occurrence.objects.exists, "occurrence of the first project")
        wait_until(lambda: redis_client.exists(f"{key_prefix}-second:owner"), "owner of the second prefix")
        assert wait_until(lambda: owner(redis_client), "owner") == identity.read()
        assert first.stop() == second.stop() == 0


@pytest.mark.django_db(transaction=True)
def test_running_project_that_loses_the_prefix_exits_with_code_1(tmp_path: Path, redis_client: Any) -> None:
    """Its supervisors notice within seconds."""
    with workers(tmp_path) as running:
        wait_until(lambda: owner(redis_client), "owner")
        set_owner(redis_client, OTHER)
        assert running.process.wait(40) == 1
        assert all(remedy in running.output() for remedy in REMEDIES)


@pytest.mark.django_db(transaction=True)
def test_emptied_redis_gets_its_owner_back(tmp_path: Path, own_redis: Any) -> None:
    """After the leader has rebuilt it; nobody else's enqueue or supervisor takes it before."""
    client = acl.unrestricted(clients.client("worker"))
    with workers(tmp_path) as running:
        first = wait_until(lambda: owner(client), "owner")
        client.flushall()
        tasks.add.enqueue(1)
        assert wait_until(lambda: owner(client), "owner after the rebuild") == first
        assert running.stop() == 0


@pytest.mark.django_db
def test_checks_do_not_ask_for_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """`manage.py check` runs where images are built, without a database and without Redis."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a store was asked")

    monkeypatch.setattr(prefix_owner, "read_owner", refuse)
    monkeypatch.setattr(prefix_owner, "note_supervisor", refuse)
    monkeypatch.setattr(identity, "read", refuse)
    call_command("check", verbosity=0)


# --- asyncq adopt


def adopt(*options: str) -> Any:
    """Run `asyncq adopt --json` and return what it prints."""
    out = StringIO()
    call_command("asyncq", "adopt", *options, "--json", stdout=out)
    return json.loads(out.getvalue())


@pytest.mark.django_db(transaction=True)
def test_adopt_gives_the_prefix_to_this_database(redis_client: Any) -> None:
    """After its question, and not while a supervisor of the other database runs."""
    tasks.add.enqueue(1)
    set_owner(redis_client, OTHER, alive=True)
    with pytest.raises(CommandError, match="Stop them first"):
        adopt("--yes")
    redis_client.delete(keys.supervisors_key())
    with pytest.raises(CommandError, match="give --yes to adopt"):
        adopt()
    assert owner(redis_client) == OTHER
    adopted = {"former_owner": str(OTHER), "former_supervisors": 0, "entries": 1}
    assert adopt("--yes") == {
        "database": str(identity.read()),
        "prefixes": [{"prefix": conf.current().key_prefix, **adopted}],
    }
    assert owner(redis_client) == identity.read()
    assert adopt()["prefixes"][0]["former_owner"] == str(identity.read())


@pytest.mark.django_db(transaction=True)
def test_forced_adoption_stops_the_others(redis_client: Any) -> None:
    """Their entry in the list of supervisors is removed too."""
    set_owner(redis_client, OTHER, alive=True)
    assert adopt("--yes", "--force")["prefixes"][0]["former_supervisors"] == 1
    assert owner(redis_client) == identity.read() and not redis_client.exists(keys.supervisors_key())
    assert prefix_owner.note_supervisor(OTHER, "other", may_take=True).owner == identity.read()


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.django_db(transaction=True)
def test_adopt_says_whose_the_prefix_is_and_asks(
    answer: str, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only "y" and "yes" adopt."""
    tasks.add.enqueue(1)
    set_owner(redis_client, OTHER)
    out = StringIO()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    if answer == "y":
        call_command("asyncq", "adopt", stdout=out)
        assert "Adopted." in out.getvalue()
    else:
        with pytest.raises(CommandError, match=r"Nothing was adopted\."):
            call_command("asyncq", "adopt", stdout=out)
    assert f"belongs to another database ({OTHER})" in out.getvalue() and "1 entry in Redis" in out.getvalue()
    assert (owner(redis_client) == OTHER) is (answer == "n")


@pytest.mark.django_db(transaction=True)
def test_copy_gets_a_new_identity_and_is_told_from_its_original(redis_client: Any) -> None:
    """It touches nothing in Redis: the prefix stays the original's, and the copy may not use it."""
    first = identity.ensure()
    lead().release()
    found = adopt("--new-identity", "--yes")
    assert (found["database"], found["former_identity"]) == (str(identity.read()), str(first))
    assert identity.read() != first == owner(redis_client)
    with pytest.raises(PrefixTaken):
        tasks.add.enqueue(1)
    with pytest.raises(CommandError, match="give --yes to give a new one"):
        adopt("--new-identity")


@pytest.mark.django_db(transaction=True)
def test_entries_without_a_row_are_archived_with_a_text(redis_client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Those that wait, and those that are to be retried: nothing of them is deleted."""
    waiting, failed = tasks.add.enqueue(1), tasks.add.using(max_attempts=2).enqueue(2)
    run = next(each for each in claim_all() if each.lease.id == failed.id)
    lifecycle.fail(run, ValueError("no"), "", timezone.now(), retry_at=timezone.now() + timedelta(seconds=60))
    assert lifecycle.record_runs([run]) == []
    lifecycle.acknowledge(Broker(), "w", [run])
    TaskRecord.objects.all()._raw_delete(writing_database(TaskRecord))
    of_queue = keys.keys_of("default")
    redis_client.zadd(of_queue.retry, {failed.id: 1})
    redis_client.zadd(of_queue.lease, {waiting.id: 1})
    lifecycle.recover(Broker(), "default", "w", [Lease(waiting.id, 1)], reason="gone")
    for _ in range(2):
        forward_due(Broker(), ["default"])
    assert claim_all() == []
    assert redis_client.zcard(of_queue.scheduled) == 2 and redis_client.zcard(of_queue.archived) == 0
    # Nobody has taken them for longer than the patience.
    for result in (waiting, failed):
        redis_client.hincrby(of_queue.task(result.id), "parked_at", -601)
        redis_client.zadd(of_queue.scheduled, {result.id: 1})
        redis_client.hdel(of_queue.task(result.id), "left_until")
    forward_due(Broker(), ["default"])
    assert claim_all() == []
    assert set(redis_client.zrange(of_queue.archived, 0, -1)) == {failed.id.encode(), waiting.id.encode()}
    for result in (waiting, failed):
        message = decode_message(redis_client.hget(of_queue.task(result.id), "msg"))
        assert message.error_msg.startswith("no row in the database") and message.id == result.id
    assert "archived messages of the type 'tests.tasks.add'" in caplog.text


def claim_all() -> list[lifecycle.Run]:
    """Claim what waits, as a worker does."""
    return interop.claim(Broker(), "default", "w", 10, "default").runs
