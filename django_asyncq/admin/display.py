"""Format single values for the pages: states, times, texts, JSON.

`format_html` escapes everything. No function here queries the database.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.utils import timezone
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import FailureReason, TaskRecord, TaskState
from ..redaction import mask, mask_text

# A text, or one that is translated when it is shown.
Text = str | Promise

ERROR_CHARACTERS = 120
# A page of 100 attempts stays under 2 MB. The end of a traceback says more than its beginning.
HEAD_CHARACTERS, TAIL_CHARACTERS = 4_000, 12_000
STATE_CLASSES = {
    TaskState.QUEUED: "queued",
    TaskState.RUNNING: "running",
    TaskState.SUCCEEDED: "succeeded",
    TaskState.FAILED: "failed",
}
# A task with another reason has not failed in a run: the last of its errors, if it has any, is an older one.
REASONS_WITH_ERROR = {
    FailureReason.EXCEPTION,
    FailureReason.TIMEOUT,
    FailureReason.WORKER_LOST,
    FailureReason.NOT_REGISTERED,
}


# What keeps its order in a text of a language that is read from right to left: a declaration, JSON, a cron expression.
CODE = re.compile(r"@task\([^)]*\)|\[[^\]]*\]|\{[^}]*\}|(?<!\S)(?:[\d*/,-]+ ){4}[\d*/,-]+")


def with_code(text: Text) -> SafeString:
    """Return a sentence whose examples of code are read from left to right in every language."""
    parts, position = [], 0
    for found in CODE.finditer(str(text)):
        parts += [(str(text)[position : found.start()], ""), ("", found[0])]
        position = found.end()
    parts.append((str(text)[position:], ""))
    written = [format_html('<bdi dir="ltr">{}</bdi>', code) if code else plain for plain, code in parts]
    return format_html_join("", "{}", ((each,) for each in written))


class Excerpt(NamedTuple):
    """A text as the page shows it. cut: number of characters removed from its middle."""

    text: str
    cut: int


def excerpt(text: str, *, whole: bool = False) -> Excerpt:
    """Shorten a long text by its middle. whole: return all of it.

    Lone surrogates are replaced, because no page can be encoded with them.
    """
    text = text.encode("utf-8", "replace").decode()
    cut = len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if whole or cut <= 0:
        return Excerpt(text, 0)
    return Excerpt(f"{text[:HEAD_CHARACTERS]}\n […]\n{text[-TAIL_CHARACTERS:]}", cut)


def json_text(value: Any) -> str:
    """Return a value as indented JSON with secrets masked."""
    return json.dumps(mask(value), indent=2, ensure_ascii=False)


def aware(value: datetime) -> datetime:
    """Return the time with a time zone, even in a project without USE_TZ."""
    return value if timezone.is_aware(value) else timezone.make_aware(value)


def plain_time(value: datetime) -> str:
    """Format a time in the current time zone as plain text, with milliseconds."""
    return timezone.localtime(aware(value)).isoformat(" ", "milliseconds")


def duration(seconds: float) -> str:
    """Format a duration in the largest unit that fits."""
    if seconds < 1:
        return _("%(number)d ms") % {"number": max(0, round(seconds * 1000))}
    if seconds < 10:
        return _("%(number)s s") % {"number": f"{seconds:.1f}"}
    return whole_duration(seconds)


def whole_duration(seconds: float) -> str:
    """Format a duration in whole seconds, minutes, hours or days."""
    number = int(seconds)
    for size, text in ((86_400, _("%(number)d d")), (3_600, _("%(number)d h")), (60, _("%(number)d min"))):
        if number >= size:
            return text % {"number": number // size}
    return _("%(number)d s") % {"number": number}


def exact_duration(seconds: float) -> str:
    """Format a limit in the largest unit that does not round it: 90 seconds are "90 s", not "1 min"."""
    exact = seconds >= 1 and next((size for size in (86_400, 3_600, 60) if seconds % size == 0), None)
    return whole_duration(seconds) if exact else _("%(number)s s") % {"number": f"{seconds:.12g}"}


def relative(value: datetime, now: datetime) -> str:
    """Format a time relative to now: "7 h ago", "in 3 min"."""
    seconds = (aware(value) - aware(now)).total_seconds()
    if -1 < seconds < 1:
        return _("now")
    template = _("in %(span)s") if seconds > 0 else _("%(span)s ago")
    return template % {"span": whole_duration(abs(seconds))}


def time_element(value: datetime | None, now: datetime, *, text: str = "") -> SafeString | str:
    """Return a time element with relative text and the absolute time as its title; "" for None. text: instead of it."""
    if value is None:
        return ""
    local = timezone.localtime(aware(value))
    return format_html(
        '<time class="asyncq-time" dir="auto" datetime="{}" title="{}">{}</time>',
        local.isoformat(),
        f"{local:%Y-%m-%d %H:%M:%S %Z}",
        text or relative(value, now),
    )


def parse_time(text: Any) -> datetime | None:
    """Parse a time of an error entry; None if it is not a time, because another program may have written the entry."""
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return found if timezone.is_aware(found) else found.replace(tzinfo=UTC)


def state_badge(state: int) -> SafeString:
    """Return the name of the state as a coloured badge."""
    known = TaskState(state)
    template = '<span class="asyncq-state asyncq-state-{}">{}</span>'
    return format_html(template, STATE_CLASSES[known], known.label)


def state_element(record: TaskRecord, now: datetime, *, why_stuck: str = "") -> SafeString:
    """Return the state badge, followed by when the task is due or its retry is, or by why it is stuck.

    why_stuck: of `Fleet.why_stuck`.
    """
    badge, note = state_badge(record.state), state_note(record, now)
    if why_stuck:
        text = _("Stuck: longer than its timeout") if why_stuck == "timeout" else _("Stuck: its worker is not alive")
        return format_html('{} <span class="asyncq-mark asyncq-mark-failed">{}</span>', badge, text)
    return format_html('{}<span class="asyncq-note" dir="auto">, {}</span>', badge, note) if note else badge


def state_note(record: TaskRecord, now: datetime) -> SafeString | str:
    """Say when a deferred task or a retry is due; "" for other tasks."""
    run_after, retry_at = record.run_after, record.retry_at
    if record.state == TaskState.QUEUED and run_after is not None and aware(run_after) > aware(now):
        return format_html(_("due {}"), time_element(run_after, now))
    if record.state == TaskState.FAILED and retry_at is not None and record.reason == FailureReason.GATE_FULL:
        return format_html(_("waits for a slot of gate {}"), format_html("<bdi>{}</bdi>", record.gate))
    if record.state == TaskState.FAILED and retry_at is not None:
        overdue = aware(retry_at) <= aware(now)
        return format_html(
            _("retry due {} (attempt {} of {})") if overdue else _("retry {} (attempt {} of {})"),
            time_element(retry_at, now),
            record.attempt,
            max(record.attempt, record.max_attempts),
        )
    return ""


def short_attempt_count(record: TaskRecord) -> SafeString:
    """Return the attempts in short form, such as "2 of 3" or "3 + 1", with the long form as the title.

    "3 + 1" means three attempts and one more by a manual retry.
    """
    manual = record.attempt - record.max_attempts
    counts = {"attempt": record.attempt, "maximum": record.max_attempts, "manual": manual}
    text = ("%(maximum)d + %(manual)d" if manual > 0 else _("%(attempt)d of %(maximum)d")) % counts
    crashes = ""
    if record.crash_count:
        crashes = ngettext("%(count)d crash", "%(count)d crashes", record.crash_count) % {"count": record.crash_count}
    return format_html(
        '<span dir="auto" title="{}">{}</span> <span class="asyncq-note" dir="auto">{}</span>',
        attempt_count(record),
        text,
        crashes,
    )


def attempt_count(record: TaskRecord) -> str:
    """Say how many attempts were made of how many, and count the worker crashes apart: they use no attempt."""
    manual = record.attempt - record.max_attempts
    counts = {"attempt": record.attempt, "maximum": record.max_attempts, "manual": manual}
    text = _("%(attempt)d (%(maximum)d + %(manual)d manual)") if manual > 0 else _("%(attempt)d of %(maximum)d")
    text %= counts
    if record.crash_count:
        crashes = ngettext("%(count)d worker crash", "%(count)d worker crashes", record.crash_count)
        crashes %= {"count": record.crash_count}
        text = _("%(attempts)s, %(crashes)s") % {"attempts": text, "crashes": crashes}
    return text


def error_line(exception: str, message: str) -> str:
    """Return the class and message of an exception as one text, with secrets masked."""
    kind = exception.rpartition(".")[2]
    message = mask_text(message)
    return f"{kind}: {message}" if message else kind


def short_error(exception: str, message: str) -> SafeString:
    """Return the exception's class and the first line of its message, truncated, with the whole text as the title."""
    return first_line(error_line(exception, message))


def first_line(text: str) -> SafeString:
    """Return the first line of an error's text, truncated, with the whole text as the title."""
    whole = excerpt(text).text
    first = whole.partition("\n")[0]
    shown = first if len(first) <= ERROR_CHARACTERS else first[: ERROR_CHARACTERS - 1] + "…"
    return format_html('<span class="asyncq-error-line" dir="ltr" title="{}">{}</span>', whole, shown)
