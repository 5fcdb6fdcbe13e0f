"""`manage.py runworkers`: run worker processes for the tasks of one TASKS alias."""

from __future__ import annotations

import math
import multiprocessing
import time
from argparse import ArgumentParser, ArgumentTypeError
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from ... import conf
from ...broker import Broker, clients
from ...broker.startup_checks import ADVISED_BYTES, check_rights, tls_mismatch, too_low_limit
from ...core import stop_requests
from ...core.guard import EX_SOFTWARE, attempt, get_logger
from ...core.masking import log_to_stderr
from ...core.names import QUEUE_NAME, check_queue_name
from ...core.registry import load_task_modules, registered_names
from ...core.test_run import is_test_run
from ...exceptions import BrokerMisconfigured, BrokerUnavailable, DatabaseNotSetUp, InvalidOption, PrefixTaken
from ...fleet.heartbeat import LivenessFile
from ...fleet.leader import notice_of_copy
from ...fleet.processes import MAY_DIFFER, SPAWNED_INSTEAD, WorkersCannotStart, fork_obstacle
from ...fleet.reloading import Reloader, start_again
from ...fleet.supervisor import Supervisor, ThreadDied, as_guest
from ...models import TaskRecord
from ...storage.errors import MIGRATE, STORE_ERRORS, as_not_set_up, one_line
from ...storage.routing import check_tables, is_to_be_migrated, small_pools, writing_database
from ...worker import entry_points
from ...worker.options import WorkerOptions
from ..commanding.printing import arg, either, flag, option
from ..reading import banner, check_queue_slots, check_queues, chosen_backend, whole_number

logger = get_logger("django_asyncq.fleet")


class ServedQueues(dict[str, int]):
    """The queues of `--queues`: name → weight. slots: name → limit of those that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[str, int] = {}


def served_queues(text: str) -> ServedQueues:
    """Read queues such as `critical=6,reports:2,default=3`.

    A name without a weight has the weight 1; one without slots may take all of a process.
    """
    queues = ServedQueues()
    for part in filter(None, (part.strip() for part in text.split(","))):
        named, colon, slots = part.partition(":")
        name, equals, weight = named.partition("=")
        try:
            check_queue_name(name)
            queues[name] = int(weight) if equals else 1
            if colon:
                queues.slots[name] = int(slots)
        except (InvalidOption, ValueError) as error:
            raise ArgumentTypeError(
                f"{part!r}: {error}. Write names with weights, such as critical=6,default=3, or with limits of slots, "
                f"such as reports:2 or reports=3:2."
            ) from error
        if queues[name] < 1:
            raise ArgumentTypeError(f"{part!r}: a weight is a whole number of at least 1.")
        if queues.slots.get(name, 1) < 1:
            raise ArgumentTypeError(
                f"{part!r}: a queue has at least 1 slot of each process. To take no tasks of it, leave it out, or "
                f"pause it with `asyncq queues pause`."
            )
    return queues


def worker_name(text: str) -> str:
    """Read the first part of the worker ids, which becomes part of Redis keys."""
    if not QUEUE_NAME.fullmatch(text):
        raise ArgumentTypeError(f"{text!r}: use 1 to 64 letters, digits, '_', '.' and '-'.")
    return text


MIGRATION_POLL_SECONDS, SAY_AGAIN_SECONDS = 1.0, 60.0
QUEUES = (
    "queues, their weights, and how many slots of each process may run tasks of one (default: the QUEUES of the alias, "
    "or all that its tasks and rows name)"
)
SINGLE = "all workers share this host: replace the dead holder of a lock at once"
MULTI = "workers may run on several hosts: replace the dead holder of a lock after its TTL"
ARGUMENTS = (
    option("--backend", "ALIAS", "TASKS alias (default: default)", default="default"),
    option("--queues", "NAME=WEIGHT:SLOTS,…", QUEUES, served_queues, {}),
    flag("--strict", "always take tasks from the queue with the highest weight first"),
    flag("--burst", "stop when no task is queued, running or due"),
    arg("--processes", type=whole_number(1), help="number of worker processes (default: ASYNCQ['PROCESSES'])"),
    arg(
        "--concurrency",
        type=whole_number(1),
        help="tasks that each process runs at once (default: ASYNCQ['CONCURRENCY'])",
    ),
    option("--max-tasks", "N", "replace a process after N tasks", whole_number(1), 0),
    option("--max-memory-mb", "N", "replace a process that uses more than N MB", whole_number(1), 0),
    option("--worker-id", "ID", "first part of the worker ids (default: the host name)", worker_name),
    flag("--reload", "start again when code changes; for development"),
    either(
        flag("--single-instance", SINGLE, default=None),
        arg("--multi-instance", action="store_false", default=None, dest="single_instance", help=MULTI),
    ),
    option("--liveness-file", "PATH", "file that is touched while all processes run", Path),
)


class Command(BaseCommand):
    """Run the worker processes and their supervisor."""

    help = (
        "Run worker processes for the tasks of a TASKS alias. Press Ctrl-C or send SIGTERM to stop after the running "
        "tasks have finished; press Ctrl-C again to stop immediately."
    )

    _is_program = False
    _verbosity = 1

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a command, which a stop request ends from here on, whatever the program is called."""
        self._is_program = True
        stop_requests.install()
        super().run_from_argv(argv)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options; defaults come from ASYNCQ where it has a key for them."""
        for argument in ARGUMENTS:
            argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Check the backend and Redis, then supervise until stopped."""
        settings = conf.current()
        self._verbosity = options["verbosity"]
        self._check_process()
        if options["reload"] and not self._is_program:
            raise CommandError(
                "--reload starts the program again, so it is for the command line only: call runworkers without it."
            )
        # A process that has called this as a function, such as a test run, keeps its logging as it is.
        if self._is_program:
            log_to_stderr("supervisor", self._verbosity)
        backend = chosen_backend(options["backend"])
        check_queues(backend, options["queues"])
        concurrency = options["concurrency"] or settings.concurrency
        queue_slots = getattr(options["queues"], "slots", {})
        check_queue_slots(queue_slots, concurrency)
        clients.require_valid_settings()
        if path := options["liveness_file"]:
            try:
                LivenessFile(path).check()
            except OSError as error:
                raise CommandError(f"--liveness-file {path} cannot be written: {error.strerror}") from error
        load_task_modules()
        self._check_shared_databases()
        # Raises for a changed setting that no worker process can get.
        entry_points.pack()
        self._check_database()
        processes = options["processes"] or settings.processes
        if options["concurrency"]:
            # The system checks have looked at ASYNCQ["CONCURRENCY"].
            for pool in small_pools(concurrency, processes):
                self.warn(f"{pool.text}. {pool.remedy}")
        worker = self._worker_options(options, backend, concurrency, queue_slots)
        single, names = options["single_instance"], sorted(registered_names())
        self.say(
            banner(worker, processes=processes, single_instance=single, names=names, with_names=self._verbosity > 1)
        )
        self._check_redis(options["backend"])
        self._warn_of_copy()
        supervisor = Supervisor(
            worker,
            processes=processes,
            burst=options["burst"],
            liveness_file=options["liveness_file"],
            single_instance=options["single_instance"],
            reloader=Reloader() if options["reload"] else None,
            start_method=self._start_method(settings.start_method, processes),
            say=self.say,
        )
        # A process that has called this as a function, such as a test run, goes on afterwards.
        with nullcontext() if self._is_program else as_guest():
            self._supervise(supervisor)
        if supervisor.starts_again:
            start_again()

    @staticmethod
    def _worker_options(
        options: dict[str, Any], backend: Any, concurrency: int, queue_slots: dict[str, int]
    ) -> WorkerOptions:
        name = {"name": options["worker_id"]} if options["worker_id"] else {}
        return WorkerOptions(
            backend=options["backend"],
            # A plain dictionary: another process gets it, in which this module is not imported.
            queues=dict(options["queues"]) or dict.fromkeys(sorted(backend.queues), 1),
            queue_slots=queue_slots,
            strict=options["strict"],
            concurrency=concurrency,
            max_tasks=options["max_tasks"],
            max_memory_mb=options["max_memory_mb"],
            **name,
        )

    def _start_method(self, method: str, processes: int) -> str:
        """Return how processes are started."""
        # One alone has nobody to share the loaded project with, and the fork server would be one more.
        if method == conf.SPAWN or (method == conf.AUTO and processes == 1):
            return conf.SPAWN
        may_differ = not self._is_program or bool(entry_points.applied())
        reason = MAY_DIFFER if may_differ else fork_obstacle()
        if not reason:
            return method
        if method == conf.AUTO or may_differ:
            logger.info(SPAWNED_INSTEAD, reason)
        else:
            self.warn(f"ASYNCQ['START_METHOD'] is {method!r}, but worker processes are spawned: {reason}.")
        return conf.SPAWN

    def say(self, text: str) -> None:
        """Print for the person at the terminal; see `_print`."""
        self._print(self.stdout, text)

    def warn(self, text: str) -> None:
        """Print a warning of the start; see `_print`."""
        self._print(self.stderr, self.style.WARNING(text))

    def _print(self, output: Any, text: str) -> None:
        """Print a text, or drop it: a closed pipe, a full disk, or an encoding that lacks a letter stops no worker.

        Python has None for an output that was closed before it started, as daemons do; hence the AttributeError.
        """
        if self._verbosity:
            with suppress(OSError, ValueError, AttributeError):
                output.write(text)
                output.flush()

    @staticmethod
    def _supervise(supervisor: Supervisor) -> None:
        try:
            supervisor.run()
        except (WorkersCannotStart, DatabaseNotSetUp, PrefixTaken) as error:
            raise CommandError(str(error)) from error
        except ThreadDied as error:
            raise CommandError(str(error), returncode=EX_SOFTWARE) from error

    @staticmethod
    def _check_process() -> None:
        """Refuse to start in a process that Python allows no children."""
        if multiprocessing.current_process().daemon:
            raise CommandError(
                "runworkers was called in a daemonic process, such as those of 'manage.py test --parallel', which may "
                "not start worker processes. Run this test without --parallel (give it a tag, and exclude that with "
                "--exclude-tag) or with pytest-xdist, or run the tasks in the process of the test with "
                "django_asyncq.testing.run_tasks()."
            )

    @staticmethod
    def _check_shared_databases() -> None:
        """Refuse to start worker processes that could not see the rows of this one."""
        try:
            # In a test run, every SQLite database without a name for tests is in memory.
            entry_points.require_shared_databases(connections if is_test_run() else [writing_database(TaskRecord)])
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error

    def _check_database(self) -> None:
        """Wait for tables that `migrate` is still to change; start on a database that is unreachable, and wait for it.

        Refuse to start on a database without the tables.
        """
        said_at = -math.inf
        while True:
            try:
                check_tables()
                return
            except STORE_ERRORS as error:
                connections.close_all()
                not_set_up = as_not_set_up(error)
                if not not_set_up:
                    self.warn(f"The database is unreachable ({one_line(error)}); workers start and wait for it.")
                    return
                # In a deploy, workers may come before `migrate` has ended.
                if not_set_up.remedy != MIGRATE or not attempt(is_to_be_migrated).value:
                    raise CommandError(str(not_set_up)) from error
                if time.monotonic() - said_at >= SAY_AGAIN_SECONDS:
                    said_at = time.monotonic()
                    text = f"The database has the tables of other code ({one_line(error)})"
                    self.warn(f"{text}; waiting for manage.py migrate with the code that runs here.")
            time.sleep(MIGRATION_POLL_SECONDS)

    def _warn_of_copy(self) -> None:
        try:
            text = notice_of_copy()
        except (BrokerUnavailable, *STORE_ERRORS) as error:
            connections.close_all()
            text = f"Whether this database is a copy was not looked at: {one_line(error)}"
        if text:
            self.warn(text)

    def _check_redis(self, alias: str) -> None:
        """Refuse to start with a Redis that refuses this client; warn of one that is unreachable, or evicts keys."""
        try:
            check_rights(alias)
            policy = Broker("worker", alias).eviction_policy()
            limit = too_low_limit()
        except BrokerMisconfigured as error:
            raise CommandError(str(error)) from error
        except BrokerUnavailable as error:
            # No client of a cluster can be built while none of its nodes answers.
            with suppress(BrokerUnavailable):
                if wrong := tls_mismatch(clients.client("worker")):
                    raise CommandError(str(wrong)) from error
            self.warn(f"{error}; workers start and wait for Redis.")
            return
        if policy not in ("", "noeviction"):
            self.warn(
                f"Redis may evict keys (maxmemory-policy {policy}). No task is lost, because Redis is rebuilt from "
                f"the database, but tasks start late: set the policy to noeviction."
            )
        if limit is not None:
            text = "Redis would hold waiting tasks in less memory after: redis-cli CONFIG SET %s %d (it is %d)"
            logger.info(text, limit.name, ADVISED_BYTES, limit.bytes)
