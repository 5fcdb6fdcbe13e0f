"""What the head of each page says when tasks are not being run. Nothing while all is well."""

from __future__ import annotations

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import PauseKind
from . import display
from .fleet import Fleet, fleet_of
from .permissions import has_right

MOST_NAMED = 3


def warnings_of(request: HttpRequest) -> list[str]:
    """Return a sentence for each thing that is wrong, for a user who may see tasks."""
    return _warnings(fleet_of(request)) if has_right(request, "view_taskrecord") else []


def _warnings(fleet: Fleet) -> list[str]:
    if fleet.error:
        return [_("Redis is unreachable, so workers and queues cannot be shown: %(reason)s.") % {"reason": fleet.error}]
    if not fleet.needs_redis:
        return []
    if not fleet.own_workers:
        return [_no_worker(fleet.silence_seconds)]
    found = []
    if all(each.is_draining for each in fleet.own_workers):
        found.append(_("All workers were asked to take no more tasks."))
    unserved = fleet.unserved()
    for queue in unserved[:MOST_NAMED]:
        found.append(_("No worker serves the queue %(queue)s, in which tasks wait.") % {"queue": queue})
    if (more := len(unserved) - MOST_NAMED) > 0:
        text = ngettext("So it is with %(count)d more queue.", "So it is with %(count)d more queues.", more)
        found.append(text % {"count": more})
    if paused := [pause.name for pause in fleet.pauses if pause.kind == PauseKind.QUEUE]:
        text = ngettext("Paused queue: %(names)s.", "Paused queues: %(names)s.", len(paused))
        shown = paused[:MOST_NAMED] + ["…"] * (len(paused) > MOST_NAMED)
        found.append(text % {"names": ", ".join(shown)})
    return found


def _no_worker(silence_seconds: float | None) -> str:
    if silence_seconds is None:
        return _("No worker is running. Start some with manage.py runworkers.")
    span = display.whole_duration(silence_seconds)
    return _("No worker has reported for %(span)s. Start some with manage.py runworkers.") % {"span": span}
