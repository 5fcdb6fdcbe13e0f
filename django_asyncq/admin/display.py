"""How single values are shown: states, times, texts, JSON.

`format_html` escapes everything; there are no queries here.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import TaskRecord, TaskState
from .redaction import mask, mask_text

ERROR_CHARACTERS = 120
# A page of 100 attempts stays under 2 MB; the end of a traceback tells more than its beginning.
HEAD_CHARACTERS, TAIL_CHARACTERS = 4_000, 12_000
STATE_CLASSES = {
    TaskState.QUEUED: "queued",
    TaskState.RUNNING: "running",
    TaskState.SUCCEEDED: "succeeded",
    TaskState.FAILED: "failed",
}


class Excerpt(NamedTuple):
    """A text as it is shown. cut: how many characters were left out of its middle."""

    text: str
    cut: int


def excerpt(text: str, *, whole: bool = False) -> Excerpt:
    """Return a long text without its middle, or all of it.

    Lone surrogates, which no page can carry, are replaced.
    """
    text = text.encode("utf-8", "replace").decode()
    cut = len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if whole or cut <= 0:
        return Excerpt(text, 0)
    return Excerpt(f"{text[:HEAD_CHARACTERS]}\n […]\n{text[-TAIL_CHARACTERS:]}", cut)


def json_text(value: Any) -> str:
    """Return a JSON value indented, with its secrets masked."""
    return json.dumps(mask(value), indent=2, ensure_ascii=False)


def aware(value: datetime) -> datetime:
    """Return the time with a zone, also in a project without USE_TZ."""
    return value if timezone.is_aware(value) else timezone.make_aware(value)


def duration(seconds: float) -> str:
    """Say how long something took, in the largest unit that fits."""
    if seconds < 1:
        return _("%(number)d ms") % {"number": max(0, round(seconds * 1000))}
    if seconds < 10:
        return _("%(number)s s") % {"number": f"{seconds:.1f}"}
    return whole_duration(seconds)


def whole_duration(seconds: float) -> str:
    """Say a time span in whole seconds, minutes, hours or days."""
    number = int(seconds)
    for size, text in ((86_400, _("%(number)d d")), (3_600, _("%(number)d h")), (60, _("%(number)d min"))):
        if number >= size:
            return text % {"number": number // size}
    return _("%(number)d s") % {"number": number}


def relative(value: datetime, now: datetime) -> str:
    """Say how far a time is from now: "7 h ago", "in 3 min"."""
    seconds = (aware(value) - aware(now)).total_seconds()
    if -1 < seconds < 1:
        return _("now")
    template = _("in %(span)s") if seconds > 0 else _("%(span)s ago")
    return template % {"span": whole_duration(abs(seconds))}


def time_element(value: datetime | None, now: datetime) -> SafeString | str:
    """Return a time element: relative text, the absolute time in its title; "" for no time."""
    if value is None:
        return ""
    local = timezone.localtime(aware(value))
    return format_html(
        '<time class="asyncq-time" dir="auto" datetime="{}" title="{}">{}</time>',
        local.isoformat(),
        f"{local:%Y-%m-%d %H:%M:%S %Z}",
        relative(value, now),
    )


def parse_time(text: Any) -> datetime | None:
    """Return the time written in an error entry, or None: the entry may have been made by anybody."""
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return found if timezone.is_aware(found) else found.replace(tzinfo=UTC)


def state_badge(state: int) -> SafeString:
    """Return the state as a word with a class for its colour."""
    known = TaskState(state)
    template = '<span class="asyncq-state asyncq-state-{}">{}</span>'
    return format_html(template, STATE_CLASSES[known], known.label)


def state_element(record: TaskRecord, now: datetime) -> SafeString:
    """Return the state and what goes with it: when it is due, when it is tried again."""
    badge, note = state_badge(record.state), state_note(record, now)
    return format_html('{}<span class="asyncq-note" dir="auto">, {}</span>', badge, note) if note else badge


def state_note(record: TaskRecord, now: datetime) -> SafeString | str:
    """Say when a deferred task is due, or when a failed one is tried again; "" for the others."""
    run_after, retry_at = record.run_after, record.retry_at
    if record.state == TaskState.QUEUED and run_after is not None and aware(run_after) > aware(now):
        return format_html(_("due {}"), time_element(run_after, now))
    if record.state == TaskState.FAILED and retry_at is not None:
        overdue = aware(retry_at) <= aware(now)
        return format_html(
            _("retry due {} (attempt {} of {})") if overdue else _("retry {} (attempt {} of {})"),
            time_element(retry_at, now),
            record.attempt,
            max(record.attempt, record.max_attempts),
        )
    return ""


def short_tries(record: TaskRecord) -> SafeString:
    """Say the same in little room: "3 + 1" is one more by hand; the whole is in the title."""
    by_hand = record.attempt - record.max_attempts
    counts = {"attempt": record.attempt, "most": record.max_attempts, "by_hand": by_hand}
    text = ("%(most)d + %(by_hand)d" if by_hand > 0 else _("%(attempt)d of %(most)d")) % counts
    lost = _("%(count)d lost") % {"count": record.crash_count} if record.crash_count else ""
    return format_html(
        '<span dir="auto" title="{}">{}</span> <span class="asyncq-note" dir="auto">{}</span>',
        tries(record),
        text,
        lost,
    )


def tries(record: TaskRecord) -> str:
    """Say how many tries were made of how many; lost workers use none and are told apart."""
    by_hand = record.attempt - record.max_attempts
    counts = {"attempt": record.attempt, "most": record.max_attempts, "by_hand": by_hand}
    text = _("%(attempt)d (%(most)d + %(by_hand)d by hand)") if by_hand > 0 else _("%(attempt)d of %(most)d")
    text %= counts
    if record.crash_count:
        lost = ngettext("%(count)d lost worker", "%(count)d lost workers", record.crash_count)
        text = _("%(tries)s, %(lost)s") % {"tries": text, "lost": lost % {"count": record.crash_count}}
    return text


def error_line(exception: str, message: str) -> str:
    """Return the exception's class and message in one text, with secrets masked."""
    kind = exception.rpartition(".")[2]
    message = mask_text(message)
    return f"{kind}: {message}" if message else kind


def short_error(exception: str, message: str) -> SafeString:
    """Return class and first line of the message, cut; the whole is in the title."""
    whole = excerpt(error_line(exception, message)).text
    first = whole.partition("\n")[0]
    text = first if len(first) <= ERROR_CHARACTERS else first[: ERROR_CHARACTERS - 1] + "…"
    return format_html('<span class="asyncq-error-line" dir="ltr" title="{}">{}</span>', whole, text)
