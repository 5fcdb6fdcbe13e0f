"""What all pages share: how values are shown, how a page or a button of the table is answered.

`format_html` escapes everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

import django
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseError
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.http import url_has_allowed_host_and_scheme, urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.guard import get_logger
from ..core.redaction import mask, mask_text
from ..exceptions import BrokerUnavailable, InvalidOption
from ..models import FailureReason, Pause, TaskRecord, TaskState
from ..observe.why import Keeper, Why
from ..storage.errors import one_line
from ..storage.routing import rows_of
from .addresses import Button, Page, code_of

if TYPE_CHECKING:
    AnyModelAdmin = ModelAdmin[Any]
    AnyModelForm = ModelForm[Any]
else:
    AnyModelAdmin = ModelAdmin
    AnyModelForm = ModelForm

logger = get_logger("django_asyncq.admin")

# A text, or one that is translated when it is shown.
Text = str | Promise

ERROR_CHARACTERS = 120
# A page of 100 attempts stays under 2 MB. The end of a traceback says more than its beginning.
HEAD_CHARACTERS, TAIL_CHARACTERS = 4_000, 12_000
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


def seconds_between(start: datetime, end: datetime) -> float:
    """Return how long it is from one time to another."""
    return (aware(end) - aware(start)).total_seconds()


def uuid_of(text: str | None) -> UUID | None:
    """Return an id as the database has it; None for a text that is none, as those of other programs may be."""
    try:
        return UUID(text) if text else None
    except ValueError:
        return None


def rows_by_id(ids: Iterable[str], *columns: str) -> dict[str, TaskRecord]:
    """Return tasks by the ids that other places have of them; at most one query."""
    known = [id for each in ids if (id := uuid_of(each))]
    return {str(row.id): row for row in rows_of(TaskRecord).filter(pk__in=known).only(*columns)} if known else {}


def plain_time(value: datetime) -> str:
    """Format a time in the current time zone as plain text, with milliseconds."""
    return timezone.localtime(aware(value)).isoformat(" ", "milliseconds")


def moment_text(text: str) -> str:
    """Return a moment of an address in the current time zone, to the second; any other text as it is."""
    try:
        return date_format(timezone.localtime(datetime.fromisoformat(text)), "Y-m-d H:i:s")
    except ValueError:
        return text


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
    seconds = seconds_between(now, value)
    if -1 < seconds < 1:
        return _("now")
    return _("in %(span)s") % {"span": whole_duration(seconds)} if seconds > 0 else ago(-seconds)


def ago(seconds: float) -> str:
    """Format how long ago something was."""
    return _("%(span)s ago") % {"span": whole_duration(seconds)}


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
    return format_html(template, known.name.lower(), known.label)


def state_element(record: TaskRecord, now: datetime, why: Why | None) -> SafeString:
    """Return the state badge, followed by why the task does not run. why: of `why_not_running`; None: nothing more."""
    badge, text = state_badge(record.state), why_text(record, now, why) if why else ""
    if why and why.keeper in MARKS:
        title = pause_note(why.pause, now) if why.pause else ""
        return format_html('{} <span class="{}">{}</span> {}', badge, MARKS[why.keeper], text, title)
    return format_html('{}<span class="asyncq-note" dir="auto">, {}</span>', badge, text) if text else badge


# What somebody must do something about, and the class of its mark.
MARKS = {
    **dict.fromkeys((Keeper.QUEUE_PAUSED, Keeper.TASK_PAUSED, Keeper.GATE_PAUSED), "asyncq-mark"),
    **dict.fromkeys(
        (Keeper.TIMEOUT, Keeper.WORKER_LOST, Keeper.UNSERVED, Keeper.UNKNOWN), "asyncq-mark asyncq-mark-failed"
    ),
}
WHY_TEXTS: dict[Keeper, Text] = {
    Keeper.REMOTE: gettext_lazy("run by another program"),
    Keeper.UNKNOWN: gettext_lazy("No running worker has its code"),
    Keeper.QUEUE_PAUSED: gettext_lazy("Its queue is paused"),
    Keeper.TASK_PAUSED: gettext_lazy("Paused"),
    Keeper.GATE_PAUSED: gettext_lazy("Its gate is paused"),
    Keeper.UNSERVED: gettext_lazy("No worker takes its queue"),
    Keeper.DUE: gettext_lazy("waits for a free worker"),
    Keeper.TIMEOUT: gettext_lazy("Stuck: longer than its timeout"),
    Keeper.WORKER_LOST: gettext_lazy("Stuck: its worker is not alive"),
}


def why_text(record: TaskRecord, now: datetime, why: Why) -> SafeString | str:
    """Say why a task does not run, in a few words."""
    if why.keeper is Keeper.DELAYED:
        return format_html(_("due {}"), time_element(why.at, now))
    if why.keeper is Keeper.PARENTS:
        count = record.waits_for or 0
        return ngettext("waits for %(count)d task", "waits for %(count)d tasks", count) % {"count": count}
    if why.keeper is Keeper.FOLLOWS:
        return format_html(_("waits for {}"), format_html('<bdi title="{}">…{}</bdi>', why.subject, why.subject[-8:]))
    if why.keeper is Keeper.BATCHED:
        return format_html(
            _("runs in the batch {}"), format_html('<bdi title="{}">…{}</bdi>', why.subject, why.subject[-8:])
        )
    if why.keeper is Keeper.GATE_FULL:
        return _in_line(format_html(_("waits for a slot of gate {}"), format_html("<bdi>{}</bdi>", why.subject)), why)
    if why.keeper is Keeper.DUE and why.subject:
        key = format_html("<bdi>{}</bdi>", why.subject)
        return _in_line(format_html(_("waits for a free worker, under the fair key {}"), key), why)
    if why.keeper is Keeper.RATE:
        text = format_html(_("waits for the rate {}"), format_html("<bdi>{}</bdi>", why.subject))
        return format_html(_("{}, looked at {}"), text, time_element(why.at, now)) if why.at else text
    if why.keeper is Keeper.RETRY and why.at is not None:
        overdue = aware(why.at) <= aware(now)
        return format_html(
            _("retry due {} (attempt {} of {})") if overdue else _("retry {} (attempt {} of {})"),
            time_element(why.at, now),
            record.attempt,
            max(record.attempt, record.max_attempts),
        )
    return str(WHY_TEXTS[why.keeper])


def _in_line(text: SafeString, why: Why) -> SafeString:
    return format_html(_("{}, place {} in line"), text, why.place) if why.place else text


def pause_note(pause: Pause, now: datetime) -> SafeString:
    """Say since when something is paused, by whom and why, with secrets masked."""
    since = time_element(pause.paused_at, now)
    by, note = mask_text(pause.paused_by), mask_text(pause.note)
    text = format_html(_("Paused by {}, {}"), format_html("<bdi>{}</bdi>", by), since)
    if not by:
        text = format_html(_("Paused {}"), since)
    return format_html('{}: <bdi class="asyncq-pause-note">{}</bdi>', text, note) if note else text


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


# --- Who may do what on the pages: each view and each action asks here, before it reads or changes anything.


def has_right(request: HttpRequest, permission: str) -> bool:
    """Whether the user has a permission of the app, such as "retry_task"."""
    user: Any = request.user
    return bool(user.has_perm(f"django_asyncq.{permission}"))


def check_rights(model_admin: Any, request: HttpRequest, rights: Iterable[str], row: Any = None) -> None:
    """Raise PermissionDenied unless the user may view the model, or a row of it, and has all rights of a page."""
    for right in ("view", *rights):
        of_admin = getattr(model_admin, f"has_{right}_permission", None)
        if not (of_admin(request, row) if of_admin else has_right(request, right)):
            raise PermissionDenied


# --- Show characters that a page would hide: those that reverse a line, that have no width, or that control a terminal.
#
# A name with U+202E in it reads backwards, and looks like another one. So each such character of a page is shown by
# its number. Fields keep theirs: what a form sends back must be what it was given.

# Not U+200C and U+200D, which join letters and emoji; not U+200B, U+200E and U+200F, which translations of Django have.
HIDDEN = [
    *range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2060, 0x2065),
    *range(0x2066, 0x206A), 0xFEFF,
]  # fmt: skip
SHOWN = {number: f"⟨U+{number:04X}⟩" for number in HIDDEN}
FIELDS = re.compile(r"(<textarea\b.*?</textarea>|<(?:input|option)\b[^>]*>)", re.DOTALL | re.IGNORECASE)

Answer = TypeVar("Answer", bound=HttpResponse)


def visible_text(text: str) -> str:
    """Return a text with the number of each hidden character in its place."""
    return text.translate(SHOWN)


def visible(answer: Answer) -> Answer:
    """Have the hidden characters of a page be shown when it is rendered; anything else is as it was."""
    if isinstance(answer, TemplateResponse):
        answer.add_post_render_callback(_show)
    return answer


def _show(answer: HttpResponse) -> None:
    parts = FIELDS.split(answer.content.decode(answer.charset))
    # Every second part is a field.
    parts[::2] = [visible_text(part) for part in parts[::2]]
    answer.content = "".join(parts).encode(answer.charset)


# --- The pages of ours that are not those of a model: their frame, and the page that asks before something is changed.
#
# Every action works without JavaScript: a button posts, a page asks, and its button posts again with
# `confirmed=yes`.

REASON_CHARACTERS = 300
# With it a page is asked for what may have changed of it; see `live.js`, and `fragment.html`.
LIVE_HEADER = "Asyncq-Live"
# What a form of ours posts besides what the question is about.
OWN_FIELDS = {"csrfmiddlewaretoken", "confirmed", "reason", "typed", "shown"}


def render_page(
    model_admin: AnyModelAdmin,
    request: HttpRequest,
    template: str,
    title: Text,
    context: Mapping[str, Any] | None = None,
) -> HttpResponse:
    """Return a page with the frame of the admin. template: below "admin/django_asyncq/"; it extends "page.html"."""
    request.current_app = model_admin.admin_site.name
    values = {
        **model_admin.admin_site.each_context(request),
        "title": title,
        "opts": model_admin.opts,
        "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
        **(context or {}),
    }
    return visible(TemplateResponse(request, f"admin/django_asyncq/{template}", values))


class Input(NamedTuple):
    """A field of a question besides the reason. kind: the type of the input; least, most: of a number, else ""."""

    name: str
    label: Text
    value: str
    kind: str = "text"
    least: str = ""
    most: str = ""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a page asks before something is changed.

    lines: paragraphs that say what will happen. button: the text of the button that does it. examples: up to some ten
    lines that name what it is about. asks_reason: show a field for the reason; needs_reason: it must not be empty.
    is_destructive: what is done cannot be undone. back: where Cancel leads, if not to where the button's page is.
    inputs: more fields. typed: a number that must be typed, as the page shows it; "" for none.
    """

    title: Text
    lines: Sequence[Text]
    button: Text
    examples: Sequence[Text] = ()
    asks_reason: bool = False
    needs_reason: bool = False
    is_destructive: bool = False
    back: str = ""
    inputs: Sequence[Input] = ()
    typed: str = ""


def reason_of(request: HttpRequest) -> str:
    """Return the reason that a person has typed, as one line; "" for none."""
    return " ".join(request.POST.get("reason", "").split())[:REASON_CHARACTERS]


def ask(model_admin: AnyModelAdmin, request: HttpRequest, question: Question, back: str) -> HttpResponse | None:
    """Return the page that asks, or None when a person has answered it with its button, and the reason it needs.

    Its form posts to the same address all that this request has posted. back: where Cancel leads.
    """
    posted = request.POST if request.method == "POST" else QueryDict()
    is_answered = posted.get("confirmed") == "yes"
    is_reason_missing = is_answered and question.needs_reason and not reason_of(request)
    # The number that the person has seen: some of the tasks may be gone since.
    digits = "".join(each for each in posted.get("typed", "") if each.isdecimal())
    is_number_wrong = is_answered and question.typed != "" and digits != posted.get("shown")
    if is_answered and not is_reason_missing and not is_number_wrong:
        return None
    skipped = {*OWN_FIELDS, *(each.name for each in question.inputs)}
    context = {
        "question": question,
        "back": question.back or back,
        "fields": [(name, value) for name, values in posted.lists() if name not in skipped for value in values],
        "action_url": request.get_full_path(),
        "is_reason_missing": is_reason_missing,
        "is_number_wrong": is_number_wrong,
    }
    return render_page(model_admin, request, "question.html", question.title, context)


def url_of(model_admin: AnyModelAdmin, view: str, *args: Any, model: str = "") -> str:
    """Return the address of a view of the admin. view: such as "changelist". model: another one than the admin's."""
    opts = model_admin.opts
    return reverse(
        f"admin:{opts.app_label}_{model or opts.model_name}_{view}", args=args, current_app=model_admin.admin_site.name
    )


def url_about(model_admin: AnyModelAdmin, view: str, **query: str) -> str:
    """Return the address of a view that is about what its query names, such as a queue."""
    return f"{url_of(model_admin, view)}?{urlencode(query)}"


def unreachable_text(error: Exception) -> str:
    """Say that nothing was changed, because Redis is unreachable."""
    return _("Redis is unreachable: %(reason)s. Nothing was changed.") % {"reason": one_line(error)}


def next_url(request: HttpRequest, default: str) -> str:
    """Return where to go after a change: the page of this site that the form has named as `next`, or the default."""
    wanted = request.POST.get("next", "")
    is_safe = url_has_allowed_host_and_scheme(
        wanted, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    )
    return wanted if wanted and is_safe else default


# What a page or a button may return: an answer, the context of its template, or where to go next. And what it may ask.
Result = HttpResponse | dict[str, Any] | str | None
Asking = Generator[Question, None, Result]


def written(request: HttpRequest, act: Callable[[], HttpResponse], back: str) -> HttpResponse:
    """Return the answer to a request. Where the database refuses what a button writes, say so in a sentence.

    Such as one that is read-only, or full: the page is right as it is, so it is no error of the server. back: where
    to say it.
    """
    if request.method != "POST":
        return act()
    try:
        return act()
    except DatabaseError as error:
        logger.warning("the database refused what a person did at %s", request.path, exc_info=True)
        text = _("The database refuses this now: %(reason)s. What the pages show is what was done.")
        messages.error(request, text % {"reason": one_line(error).rstrip(".")})
        return HttpResponseRedirect(back)


def answer(model_admin: Any, request: HttpRequest, entry: Page | Button, object_id: str) -> HttpResponse:
    """Show a page of ours, or do what a button says once its question is answered. Raises: PermissionDenied."""
    back = url_of(model_admin, entry.back if isinstance(entry, Button) else "changelist")
    return written(request, lambda: _answer(model_admin, request, entry, object_id), next_url(request, back))


def _answer(model_admin: Any, request: HttpRequest, entry: Page | Button, object_id: str) -> HttpResponse:
    if isinstance(entry, Button) and request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    check_rights(model_admin, request, entry.rights)
    changelist, row = url_of(model_admin, "changelist"), []
    back = url_of(model_admin, entry.back) if isinstance(entry, Button) else changelist
    if entry.of_object:
        row = [model_admin.get_object(request, unquote(object_id))]
        if row[0] is None:
            messages.warning(request, model_admin.missing)
            return HttpResponseRedirect(changelist)
        check_rights(model_admin, request, entry.rights, row[0])
        back = url_of(model_admin, "change", quote(row[0].pk))
    back, found = next_url(request, back), None
    try:
        done = code_of(entry.code)(model_admin, request, *row)
        found = asked(model_admin, request, done, back) if isinstance(done, Generator) else done
    except BrokerUnavailable as error:
        messages.error(request, unreachable_text(error))
    except InvalidOption as error:
        messages.error(request, str(error))
    if isinstance(entry, Page) and isinstance(found, dict):
        return render_page(model_admin, request, entry.template, entry.title, {"back": back, **found})
    return found if isinstance(found, HttpResponse) else HttpResponseRedirect(str(found or back))


def asked(model_admin: AnyModelAdmin, request: HttpRequest, asking: Asking, back: str) -> Result:
    """Go on to the question, and behind it once it is answered; return the page that asks, or the function's result."""
    try:
        while True:
            if (page := ask(model_admin, request, next(asking), back)) is not None:
                return page
    except StopIteration as end:
        result: Result = end.value
        return result
