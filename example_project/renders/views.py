"""The page, and the JSON API that the page and other clients use.

The API ignores cookies and has no users: every client that can reach the URL may order and cancel. An order
requires `Content-Type: application/json`, and a cancel is a DELETE. A browser sends either to another origin only after
a preflight request, which the site never allows. Together with ALLOWED_HOSTS this protects as CSRF tokens would. The
forms of the page, which are used when JavaScript is off, are ordinary forms with a CSRF token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import RequestDataTooBig
from django.http import FileResponse, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import redirect
from django.shortcuts import render as render_template
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from django_asyncq import DuplicateTask, GateUnavailable, QueueFull
from django_asyncq.core.compat import TaskResultDoesNotExist

from .catalogue import MODELS
from .gates import meters
from .orders import LONGEST_NAME, BadOrder, Order, read_order
from .palettes import PALETTES
from .presentation import (
    describe_all,
    describe_film,
    describe_meter,
    describe_visitor,
    films,
    gallery,
    renders,
    visitors,
)
from .tasks import film, image_path, render

SHOWN = 60
SECONDS_UNTIL_REDIS_IS_BACK = 5
FILM_ORDERED = "The film is on its way."
DUPLICATE = "This picture is already being rendered."
# What a person reads of the three answers of `cancel`.
CANCEL_TEXTS = {
    "cancelled": "Cancelled.",
    "asked": "The worker was asked to stop.",
    "over": "It had already finished.",
}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

View = Callable[..., HttpResponseBase]


def queue_render(order: Order) -> Any:
    """Enqueue one render. Raises: DuplicateTask, QueueFull, GateUnavailable."""
    model = MODELS[order.model]
    # The limit and the seconds apply only while no Gate row of that name exists.
    task = render.using(
        priority=order.priority,
        queue_limit=model.limit,
        expected_seconds=model.expected_seconds,
        on_full="wait" if order.wait else "reject",
    )
    return task.enqueue(order.model, **order.params)


def error_answer(status: int, error: str, **more: Any) -> JsonResponse:
    """Return an error as JSON: `error` is one sentence for a person, the other keys are for programs."""
    return JsonResponse({"error": error, **more}, status=status)


def answers_in_json(view: View) -> View:
    """Turn the errors of an order into 400, 409, 429 and 503; the last two have `Retry-After`."""

    @wraps(view)
    def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            return view(request, *args, **kwargs)
        except BadOrder as error:
            return error_answer(400, "The order has errors.", errors=error.errors)
        except DuplicateTask as error:
            # The one that holds the key may have finished at this moment; then there is none to name.
            url = reverse("render", args=[error.existing_id]) if error.existing_id else None
            return error_answer(409, DUPLICATE, id=error.existing_id, status_url=url)
        except QueueFull as error:
            response = error_answer(
                429,
                f"The gate {error.gate} is full.",
                gate=error.gate,
                limit=error.limit,
                occupancy=error.occupancy,
                retry_after=error.retry_after,
            )
            response["Retry-After"] = str(error.retry_after)
            return response
        except GateUnavailable as error:
            response = error_answer(
                503,
                f"The gate {error.gate} cannot be checked, because Redis is unreachable.",
                gate=error.gate,
                retry_after=SECONDS_UNTIL_REDIS_IS_BACK,
            )
            response["Retry-After"] = str(SECONDS_UNTIL_REDIS_IS_BACK)
            return response

    return answer


@require_GET
def index(request: HttpRequest) -> HttpResponse:
    """Show the models with their gates and the gallery."""
    found, counts = gallery(SHOWN)
    said = list(messages.get_messages(request))
    context = {
        # An answer to an order is beside the button that was pressed; the tag of its message names the model.
        "meters": [
            {
                **describe_meter(meter),
                "copies": meter.model.copies,
                "said": [each for each in said if each.extra_tags == meter.model.name],
            }
            for meter in meters()
        ],
        "film_said": [each for each in said if each.extra_tags == "film"],
        "said": [each for each in said if each.extra_tags not in (*MODELS, "film")],
        "palettes": list(PALETTES),
        "cards": describe_all(found),
        "counts": counts,
        "visitors": visitors(),
        "films": films(),
        # What its form sets, and each order of the page carries on when JavaScript is off.
        "visitor": request.GET.get("visitor", "")[:LONGEST_NAME],
        "wait": request.GET.get("wait") == "1",
        "longest_name": LONGEST_NAME,
    }
    response = render_template(request, "renders/index.html", context)
    response["Content-Security-Policy"] = POLICY
    return response


@require_POST
def submit(request: HttpRequest) -> HttpResponse:
    """Accept an order from the form of the page when JavaScript is off, and show a message."""
    accepted, model = 0, request.POST.get("model", "")
    most = MODELS[model].copies if model in MODELS else 1
    copies = most if request.POST.get("copies") == str(most) else 1
    try:
        for _ in range(copies):
            # Without a seed each copy gets another one, and so is another picture.
            queue_render(read_order(form_data(request)))
            accepted += 1
    except BadOrder as error:
        messages.error(request, str(error), model)
    except DuplicateTask:
        messages.warning(request, f"{accepted} accepted. {DUPLICATE}", model)
    except QueueFull as error:
        text = f"{accepted} accepted. The gate is full; try again in {error.retry_after} s."
        messages.warning(request, text, model)
    except GateUnavailable:
        text = f"{accepted} accepted. The gate cannot be checked, because Redis is unreachable."
        messages.error(request, text, model)
    else:
        messages.success(request, f"{accepted} accepted.", model)
    return back_to_the_page(request)


@require_POST
def order_film(request: HttpRequest) -> HttpResponse:
    """Enqueue all steps of a film together, and show a message; the script of the page gets it as JSON."""
    last = film().enqueue()
    if not request.accepts("text/html"):
        return JsonResponse({"id": last.id, "text": FILM_ORDERED}, status=202)
    messages.success(request, FILM_ORDERED, "film")
    return back_to_the_page(request)


def back_to_the_page(request: HttpRequest) -> HttpResponse:
    """Show the page again as the visitor has set it."""
    kept = {name: value for name in ("visitor", "wait") if (value := request.POST.get(name))}
    return redirect(f"{reverse('index')}?{urlencode(kept)}" if kept else "index")


def form_data(request: HttpRequest) -> dict[str, Any]:
    """Return the order in the fields of the form. A seed that is no number stays text, which is refused."""
    data: dict[str, Any] = {name: request.POST.get(name, "") for name in ("model", "palette", "visitor")}
    data["wait"] = request.POST.get("wait") == "1"
    if seed := request.POST.get("seed", "").strip():
        data["seed"] = int(seed) if seed.isascii() and seed.isdigit() and len(seed) < 20 else seed
    return data


@require_POST
def cancel(request: HttpRequest, id: UUID) -> HttpResponse:
    """Cancel a render with the button of the page when JavaScript is off, and show a message."""
    try:
        messages.info(request, CANCEL_TEXTS[render.get_result(str(id)).cancel(reason="by a visitor")])
    except TaskResultDoesNotExist:
        messages.error(request, f"Render {id} does not exist.")
    return back_to_the_page(request)


@require_GET
def models(request: HttpRequest) -> JsonResponse:
    """List the models, their limits and the occupancy of their gates."""
    return JsonResponse({"models": [describe_meter(meter) for meter in meters()]})


@csrf_exempt
@require_http_methods(["GET", "POST"])
@answers_in_json
def render_list(request: HttpRequest) -> HttpResponseBase:
    """List the newest renders and films, the gates, the counts and the visitors (GET), or order a render (POST).

    POST answers 202 with the id and `Location`, or 400, 413 or 415 for an invalid request. It answers 409 with the id
    of the render that is queued or running when that is the same picture, 429 with `Retry-After` when the gate is full,
    and 503 with `Retry-After` when Redis is unreachable: a gate that cannot be checked admits nothing. An order with
    `"wait": true` is accepted in both cases, and its render waits for a slot. The view needs no CSRF token for the
    reason given at the top of this module.
    """
    if request.method == "POST":
        return take_order(request)
    found, counts = gallery(SHOWN)
    return JsonResponse(
        {
            "renders": describe_all(found),
            "models": [describe_meter(meter) for meter in meters()],
            "counts": counts,
            "visitors": [describe_visitor(each) for each in visitors()],
            "films": [describe_film(each) for each in films()],
        }
    )


def take_order(request: HttpRequest) -> JsonResponse:
    """Read the order, enqueue the render, answer with its URLs. Raises: BadOrder, EnqueueRefused."""
    if request.content_type != "application/json":
        return error_answer(415, "Send the order as JSON, with Content-Type: application/json.")
    try:
        data = json.loads(request.body)
    except RequestDataTooBig:
        return error_answer(413, "The order is too long.")
    except (ValueError, RecursionError):
        return error_answer(400, "The body is not valid JSON.", errors={"body": 'such as {"model": "fern"}'})
    order = read_order(data)
    result = queue_render(order)
    status_url = reverse("render", args=[result.id])
    accepted = {
        "id": result.id,
        "model": order.model,
        "state": "queued",
        "seed": order.seed,
        "status_url": status_url,
        "image_url": reverse("image", args=[result.id]),
    }
    return JsonResponse(accepted, status=202, headers={"Location": status_url})


@csrf_exempt
@require_http_methods(["GET", "DELETE"])
def render_detail(request: HttpRequest, id: UUID) -> JsonResponse:
    """Return the status of a render (GET), or cancel it (DELETE); 404 when no render has this id.

    DELETE answers with `cancel`: "cancelled", or "asked" for one that runs, or "over". A browser sends it to another
    origin only after a preflight request, so it needs no CSRF token either.
    """
    record = renders().filter(id=id).first()
    if record is None:
        return error_answer(404, f"Render {id} does not exist.")
    if request.method == "DELETE":
        answer = render.get_result(str(id)).cancel(reason="by a visitor")
        return JsonResponse({"id": str(id), "cancel": answer, "text": CANCEL_TEXTS[answer]})
    return JsonResponse(*describe_all([record]))


@require_GET
def image(request: HttpRequest, id: UUID) -> HttpResponseBase:
    """Send a picture. The URL contains only a UUID, so no other file can be requested."""
    return send_file(id, "png", "Picture")


@require_GET
def film_image(request: HttpRequest, id: UUID) -> HttpResponseBase:
    """Send a film. As with pictures, the URL contains only a UUID."""
    return send_file(id, "gif", "Film")


def send_file(id: UUID, kind: str, title: str) -> HttpResponseBase:
    """Send what a task has made, or answer 404."""
    try:
        file = image_path(id, kind).open("rb")
    except FileNotFoundError:
        return error_answer(404, f"{title} {id} does not exist, or is not finished yet.")
    # The file of an id never changes.
    headers = {"Cache-Control": "private, max-age=86400, immutable"}
    return FileResponse(file, content_type=f"image/{kind}", headers=headers)
