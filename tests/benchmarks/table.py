"""The outcome as Markdown: what was measured, the ratios within the rounds, the costs, and everything's version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .costs import FOREIGN_LIMIT
from .figures import ratios, spread
from .peers import ALL, OURS, Peer


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio that was promised: ours divided by the best of these peers, within a round.

    label: the measure's; name: of the value. at_least, at_most: one of them is the bound.
    """

    label: str
    name: str
    peers: tuple[str, ...]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bound(self) -> str:
        """The bound in words."""
        return f"at least {self.at_least}" if self.at_least is not None else f"at most {self.at_most}"

    def is_reached(self, ratio: float) -> bool:
        """Whether a ratio keeps the bound."""
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)


GOALS = (
    Goal("drain", "per_second", ("celery+results",), at_least=15),
    Goal("drain", "per_second", ("dramatiq", "huey"), at_least=1.3),
    Goal("bulk", "per_second", ("celery",), at_least=6),
    Goal("flow", "per_second", ("celery+results",), at_least=2),
    Goal("enqueue", "per_second", ("celery",), at_least=0.85),
    Goal("enqueue", "per_second", ("django-tasks-db",), at_least=1),
    Goal("transaction", "per_second", ("django-tasks-db",), at_least=1.2),
    Goal("latency", "p50_ms", ("celery",), at_most=1.5),
)
TOO_LONG = "they would take many minutes and say the same"
PER_SECOND = (("per_second", "tasks/s", True),)
# Label (its first word) → the values shown: name, unit, whether more is better.
SHOWN: dict[str, tuple[tuple[str, str, bool], ...]] = {
    **dict.fromkeys(("enqueue", "transaction", "bulk", "drain", "retries", "flow"), PER_SECOND),
    "gated": (*PER_SECOND, ("share", "of the ungated rate", True)),
    "latency": (
        ("p50_ms", "ms p50", False),
        ("p95_ms", "ms p95", False),
        ("p99_ms", "ms p99", False),
        ("call_ms", "ms p50 of the enqueuing call itself", False),
    ),
    **dict.fromkeys(("sleep", "asleep"), (("times_ideal", "times the ideal", False),)),
    "mix": (("idle_wait_ms", "ms longest wait beside a free slot", False), ("p99_ms", "ms p99 of short ones", False)),
    "idle": (
        ("round_trips_per_second", "Redis round trips/s", False),
        ("redis_commands_per_second", "Redis commands/s, in scripts too", False),
        ("statements_per_second", "SQL statements/s", False),
        ("worker_cpu_percent", "% CPU of all its processes", False),
        ("busiest_cpu_percent", "% CPU of the busiest", False),
    ),
}
COSTS = {
    "worker_cpu_us": "worker CPU µs",
    "client_cpu_us": "producer CPU µs",
    "redis_cpu_us": "Redis CPU µs",
    "database_cpu_us": "database CPU µs",
    "redis_sent": "Redis commands sent",
    "redis_in_scripts": "in scripts",
    "round_trips": "round trips",
    "statements": "SQL statements",
    "transactions": "transactions",
    "wal_bytes": "WAL bytes",
    "process_pss_mib": "MiB PSS, largest process",
    "workers_pss_mib": "MiB PSS, all",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One outcome of one peer in one round; `error` says why there is none."""

    round: int
    peer: str
    label: str
    values: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


def number(value: float) -> str:
    """Three digits are all that a benchmark knows."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cells(values: Sequence[float]) -> list[str]:
    """Least, median, most."""
    found = spread(values)
    return [number(found.least), f"**{number(found.middle)}**", number(found.most)]


def lines(head: Sequence[str], body: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """Draw a table; the first `words` columns are left-aligned."""
    rule = ["---" if index < words else "---:" for index in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def by_round(rows: Iterable[Row], peer: str, label: str, name: str) -> dict[int, float]:
    """Return a value's figure in each round that has one."""
    return {
        row.round: row.values[name] for row in rows if (row.peer, row.label) == (peer, label) and name in row.values
    }


def shown(label: str) -> tuple[tuple[str, str, bool], ...]:
    """Return what is shown of an outcome with this label."""
    return SHOWN[label.split()[0]]


def figures(rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    """The main table: each measure of each peer, and ours divided by theirs within the rounds."""
    body: list[list[str]] = []
    labels = dict.fromkeys(row.label for row in rows)
    for label in labels:
        for name, unit, more_is_better in shown(label):
            ours = by_round(rows, OURS, label, name)
            for peer in peers:
                theirs = by_round(rows, peer, label, name)
                if not theirs:
                    continue
                shares = ratios(ours, theirs) if peer != OURS else []
                ratio = cells(shares) if shares else ["", "", ""]
                better = "more" if more_is_better else "less"
                body.append([label, f"{unit} ({better} is better)", peer, *cells(list(theirs.values())), *ratio])
    head = ["measure", "unit", "what", "min", "median", "max", "ours / theirs min", "median", "max"]
    return lines(head, body, words=3)


def goals(rows: Sequence[Row]) -> list[str]:
    """Each goal beside what was measured: the ratios of the rounds in which both were measured."""
    body: list[list[str]] = []
    for goal in GOALS:
        for label in dict.fromkeys(row.label for row in rows if row.label.split()[0] == goal.label):
            ours = by_round(rows, OURS, label, goal.name)
            best = best_by_round(rows, goal, label)
            if not (found := ratios(ours, best)):
                continue
            is_reached = goal.is_reached(spread(found).middle)
            peers = " or ".join(goal.peers)
            body.append([label, goal.name, peers, *cells(found), goal.bound, "reached" if is_reached else "**missed**"])
    head = ["measure", "value", "ours / the best of", "min", "median", "max", "goal", "by the median"]
    return lines(head, body, words=3) if body else []


def best_by_round(rows: Sequence[Row], goal: Goal, label: str) -> dict[int, float]:
    """Return the best value of the goal's peers in each round in which all of them were measured."""
    values = [by_round(rows, peer, label, goal.name) for peer in goal.peers]
    choose = max if goal.at_least is not None else min
    return {
        number: choose(found[number] for found in values)
        for number in values[0]
        if all(number in found for found in values)
    }


def costs(rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    """Medians of what each task cost, for the measures that have costs."""
    body: list[list[str]] = []
    for label in dict.fromkeys(row.label for row in rows if "worker_cpu_us" in row.values):
        for peer in peers:
            found = {name: list(by_round(rows, peer, label, name).values()) for name in COSTS}
            if found["worker_cpu_us"]:
                shown = (number(spread(values).middle) if values else "–" for values in found.values())
                body.append([label, peer, *shown])
    return lines(["measure", "what", *COSTS.values()], body, words=2) if body else []


def failures(rows: Sequence[Row], refused: Mapping[str, str]) -> list[str]:
    """What is missing, and why: nothing is left out in silence."""
    said = [f"- {peer}: not installed: {error}" for peer, error in refused.items()]
    said += [f"- {row.peer}, {row.label}, round {row.round + 1}: {row.error}" for row in rows if row.error]
    return said


def disturbed(rows: Sequence[Row]) -> list[str]:
    """Figures taken while others used much of the machine."""
    return [
        f"- {row.peer}, {row.label}, round {row.round + 1}: {row.values['foreign']:.0%}"
        for row in rows
        if row.values.get("foreign", 0) > FOREIGN_LIMIT
    ]


def notes(peers: Sequence[str], measures: Sequence[str]) -> list[str]:
    """Each peer's record and settings, and what was not measured of it."""
    said: list[str] = []
    for name in peers:
        peer = ALL[name]
        said.append(f"- **{name}**: {peer.record}.")
        said += [f"  - `{what}`: {why}." for what, why in peer.settings.items()]
        said += [
            f"  - not measured: {measure}: {why}." for measure, why in peer.unmeasured.items() if measure in measures
        ]
        if "drain" in measures and peer.drain_limit < Peer.drain_limit:
            said.append(f"  - not measured: drains of more than {peer.drain_limit:,}: {TOO_LONG}.")
    return said


def report(
    rows: Sequence[Row],
    peers: Sequence[str],
    measures: Sequence[str],
    versions: Mapping[str, Mapping[str, str]],
    refused: Mapping[str, str],
) -> str:
    """Put it all together."""
    good = [row for row in rows if not row.error]
    parts: list[tuple[str, list[str]]] = [
        ("Goals: ratios within a round", goals(good)),
        ("Figures", figures(good, peers)),
        ("Costs for each task (medians)", costs(good, peers)),
        ("Missing", failures(rows, refused)),
        (f"Taken while others used more than {FOREIGN_LIMIT:.0%} of the machine", disturbed(good)),
        ("Settings", notes(peers, measures)),
        (
            "Versions",
            [f"- {what}: {', '.join(f'{n} {v}' for n, v in found.items())}" for what, found in versions.items()],
        ),
    ]
    return "\n\n".join(f"### {title}\n\n" + "\n".join(body) for title, body in parts if body) + "\n"
