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
LONGEST_NAME = 40
# Of a visitor who says none.
NOBODY = "guest"
FIELDS = ("model", "seed", "size", "palette", "priority", "visitor", "wait")


class BadOrder(Exception):
    """An order is invalid. errors: dict of field → what is expected of it."""

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {message}" for field, message in errors.items()))
        self.errors = errors


@dataclass(frozen=True, slots=True)
class Order:
    """A valid order. visitor: who shares the workers fairly with others. wait: whether it may wait at a full gate."""

    model: str
    seed: int
    size: int
    palette: str
    priority: int = 0
    visitor: str = NOBODY
    wait: bool = False

    @property
    def params(self) -> dict[str, Any]:
        """The keyword arguments of the task."""
        return {"seed": self.seed, "size": self.size, "palette": self.palette, "visitor": self.visitor}


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
    visitor, wait = data.get("visitor", ""), data.get("wait", False)
    if not isinstance(visitor, str) or not visitor.isprintable() or len(visitor.strip()) > LONGEST_NAME:
        errors["visitor"] = f"a name of at most {LONGEST_NAME} printable characters, or omitted"
    if not isinstance(wait, bool):
        errors["wait"] = "true, to wait at a full gate, or false"
    numbers = {
        "seed": _whole(data, "seed", 0, LARGEST_SEED, random.randint(0, LARGEST_SEED), errors),
        "size": _whole(data, "size", SMALLEST, LARGEST, DEFAULT_SIZE, errors),
        "priority": _whole(data, "priority", -100, 100, 0, errors),
    }
    if errors:
        raise BadOrder(errors)
    name = str(visitor).strip() or NOBODY
    return Order(model=str(model), palette=palette or MODELS[str(model)].palette, visitor=name, wait=wait, **numbers)


def _whole(data: Mapping[str, Any], field: str, least: int, most: int, default: int, errors: dict[str, str]) -> int:
    value = data.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        errors[field] = f"a whole number from {least} to {most}"
        return default
    return value
