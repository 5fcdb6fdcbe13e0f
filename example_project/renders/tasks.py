"""The tasks of the studio: paint a picture where the site finds it, and sweep up what killed painters left."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

from django.conf import settings
from PIL.Image import Image

from django_asyncq import TaskContext, every, startup_task, task

from .catalogue import MODELS

logger = logging.getLogger("renders")

MAX_ATTEMPTS = 4
# No picture takes so long: the time-out is far below.
UNFINISHED_SECONDS = 3600
# Chance that a flaky model loses its first, second and third attempt; it never loses its last.
GLITCH_CHANCES = (0.8, 0.5, 0.3)


class RenderGlitch(Exception):
    """The picture was lost on the way; the next attempt may bring it."""


@task(
    queue_name="renders",
    takes_context=True,
    gate="{model}",
    queue_limit=4,
    expected_seconds=1,
    max_attempts=MAX_ATTEMPTS,
    backoff=1,
    give_up_on=(ValueError,),
    timeout=60,
    schedulable=True,
)
def render(context: TaskContext, model: str, **params: Any) -> dict[str, Any]:
    """Paint one picture. Safe to repeat: the seed decides the picture, and the file is replaced as a whole.

    params: seed, size and palette. Returns: the file's name and the seconds it took.
    Raises: RenderGlitch now and then for a flaky model; ValueError, for good, when it cannot be painted.
    """
    begun = time.perf_counter()
    id = context.task_result.id
    chosen = MODELS[model]
    image = chosen.paint(**params)
    if chosen.is_flaky and glitches(id, context.attempt):
        raise RenderGlitch(f"attempt {context.attempt} of {MAX_ATTEMPTS} was lost in the nebula")
    path = save(image, id)
    seconds = round(time.perf_counter() - begun, 2)
    logger.info("%s painted for %s in %.2f s", model, id, seconds)
    return {"image": path.name, "seconds": seconds}


def glitches(id: str, attempt: int) -> bool:
    """Decide whether a flaky model loses this attempt; the same answer whenever it is asked."""
    if attempt > len(GLITCH_CHANCES):
        return False
    draw = int.from_bytes(hashlib.sha256(f"{id}:{attempt}".encode()).digest()[:4])
    return draw / 2**32 < GLITCH_CHANCES[attempt - 1]


def image_path(id: uuid.UUID | str) -> Path:
    """Return where the picture of a task is, or will be. id: a UUID, never text from outside."""
    return images_folder() / f"{id}.png"


def images_folder() -> Path:
    """Return the folder of all pictures."""
    return settings.STUDIO_VAR / "images"


def save(image: Image, id: str) -> Path:
    """Write the picture under its name in one step, so that nobody ever reads half of it."""
    path = image_path(id)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: after a lost lease two processes may write the same picture.
    unfinished = path.with_name(f".{path.stem}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        image.save(unfinished, "PNG")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


@task(queue_name="renders", schedule=every(minutes=5, overlap="skip"))
def sweep() -> int:
    """Remove pictures that were left unfinished because their process was killed. Returns: how many."""
    removed = 0
    for path in images_folder().glob(".*.tmp"):
        if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


@startup_task("images folder")
def make_images_folder() -> None:
    """Let the first picture find its place."""
    images_folder().mkdir(parents=True, exist_ok=True)
