"""Access to the pages for monitors: a program with ASYNCQ["MONITOR_TOKEN"], or a member of staff."""

from __future__ import annotations

from django.http import HttpRequest
from django.utils.crypto import constant_time_compare

from .. import conf

SCHEME = "bearer "


def may_read(request: HttpRequest) -> bool:
    """Whether a request has the token in `Authorization: Bearer …`, or is that of a member of staff."""
    token, header = conf.current().monitor_token, request.headers.get("Authorization", "")
    scheme, given = header[: len(SCHEME)].lower(), header[len(SCHEME) :].strip()
    if token and scheme == SCHEME and constant_time_compare(given, token):
        return True
    user = getattr(request, "user", None)
    return bool(user is not None and user.is_active and user.is_staff)
