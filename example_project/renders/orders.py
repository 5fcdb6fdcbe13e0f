"""Validate an order for a render that comes from a client."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .catalogue import MODELS
from .palettes import PALETTES

SMALLEST, LARGEST, DEFAULT_SIZE = 64, 768, 384
LARGEST_SEED = 2**31 - 1
FIELDS = ("model", "seed", "size", "palette", "priority")


class BadOrder(Exception):
    """An order is invalid. errors: dict of field → what is expected of it."""

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {message}" for field, message in errors.items()))
        self.errors = errors


@dataclass(frozen=True, slots=True)
class Order:
    """A valid order."""

    model: str
    seed: int
    size: int
    palette: str
    priority: int = 0

    @property
    def params(self) -> dict[str, Any]:
        """The keyword arguments of the task."""
        return {"seed": self.seed, "size": self.size, "palette": self.palette}


def read_order(data: Any) -> Order:
    """Validate an order and fill in missing fields: a random seed, the palette of the model.

    data: the parsed JSON body. Raises: BadOrder, which names every invalid field.
    """
    if not isinstance(data, Mapping):
        raise BadOrder({"body": 'a JSON object, such as {"model": "fern"}'})
    errors = {field: f"unknown field; the fields are {', '.join(FIELDS)}" for field in data if field not in FIELDS}
    model, palette = data.get("model"), data.get("palette", "")
    if not isinstance(model, str) or model not in MODELS:
        errors["model"] = f"one of {', '.join(MODELS)}"
    if not isinstance(palette, str) or (palette and palette not in PALETTES):
        errors["palette"] = f"one of {', '.join(PALETTES)}, or omitted"
    numbers = {
        "seed": _whole(data, "seed", 0, LARGEST_SEED, random.randint(0, LARGEST_SEED), errors),
        "size": _whole(data, "size", SMALLEST, LARGEST, DEFAULT_SIZE, errors),
        "priority": _whole(data, "priority", -100, 100, 0, errors),
    }
    if errors:
        raise BadOrder(errors)
    return Order(model=str(model), palette=palette or MODELS[str(model)].palette, **numbers)


def _whole(data: Mapping[str, Any], field: str, least: int, most: int, default: int, errors: dict[str, str]) -> int:
    value = data.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        errors[field] = f"a whole number from {least} to {most}"
        return default
    return value
