"""Say what is wrong with the fleet: once when it is new, and once when it is over, whoever looks.

Of all that look, the one whose INSERT makes the row of a problem says it, and the one whose DELETE removes the row says
that it is over. When nobody could be told, the row is removed again, and the next look says it. A sender that is killed
between the row and the message says nothing.

Nothing is sent to an address that is not in the settings. That of the webhook has a secret in it, so only its scheme
and host are ever shown. No redirect is followed: it could lead into the project's own network.
"""

from __future__ import annotations

import contextvars
import json
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from http.client import HTTPMessage
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from django.conf import settings as django_settings
from django.core.mail import EmailMessage
from django.db import connections

from .. import __version__, conf
from ..core.guard import Attempted, attempt, class_name, own_thread
from ..core.policies import alert_settings
from ..models import Alert
from ..signals import fleet_problem
from ..storage import database_clock
from ..storage.errors import Outages, one_line
from ..storage.routing import rows_of
from .problems import Look, Looker, Problem, logger

EVERY_SECONDS = 60.0
# No look has found it for so long. One host may find what another does not, such as its own SECRET_KEY that differs.
OVER_AFTER = timedelta(seconds=2.5 * EVERY_SECONDS)
MAIL_SECONDS, WEBHOOK_SECONDS = 30.0, 5.0
# What else is new is said by the next look.
MOST_IN_MESSAGE = 50
LONGEST_SUBJECT = 200


class Message(NamedTuple):
    """A message about problems. subject, body: of a mail. document: for the webhook."""

    subject: str
    body: str
    document: dict[str, Any]


class Alerter:
    """Looks and says, by the settings in force when it is made. Used by one thread. outages: see `Looker`."""

    def __init__(self, outages: Outages | None = None) -> None:
        settings = alert_settings()
        self.looker = Looker(settings, outages)
        self._ways: list[_Way] = []
        if settings.webhook:
            shown = urlsplit(settings.webhook)
            name = f"webhook of {shown.scheme}://{shown.netloc}"
            self._ways.append(_Way(name, WEBHOOK_SECONDS, lambda message: _post(settings.webhook, message)))
        if settings.mail:
            self._ways.append(_Way("mail", MAIL_SECONDS, lambda message: _mail(settings.mail, message)))
        # No row can say that the database is unreachable; so each process that looks again and again says it.
        self._lost_database: Problem | None = None

    @property
    def has_listeners(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._ways) or fleet_problem.has_listeners(Alert)

    def tick(self) -> float:
        """Look, and say what is new and over; return the seconds until the next look. Raises: django.db.Error."""
        self.say(self.looker.look())
        return EVERY_SECONDS

    def say(self, look: Look) -> list[str]:
        """Say what is new and what is over; return why it could not be said, if so. Raises: django.db.Error."""
        if look.database:
            if self._lost_database:
                return []
            told, failed = self._tell([look.database], [])
            self._lost_database = look.database if told else None
            return failed
        new: dict[int, Problem] = {}
        over = [self._lost_database] if self._lost_database else []
        self._lost_database = None
        rows, now, known = rows_of(Alert), database_clock.now(), {each.key: each.pk for each in look.rows}
        failed = []
        try:
            if again := [pk for key, pk in known.items() if key in look.problems]:
                rows.filter(pk__in=again).update(seen_at=now)
            for problem in [each for each in look.problems.values() if each.key not in known][:MOST_IN_MESSAGE]:
                kind, backend, subject = problem.key
                values = {"title": problem.title, "seen_at": now}
                row, is_mine = rows.get_or_create(kind=kind, backend=backend, subject=subject, defaults=values)
                if is_mine:
                    new[row.pk] = problem
            gone = [each for each in look.rows if each.kind in look.kinds and each.key not in look.problems]
            for row in gone[:MOST_IN_MESSAGE]:
                if rows.filter(pk=row.pk, seen_at__lte=now - OVER_AFTER).delete()[0]:
                    over.append(Problem(*row.key, row.title, row.title, ""))
        finally:
            # Also after an error in between: what has its row now is said by nobody else.
            if new or over:
                told, failed = self._tell(list(new.values()), over)
                if not told and new:
                    rows.filter(pk__in=list(new)).delete()
        return failed

    def _tell(self, new: list[Problem], over: list[Problem]) -> tuple[bool, list[str]]:
        """Return whether anybody was told, and why others were not."""
        message = compose(new, over)
        failed = [f"{way.name}: {text}" for way in self._ways if (text := way.send(message))]
        for text in failed:
            logger.warning("alerts could not be sent by %s", text)
        told = len(failed) < len(self._ways)
        for problem, is_over in [*((each, False) for each in new), *((each, True) for each in over)]:
            answers = attempt(fleet_problem.send_robust, Alert, problem=problem, is_over=is_over).value or []
            told = told or any(not isinstance(answer, Exception) for _, answer in answers)
        if told:
            logger.info("alerts sent: %d new, %d over", len(new), len(over))
        return told, failed


class _Way:
    """A way to send, bounded in time: a thread that takes longer is left behind, and while it goes on, nothing is sent.

    A time-out of a socket is no such bound: a server that sends one byte every few seconds keeps it.
    """

    def __init__(self, name: str, seconds: float, send: Callable[[Message], None]) -> None:
        self.name = name
        self._seconds = seconds
        self._send = send
        self._thread: threading.Thread | None = None

    def send(self, message: Message) -> str:
        """Send a message; return what went wrong, without secrets, "" for nothing."""
        if self._thread and self._thread.is_alive():
            return "the attempt before has still not finished"
        done: list[Attempted] = []

        def send() -> None:
            own_thread()
            done.append(attempt(self._send, message))
            # A mail backend of the project may use the database.
            attempt(connections.close_all)

        run = contextvars.Context().run
        self._thread = threading.Thread(target=run, args=(send,), name="asyncq alert", daemon=True)
        self._thread.start()
        self._thread.join(self._seconds)
        if not done:
            return f"no answer within {self._seconds:g} s"
        return "" if done[0].error is None else _text_of(done[0].error)


def compose(new: list[Problem], over: list[Problem]) -> Message:
    """Return the message about problems, of which there is one at least."""
    titles = [*(each.title for each in new), *(f"over: {each.title}" for each in over)]
    lines = [*(f"- {each.text}; see: {each.command}" for each in new), *(f"- over: {each.title}" for each in over)]
    subject = f"asyncq: {titles[0][:LONGEST_SUBJECT]}" + (f", and {len(titles) - 1} more" if len(titles) > 1 else "")
    project, host = conf.current().key_prefix, socket.gethostname()
    about = f"Sent by django_asyncq on {host}; the Redis prefix is {project}."
    text = "\n".join([subject, *lines])
    # In a chat no name is a link or a mention. Source: Slack, Formatting text for app surfaces.
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escaped)
    document = {
        "text": text,
        "alerts": [each._asdict() for each in new],
        "over": [each._asdict() for each in over],
        "project": project,
        "host": host,
    }
    return Message(subject, "\n".join([*lines, "", about, ""]), document)


def _mail(addresses: tuple[str, ...], message: Message) -> None:
    subject = f"{django_settings.EMAIL_SUBJECT_PREFIX}{message.subject}"
    EmailMessage(subject, message.body, django_settings.SERVER_EMAIL, list(addresses)).send()


class _NoRedirects(HTTPRedirectHandler):
    """Let a redirect be an error like any other answer that is none of 2xx."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follow nothing."""


def _post(url: str, message: Message) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": f"django_asyncq/{__version__}"}
    # Of two schemes only: the check says so, and there is no handler for another one.
    request = Request(url, json.dumps(message.document).encode(), headers, method="POST")  # noqa: S310
    opener = OpenerDirector()
    handlers = (ProxyHandler, HTTPHandler, HTTPSHandler, HTTPDefaultErrorHandler, _NoRedirects, HTTPErrorProcessor)
    for handler in handlers:
        opener.add_handler(handler())
    try:
        opener.open(request, timeout=WEBHOOK_SECONDS).close()
    except HTTPError as error:
        # It is an answer too, which has a connection.
        error.close()
        raise


def _text_of(error: BaseException) -> str:
    """Return what went wrong, on one line and without the address: errors of `http.client` may repeat it."""
    if isinstance(error, HTTPError):
        return f"status {error.code}" + (", and no redirect is followed" if 300 <= error.code < 400 else "")
    reason = error.reason if isinstance(error, URLError) else error
    return f"{class_name(reason)}: {one_line(reason)}" if isinstance(reason, OSError) else class_name(error)
