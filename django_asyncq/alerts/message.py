"""Write one message about all that is new and all that is over: as mail, and as JSON for a webhook."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from .. import conf
from .decision import Alerting, Decision, Over
from .findings import Finding, in_order
from .wording import moment, span, utc

# The rest is counted.
MOST_LISTED = 50
LONGEST_SUBJECT = 200


class Message(NamedTuple):
    """A message. subject, body: of a mail, the subject without the project's prefix. document: for a webhook."""

    subject: str
    body: str
    document: dict[str, Any]


def compose(decisions: Iterable[Decision], now: datetime) -> Message:
    """Return the message about what was decided, of which there is something."""
    chosen = list(decisions)
    by_finding = {each.finding.key: each for decision in chosen for each in decision.alerts}
    alerts = [by_finding[each.key] for each in in_order(each.finding for each in by_finding.values())]
    over = [each for decision in chosen for each in decision.over]
    lines = [*_listed([_alert_line(each) for each in alerts]), *_listed([_over_line(each) for each in over])]
    subject = _subject(alerts, over)
    project, host = conf.current().key_prefix, socket.gethostname()
    about = f"Sent by django_asyncq on {host} at {moment(now)}; the Redis prefix is {project}."
    document = {
        "text": _for_chat("\n".join([subject, *(f"- {line}" for line in lines)])),
        "alerts": [
            {**finding_document(each.finding, each.since), "is_repeated": each.is_repeated}
            for each in alerts[:MOST_LISTED]
        ],
        "over": [_over_document(each) for each in over[:MOST_LISTED]],
        "more": max(len(alerts) - MOST_LISTED, 0) + max(len(over) - MOST_LISTED, 0),
        "project": project,
        "host": host,
    }
    return Message(subject, "\n".join([*(f"- {line}" for line in lines), "", about, ""]), document)


def compose_test(now: datetime) -> Message:
    """Return a message that only shows that messages arrive."""
    project, host = conf.current().key_prefix, socket.gethostname()
    subject = "asyncq: a test of alerts"
    body = f"Nothing is wrong. Sent by django_asyncq on {host} at {moment(now)}; the Redis prefix is {project}.\n"
    document = {"text": subject, "alerts": [], "over": [], "more": 0, "project": project, "host": host}
    return Message(subject, body, document)


def finding_line(finding: Finding, since: datetime | None) -> str:
    """Return what a message says of something wrong, on one line. since: None when that is not known."""
    began = "" if since is None else f", since {moment(since)}"
    return f"{finding.text}{began}; see: {finding.command}"


def finding_document(finding: Finding, since: datetime | None) -> dict[str, Any]:
    """Return the same for a program. since: None when that is not known."""
    return {
        **finding.key._asdict(),
        "value": None if finding.value is None else round(finding.value, 4),
        "limit": finding.limit,
        "since": None if since is None else utc(since).isoformat(),
        "text": finding.text,
        "command": finding.command,
    }


def _alert_line(each: Alerting) -> str:
    line = finding_line(each.finding, each.since)
    return f"still: {line}" if each.is_repeated else line


def _over_line(each: Over) -> str:
    return f"over: {each.title}; it was seen for {span(each.lasted_seconds)}, since {moment(each.since)}"


def _listed(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LISTED
    return lines if more <= 0 else [*lines[:MOST_LISTED], f"and {more:,} more"]


def _subject(alerts: list[Alerting], over: list[Over]) -> str:
    """Return the first title, and how many there are besides it."""
    new = [each for each in alerts if not each.is_repeated]
    titles = [each.finding.title for each in new] + [
        f"still: {each.finding.title}" for each in alerts if each.is_repeated
    ]
    titles += [f"over: {each.title}" for each in over]
    first = titles[0] if len(titles[0]) <= LONGEST_SUBJECT else f"{titles[0][:LONGEST_SUBJECT]}…"
    more = len(titles) - 1
    return f"asyncq: {first}, and {more:,} more" if more else f"asyncq: {first}"


def _over_document(each: Over) -> dict[str, Any]:
    since, seconds = utc(each.since).isoformat(), round(each.lasted_seconds, 1)
    return {**each.key._asdict(), "since": since, "lasted_seconds": seconds, "text": each.title}


def _for_chat(text: str) -> str:
    """Return a text in which no name is a link or a mention. Source: Slack, Formatting text for app surfaces."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
