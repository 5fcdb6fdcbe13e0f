"""The health of the fleet as JSON and as the status of the answer: `path("health", health_view)`."""

from __future__ import annotations

import time
from dataclasses import asdict
from threading import Lock

from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse

from .access import may_read
from .inspector import Health, Inspector

# Anybody may ask, so a burst of requests costs one look.
SECONDS_KEPT = 1.0
MOST_KEPT = 50
LARGEST_LIMIT = 1e9
LIMITS = ("max_age", "max_waiting", "max_silence")

_lock = Lock()
_kept: dict[tuple[float | None, ...], tuple[float, Health]] = {}


def health_view(request: HttpRequest) -> HttpResponse:
    """Answer 200 when tasks are being run, 503 when not, and `{"healthy": …}`.

    `max_age`, `max_silence`: seconds; `max_waiting`: a number of tasks; see `Inspector.health`. Without them only what
    is always a problem counts, such as a store that is unreachable. Those who may read the numbers get the problems
    and the numbers too. A limit that is no number, or that there is not, is answered with 400.
    """
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD"])
    try:
        _check_names(request)
        limits = tuple(_limit(request, name) for name in LIMITS)
    except ValueError as error:
        return JsonResponse({"error": str(error)}, status=400)
    health = _look(limits)
    found = {"healthy": health.is_healthy}
    if may_read(request):
        found |= {name: value for name, value in asdict(health).items() if name != "is_healthy"}
    answer = JsonResponse(found, status=200 if health.is_healthy else 503)
    answer["Cache-Control"] = "no-store"
    return answer


def _check_names(request: HttpRequest) -> None:
    """Refuse limits that there are not: without its limit a monitor would never warn. Other parameters are let through.

    Raises: ValueError, with a text for people.
    """
    unknown = sorted(name for name in request.GET if name.startswith("max_") and name not in LIMITS)
    if unknown:
        raise ValueError(f"no limit is called {unknown[0][:50]!r}: the limits are {', '.join(LIMITS)}")


def _limit(request: HttpRequest, name: str) -> float | None:
    """Return a limit of the request; None for none. Raises: ValueError, with a text for people."""
    written = request.GET.get(name, "")
    if not written:
        return None
    try:
        limit = float(written)
    except ValueError:
        limit = -1.0
    if not 0 <= limit <= LARGEST_LIMIT:
        raise ValueError(f"{name} must be a number, at least 0, not {written[:50]!r}")
    return limit


def _look(limits: tuple[float | None, ...]) -> Health:
    """Return the health by these limits, at most a second old."""
    with _lock:
        kept = _kept.get(limits)
        if kept is not None and time.monotonic() - kept[0] < SECONDS_KEPT:
            return kept[1]
        max_age, max_waiting, max_silence = limits
        health = Inspector().health(
            max_age_seconds=max_age,
            max_waiting=None if max_waiting is None else int(max_waiting),
            max_silence_seconds=max_silence,
        )
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[limits] = (time.monotonic(), health)
    return health
