"""Read what rq-scheduler and rq's own cron scheduler left in Redis. Source: rq-scheduler 0.14, rq 3.0, django-rq 4.2.

A pickle is never read, so a job is understood only where its serializer is rq's JSONSerializer; rq's cron scheduler
keeps its schedules as JSON for two minutes after it stops.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils.dateparse import parse_datetime

from ..broker.other_queues import RqCron, RqScheduled, address_of, read_rq
from ..core import payload
from ..core.time import EPOCH, moment_of
from .clocks import FIELDS, Crontab, each_wall_once, from_croniter, values_of, walls_of, zone_called
from .old import (
    ANY_ANCHOR,
    MOST_BYTES,
    CannotImport,
    Found,
    NothingToImport,
    OldSchedule,
    Rule,
    every,
    json_of,
    once,
    read_safely,
    shown,
)

LONGEST_DESCRIPTION = 120
# What rq writes in the place of arguments that are no JSON.
NOT_JSON = "<not JSON serializable>"
# Two processes with the same schedules differ in them.
TIMES = ("latest_enqueue_time", "next_enqueue_time")


def read(url: str | None) -> Found:
    """Return what both schedulers have. url: of their Redis; None: as RQ_QUEUES says.

    Raises: NothingToImport when no Redis is named, or nothing is there; BrokerUnavailable.
    """
    queues = getattr(settings, "RQ_QUEUES", None)
    try:
        options = [{"url": url}] if url else address_of(queues if isinstance(queues, Mapping) else {})
    except ValueError as error:
        raise NothingToImport(f"{error}. Name the Redis of rq with --redis URL.") from error
    jobs, crons, servers = list[RqScheduled](), list[RqCron](), list[str]()
    for each in options:
        found = read_rq(each)
        servers.append(found.server)
        jobs += found.scheduled
        crons += found.crons
    where = " and ".join(servers)
    if not jobs and not crons:
        raise NothingToImport(
            f"{where} has neither jobs of rq-scheduler (rq:scheduler:scheduled_jobs) nor a running rq cron scheduler "
            f"(rq:cron_schedulers). Start rqcron for a moment, or name another Redis with --redis URL."
        )
    schedules = [read_safely(_of_job, _plain(job), job) for job in jobs]
    return Found(where, schedules + _of_crons(crons))


def _zone() -> str:
    # Django gives its own zone to the process, and both schedulers use that of the process.
    return str(settings.TIME_ZONE or "UTC")


# --- rq-scheduler: a job each


def _plain(job: RqScheduled) -> OldSchedule:
    text = job.description.decode("utf-8", "replace")
    name = text.partition("(")[0] if payload.storable_text(text, LONGEST_DESCRIPTION) else ""
    return OldSchedule(key=job.id, name=f"{name[:100] or 'job'} {job.id}", task=name)


def _of_job(plain: OldSchedule, job: RqScheduled) -> OldSchedule:
    """Return the schedule of a job. Raises: CannotImport."""
    at = moment_of(job.score)
    if not job.data:
        raise CannotImport("its job has expired in Redis")
    if at is None:
        raise CannotImport("its next time is no time")
    said = shown(job.description.decode("utf-8", "replace")[:LONGEST_DESCRIPTION])
    call = _json(_decompressed(job.data))
    if not isinstance(call, list) or len(call) != 4 or not isinstance(call[0], str):
        raise CannotImport(
            f"its function, its arguments and its interval are a pickle, which may run any code and is never read. "
            f"Its description is {said}, its next time {at:%Y-%m-%d %H:%M} UTC: declare it in code"
        )
    task, instance, args, kwargs = call
    meta = _json(job.meta) if job.meta else {}
    if instance is not None or not isinstance(args, list) or not isinstance(kwargs, dict) or not isinstance(meta, dict):
        raise CannotImport(f"its call is not one of a function with JSON arguments: {said}")
    plain = replace(plain, name=f"{task[:100]} {job.id}", task=task, args=args, kwargs=kwargs)
    interval, cron, count = meta.get("interval"), meta.get("cron_string"), meta.get("repeat")
    differences = _of_queue(job.origin.decode("utf-8", "replace"))
    if isinstance(interval, int) and interval:
        rule, written = every(interval, at, first=at), f"every {interval} s"
    elif isinstance(cron, str) and cron:
        rule, written = _crontab(cron, at), f"{cron} ({_zone()})"
    elif interval or cron:
        raise CannotImport(f"its interval {shown(interval)} or cron {shown(cron)} is not valid")
    else:
        rule, written = once(at), f"once, {at.isoformat()}"
    is_once = not interval and not cron
    if count is not None and not isinstance(count, int):
        raise CannotImport(f"its repeat {shown(count)} is not valid")
    return replace(
        plain,
        written=written,
        rule=rule,
        is_once=is_once,
        count=count if count and not is_once else None,
        differences=tuple(differences),
    )


def _of_queue(queue: str) -> list[str]:
    if queue in ("", "default"):
        return []
    return [f"its queue {shown(queue)}: here the task's queue_name decides"]


def _crontab(written: str, at: datetime) -> Rule:
    """Return the rule of a cron_string, whose fields must all match. Raises: CannotImport."""
    fields = written.split()
    if len(fields) != len(FIELDS):
        raise CannotImport(f"its cron {shown(written)} has {len(fields)} fields, here five are known")
    weekday = ",".join("0" if each == "7" else each for each in fields[4].split(","))
    values = map(values_of, FIELDS, [*fields[:4], weekday])
    crontab = Crontab.of(values, fields)
    following = each_wall_once(crontab.walls, zone_called(_zone()))
    return Rule(lambda after: following(max(after, at - timedelta(seconds=1))), crontab.expression(), None, _zone())


def _decompressed(data: bytes) -> bytes:
    """Return the data of a job, of which only so much is unpacked as a schedule may have."""
    try:
        return zlib.decompressobj().decompress(data, MOST_BYTES + 1)
    except zlib.error:
        return data


def _json(data: bytes) -> Any:
    return payload.loads_untrusted(data, max_bytes=MOST_BYTES, max_depth=payload.MAX_DEPTH)


# --- rq's cron scheduler: a list of JSON for each process


def _of_crons(crons: Sequence[RqCron]) -> list[OldSchedule]:
    """Return the schedules of all processes, each once: a stopped and a started one have the same."""
    entries: dict[str, Any] = {}
    for each in crons:
        listed = _json(each.schedules)
        for entry in listed if isinstance(listed, list) else [None]:
            lasting = [item for item in entry.items() if item[0] not in TIMES] if isinstance(entry, dict) else entry
            entries[json.dumps(lasting, sort_keys=True)] = entry
    found, names = [], set[str]()
    for number, entry in enumerate(entries.values()):
        fields = entry if isinstance(entry, dict) else {}
        task = str(fields.get("func_name") or "")
        name = str(fields.get("name") or task or f"entry {number}")
        if name in names:
            name = f"{name} ({fields.get('cron') or fields.get('interval')})"
        names.add(name)
        plain = OldSchedule(key=str(number), name=name, task=task, is_code=True)
        found.append(read_safely(_of_cron, plain, entry))
    return found


def _of_cron(plain: OldSchedule, entry: Any) -> OldSchedule:
    """Return the schedule of an entry. Raises: CannotImport."""
    if not isinstance(entry, dict):
        raise CannotImport(f"its entry is no JSON object: {shown(entry)}")
    if NOT_JSON in (entry.get("args"), entry.get("kwargs")):
        raise CannotImport("its arguments are no JSON, and rq has not written them down")
    cron, interval = entry.get("cron"), entry.get("interval")
    differences = _of_queue(str(entry.get("queue_name") or ""))
    if isinstance(cron, str) and cron:
        rule = rule_of_cron(cron)
        written = f"{cron} ({_zone()})"
    elif isinstance(interval, int) and interval:
        latest = entry.get("latest_enqueue_time")
        last = parse_datetime(latest) if isinstance(latest, str) else None
        if last is None or last.tzinfo is None:
            differences.append("nothing says when it ran last: it fires at multiples of the interval")
            last = ANY_ANCHOR
        rule, written = every(interval, max(last, EPOCH)), f"every {interval} s"
    else:
        raise CannotImport(f"its interval {shown(interval)} or cron {shown(cron)} is not valid")
    return replace(
        plain,
        written=written,
        args=json_of(entry.get("args"), list, "args"),
        kwargs=json_of(entry.get("kwargs"), dict, "kwargs"),
        rule=rule,
        differences=tuple(differences),
    )


def rule_of_cron(written: str) -> Rule:
    """Return the rule of an expression of rq's cron scheduler. Raises: CannotImport."""
    expression = from_croniter(written)
    return Rule(each_wall_once(walls_of(expression), zone_called(_zone())), cron=expression, zone=_zone())
