"""Who may do what on the pages: each view and each action asks here, before it reads or changes anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed

View = TypeVar("View", bound=Callable[..., HttpResponse])


def has_right(request: HttpRequest, permission: str) -> bool:
    """Whether the user has a permission of the app, such as "retry_task"."""
    user: Any = request.user
    return bool(user.has_perm(f"django_asyncq.{permission}"))


def require(request: HttpRequest, *permissions: str) -> None:
    """Raise PermissionDenied unless the user has all of these permissions of the app."""
    if not all(has_right(request, permission) for permission in permissions):
        raise PermissionDenied


def requires(*permissions: str) -> Callable[[View], View]:
    """Let a view of a ModelAdmin answer only users who have all of these permissions of the app."""

    def decorate(view: View) -> View:
        @wraps(view)
        def checked(model_admin: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            require(request, *permissions)
            return view(model_admin, request, *args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def only_post(view: View) -> View:
    """Let a view of a ModelAdmin answer POST only: what it does must not follow from a link."""

    @wraps(view)
    def checked(model_admin: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        return view(model_admin, request, *args, **kwargs)

    return checked  # type: ignore[return-value]
