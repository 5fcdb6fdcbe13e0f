"""Named points between a write to one store and the write to the other, at which a test can stop the process.

The code of the package knows nothing of them: `PLACES` says before or behind which statement each one is. `arm` puts a
call of `reach` there, into the code objects of the functions. So a process in which nothing is armed, as in production,
runs the code as it is written.
Must not know what a task is or does: a point only says how far the process has come. Needs no Django.
Source: FreeBSD, fail(9).
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

PACKAGE = __name__.partition(".")[0]


class Place(NamedTuple):
    """Where a point is: before or behind a statement of a function, which is the only one that begins with `text`.

    module: without the package. function: qualified name. when: an expression; a point that is not reached otherwise.
    """

    module: str
    function: str
    text: str
    is_after: bool
    when: str


def after(module: str, function: str, text: str, when: str = "") -> Place:
    """Return the place behind a statement."""
    return Place(module, function, text, True, when)


def before(module: str, function: str, text: str, when: str = "") -> Place:
    """Return the place before a statement."""
    return Place(module, function, text, False, when)


# What has just happened; then what has not.
POINTS: Mapping[str, str] = {
    # Into the queue.
    "build.gate_built": "a gate's members are built from the rows; tasks that finished meanwhile still have a slot",
    "enqueue.slot_acquired": "the gate granted a provisional slot; the row is not inserted",
    "enqueue.row_inserted": "the row is inserted, or on its way; an open transaction is not committed",
    "after.rows_inserted": "the rows of tasks that wait for others are inserted; what they wait for is not, no commit",
    "enqueue.committed": "the transaction is committed; nothing is pushed, no slot is confirmed",
    "dispatch.slots_confirmed": "slots are confirmed separately (delayed, lost, in a cluster); nothing is pushed",
    "dispatch.queue_pushed": "the tasks of one queue are pushed; those of the next queue are not",
    "broker.batch_sent": "one script call has written some hundred tasks to Redis; the next call is not sent",
    "push_batch.collected": "the batcher has collected tasks to push together; none of them is pushed",
    "enqueue.pushed": "all tasks are pushed, or wait in the batcher; nothing is announced",
    "park.row_written": "the row of a task that lost its slot is RETRYING; Redis does not know",
    "batch.taken": "Redis has taken the members of a ripe group; no row says so",
    "batch.rows_written": "the row of a batch is written, its members name it; Redis still has the members",
    "batch.dropped": "the entries of the members are dropped; the batch is not pushed",
    # Through a worker.
    "claim.leased": "Redis has leased the tasks; their rows are not read",
    "adopt.row_named": "a hash names the row of another program's task; the row is not inserted",
    "adopt.row_inserted": "the row of another program's task is inserted; nothing is announced, no worker slot has it",
    "claim.rows_read": "the rows are read; no worker slot has the tasks",
    "start.taken": "a start of a rate is taken; nothing of the run has begun",
    "begin.counted": "the slot table shows the run, the attempt is counted in memory; the function is not called",
    "mark_running.row_written": "the row is RUNNING; nothing is announced, the task goes on",
    "run.function_returned": "the function has returned; nothing is recorded",
    "report.row_written": "the outcome is in the row; Redis does not know",
    "acknowledge.queue_acknowledged": "the outcomes of one queue are acknowledged; those of the next queue are not",
    "report.acknowledged": "Redis knows the outcome; nothing is announced, no gate slot is released",
    "complete.row_written": "effects and success are written in one transaction; it is not committed",
    "complete.committed": "the effects and the success are committed; Redis does not know",
    "spill.queue_spilled": "the outcomes of one queue are spilled to Redis; those of the next queue are not",
    "replay.row_written": "a spilled outcome is in the row; Redis does not know",
    "wait_for_key.row_written": "a task that waits for a host with the key has a QUEUED row; Redis does not know",
    "refuse.row_written": "the row of a task without code is FAILED; its entry is still in Redis",
    "postpone.put_aside": "tasks that cannot run here are put aside in Redis; nothing is logged",
    "requeue.row_written": "the row of an unfinished task is QUEUED again; Redis does not know",
    # Back into the queue.
    "let_in.slot_acquired": "the gate granted a slot to a task that waits for it; its row still waits",
    "let_in.committed": "the row of a task that waited at its gate has a slot; nothing is pushed",
    "retry.slot_acquired": "the gate granted a slot for a retry; the row is still FAILED",
    "retry.committed": "the row is QUEUED again; nothing is pushed",
    "replace.committed": "a task has newer arguments; its entry in Redis is the old one",
    "replace.taken_out": "the old entry is removed; the task is not pushed",
    "hurry.committed": "a delayed task has no time any more; its entry in Redis is still scheduled",
    "follow.committed": "a follower holds the key; it is not pushed",
    "settle.rows_counted": "a finished task is counted out of those that wait for it; neither is committed",
    "settle.committed": "tasks wait for no other one any more; they are not pushed, those that failed not announced",
    "recover.row_written": "the row of a lost worker's task is updated; Redis does not know",
    "recover.redis_updated": "both stores know that the task is recovered; nothing is announced",
    "abandon.row_written": "a RUNNING row without an entry in Redis is closed; nothing is pushed",
    "members.released": "a lost batch has left its members behind; they are not pushed",
    "evidence.rows_written": "the row shows what another program has done; its entry is not settled",
    # Stopped.
    "close.rows_written": "the rows of cancelled or expired tasks are FAILED, not committed; Redis does not know",
    "cancel.rows_written": "a cancel is written, not committed; Redis does not know, no worker is asked to stop",
    "close.committed": "a cancel or an expiry is committed; Redis does not know, no worker is asked to stop",
    "close.taken_out": "the entries of closed tasks are removed; nothing is announced, no gate slot is released",
    "close_claimed.rows_written": "a claimed task that must not begin is FAILED; its entry is still in Redis",
    # Deletion.
    "delete.committed": "the row is deleted; its gate slot and its entry are still there",
    "prune.rows_deleted": "old rows are deleted; their entries in the archive are still there",
    # Maintenance.
    "forward.retry_found": "a retry is found due; its row is not changed",
    "reconcile.marked_alive": "Redis had lost its memory and is marked as alive; nothing is rebuilt",
    "reconcile.page_repaired": "some hundred rows are repaired; the next page is not",
    "reconcile.leases_recovered": "tasks with expired leases are recovered; the other repairs are not done",
    "beat.leases_renewed": "the leases of one queue are renewed; those of the next queue are not",
    "reap.death_noticed": "the supervisor knows that a worker process died; its tasks are not recovered",
    "fire.occurrences_written": "occurrences of schedules and their tasks are written, not committed; no next one is",
    "fire.committed": "occurrences, their tasks and the next times are committed, perhaps pushed; nothing is logged",
    "inbox.taken": "documents are taken out of an inbox; no row is inserted",
    "inbox.committed": "the tasks of taken documents are committed, perhaps pushed; the documents are still taken",
    "bulk.page_changed": "a page of an action on many tasks is changed and counted, not committed",
    "bulk.page_committed": "the page and the position behind it are committed; the next page is not begun",
    "start_up.row_written": "the run of a start-up task has a row; its process is not started",
}

# The statement next to each, in the order of the points.
PLACES: Mapping[str, Place] = {
    "build.gate_built": after("gates.auditor", "build", "if scripts.run("),
    "enqueue.slot_acquired": after("lifecycle.enqueueing", "admit", "refused = ask("),
    "enqueue.row_inserted": before("lifecycle.enqueueing", "dispatch_after_commit", "hook = Dispatch.of_transaction("),
    "after.rows_inserted": before("lifecycle.parents", "enqueue_after", "insert_edges("),
    "enqueue.committed": before("lifecycle.enqueueing", "Dispatch.follow_up", "if not dispatching.add("),
    "dispatch.slots_confirmed": after("lifecycle.dispatching", "_confirmed", "lost = gates.confirm("),
    "dispatch.queue_pushed": after("lifecycle.dispatching", "push", "if delayed :="),
    "broker.batch_sent": after("broker", "Broker._words", "words += replies.texts("),
    "push_batch.collected": before("lifecycle.dispatching", "PushBatcher._push", "count = len("),
    "enqueue.pushed": before("lifecycle.enqueueing", "Dispatch.follow_up", "announce("),
    "park.row_written": after("lifecycle.dispatching", "park", "update_waiting(changed,"),
    "batch.taken": before("lifecycle.batching", "form_batches", "formed += _form("),
    "batch.rows_written": after("lifecycle.batching", "_form", "batches = make_batches("),
    "batch.dropped": after("lifecycle.batching", "_form", "if left or len("),
    "claim.leased": before("lifecycle.claiming", "_received", "runs, others = classify(", "taken.leases"),
    "adopt.row_named": before("interop.adopt", "_give_rows", "good = [each for each in candidates"),
    "adopt.row_inserted": before("interop.adopt", "_give_rows", "failed = {"),
    "claim.rows_read": after("lifecycle.claiming", "_received", "runs, others = classify(", "runs"),
    "start.taken": before("worker.rates", "RateKeeper._take", "if time.monotonic() - asked_at"),
    "begin.counted": after("worker.run", "RunSteps.begin", "if run_logger.logger.isEnabledFor("),
    "mark_running.row_written": after("lifecycle.running", "mark_running", "lost, locked = ("),
    "run.function_returned": after("worker.run", "RunSteps.finish", "if not unconnected"),
    "report.row_written": before("worker.report", "Reporter._write", "self._acknowledge("),
    "acknowledge.queue_acknowledged": after("lifecycle.running", "acknowledge", "if final:"),
    "report.acknowledged": after("worker.report", "Reporter._write", "self._acknowledge("),
    "complete.row_written": after("worker.complete", "Completion._write", "if completed is None:"),
    "complete.committed": before("worker.complete", "Completion._conclude", "if job.phase is JobPhase.REPORTED:"),
    "spill.queue_spilled": after("lifecycle.spill", "spill_outcomes", "spilled += SpilledOutcomes("),
    "replay.row_written": before("lifecycle.spill", "replay_outcomes", "acknowledge("),
    "wait_for_key.row_written": after("lifecycle.spill", "_wait_for_key", "accepted = write_usable("),
    "refuse.row_written": after("lifecycle.running", "refuse", "log_failed("),
    "postpone.put_aside": after("lifecycle.running", "postpone", "ages |= dict("),
    "requeue.row_written": after("lifecycle.running", "requeue", "lost = record_runs("),
    "let_in.slot_acquired": after("lifecycle.waiting", "let_in", "lost = gates.confirm("),
    "let_in.committed": before("lifecycle.waiting", "Dispatched.follow_up", "dispatch("),
    "retry.slot_acquired": after("lifecycle.retrying", "retry", "refused = ask("),
    "retry.committed": before("lifecycle.retrying", "Redispatch.follow_up", "dispatch("),
    "replace.committed": before("lifecycle.replacing", "Replacement.follow_up", "ids ="),
    "replace.taken_out": after("lifecycle.replacing", "_bring_to_redis", "claimed = take_out("),
    "hurry.committed": before("lifecycle.dispatching", "Hurry.follow_up", "dispatch("),
    "follow.committed": before("lifecycle.following", "Promotion.follow_up", "dispatch("),
    "settle.rows_counted": before("lifecycle.children", "_settle_children", "begin_ready("),
    "settle.committed": before("lifecycle.children", "Settled.follow_up", "for record in self.failed:"),
    "recover.row_written": after("lifecycle.recovery", "_close_runs", "accepted = write_usable("),
    "recover.redis_updated": after("lifecycle.recovery", "_update_redis", "if final :="),
    "abandon.row_written": after("lifecycle.recovery", "abandon", "if record.id not in write_usable("),
    "members.released": before("lifecycle.members", "Release.follow_up", "dispatch("),
    "evidence.rows_written": after("interop.evidence", "_write", "written = _write_rows("),
    "close.rows_written": after("lifecycle.closing", "close", "free_slots("),
    "cancel.rows_written": after("lifecycle.closing", "_cancel", "if asked:"),
    "close.committed": before("lifecycle.closing", "Stop.follow_up", "ask_runs_here("),
    "close.taken_out": after("lifecycle.closing", "Stop._follow_closed", "claimed = take_out("),
    "close_claimed.rows_written": after("lifecycle.closing", "close_claimed", "written = write_usable("),
    "delete.committed": before("lifecycle.deletion", "Removal.follow_up", "self._remove_from_redis("),
    "prune.rows_deleted": before("lifecycle.deletion", "prune", "failed: dict["),
    "forward.retry_found": before("fleet.forwarder", "_forward", "retried += _retry_due("),
    "reconcile.marked_alive": after("fleet.reconciler", "prepare", "broker.mark_alive("),
    "reconcile.page_repaired": after("fleet.reconciler", "Reconciler._rows_by_entry_state", "yield [", "matching"),
    "reconcile.leases_recovered": after("fleet.reconciler", "Reconciler.recover_expired", "for broker in"),
    "beat.leases_renewed": after("fleet.heartbeat", "LeaseKeeper.renew.extend", "for worker_id, extended in zip("),
    "reap.death_noticed": after("fleet.processes", "Processes.reap", "self._note_death("),
    "fire.occurrences_written": after("scheduling.scheduler", "fire", "for step in zip_longest("),
    "fire.committed": before("scheduling.scheduler", "fire", "for line in lines:"),
    "inbox.taken": after("interop.inbox", "InboxService.read", "if not taken.documents:"),
    "inbox.committed": before("interop.inbox", "InboxService.read", "inbox.settle("),
    "bulk.page_changed": after("fleet.bulk", "BulkRunner._change_page", "action.save("),
    "bulk.page_committed": before("fleet.bulk", "BulkRunner._change_page", "if action.state != BulkState.RUNNING:"),
    "start_up.row_written": before("fleet.startup_tasks", "StartupRunner._begin", "logger.info("),
}

_armed: Callable[[str], None] | None = None


def reach(name: str) -> None:
    """Call what is armed with the name of the point; do nothing otherwise. name: one of POINTS."""
    armed = _armed
    if armed is not None:
        armed(name)


def arm(action: Callable[[str], None] | None, *points: str) -> Callable[[str], None] | None:
    """Have `action` called with the name of each point that this process reaches, in any thread.

    action: None for nothing. points: the only ones it is called for, as far as no other has been armed; default all.
    A function that is running now reaches its points when it is called again. Returns: what was armed before.
    """
    global _armed
    if action is not None:
        _instrument(points or POINTS)
    before, _armed = _armed, action
    return before


def disarm() -> None:
    """Have nothing happen at any point."""
    arm(None)


def remove() -> None:
    """Disarm, and have all functions run as they are written again, without the calls of `reach`."""
    disarm()
    with _lock:
        for function, code in _written.items():
            function.__code__ = code
        _written.clear()
        _places.clear()


# --- Put the calls of `reach` where the points are.


# The points that have been armed in this process, by module.
_places: dict[str, dict[str, Place]] = {}
# The code of changed functions before the first change.
_written: dict[FunctionType, CodeType] = {}
_lock = threading.Lock()


def _instrument(points: Sequence[str] | Mapping[str, str]) -> None:
    """Put the calls of `reach` into the modules that are loaded, and into the others when they will be."""
    with _lock:
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
        changed: set[str] = set()
        for point in points:
            place = PLACES.get(point)
            if place is not None and point not in _places.setdefault(f"{PACKAGE}.{place.module}", {}):
                _places[f"{PACKAGE}.{place.module}"][point] = place
                changed.add(f"{PACKAGE}.{place.module}")
        for name in changed.intersection(sys.modules):
            _change(sys.modules[name])


class _Finder:
    """Changes a module of the package right after its import."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that would be found without this finder; None for modules without an armed point."""
        spec = PathFinder.find_spec(name, path) if name in _places else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change(module: ModuleType) -> None:
    """Replace the code of the functions of a module in which armed points are."""
    places = _places[module.__name__]
    path = Path(str(module.__file__))
    code = compile(instrumented(path.read_text(encoding="utf-8"), places), str(path), "exec", dont_inherit=True)
    for place in places.values():
        function, names = _function_of(module, place.function)
        _written.setdefault(function, function.__code__)
        function.__code__ = _code_of(code, names)


def instrumented(source: str, places: Mapping[str, Place]) -> ast.Module:
    """Return a module with a call of `reach` at each of these points. Raises: LookupError, when one has no place."""
    tree, lines = ast.parse(source), source.splitlines()
    # Found before any is put in, so that none moves another.
    found = [(point, place, *_find(tree, lines, place)) for point, place in places.items()]
    for point, place, body, statement in found:
        call = f"__import__({__name__!r}, fromlist=['reach']).reach({point!r})"
        (new,) = ast.parse(f"if {place.when}: {call}" if place.when else call).body
        for node in ast.walk(new):
            ast.copy_location(node, statement)
        body.insert(body.index(statement) + place.is_after, new)
    return ast.fix_missing_locations(tree)


def _find(tree: ast.Module, lines: Sequence[str], place: Place) -> tuple[list[ast.stmt], ast.stmt]:
    """Return the statement of a place, and the block that it is in."""
    nodes: list[ast.stmt] = tree.body
    for name in place.function.split("."):
        (inner,) = [each for body in _bodies(nodes) for each in body if getattr(each, "name", None) == name]
        nodes = getattr(inner, "body")  # noqa: B009
    found = [
        (body, each)
        for body in _bodies(nodes)
        for each in body
        if lines[each.lineno - 1].lstrip().startswith(place.text)
    ]
    if len(found) != 1:
        raise LookupError(f"{place.module}: {place.function} has {len(found)} statements that begin with {place.text}")
    return found[0]


def _bodies(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield a block, and those in its statements; not those of the functions and classes in it."""
    yield body
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in (each, *getattr(each, "handlers", [])):
            for name in ("body", "orelse", "finalbody"):
                if inner := getattr(part, name, []):
                    yield from _bodies(inner)


def _function_of(module: ModuleType, qualified: str) -> tuple[FunctionType, list[str]]:
    """Return a function, or the one in which it is defined at each call; and the names that lead to it."""
    found: Any = module
    names: list[str] = []
    for name in qualified.split("."):
        if isinstance(found, FunctionType):
            break
        found = vars(found)[name]
        names.append(name)
        # Class and static methods, properties, decorated functions.
        while (inner := getattr(found, "__func__", None) or getattr(found, "__wrapped__", None)) is not None:
            found = inner
    return found, names


def _code_of(code: CodeType, names: Sequence[str]) -> CodeType:
    for name in names:
        (code,) = [each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name]
    return code
