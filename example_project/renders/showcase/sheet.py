"""Make the contact sheet: every render of a demo in one picture, with captions."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from django_asyncq.models import TaskRecord, TaskState

from ..catalogue import MODELS
from ..presentation import error_of, lost_workers
from ..tasks import image_path

TILE, GAP, CAPTION, MARGIN = 168, 14, 38, 24
GROUND, INK, FAINT, WELL, ALARM = "#11101a", "#efedf8", "#aaa5c0", "#272338", "#ff8f8f"


def contact_sheet(records: Sequence[TaskRecord], path: Path) -> Path:
    """Write the sheet and return its path. The tile of a render without a picture shows the reason."""
    columns = min(8, max(1, len(records)))
    rows = max(1, math.ceil(len(records) / columns))
    width = 2 * MARGIN + columns * TILE + (columns - 1) * GAP
    height = 2 * MARGIN + rows * (TILE + CAPTION) + (rows - 1) * GAP
    sheet = Image.new("RGB", (width, height), GROUND)
    draw = ImageDraw.Draw(sheet)
    for number, record in enumerate(records):
        left = MARGIN + number % columns * (TILE + GAP)
        top = MARGIN + number // columns * (TILE + CAPTION + GAP)
        _tile(sheet, draw, record, left, top)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    sheet.save(unfinished, "PNG", optimize=True)
    unfinished.replace(path)
    return path


def _tile(sheet: Image.Image, draw: ImageDraw.ImageDraw, record: TaskRecord, left: int, top: int) -> None:
    title, detail = ImageFont.load_default(13), ImageFont.load_default(11)
    model = MODELS.get(record.args[0])
    draw.text((left, top + TILE + 4), model.title if model else record.args[0], INK, title)
    try:
        with Image.open(image_path(record.id)) as picture:
            sheet.paste(picture.convert("RGB").resize((TILE, TILE), Image.Resampling.LANCZOS), (left, top))
    except OSError:
        draw.rectangle((left, top, left + TILE - 1, top + TILE - 1), WELL)
        draw.line((left + 60, top + 60, left + TILE - 60, top + TILE - 60), ALARM, 3)
        draw.line((left + 60, top + TILE - 60, left + TILE - 60, top + 60), ALARM, 3)
    failed = record.state == TaskState.FAILED
    draw.text((left, top + TILE + 21), _detail(record)[:32], ALARM if failed else FAINT, detail)


def _detail(record: TaskRecord) -> str:
    if record.state == TaskState.FAILED:
        return error_of(record)
    result = record.return_value if isinstance(record.return_value, dict) else {}
    parts = [f"{result['seconds']:.1f} s"] if "seconds" in result else []
    if record.attempt > 1:
        parts.append(f"{record.attempt} attempts")
    if lost_workers(record):
        parts.append("recovered")
    return ", ".join(parts)
