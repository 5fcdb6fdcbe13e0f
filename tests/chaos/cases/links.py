"""The connection to Redis: bad, or leading to another server after a fail-over."""

from __future__ import annotations

import time
from contextlib import ExitStack

from tests.workers import wait_until

from .. import checker, witness
from ..log_lines import WORKER_DIED
from ..proxy import Switch, Weather
from ..rig import Report, Rig, Server, free_port

RECOVERED_SECONDS = 10.0


def bad_line(rig: Rig, report: Report, scale: float) -> None:
    """Lose 5 % of the requests, delay by 200 ms, send in small parts, for 20 s each; then be reliable again."""
    each = max(4.0, 20 * scale)
    with rig.redis() as server, Weather(("127.0.0.1", server.port), rig.seed) as proxy:
        direct, rig.redis_url = rig.redis_url, proxy.url()
        with rig.fleet(2, 4) as fleet:
            rig.wait_ready(fleet, 2)
            rig.redis_url = direct
            # The producers connect directly, so that the load stays the same.
            load = rig.producer("load", round(each * 5 * 40), 10, 25, rig.seed)
            wait_until(lambda: rig.count("end") > 20, "a load", 30)
            usual = _per_second(rig, each)
            report.figure("tasks per second, usual", usual)
            for name, weather in (
                ("requests lost", {"request_share": 0.05}),
                ("latency", {"delay_seconds": 0.2}),
                ("drops", {"is_trickling": True}),
            ):
                vars(proxy).update(weather)
                report.figure(name, _per_second(rig, each))
                proxy.clear()
            began = time.monotonic()
            while (rate := _per_second(rig, 2)) < usual * 0.9 and time.monotonic() < began + 30:
                report.figure("slow after", rate)
            report.timing("s until 90 % of usual", time.monotonic() - began, at_most=RECOVERED_SECONDS)
            rig.ended_well(load)
            report.goal("settled", int(rig.settle(20 if rig.mutant else 60)), at_least=1)
            report.goal("requests lost in all", proxy.lost, at_least=5)
            rig.check(report)
    crashed = sum(fleet.log.read_text(errors="replace").count(WORKER_DIED) for fleet in rig.fleets)
    report.goal("workers that had to be replaced", crashed, at_most=0)


def _per_second(rig: Rig, seconds: float) -> float:
    before, began = rig.count("end"), time.monotonic()
    time.sleep(seconds)
    return (rig.count("end") - before) / (time.monotonic() - began)


def failed_over(rig: Rig, report: Report, scale: float) -> None:
    """Cut the replication, kill the primary a second later, and let the replica replace it, ten times."""
    times = max(2, round(10 * scale))
    with rig.redis() as first, ExitStack() as stack:
        proxy = stack.enter_context(Switch(("127.0.0.1", first.port)))
        direct, rig.redis_url = rig.redis_url, proxy.url()
        fleets = [stack.enter_context(rig.fleet(2, 4)) for _ in range(2)]
        for fleet in fleets:
            rig.wait_ready(fleet, 2)
        loads = [
            rig.producer("load", times * 250, 100, 25, rig.seed),
            rig.producer("load", times * 40, 200, 100, rig.seed + 1, "failed-over"),
        ]
        rig.redis_url = direct
        lost = sum(_fail_over(rig, stack, proxy, number) for number in range(times))
        rig.ended_well(*loads)
        report.goal("settled", int(rig.settle(90)), at_least=1)
        report.figure("fail-overs", times)
        report.goal("writes that the new primaries never had", lost, at_least=times)
        rig.check(report, agreement_seconds=25)
    # A gate cannot be strict in a store that loses writes: the figure states how far it was exceeded.
    report.figure(
        "most QUEUED or RUNNING at a gate of 5", checker.most_live(witness.transitions()).get("failed-over", 0)
    )


def _fail_over(rig: Rig, stack: ExitStack, proxy: Switch, number: int) -> int:
    """Return how many bytes of the stream of writes were lost with the primary."""
    primary = rig.server
    with Switch(("127.0.0.1", primary.port)) as line:
        replica = Server(free_port(), rig.folder / f"replica-{number}")
        replica.extra = ["--replicaof", "127.0.0.1", str(line.port)]
        replica.start()
        stack.callback(replica.kill)
        wait_until(lambda: _is_following(replica), "a replica that follows", 30)
        line.hold()
        late = rig.producer("bulk", 100, 300, rig.seed + number, ASYNCQ_TEST_REDIS_URL=proxy.url())
        wait_until(lambda: late.poll() is not None, "a producer", 30)
        rig.ended_well(late)
        time.sleep(0.5)
        with primary.client() as client, replica.client() as behind:
            lost = client.info("replication")["master_repl_offset"] - behind.info("replication")["slave_repl_offset"]
        primary.kill()
        rig.note("fault", kind="fail-over", pids=[pid for fleet in rig.fleets for pid in fleet.workers()])
        proxy.go_away()
        with replica.client() as client:
            client.replicaof("NO", "ONE")
        line.go_away()
    rig.server = replica
    proxy.lead_to(("127.0.0.1", replica.port))
    time.sleep(rig.random.uniform(0, 1))
    proxy.come_back()
    time.sleep(rig.random.uniform(2, 4))
    return int(lost)


def _is_following(replica: Server) -> bool:
    with replica.client() as client:
        return bool(client.info("replication").get("master_link_status") == "up")
