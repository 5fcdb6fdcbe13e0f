"""Leadership: Redis flaps, and leaders are cut off from it."""

from __future__ import annotations

import time
from contextlib import ExitStack

from tests.proxy import Proxy
from tests.workers import wait_until

from .. import checker
from ..log_lines import LEADS
from ..rig import Fleet, Report, Rig
from .everywhere import schedule, unschedule

LOCK_TTL_SECONDS = 3


def flapping(rig: Rig, report: Report, scale: float) -> None:
    """Let Redis be reachable for 1 s and unreachable for 1 s, for a minute; then cut off the leader, ten times."""
    from django_asyncq.models import Occurrence

    flaps, cuts = max(3, round(30 * scale)), max(2, round(10 * scale))
    rig.more["ASYNCQ_TEST_LOCK_TTL"] = str(LOCK_TTL_SECONDS)
    with rig.redis() as server, ExitStack() as stack:
        schedule()
        proxies = [stack.enter_context(Proxy(("127.0.0.1", server.port))) for _ in range(2)]
        fleets = [stack.enter_context(rig.fleet(1, 4, ASYNCQ_TEST_REDIS_URL=proxy.url())) for proxy in proxies]
        for fleet in fleets:
            rig.wait_ready(fleet, 1)
        wait_until(lambda: rig.count("fenced") > 0, "a leader that writes", 30)
        load = rig.producer("load", (flaps * 2 + cuts * 5) * 5, 20, 200, rig.seed)
        for _ in range(flaps):
            for proxy in proxies:
                proxy.go_away()
            time.sleep(1)
            for proxy in proxies:
                proxy.come_back()
            time.sleep(1)
        # Without its guard the first leader does not notice, and no other would follow.
        cuts = 1 if rig.mutant else cuts
        slowest = max(_cut_off_leader(fleets, proxies) for _ in range(cuts))
        rig.ended_well(load)
        unschedule()
        report.goal("settled", int(rig.settle(90)), at_least=1)
        rig.note_rows()
        rig.check(report)
    fenced = [line for line in rig.history() if line["event"] == "fenced"]
    report.figure("flaps", flaps)
    report.figure("leaders cut off", cuts)
    report.goal("writes of leaders", len(fenced), at_least=10)
    report.goal("terms", len({line["term"] for line in fenced}), at_least=2 if rig.mutant else cuts)
    report.goal("terms that fell", len(checker.falling_terms(fenced)), at_most=0)
    report.timing("slowest s until another led", slowest, at_most=LOCK_TTL_SECONDS + 2.0)
    occurrences = list(Occurrence.objects.values_list("occurs_at", flat=True))
    report.goal("occurrences twice", len(occurrences) - len(set(occurrences)), at_most=0)


def _leads_since(fleet: Fleet) -> int:
    return fleet.log.read_text(errors="replace").count(LEADS)


def _cut_off_leader(fleets: list[Fleet], proxies: list[Proxy]) -> float:
    """Cut the leader off until another leads, and some time longer; return how long that took."""
    leader = _leader_of(fleets)
    other = 1 - leader
    before, began = _leads_since(fleets[other]), time.monotonic()
    proxies[leader].go_away()
    try:
        wait_until(lambda: _leads_since(fleets[other]) > before, "another leader", 30)
        took = time.monotonic() - began
        time.sleep(1.5)
    finally:
        proxies[leader].come_back()
    time.sleep(1.5)
    return took


def _leader_of(fleets: list[Fleet]) -> int:
    """Return which fleet logged last that it leads."""
    said = []
    for number, fleet in enumerate(fleets):
        lines = [line for line in fleet.log.read_text(errors="replace").splitlines() if LEADS in line]
        said += [(lines[-1][:23], number)] if lines else []
    return max(said)[1]
