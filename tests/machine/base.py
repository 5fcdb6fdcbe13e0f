"""What all rules need: both stores at the start, the choices there are, and a process that dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.keys import alive_key, own_queues_key
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.fleet import reconciler, repairs
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.gates import admission
from django_asyncq.lifecycle import closing, dispatching, recovery, retrying
from django_asyncq.models import Gate, TaskRecord

from . import stores
from .model import Model
from .values import ALONE, FAILED, GATE, QUEUED, QUEUES, Held

# With few tasks, two processes often want the same one: most guards are about that.
MOST_LIVE = 5
LIKELY_QUEUES = ("one", "one", "one", "two")
LONG = timedelta(hours=2)
# The modules that raise fences.
RAISES_FENCES = (closing, dispatching, recovery, reconciler)
# A second call of these returns something else by nature: they dequeue, or they list and clean up.
NOT_REPEATABLE = {"dequeue", "expired"}


@dataclass(eq=False)
class Hand:
    """A run in a worker's hands, in the model and for real. stage: "open", "recorded" or "acknowledged"."""

    label: str
    held: Held
    run: lifecycle.Run
    stage: str = "open"
    lost: bool = False

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print it as Hypothesis does in a failing sequence."""
        printer.text(self.label)


def one_of(attribute: str) -> st.SearchStrategy[Any]:
    """Choose among what the machine has now."""
    return st.runner().flatmap(lambda machine: st.sampled_from(getattr(machine, attribute)))


def seldom(function: Any) -> Any:
    """Offer a rule at every third step only, so that faults do not crowd out what workers do."""
    return precondition(lambda machine: machine.steps % 3 == 0)(function)


def hands_of(machine: Any, *stages: str) -> list[Hand]:
    return [hand for hand in machine.hands if hand.stage in stages]


class Base(RuleBasedStateMachine):
    """Both stores, empty, and the model."""

    def __init__(self) -> None:
        super().__init__()
        stores.flush()
        Broker.forget_registered()
        TaskRecord.objects.all()._raw_delete(TaskRecord.objects.db)
        Gate.objects.all().delete()
        Gate.objects.create(name="effects", limit=0)
        self.model = Model()
        Gate.objects.create(name=GATE, limit=self.model.limit, expected_seconds=1)
        self.broker = Broker("worker")
        self.reconciler = Reconciler(Broker("worker"))
        self.hands: list[Hand] = []
        self.listed: tuple[str, str, str, int] | None = None
        self.born = 0
        self.claims = 0
        self.steps = 0
        self.last: Callable[[], Any] | None = None
        self.called_before: Callable[[], Any] | None = None
        self.twice = False
        self.fences: dict[str, int] = {}
        # Tasks of which a committed cancel has said that they are cancelled, and that no person has retried.
        self.cancelled: set[str] = set()
        self.outcomes: dict[str, list[int]] = {}
        self.remember()
        self.patches = [
            mock.patch.object(scripts, "run", self._run_script(scripts.run)),
            mock.patch.object(reconciler, "GRACE_SECONDS", 0),
            mock.patch.object(repairs, "GRACE_SECONDS", 0),
            *(
                mock.patch.object(module, "later_fence", self._later)
                for module in (closing, dispatching, recovery, reconciler)
            ),
            mock.patch.object(dispatching, "GATE_RETRY_SECONDS", 7200),
            mock.patch.object(retrying, "GATE_RETRY_SECONDS", 7200),
            # The order is kept for as long as a sequence lasts.
            mock.patch.object(admission, "KEPT_SECONDS", 86_400),
        ]
        for patch in self.patches:
            patch.start()

    def _later(self, record: TaskRecord) -> int:
        """Replace the clock: in the life of a queue no two calls come within a microsecond, here they could."""
        return max(self.model.later, record.fence + 1)

    def _run_script(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(name: str, *arguments: Any) -> Any:
            answer = real(name, *arguments)
            return real(name, *arguments) if self.twice and name not in NOT_REPEATABLE else answer

        return run

    def remember(self) -> None:
        """Make Redis remember everything, since long ago."""
        stores.client().sadd(own_queues_key(), *QUEUES)
        stores.client().set(alive_key(), 1)
        self.model.alive = "long"

    def answer(self, got: Any, wanted: Any) -> None:
        """Compare a result; the second of two calls may count differently."""
        assert self.twice or got == wanted, f"answered {got}, the model says {wanted}"

    @contextmanager
    def dies_before(self, module: Any, name: str, *, dies: bool) -> Iterator[None]:
        """Let the process die when it comes to this call, and go on after the block.

        A commit hook would only log the error in production; in a test run it raises.
        """
        if not dies:
            yield
            return
        death = BrokerUnavailable("it died here")
        with mock.patch.object(module, name, side_effect=death):
            try:
                yield
            except BrokerUnavailable as error:
                if error is not death:
                    raise

    @property
    def names(self) -> list[str]:
        return sorted(self.model.rows)

    @property
    def live(self) -> int:
        return sum(not row.is_final for row in self.model.rows.values())

    @property
    def queued(self) -> list[str]:
        return sorted(name for name, row in self.model.rows.items() if row.state == QUEUED)

    @property
    def claimable(self) -> list[str]:
        return sorted({e.queue for e in self.model.entries.values() if e.place in ("pending", "priority")})

    @property
    def suspicious(self) -> list[str]:
        """Queues in which a suspect waits."""
        return sorted({e.queue for e in self.model.entries.values() if e.place == "suspects"})

    @property
    def is_quarantine_busy(self) -> bool:
        """Whether Redis says that the worker in quarantine holds a task."""
        return any(self.model.listed(queue, ALONE) for queue in QUEUES)

    @property
    def droppable(self) -> list[str]:
        """Queues with an id that may be dropped.

        One is dropped at a time: of two, the older might be the one that came back.
        """
        if any(self.model.dropped.values()):
            return []
        return sorted(queue for queue, names in self.model.pending.items() if names)

    @property
    def failed(self) -> list[str]:
        return sorted(name for name, row in self.model.rows.items() if row.state == FAILED)

    @property
    def active(self) -> list[str]:
        return sorted(name for name, entry in self.model.entries.items() if entry.place == "active")

    @property
    def waiting(self) -> list[str]:
        waits = {name for name, row in self.model.rows.items() if row.due == "future"}
        entries = {n for n, e in self.model.entries.items() if e.due == "future" and e.place in ("scheduled", "retry")}
        return sorted(waits | entries)

    @property
    def open_hands(self) -> list[Hand]:
        return hands_of(self, "open")

    @property
    def fresh_hands(self) -> list[Hand]:
        return [hand for hand in self.open_hands if not hand.held.begun]

    @property
    def zombies(self) -> list[Hand]:
        return [hand for hand in self.open_hands if not self.model.holds(hand.held.name, hand.held.fence)]

    @property
    def holding(self) -> list[Hand]:
        return [
            hand for hand in hands_of(self, "open", "recorded") if self.model.holds(hand.held.name, hand.held.fence)
        ]

    @property
    def unannounced_hands(self) -> list[Hand]:
        return hands_of(self, "recorded", "acknowledged")

    @property
    def spilled(self) -> list[str]:
        """Tasks with an outcome in Redis, where a process will find it."""
        entries = self.model.entries.items()
        return sorted(n for n, e in entries if e.outcome and e.place in ("active", "pending", "priority"))

    @property
    def provisional(self) -> list[str]:
        return sorted(name for name, provisional in self.model.members.items() if provisional)
