"""The tasks of the studio: paint a picture, make a film in parts, remove files that killed workers left unfinished."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings
from PIL import Image

from django_asyncq import TaskContext, Workflow, every, group, previous, startup_task, task

from . import painters
from .catalogue import MODELS
from .orders import NOBODY

logger = logging.getLogger("renders")

MAX_ATTEMPTS = 4
# Far longer than the timeout of a render, so no file of a running render is this old.
UNFINISHED_SECONDS = 3600
# Chance that the first, second and third attempt of a flaky model fails; its last attempt never does.
GLITCH_CHANCES = (0.8, 0.5, 0.3)
# Of a film: a workflow of 31 tasks.
FRAMES, TILES, FILM_SIZE = 6, 4, 240


class RenderGlitch(Exception):
    """A flaky render lost its picture. The next attempt may succeed."""


def picture(model: str, visitor: str = NOBODY, **params: Any) -> str:
    """Return which picture a call of `render` paints, whoever has ordered it: no other call paints it meanwhile."""
    return json.dumps([model, params], sort_keys=True)


@task(
    queue_name="renders",
    takes_context=True,
    gate="{model}",
    queue_limit=4,
    expected_seconds=1,
    fair="{visitor}",
    max_attempts=MAX_ATTEMPTS,
    backoff=1,
    give_up_on=(ValueError,),
    timeout=60,
    schedulable=True,
    unique=picture,
)
def render(context: TaskContext, model: str, visitor: str = NOBODY, **params: Any) -> dict[str, Any]:
    """Paint one picture and save it. The same picture is not rendered twice at a time.

    It is safe to repeat: the seed decides the picture, and the file is replaced in one step.
    visitor: who has ordered it; visitors share the workers fairly. params: seed, size and palette.
    Returns: the file's name and the duration in seconds.
    Raises: RenderGlitch at random for a flaky model; ValueError, which is not retried, for an impossible model;
    TaskCancelled between two steps when somebody has cancelled it.
    """
    begun = time.perf_counter()
    id = context.task_result.id
    chosen = MODELS[model]
    image = chosen.paint(**params, steps=partial(counted, context))
    if chosen.is_flaky and glitches(id, context.attempt):
        raise RenderGlitch(f"attempt {context.attempt} of {MAX_ATTEMPTS} was lost in the nebula")
    path = save(image, id)
    seconds = round(time.perf_counter() - begun, 2)
    logger.info("%s painted for %s in %.2f s", model, id, seconds)
    return {"image": path.name, "seconds": seconds}


def counted(context: TaskContext, total: int) -> Iterator[int]:
    """Count the steps of a painter: stop it when the task is cancelled, and note how far it is."""
    for done in range(total):
        context.check()
        context.progress(done, total)
        yield done


def glitches(id: str, attempt: int) -> bool:
    """Whether this attempt of a flaky model fails. The answer depends on id and attempt only."""
    if attempt > len(GLITCH_CHANCES):
        return False
    draw = int.from_bytes(hashlib.sha256(f"{id}:{attempt}".encode()).digest()[:4])
    return draw / 2**32 < GLITCH_CHANCES[attempt - 1]


# --- A film: its tiles are painted side by side; a frame waits for its tiles, and the film for its frames. Each part is
# --- a file, and its name is the value that the next part gets.


@task(queue_name="renders", takes_context=True, fair="films", max_attempts=MAX_ATTEMPTS, timeout=60)
def paint_tile(context: TaskContext, frame: int, tile: int) -> str:
    """Paint one quarter of a frame. Returns: the name of its file."""
    image = painters.zoom(frame, tile, FILM_SIZE, "ember", partial(counted, context))
    return save(image, context.task_result.id).name


@task(queue_name="renders", takes_context=True, fair="films", max_attempts=MAX_ATTEMPTS, timeout=60)
def join_tiles(context: TaskContext, tiles: list[str]) -> str:
    """Put a frame together. tiles: the names of their files, row by row. Returns: the name of its file."""
    frame = Image.new("RGB", (FILM_SIZE, FILM_SIZE))
    for number, name in enumerate(tiles):
        row, column = divmod(number, 2)
        with Image.open(images_folder() / name) as tile:
            frame.paste(tile, (column * FILM_SIZE // 2, row * FILM_SIZE // 2))
    return save(frame, context.task_result.id).name


@task(queue_name="renders", takes_context=True, fair="films", max_attempts=MAX_ATTEMPTS, timeout=60)
def make_film(context: TaskContext, frames: list[str]) -> dict[str, Any]:
    """Make a film that goes in and out again. frames: the names of their files. Returns: the name of the film's."""
    images = []
    for name in frames:
        with Image.open(images_folder() / name) as frame:
            images.append(frame.copy())
    more = [*images[1:], *images[-2:0:-1]]
    options = {"save_all": True, "append_images": more, "duration": 160, "loop": 0}
    return {"film": save(images[0], context.task_result.id, "gif", **options).name}


def film() -> Workflow[Any]:
    """Return the steps of one film, which are enqueued together: tiles, then frames, then the film."""
    joined = join_tiles.using(after={"tiles": previous}).step()
    shots = [group([paint_tile.step(frame, tile) for tile in range(TILES)], then=joined) for frame in range(FRAMES)]
    return group(shots, then=make_film.using(after={"frames": previous}).step())


def image_path(id: uuid.UUID | str, kind: str = "png") -> Path:
    """Return the path of a task's picture, or with the kind "gif" of its film. id: a UUID, never unchecked input."""
    return images_folder() / f"{id}.{kind}"


def images_folder() -> Path:
    """Return the folder of the pictures."""
    return settings.STUDIO_VAR / "images"


def save(image: Image.Image, id: str, kind: str = "png", **options: Any) -> Path:
    """Write the picture and rename it in one step, so that nobody reads a partial file. options: as of Pillow."""
    path = image_path(id, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique, because after a lost lease two processes may write the same picture.
    unfinished = path.with_name(f".{path.stem}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        image.save(unfinished, kind, **options)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


@task(queue_name="renders", schedule=every(minutes=5, overlap="skip"))
def remove_unfinished_pictures() -> int:
    """Remove the temporary files of processes that were killed. Returns: how many."""
    removed = 0
    for path in images_folder().glob(".*.tmp"):
        if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


@startup_task("images folder")
def make_images_folder() -> None:
    """Create the folder of the pictures."""
    images_folder().mkdir(parents=True, exist_ok=True)
