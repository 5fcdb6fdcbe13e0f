"""Timed trials of the control calls against real workers: what each guide says is true when the call returns.

300 trials of each on PostgreSQL, 100 elsewhere; a trial acts at a random moment around the one that decides.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction

from django_asyncq.control import start_bulk, stop_bulk
from django_asyncq.fleet.bulk import BulkRunner
from django_asyncq.models import BulkState, FailureReason, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector

from .. import batch_tasks, tasks
from ..redis_state import unknown
from ..workers import history, wait_until, workers

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long, pytest.mark.timeout(1800)]

# Fewer where one writer at a time makes each of them slow.
TRIALS = {"postgresql": 300}
FEWER = 100
# A body that a worker had taken before may begin until it hears of it: a beat at the latest.
TAKEN_SECONDS = 6.0


def trials() -> int:
    """How many on this database."""
    return TRIALS.get(connection.vendor, FEWER)


class Fleet:
    """Real workers, and what their bodies have written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begins(self) -> dict[str, list[float]]:
        """When bodies began, by the id of their task."""
        found: dict[str, list[float]] = defaultdict(list)
        for line in history(self.path):
            if line.get("event") in ("begin", "fail_until", "attempt"):
                found[line["id"]].append(line["at"])
        return found

    def ends(self) -> dict[str, float]:
        """When bodies have run to their end."""
        return {line["id"]: line["at"] for line in history(self.path) if line.get("event") == "end"}


@pytest.fixture
def fleet(own_keys: None, tmp_path: Path) -> Iterator[Fleet]:
    """Two processes of four slots."""
    path = tmp_path / "history.jsonl"
    with workers(tmp_path, "--processes", "2", "--concurrency", "4", ASYNCQ_TEST_HISTORY=str(path)):
        tasks.nap.enqueue(0.0).wait(300)  # until a busy machine has started them
        yield Fleet(path)


def settled(ids: list[str]) -> dict[str, TaskRecord]:
    """Wait until all tasks are final; return their rows."""
    rows = TaskRecord.objects.filter(id__in=ids)
    wait_until(lambda: not rows.filter(finished_at=None).exists(), "end of all tasks", 120)
    return {str(row.id): row for row in rows}


def act(chance: random.Random, longest: float, call: Callable[[], Any], *, opens: bool = True) -> tuple[Any, float]:
    """Call after a random time, sometimes in a transaction that stays open; return the answer and when it came."""
    time.sleep(chance.choice((0.0, chance.uniform(0, longest))))
    is_open = opens and chance.random() < 0.15
    with transaction.atomic() if is_open else nullcontext():
        answer = call()
        at = time.monotonic()
        if is_open:
            time.sleep(chance.uniform(0, 0.05))
    return answer, at


def busy(chance: random.Random) -> None:
    """Let the slots be taken in most of the trials, so that a task waits for a while."""
    if count := chance.choice((0, 8, 16, 32, 48)):
        tasks.nap.enqueue_many([(0.01,)] * count)


def check_answers(fleet: Fleet, answers: dict[str, tuple[str, float]], *, both: bool = True) -> None:
    """What the table in the guide says of each answer."""
    rows, begins, ends = settled(list(answers)), fleet.begins(), fleet.ends()
    wrong = []
    for id, (word, at) in answers.items():
        row = rows[id]
        is_cancelled = (row.state, row.reason) == (TaskState.FAILED, FailureReason.CANCELLED)
        if word == "cancelled" and (not is_cancelled or any(each > at for each in begins[id])):
            wrong.append(f"{id} was cancelled: {row.state=} {row.reason=}, begun {[each - at for each in begins[id]]}")
        if word == "over" and (row.finished_at is None or (id not in ends and not begins[id])):
            wrong.append(f"{id} was over: {row.state=}")
        if (row.state == TaskState.SUCCEEDED) != (id in ends) and id in ends:
            wrong.append(f"{id} ran to its end, and is {row.state} {row.reason}")
        if row.attempt != len(begins[id]):
            wrong.append(f"{id}: attempt {row.attempt}, and its body began {len(begins[id])} times; {word}")
        if begins[id] and (row.started_at is None or not row.worker_ids):
            wrong.append(f"{id}: its row does not say that it began")
    words = Counter(word for word, _ in answers.values())
    late = sum(1 for id, (word, at) in answers.items() if word == "asked" and any(each > at for each in begins[id]))
    print(f"{len(answers)} trials: {dict(words)}; asked before the body began: {late}; violations: {len(wrong)}")
    assert not wrong, "\n".join(wrong)
    assert not both or min(words["cancelled"], words["asked"] + words["over"]) >= len(answers) // 20, words


def test_cancel_and_start(fleet: Fleet) -> None:
    """ "cancelled": no body begins; also while the transaction of the cancel is open."""
    chance, answers = random.Random(1), {}
    for _ in range(trials()):
        busy(chance)
        result = tasks.nap.enqueue(0.02)
        answers[result.id] = act(chance, 0.04, result.cancel)
    check_answers(fleet, answers)


def test_cancel_and_finish(fleet: Fleet) -> None:
    """ "asked": the row says what the body has made of it; "over": it had finished."""
    chance, answers = random.Random(2), {}
    for _ in range(trials()):
        result = tasks.nap.enqueue(0.01)
        time.sleep(0.005)
        answers[result.id] = act(chance, 0.03, result.cancel, opens=False)
    check_answers(fleet, answers, both=False)


def test_cancel_and_retry(fleet: Fleet) -> None:
    """ "cancelled": no further attempt begins, while the leader brings the task back at that moment."""
    chance, answers = random.Random(3), {}
    for _ in range(trials()):
        result = tasks.fail_until.enqueue(3)
        answers[result.id] = act(chance, 0.05, result.cancel)
    rows, begins = settled(list(answers)), fleet.begins()
    wrong = [
        (id, word, row.attempt, [each - at for each in begins[id]])
        for id, (word, at) in answers.items()
        if (row := rows[id])
        and (
            (word == "cancelled" and (row.reason != FailureReason.CANCELLED or any(each > at for each in begins[id])))
            or row.attempt != len(begins[id])
        )
    ]
    print(f"{len(answers)} trials: {dict(Counter(word for word, _ in answers.values()))}; violations: {len(wrong)}")
    assert not wrong, wrong


def test_cancel_of_members_of_batches(fleet: Fleet) -> None:
    """ "cancelled": no batch gets the call; the others run."""
    chance, answers, numbers = random.Random(4), {}, {}
    for trial in range(trials()):
        results = [batch_tasks.collect.enqueue(number=3 * trial + each) for each in range(3)]
        numbers |= {result.id: 3 * trial + each for each, result in enumerate(results)}
        chosen = chance.choice(results)
        answers[chosen.id] = act(chance, 0.08, chosen.cancel)
        time.sleep(chance.uniform(0, 0.02))
    left = [id for id in numbers if id not in answers]
    # The last of them may wait for calls that do not come.
    wait_until(lambda: TaskRecord.objects.filter(id__in=left, finished_at=None).count() < 3, "end of the batches", 120)
    settled([id for id, (word, _) in answers.items() if word != "asked"])
    ran = {each["number"] for line in history(fleet.path) for each in line.get("kwargs", ())}
    wrong = [(id, word) for id, (word, _) in answers.items() if word == "cancelled" and numbers[id] in ran]
    lost = [id for id in left if numbers[id] not in ran]
    print(f"{len(answers)} trials: {dict(Counter(word for word, _ in answers.values()))}; violations: {len(wrong)}")
    assert not wrong, wrong
    assert len(lost) < 3, lost


def test_run_now_and_due(fleet: Fleet) -> None:
    """Each body runs once, whether the task was due or was brought forward at the same moment."""
    chance, answers = random.Random(5), {}
    for _ in range(trials()):
        result = tasks.nap.using(run_after=timedelta(seconds=0.15)).enqueue(0.0)
        outcome, at = act(chance, 0.25, lambda id=result.id: Inspector().tasks.run([UUID(id)]), opens=False)
        answers[result.id] = (bool(outcome.done), at)
    rows, begins = settled(list(answers)), fleet.begins()
    wrong = [id for id, row in rows.items() if row.state != TaskState.SUCCEEDED or len(begins[id]) != 1]
    wrong += [id for id, (is_done, at) in answers.items() if is_done and rows[id].run_after is None]
    print(f"{len(answers)} trials: {dict(Counter(word for word, _ in answers.values()))}; violations: {len(wrong)}")
    assert not wrong, wrong


def test_delete_and_run(fleet: Fleet) -> None:
    """The row is gone for good; a body begins only if a worker had taken the task before. A discard: none begins."""
    chance, answers = random.Random(6), {}
    for _ in range(trials()):
        busy(chance)
        result = tasks.nap.enqueue(0.02)
        if chance.random() < 0.5:
            rows = TaskRecord.objects.filter(id=result.id)
            answers[result.id] = ("deleted", act(chance, 0.04, rows.delete)[1])
        else:
            outcome, at = act(chance, 0.04, lambda id=result.id: Inspector().tasks.discard([UUID(id)]), opens=False)
            answers[result.id] = ("discarded" if outcome.done else "kept", at)
    settled([id for id, (word, _) in answers.items() if word == "kept"])
    time.sleep(TAKEN_SECONDS)
    begins, ends, wrong = fleet.begins(), fleet.ends(), []
    for id, (word, at) in answers.items():
        after = [each - at for each in begins[id] if each > at]
        is_left = TaskRecord.objects.filter(id=id).exists()
        if is_left != (word == "kept"):
            wrong.append((id, word, "row"))
        if (word == "discarded" and after and id not in ends) or any(each > TAKEN_SECONDS for each in after):
            wrong.append((id, word, after))
    # The entry of one that has failed is in asynq's archive.
    gone = [id for id, (word, _) in answers.items() if word != "kept"]
    wrong += [(id, answers[id][0], "entry") for id in set(gone) - set(unknown(gone))]
    late = sum(word == "deleted" and any(each > at for each in begins[id]) for id, (word, at) in answers.items())
    words = dict(Counter(word for word, _ in answers.values()))
    print(f"{len(answers)} trials: {words}; begun after a deletion: {late}; violations: {len(wrong)}")
    assert not wrong, wrong


def test_waiting_for_the_end_of_what_was_asked(fleet: Fleet) -> None:
    """When `cancel(wait=…)` returns, no body goes on."""
    chance, wrong, words = random.Random(7), [], Counter[str]()
    for _ in range(trials() // 3):
        result = tasks.nap.enqueue(chance.uniform(0.05, 0.15))
        time.sleep(chance.uniform(0, 0.06))
        word = result.cancel(wait=20)
        at = time.monotonic()
        words[word] += 1
        row = TaskRecord.objects.get(id=result.id)
        if word == "asked" or row.finished_at is None:
            wrong.append((result.id, word, row.state))
        elif fleet.begins()[result.id] and fleet.ends().get(result.id, at + 1) > at:
            wrong.append((result.id, word, "its body goes on"))
    print(f"{words.total()} trials: {dict(words)}; violations: {len(wrong)}")
    assert not wrong, wrong


def test_stop_of_a_bulk_action(own_keys: None) -> None:
    """No further page begins after the return."""
    chance, wrong, stopped_in = random.Random(8), [], Counter[int]()
    for _ in range(trials() // 3):
        TaskRecord.objects.all().delete()
        tasks.add.using(run_after=timedelta(hours=1)).enqueue_many([(number,) for number in range(40)])
        action = start_bulk("cancel", {"name": "tests.tasks.add"}, rows_per_second=5)
        over = threading.Event()

        def lead(over: threading.Event = over) -> None:
            runner = BulkRunner(transaction.atomic)
            while not over.is_set():
                runner.tick(time.monotonic() * 1000)  # the rate is not waited for
            connection.close()

        leader = threading.Thread(target=lead)
        leader.start()
        time.sleep(chance.uniform(0, 0.05))
        try:
            action = stop_bulk(action)
        except Exception:  # noqa: BLE001 - it had finished
            stopped_in[-1] += 1
            continue
        finally:
            before = TaskRecord.objects.filter(state=TaskState.FAILED).count()
            time.sleep(0.03)
            over.set()
            leader.join()
        action.refresh_from_db()
        after = TaskRecord.objects.filter(state=TaskState.FAILED).count()
        stopped_in[after // 5] += 1
        if (action.state, action.done, after) != (BulkState.STOPPED, after, before):
            wrong.append((action.state, action.done, before, after))
    print(f"{stopped_in.total()} trials, stopped behind page: {dict(stopped_in)}; violations: {len(wrong)}")
    assert not wrong, wrong
