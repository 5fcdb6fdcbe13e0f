"""Colours: a palette turns numbers from 0 to 1 into RGB. Pure functions over NumPy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Pixels = NDArray[np.uint8]

# Colours at equal distances from 0 to 1, dark to light, so that a density or an escape time reads as depth.
PALETTES: dict[str, tuple[str, ...]] = {
    "ember": ("#050308", "#2a0a3a", "#7a1246", "#c9302c", "#f47a20", "#fbc25e", "#fff4d6"),
    "lagoon": ("#02060f", "#06243f", "#0b5563", "#14917c", "#5fc9a0", "#c4ecc4", "#fdfbe4"),
    "dusk": ("#07051a", "#241a5a", "#5a2a8c", "#a8388a", "#e8627c", "#fba98a", "#fff0dc"),
    "moss": ("#030a06", "#0d2a1c", "#1f5230", "#4b8134", "#93b447", "#d9dc82", "#fdfbe2"),
    "aurora": ("#04040e", "#0c1d4a", "#0f5c7a", "#1fa187", "#7fd36b", "#e6e07a", "#fff8e8"),
    "frost": ("#03060d", "#10274d", "#28558f", "#5b8fc7", "#9cc5e3", "#d8ebf2", "#ffffff"),
}


def colours_of(name: str) -> Floats:
    """Return a palette's colours as an array of shape (n, 3), 0 to 255."""
    return np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in PALETTES[name]], dtype=float)


def colourise(values: Floats, name: str) -> Pixels:
    """Return the RGB pixels of values from 0 to 1; values outside are clipped."""
    colours = colours_of(name)
    positions = np.linspace(0, 1, len(colours))
    clipped = np.nan_to_num(np.clip(values, 0, 1))
    channels = [np.interp(clipped, positions, colours[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).astype(np.uint8)


def equalise(values: Floats, mask: NDArray[np.bool_] | None = None) -> Floats:
    """Spread values evenly over 0 to 1 by their rank; where the mask is false the result is 0.

    Escape times are concentrated at one end; ranks give each colour the same area.
    """
    chosen = values if mask is None else values[mask]
    result = np.zeros(values.shape)
    if chosen.size == 0:
        return result
    edges = np.linspace(chosen.min(), chosen.max() + 1e-9, 1025)
    counts, _ = np.histogram(chosen, bins=edges)
    share = np.concatenate([[0.0], np.cumsum(counts) / chosen.size])
    spread = np.interp(chosen, edges, share)
    if mask is None:
        return spread.reshape(values.shape)
    result[mask] = spread
    return result


def shade(pixels: Pixels, light: Floats) -> Pixels:
    """Return the pixels darkened or lightened by a factor per pixel."""
    return np.clip(pixels * light[..., None], 0, 255).astype(np.uint8)
