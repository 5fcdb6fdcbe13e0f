"""The one task of the studio: paint a picture and put it where the site finds it."""

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

from django_asyncq import TaskContext, task

from .catalogue import MODELS

logger = logging.getLogger("renders")

MAX_ATTEMPTS = 4
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
    return settings.STUDIO_VAR / "images" / f"{id}.png"


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
