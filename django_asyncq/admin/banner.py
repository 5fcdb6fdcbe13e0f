"""What the head of each page says when tasks are not being run, and where that is mended. Nothing while all is well."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import PauseKind
from ..observe.fleet import Fleet
from . import base
from .base import has_right
from .fleet import fleet_of
from .navigation import links_of

MOST_NAMED = 3


def warnings_of(request: HttpRequest) -> dict[str, Any]:
    """Return what the template shows of each thing that is wrong, to a user who may see tasks.

    known_at: when it was so. A page that has stood open for an hour says nothing of this moment.
    """
    if not has_right(request, "view_taskrecord"):
        return {}
    fleet = fleet_of(request)
    links = {link.view: link for link in links_of(request)}
    found = [(text, links.get(f"django_asyncq_taskrecord_{page}")) for text, page in _warnings(fleet)]
    clock = f"{timezone.localtime(base.aware(fleet.now)):%H:%M:%S}"
    return {"warnings": found, "known_at": base.time_element(fleet.now, fleet.now, text=clock)}


def _warnings(fleet: Fleet) -> list[tuple[str, str]]:
    """Return a sentence for each thing that is wrong, and the name of the page that helps."""
    if fleet.error:
        text = _("Redis is unreachable, so workers and queues cannot be shown: %(reason)s.")
        # The list of tasks is read from the database.
        return [(text % {"reason": fleet.error}, "changelist")]
    if not fleet.needs_redis:
        return []
    if not fleet.own_workers:
        return [(_no_worker(fleet.silence_seconds), "workers")]
    found = []
    if all(each.is_draining for each in fleet.own_workers):
        found.append((_("All workers were asked to take no more tasks."), "workers"))
    unserved = fleet.unserved()
    for queue in unserved[:MOST_NAMED]:
        text = _("No worker serves the queue %(queue)s, in which tasks wait.")
        found.append((text % {"queue": queue}, "queues"))
    if (more := len(unserved) - MOST_NAMED) > 0:
        text = ngettext("And %(count)d more queue.", "And %(count)d more queues.", more)
        found.append((text % {"count": more}, "queues"))
    if unknown := fleet.unknown():
        text = ngettext(
            "No running worker has the code of %(names)s. Its tasks wait for one.",
            "No running worker has the code of %(names)s. Their tasks wait for one.",
            len(unknown),
        )
        found.append((text % {"names": _named(unknown)}, "workers"))
    if paused := [pause.name for pause in fleet.pauses if pause.kind == PauseKind.QUEUE]:
        text = ngettext("Paused queue: %(names)s.", "Paused queues: %(names)s.", len(paused))
        found.append((text % {"names": _named(paused)}, "queues"))
    return found


def _named(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED] + ["…"] * (len(names) > MOST_NAMED))


def _no_worker(silence_seconds: float | None) -> str:
    if silence_seconds is None:
        return _("No worker is running. Start some with manage.py runworkers.")
    span = base.whole_duration(silence_seconds)
    return _("No worker has reported for %(span)s. Start some with manage.py runworkers.") % {"span": span}
