"""Tests of the studio: `manage.py test renders`. They need no Redis."""

from __future__ import annotations

import json
import tempfile
import uuid
from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import Client, SimpleTestCase, TestCase
from PIL import Image

from django_asyncq import TaskCancelled
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.testing import lose_redis, make_context, run_tasks

from . import painters
from .catalogue import MODELS
from .gates import ensure_gates, meters
from .orders import BadOrder, read_order
from .palettes import PALETTES
from .presentation import films, gallery
from .showcase.processes import Stage, StageError
from .showcase.traffic import FEWEST, plan
from .tasks import (
    FILM_SIZE,
    FRAMES,
    MAX_ATTEMPTS,
    TILES,
    RenderGlitch,
    film,
    glitches,
    image_path,
    make_film,
    paint_tile,
    render,
    save,
)


@mock.patch.object(painters, "REACTION_STEPS", 300)
class PainterTests(SimpleTestCase):
    """The painters, the slow one with fewer steps."""

    def test_each_paints_a_picture_of_the_size_asked_for(self) -> None:
        """Every possible model gives an RGB picture with many colours."""
        for model in self.possible():
            with self.subTest(model.name):
                image = model.paint(seed=7, size=64)
                self.assertEqual((image.size, image.mode), ((64, 64), "RGB"))
                self.assertGreater(len(image.getcolors(64 * 64)), 16)

    def test_the_seed_decides_the_picture(self) -> None:
        """The same seed gives the same bytes; another seed gives others."""
        for model in self.possible():
            with self.subTest(model.name):
                first, again, other = (model.paint(seed=seed, size=64).tobytes() for seed in (1, 1, 2))
                self.assertEqual(first, again)
                self.assertNotEqual(first, other)

    def test_the_palette_can_be_chosen(self) -> None:
        """Each palette colours the same shape differently."""
        pictures = {MODELS["julia"].paint(seed=1, size=64, palette=name).tobytes() for name in PALETTES}
        self.assertEqual(len(pictures), len(PALETTES))

    def test_the_staircase_cannot_be_painted(self) -> None:
        """The impossible model raises ValueError, whatever the seed."""
        with self.assertRaisesMessage(ValueError, "cannot return to its start"):
            MODELS["staircase"].paint(seed=3, size=64)

    def possible(self) -> list[Any]:
        """Return the models that can be painted."""
        return [model for model in MODELS.values() if not model.is_impossible]


class OrderTests(SimpleTestCase):
    """Validation of orders."""

    def test_missing_fields_are_filled_in(self) -> None:
        """Only the model is required."""
        order = read_order({"model": "fern"})
        self.assertEqual((order.palette, order.size, order.priority), ("moss", 384, 0))
        self.assertEqual((order.visitor, order.wait), ("guest", False))
        self.assertEqual(read_order({"model": "fern", "visitor": " ann "}).visitor, "ann")
        self.assertEqual(read_order({"model": "fern", "visitor": "  "}).visitor, "guest")

    def test_every_invalid_field_is_named(self) -> None:
        """All errors are returned at once, each with its field."""
        bad = {"model": "x", "seed": -1, "size": 10**9, "palette": "mud", "priority": True, "name": "y"}
        bad |= {"visitor": "a\nb", "wait": 1}
        with self.assertRaises(BadOrder) as caught:
            read_order(bad)
        self.assertEqual(set(caught.exception.errors), set(bad))

    def test_an_order_must_be_an_object(self) -> None:
        """Other JSON values and fields of a wrong type are refused."""
        wrong_types = (
            {"model": ["fern"]},
            {"model": "fern", "palette": {}},
            {"model": "fern", "seed": 1.0},
            {"model": "fern", "visitor": 7},
            {"model": "fern", "visitor": "x" * 41},
        )
        for data in (None, [], "fern", 1, *wrong_types):
            with self.subTest(data=data), self.assertRaises(BadOrder):
                read_order(data)

    def test_a_plan_has_every_model_and_fills_the_slow_gate(self) -> None:
        """The smallest demo orders each model, and more of the slow one than its gate admits."""
        names = [request.body["model"] for request in plan(FEWEST, seed=1)]
        self.assertEqual((len(names), set(names)), (FEWEST, set(MODELS)))
        self.assertGreater(names.count("reaction"), MODELS["reaction"].limit)
        for request in plan(200, seed=2):
            read_order(request.body)


class StudioTestCase(TestCase):
    """A test with its own folder, whose tasks wait in their rows until the test runs them."""

    def setUp(self) -> None:
        """Change the settings for one test."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        backend = {**settings.TASKS["default"], "BACKEND": "django_asyncq.testing.TestBackend"}
        self.enterContext(self.settings(TASKS={"default": backend}, STUDIO_VAR=Path(folder)))
        ensure_gates()

    def order(self, data: Any, client: Client | None = None, **more: Any) -> Any:
        """POST an order to the API."""
        options = {"content_type": "application/json", **more}
        body = data if isinstance(data, bytes | str) else json.dumps(data)
        return (client or self.client).post("/api/renders", body, **options)


class ApiTests(StudioTestCase):
    """The JSON API."""

    def test_an_order_is_accepted_with_202(self) -> None:
        """The answer names the task and its URL; the row contains the order."""
        response = self.order({"model": "fern", "seed": 5, "size": 128})
        answer = response.json()
        self.assertEqual(response.status_code, 202)
        self.assertEqual(response["Location"], f"/api/renders/{answer['id']}")
        record = TaskRecord.objects.get(id=answer["id"])
        self.assertEqual((record.args, record.gate, record.state), (["fern"], "fern", TaskState.QUEUED))
        self.assertEqual(record.kwargs, {"seed": 5, "size": 128, "palette": "moss", "visitor": "guest"})
        self.assertEqual(self.client.get(answer["status_url"]).json()["state"], "queued")

    def test_a_full_gate_answers_429_with_retry_after(self) -> None:
        """The limit of the Gate row is enforced, nothing is written, and other gates are not affected."""
        Gate.objects.filter(name="fern").update(limit=2)
        answers = [self.order({"model": "fern"}).status_code for _ in range(3)]
        self.assertEqual(answers, [202, 202, 429])
        response = self.order({"model": "fern"})
        seconds = int(response["Retry-After"])
        self.assertGreaterEqual(seconds, 1)
        answer = response.json()
        self.assertEqual((answer["gate"], answer["limit"], answer["occupancy"]), ("fern", 2, 2))
        self.assertEqual(answer["retry_after"], seconds)
        self.assertEqual(TaskRecord.objects.count(), 2)
        self.assertEqual(self.order({"model": "julia"}).status_code, 202)

    def test_an_order_that_may_wait_gets_a_place_in_line(self) -> None:
        """It is accepted at a full gate; its card says its place, which falls when those before it are gone."""
        Gate.objects.filter(name="fern").update(limit=1)
        order = {"model": "fern", "size": 64, "visitor": "ann", "wait": True}
        ids = [self.order({**order, "seed": seed}).json()["id"] for seed in range(4)]
        self.assertEqual(self.order({**order, "wait": False}).status_code, 429)

        def notes() -> list[str]:
            found = {each["id"]: each["note"] for each in self.client.get("/api/renders").json()["renders"]}
            return [found[id] for id in ids]

        waits = "for ann · waits for a slot · "
        self.assertEqual(notes(), ["for ann", f"{waits}1st in line", f"{waits}2nd in line", f"{waits}3rd in line"])
        self.assertEqual(self.client.get(f"/api/renders/{ids[3]}").json()["place"], 3)
        gates = {model["name"]: model for model in self.client.get("/api/models").json()["models"]}
        self.assertEqual(gates["fern"]["text"], "1 of 1 slots, full, 3 waiting")
        self.client.delete(f"/api/renders/{ids[1]}")
        self.assertEqual(notes()[2:], [f"{waits}1st in line", f"{waits}2nd in line"])
        with lose_redis():
            self.assertEqual(notes()[2], "for ann · waits for a slot")
        run_tasks()
        self.assertTrue(all(image_path(id).exists() for id in (ids[0], *ids[2:])))

    def test_one_who_floods_waits_behind_himself(self) -> None:
        """The only render of another visitor is the second that is painted, and the page counts for each."""
        for seed in range(4):
            self.order({"model": "sketch", "size": 64, "seed": seed, "visitor": "bob"})
        last = self.order({"model": "sketch", "size": 64, "seed": 9, "visitor": "ann"}).json()["id"]
        found = self.client.get("/api/renders").json()["visitors"]
        texts = [(each["name"], each["text"]) for each in found]
        self.assertEqual(texts, [("ann", "0 of 1 done"), ("bob", "0 of 4 done")])
        done = [result.id for result in run_tasks()]
        self.assertIn(last, done[:2])
        found = self.client.get("/api/renders").json()["visitors"]
        self.assertEqual([each["text"] for each in found], ["1 of 1 done", "4 of 4 done"])

    def test_a_picture_is_the_same_whoever_orders_it(self) -> None:
        """The second visitor gets the URL of the first one's render."""
        order = {"model": "fern", "seed": 5, "size": 64}
        first = self.order({**order, "visitor": "ann"})
        again = self.order({**order, "visitor": "bob"})
        self.assertEqual((again.status_code, again.json()["id"]), (409, first.json()["id"]))

    def test_without_redis_an_order_is_refused_with_503(self) -> None:
        """A gate that cannot be checked admits nothing, and the answer has `Retry-After`."""
        with lose_redis():
            response = self.order({"model": "fern"})
        self.assertEqual((response.status_code, response["Retry-After"]), (503, "5"))
        self.assertEqual(response.json()["gate"], "fern")
        self.assertEqual(TaskRecord.objects.count(), 0)
        with lose_redis():
            self.assertEqual(self.order({"model": "fern", "wait": True}).status_code, 202)

    def test_invalid_requests_are_refused_with_a_reason(self) -> None:
        """Invalid JSON and fields give 400, form data 415, a long body 413, each with an error message."""
        cases = [
            (self.order({"model": "fern", "size": "big"}), 400),
            (self.order(b"{"), 400),
            (self.order(b"\xff\xfe"), 400),
            (self.order("[" * 100_000), 400),
            (self.order("model=fern", content_type="application/x-www-form-urlencoded"), 415),
            (self.order({"model": "fern"}, content_type="text/plain"), 415),
            (self.order(b" " * 3_000_000), 413),
        ]
        for response, status in cases:
            with self.subTest(status=status):
                self.assertEqual(response.status_code, status)
                self.assertTrue(response.json()["error"])
        self.assertEqual(TaskRecord.objects.count(), 0)

    def test_the_list_shows_the_newest_renders_the_gates_and_the_counts(self) -> None:
        """One request returns everything that the page shows."""
        ids = [self.order({"model": "julia"}).json()["id"] for _ in range(3)]
        found = self.client.get("/api/renders").json()
        self.assertEqual([render["id"] for render in found["renders"]], ids[::-1])
        self.assertEqual(found["counts"]["queued"], 3)
        gates = {model["name"]: model["text"] for model in found["models"]}
        self.assertEqual((gates["julia"], gates["fern"]), ("3 of 4 slots", "0 of 3 slots"))
        self.assertEqual(len(self.client.get("/api/models").json()["models"]), len(MODELS))

    def test_cards_and_counts_are_of_one_moment(self) -> None:
        """They are read by one statement, so they add up while renders run; without a render all counts are 0."""
        self.assertEqual(set(gallery(60)[1].values()), {0})
        for _ in range(6):
            self.order({"model": "mandelbrot"})
        with self.assertNumQueries(1):
            found, counts = gallery(4)
        self.assertEqual((len(found), sum(counts.values())), (4, TaskRecord.objects.count()))

    def test_the_same_picture_is_rendered_once_at_a_time(self) -> None:
        """A second order of it is refused with the first one's URL; another seed, or a later order, is accepted."""
        order = {"model": "fern", "seed": 5, "size": 64}
        first = self.order(order)
        again = self.order(order)
        self.assertEqual((first.status_code, again.status_code), (202, 409))
        self.assertEqual(again.json()["id"], first.json()["id"])
        self.assertEqual(again.json()["status_url"], first.json()["status_url"])
        self.assertEqual(again.json()["error"], "This picture is already being rendered.")
        self.assertEqual(self.order({**order, "seed": 6}).status_code, 202)
        self.assertEqual(len(run_tasks()), 2)
        self.assertTrue(image_path(first.json()["id"]).exists())
        self.assertEqual(self.order(order).status_code, 202)

    def test_a_queued_render_can_be_cancelled(self) -> None:
        """It never runs, its slot is free again, and so is the picture; a second DELETE finds it over."""
        Gate.objects.filter(name="fern").update(limit=1)
        url = self.order({"model": "fern", "seed": 5}).json()["status_url"]
        self.assertTrue(self.client.get(url).json()["cancel_url"])
        with self.captureOnCommitCallbacks(execute=True):
            self.assertEqual(self.client.delete(url).json()["cancel"], "cancelled")
        self.assertEqual(run_tasks(), [])
        found = self.client.get(url).json()
        self.assertEqual((found["state"], found["cancel_url"], gallery(1)[1]["cancelled"]), ("cancelled", None, 1))
        self.assertEqual(self.client.delete(url).json()["cancel"], "over")
        self.assertEqual(self.order({"model": "fern", "seed": 5}).status_code, 202)
        self.assertEqual(self.client.delete(f"/api/renders/{uuid.uuid4()}").status_code, 404)

    def test_a_running_render_shows_its_progress(self) -> None:
        """As a number from 0 to 1, for the bar on its card."""
        id = self.order({"model": "newton", "size": 64}).json()["id"]
        progress = {"done": 7, "total": 10, "message": "", "data": {}}
        TaskRecord.objects.filter(id=id).update(state=TaskState.RUNNING, progress=progress)
        found = self.client.get(f"/api/renders/{id}").json()
        self.assertEqual((found["state"], found["progress"]), ("running", 0.7))
        self.assertContains(self.client.get("/"), 'value="0.7"')
        self.assertEqual(self.client.delete(f"/api/renders/{id}").json()["cancel"], "asked")
        self.assertIn("asked to stop", self.client.get(f"/api/renders/{id}").json()["note"])

    def test_unknown_renders_and_methods_are_refused(self) -> None:
        """404 for an id without a row or no id at all, 405 for other methods."""
        self.assertEqual(self.client.get(f"/api/renders/{uuid.uuid4()}").status_code, 404)
        self.assertEqual(self.client.get("/api/renders/7").status_code, 404)
        self.assertEqual(self.client.delete("/api/renders").status_code, 405)

    def test_retrying_is_not_failed(self) -> None:
        """FAILED with `retry_at` is shown as retrying."""
        retrying = TaskRecord.objects.get(id=self.order({"model": "nebula"}).json()["id"])
        retrying.state, retrying.attempt, retrying.retry_at = TaskState.FAILED, 1, retrying.enqueued_at
        retrying.reason = FailureReason.EXCEPTION
        retrying.errors = [{"exception": "renders.tasks.RenderGlitch", "message": "lost\nmore"}]
        retrying.save()
        self.assertEqual(gallery(1)[1]["retrying"], 1)
        answer = self.client.get(f"/api/renders/{retrying.id}").json()
        self.assertEqual((answer["state"], answer["error"]), ("retrying", "RenderGlitch: lost"))
        self.assertIn("attempt 2 of 4", answer["note"])


class ImageTests(StudioTestCase):
    """The URLs of the pictures."""

    def test_a_picture_is_sent(self) -> None:
        """The answer is the PNG that was saved under the id."""
        id = str(uuid.uuid4())
        save(Image.new("RGB", (8, 8), "red"), id)
        response = self.client.get(f"/images/{id}.png")
        self.assertEqual((response.status_code, response["Content-Type"]), (200, "image/png"))
        self.assertEqual(Image.open(BytesIO(response.getvalue())).size, (8, 8))
        self.assertEqual([path.name for path in image_path(id).parent.iterdir()], [f"{id}.png"])

    def test_no_other_file_can_be_requested(self) -> None:
        """Missing pictures and paths outside the folder give 404."""
        (settings.STUDIO_VAR / "secret.png").write_text("secret")
        names = (f"{uuid.uuid4()}", "../secret", "..%2fsecret", "%2e%2e/secret", "/etc/passwd", "secret", "x" * 300)
        for name in names:
            with self.subTest(name):
                self.assertEqual(self.client.get(f"/images/{name}.png").status_code, 404)


class PageTests(StudioTestCase):
    """The page, and its form without JavaScript."""

    def test_the_page_shows_models_and_renders_and_loads_nothing_from_other_sites(self) -> None:
        """Everything is in the HTML, with nothing inline and nothing from another site."""
        id = self.order({"model": "fern"}).json()["id"]
        response = self.client.get("/")
        self.assertContains(response, f'data-id="{id}"')
        self.assertContains(response, "1 of 3 slots")
        self.assertNotContains(response, "http:")
        self.assertNotContains(response, "style=")
        self.assertIn("default-src 'self'", response["Content-Security-Policy"])

    def test_the_form_needs_its_token(self) -> None:
        """Without the token the answer is 403; with it the render is queued and the page says so."""
        strict = Client(enforce_csrf_checks=True)
        self.assertEqual(strict.post("/submit", {"model": "fern"}).status_code, 403)
        strict.get("/")
        token = strict.cookies["csrftoken"].value
        data = {"model": "fern", "copies": "5", "csrfmiddlewaretoken": token}
        response = strict.post("/submit", data, follow=True)
        self.assertContains(response, "3 accepted. The gate is full; try again in 1 s.", count=1)
        pressed = response.content.decode().partition('data-model="fern"')[2].partition("</form>")[0]
        self.assertIn("The gate is full", pressed)
        self.assertEqual(TaskRecord.objects.count(), 3)

    def test_the_form_knows_the_visitor_without_javascript(self) -> None:
        """The page carries the name and the wish to wait from its address into each form, and back."""
        page = self.client.get("/?visitor=ann+%22b%22&wait=1").content.decode()
        self.assertEqual(page.count('name="visitor" value="ann &quot;b&quot;"'), len(MODELS) + 3)
        self.assertEqual(page.count('<input type="hidden" name="wait" value="1">'), len(MODELS) + 2)
        Gate.objects.filter(name="fern").update(limit=1)
        data = {"model": "fern", "copies": "5", "visitor": "ann", "wait": "1"}
        response = self.client.post("/submit", data, follow=True)
        self.assertEqual(response.redirect_chain, [("/?visitor=ann&wait=1", 302)])
        self.assertContains(response, "5 accepted.")
        self.assertContains(response, "4th in line")
        self.assertContains(response, "0 of 5 done")
        self.assertEqual(TaskRecord.objects.waiting_at_gate("fern").count(), 4)
        data = {"model": "sketch", "copies": "40", "visitor": "ann"}
        self.assertContains(self.client.post("/submit", data, follow=True), "40 accepted.")
        self.assertContains(
            self.client.post("/submit", {**data, "visitor": "x" * 41}, follow=True), "visitor: a name of"
        )

    def test_a_picture_ordered_twice_with_the_form_is_rendered_once(self) -> None:
        """The seed decides the picture; the page says that it is already being rendered."""
        for seed, text in (
            ("5", "1 accepted."),
            ("5", "0 accepted. This picture is already"),
            ("six", "seed: a whole"),
        ):
            response = self.client.post("/submit", {"model": "fern", "seed": seed}, follow=True)
            self.assertContains(response, text)
        self.assertEqual(TaskRecord.objects.count(), 1)

    def test_the_cancel_button_needs_its_token(self) -> None:
        """Without the token the answer is 403; with it the render is cancelled and the page says so."""
        id = self.order({"model": "fern"}).json()["id"]
        strict = Client(enforce_csrf_checks=True)
        self.assertEqual(strict.post(f"/cancel/{id}").status_code, 403)
        self.assertContains(strict.get("/"), f'action="/cancel/{id}"')
        data = {"csrfmiddlewaretoken": strict.cookies["csrftoken"].value}
        self.assertContains(strict.post(f"/cancel/{id}", data, follow=True), "Cancelled.")
        self.assertContains(strict.post(f"/cancel/{id}", data, follow=True), "It had already finished.")
        self.assertContains(strict.post(f"/cancel/{uuid.uuid4()}", data, follow=True), "does not exist.")

    def test_the_api_needs_no_token(self) -> None:
        """A client without cookies may order; a form of another site cannot send JSON."""
        strict = Client(enforce_csrf_checks=True)
        self.assertEqual(self.order({"model": "fern"}, strict).status_code, 202)
        self.assertEqual(strict.post("/api/renders", {"model": "fern"}).status_code, 415)

    def test_an_invalid_form_shows_a_message(self) -> None:
        """An unknown model queues nothing."""
        response = self.client.post("/submit", {"model": "<b>"}, follow=True)
        self.assertContains(response, "model: one of mandelbrot")


class TaskTests(StudioTestCase):
    """The function of the task, called as a worker calls it."""

    def run_render(self, model: str, id: str, attempt: int = 1) -> dict[str, Any]:
        """Call the function with a context like the worker's."""
        context = make_context(render, attempt=attempt)
        context = replace(context, task_result=replace(context.task_result, id=id))
        return render.func(context, model, seed=1, size=64, palette="")

    def test_a_render_leaves_its_picture(self) -> None:
        """The result names the file; a second run gives the same bytes."""
        id = str(uuid.uuid4())
        self.assertEqual(self.run_render("julia", id)["image"], f"{id}.png")
        first = image_path(id).read_bytes()
        self.run_render("julia", id)
        self.assertEqual(image_path(id).read_bytes(), first)

    def test_a_cancelled_render_stops_between_two_steps(self) -> None:
        """The context says so, and no picture is left."""
        context = make_context(render, cancelled=True)
        with self.assertRaises(TaskCancelled):
            render.func(context, "flow", seed=1, size=64, palette="")
        self.assertFalse(image_path(context.task_result.id).exists())

    def test_a_flaky_model_succeeds_in_the_end(self) -> None:
        """Whether an attempt fails depends only on id and attempt; the last attempt never fails."""
        ids = [str(uuid.UUID(int=number)) for number in range(40)]
        self.assertFalse(any(glitches(id, MAX_ATTEMPTS) for id in ids))
        lost = next(id for id in ids if glitches(id, 1))
        with self.assertRaises(RenderGlitch):
            self.run_render("nebula", lost)
        self.assertFalse(image_path(lost).exists())
        self.run_render("nebula", lost, MAX_ATTEMPTS)
        self.assertTrue(image_path(lost).exists())

    def test_a_failed_save_leaves_no_file_behind(self) -> None:
        """When the disk is full, neither a partial picture nor a temporary file remains."""
        id = str(uuid.uuid4())
        image = mock.Mock(save=mock.Mock(side_effect=OSError("disk full")))
        with self.assertRaises(OSError):
            save(image, id)
        self.assertEqual(list(image_path(id).parent.iterdir()), [])


class FilmTests(StudioTestCase):
    """A film is a workflow: tiles, then frames, then the film."""

    def test_a_film_is_made_of_its_frames_and_these_of_their_tiles(self) -> None:
        """All steps are queued together; the last one leaves a film, which the page then shows."""
        response = self.client.post("/film", {"visitor": "ann"}, follow=True)
        self.assertContains(response, "The film is on its way.", count=1)
        steps = FRAMES * TILES + FRAMES + 1
        self.assertEqual(TaskRecord.objects.count(), steps)
        (queued,) = films()
        self.assertEqual((queued.text, queued.url), (f"0 of {steps} steps", ""))
        self.assertContains(response, f"0 of {steps} steps")
        self.assertEqual(self.client.get(f"/films/{queued.id}.gif").status_code, 404)
        run_tasks()
        (made,) = self.client.get("/api/renders").json()["films"]
        self.assertEqual((made["text"], made["url"]), (f"{steps} of {steps} steps", f"/films/{queued.id}.gif"))
        self.assertContains(self.client.get("/"), f'src="{made["url"]}"')
        with Image.open(BytesIO(self.client.get(made["url"]).getvalue())) as moving:
            self.assertEqual((moving.n_frames, moving.size), (2 * FRAMES - 2, (FILM_SIZE, FILM_SIZE)))

    def test_the_script_of_the_page_gets_json(self) -> None:
        """And needs the token all the same."""
        response = self.client.post("/film", headers={"Accept": "application/json"})
        self.assertEqual((response.status_code, response.json()["id"]), (202, str(films()[0].id)))
        self.assertEqual(Client(enforce_csrf_checks=True).post("/film").status_code, 403)

    def test_tiles_fit_together(self) -> None:
        """Four quarters are the frame, as one that is painted from all of its points."""
        tiles = [painters.zoom(2, number, 64, "ember", range) for number in range(TILES)]
        self.assertEqual({tile.size for tile in tiles}, {(32, 32)})
        whole = painters.plane(64, painters.MANDELBROT_REGIONS[0][0], 0.4)
        parts = [painters.zoom_points(2, number, 64) for number in range(TILES)]
        self.assertTrue((np.block([parts[:2], parts[2:]]) == whole).all())

    def test_a_tile_that_fails_for_good_ends_the_film(self) -> None:
        """What waits for it does not run, and the page says so."""
        film().enqueue()
        with mock.patch.object(painters, "zoom", side_effect=ValueError("no colours left")):
            run_tasks(until=timedelta(hours=1))
        (shown,) = films()
        self.assertEqual((shown.done, shown.failed, shown.url), (0, shown.total, ""))
        failed = TaskRecord.objects.filter(name=make_film.module_path).values_list("reason", flat=True)
        self.assertEqual(list(failed), [FailureReason.PARENT_FAILED])
        self.assertEqual(TaskRecord.objects.filter(name=paint_tile.module_path, attempt__gt=0).count(), FRAMES * TILES)


class CommandTests(StudioTestCase):
    """The commands that need no processes; `tests/project/test_example.py` runs the demo itself."""

    def test_gates_are_created_once_and_kept(self) -> None:
        """A limit set by a person is kept; a gate without a limit says so."""
        Gate.objects.filter(name="fern").update(limit=0)
        Gate.objects.filter(name="julia").delete()
        self.assertEqual((ensure_gates(), ensure_gates()), (1, 0))
        texts = {meter.model.name: meter.text for meter in meters()}
        self.assertEqual(texts["fern"], "0 queued or running, no limit")

    def test_the_demo_names_a_missing_package(self) -> None:
        """The error names the package and the command that installs it."""
        with (
            mock.patch("importlib.util.find_spec", return_value=None),
            self.assertRaisesMessage(CommandError, 'pip install -e ".[demo]"'),
        ):
            call_command("demo")

    def test_a_demo_with_too_few_orders_is_refused(self) -> None:
        """Fewer orders would not fill a gate."""
        with self.assertRaisesMessage(CommandError, "at least 13"):
            call_command("demo", count=5)

    def test_a_process_that_exits_stops_the_demo_with_its_log(self) -> None:
        """The error contains the end of the log of the process."""
        with Stage(settings.STUDIO_VAR, {}) as stage:
            stage.start("site", "no_such_command")
            with self.assertRaisesMessage(StageError, "Unknown command: 'no_such_command'"):
                stage.wait_for_file("site", settings.STUDIO_VAR / "never")
