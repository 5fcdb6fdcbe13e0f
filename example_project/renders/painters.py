"""The painters: functions from (random generator, size, palette, steps) to a picture.

All randomness comes from the generator, so the same seed gives the same picture. A render that is retried, or whose
worker was killed, therefore gives the picture that its first attempt would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from .palettes import Floats, Pixels, colourise, colours_of, equalise, shade

# A `range` that may do something at each step, such as to note how far the picture is, or to raise and so stop it.
Steps = Callable[[int], Iterable[int]]
Painter = Callable[[Generator, int, str, Steps], Image.Image]
Complexes = NDArray[np.complexfloating]

# Centre and half width of interesting regions.
MANDELBROT_REGIONS = (
    (-0.743643887 + 0.131825904j, 0.0035),
    (-0.7463 + 0.1102j, 0.006),
    (-1.25066 + 0.02012j, 0.0022),
    (-0.16 + 1.0405j, 0.028),
    (-1.7685 + 0.0017j, 0.012),
    (-0.722 + 0.246j, 0.019),
)
JULIA_SEEDS = (
    -0.8 + 0.156j,
    -0.7269 + 0.1889j,
    0.285 + 0.01j,
    -0.4 + 0.6j,
    -0.835 - 0.2321j,
    -0.70176 - 0.3842j,
)
CLIFFORD = (
    (-1.4, 1.6, 1.0, 0.7),
    (1.7, 1.7, 0.6, 1.2),
    (-1.7, 1.3, -0.1, -1.2),
    (1.5, -1.8, 1.6, 0.9),
    (-1.8, -2.0, -0.5, -0.9),
)
# Each fern: rows of a, b, c, d, e, f and the chance of being chosen.
# Source: Barnsley, "Fractals Everywhere", 1988.
FERNS = (
    (
        (0.0, 0.0, 0.0, 0.16, 0.0, 0.0, 0.01),
        (0.85, 0.04, -0.04, 0.85, 0.0, 1.6, 0.85),
        (0.2, -0.26, 0.23, 0.22, 0.0, 1.6, 0.07),
        (-0.15, 0.28, 0.26, 0.24, 0.0, 0.44, 0.07),
    ),
    (
        (0.0, 0.0, 0.0, 0.25, 0.0, -0.4, 0.02),
        (0.95, 0.005, -0.005, 0.93, -0.002, 0.5, 0.84),
        (0.035, -0.2, 0.16, 0.04, -0.09, 0.02, 0.07),
        (-0.04, 0.2, 0.16, 0.04, 0.083, 0.12, 0.07),
    ),
)
# Feed and kill rates at which spots, worms and corals grow. Source: Pearson, Science 261, 1993.
GRAY_SCOTT = ((0.0367, 0.0649), (0.0545, 0.062), (0.029, 0.057), (0.039, 0.058))
# These steps take two to five seconds on one core, long enough to be interrupted in the middle.
REACTION_STEPS = 7_000


def plane(size: int, centre: complex, half_width: float, turn: float = 0.0) -> Complexes:
    """Return the complex number of each pixel of a square picture, rotated by an angle."""
    axis = np.linspace(-half_width, half_width, size)
    return centre + (axis[None, :] + 1j * axis[::-1, None]) * np.exp(1j * turn)


def to_image(pixels: Pixels, size: int) -> Image.Image:
    """Return the pixels as a square picture. A larger grid is scaled down, which smooths its edges."""
    image = Image.fromarray(pixels)
    return image if image.size == (size, size) else image.resize((size, size), Image.Resampling.LANCZOS)


def escape_times(start: Complexes, step: Complexes | complex, steps: Iterable[int]) -> tuple[Floats, NDArray[np.bool_]]:
    """Iterate z² + c; return the smooth escape time of each point and whether it escaped.

    Points that have escaped are removed from the arrays, so later iterations do less work.
    """
    times = np.zeros(start.size)
    escaped = np.zeros(start.size, dtype=bool)
    alive = np.arange(start.size)
    z = start.ravel().copy()
    c = np.broadcast_to(step, start.shape).ravel()
    for count in steps:
        z = z * z + c
        size_squared = z.real**2 + z.imag**2
        out = size_squared > 256.0
        if out.any():
            outside = alive[out]
            times[outside] = count + 1 - np.log2(np.log2(size_squared[out]) / 2)
            escaped[outside] = True
            keep = ~out
            alive, z, c = alive[keep], z[keep], c[keep]
            if alive.size == 0:
                break
    return times.reshape(start.shape), escaped.reshape(start.shape)


def mandelbrot(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint a region of the Mandelbrot set by smooth escape time."""
    centre, half_width = MANDELBROT_REGIONS[random.integers(len(MANDELBROT_REGIONS))]
    half_width *= random.uniform(0.6, 1.5)
    points = plane(size * 3 // 2, centre, half_width, random.uniform(0, 2 * np.pi))
    times, escaped = escape_times(np.zeros_like(points), points, steps(420))
    return to_image(colourise(equalise(times, escaped) ** 1.3, palette), size)


def zoom(frame: int, tile: int, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint a quarter of one frame of a way into the Mandelbrot set: each frame shows half as much as the one before.

    tile: 0 to 3, row by row. size: of the whole frame, an even number. Colours do not depend on what a tile shows, so
    that the quarters fit together.
    """
    points, rounds = zoom_points(frame, tile, size), 90 + 30 * frame
    times, escaped = escape_times(np.zeros_like(points), points, steps(rounds))
    return to_image(colourise(np.where(escaped, np.sqrt(times / rounds), 0), palette), size // 2)


def zoom_points(frame: int, tile: int, size: int) -> Complexes:
    """Return the complex numbers of a quarter of a frame."""
    centre, _ = MANDELBROT_REGIONS[0]
    half, (row, column) = size // 2, divmod(tile, 2)
    return plane(size, centre, 1.6 / 2**frame)[row * half :, column * half :][:half, :half]


def julia(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint a Julia set whose constant is close to a well-known one."""
    constant = JULIA_SEEDS[random.integers(len(JULIA_SEEDS))]
    constant += complex(*random.normal(0, 0.002, 2))
    points = plane(size * 3 // 2, 0, random.uniform(1.1, 1.45), random.uniform(0, 2 * np.pi))
    times, escaped = escape_times(points, constant, steps(300))
    return to_image(colourise(equalise(times, escaped) ** 2.2, palette), size)


def newton(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint which root Newton's method finds from each point, darker where it converges slowly."""
    count = int(random.integers(3, 7))
    angles = 2 * np.pi * (np.arange(count) + random.uniform(-0.18, 0.18, count)) / count
    roots = random.uniform(0.7, 1.25, count) * np.exp(1j * angles)
    z = plane(size * 3 // 2, 0, random.uniform(1.2, 1.9), random.uniform(0, 2 * np.pi))
    relaxation = random.uniform(0.9, 1.2)
    speed = np.zeros(z.shape)
    with np.errstate(all="ignore"):
        for _ in steps(34):
            # f'/f is the sum of 1 / (z - root), so no polynomial needs to be expanded.
            change = np.nan_to_num(relaxation / sum(1 / (z - root) for root in roots))
            z = z - change
            speed += np.exp(-np.abs(change) * 60)
    nearest = np.argmin(np.stack([np.abs(z - root) for root in roots]), axis=0)
    base = colourise(np.linspace(0.28, 0.88, count), palette)[nearest]
    light = 0.2 + 0.95 * equalise(speed) ** 0.8
    return to_image(shade(base, light), size)


def density_image(x: Floats, y: Floats, size: int, bounds: tuple[float, float, float, float]) -> Floats:
    """Count points per pixel; return the logarithm scaled to 0 to 1. bounds: left, right, bottom, top."""
    left, right, bottom, top = bounds
    counts, _, _ = np.histogram2d(y, x, bins=size, range=((bottom, top), (left, right)))
    brightness = np.log1p(counts[::-1])
    return brightness / max(float(np.quantile(brightness, 0.999)), 1e-9)


def square_bounds(x: Floats, y: Floats, margin: float = 0.06) -> tuple[float, float, float, float]:
    """Return the square around the points, with a margin."""
    half = max(float(np.ptp(x)), float(np.ptp(y)), 1e-6) * (0.5 + margin)
    middle_x, middle_y = (float(x.min() + x.max()) / 2, float(y.min() + y.max()) / 2)
    return middle_x - half, middle_x + half, middle_y - half, middle_y + half


def fern(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint a fern by the chaos game, thousands of points at a time."""
    rows = np.array(FERNS[random.integers(len(FERNS))])
    rows[1, :4] += random.normal(0, 0.004, 4)
    points, rounds = 30_000, 90
    x, y = np.zeros(points), np.zeros(points)
    all_x, all_y = [], []
    for turn in steps(rounds):
        a, b, c, d, e, f, _ = rows[random.choice(len(rows), points, p=rows[:, 6] / rows[:, 6].sum())].T
        x, y = a * x + b * y + e, c * x + d * y + f
        if turn >= 20:
            all_x.append(x)
            all_y.append(y)
    x, y = np.concatenate(all_x), np.concatenate(all_y)
    brightness = density_image(x, y, size, square_bounds(x, y))
    return to_image(colourise(0.06 + 0.94 * brightness**0.85, palette), size)


def attractor(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint the density of a Clifford attractor. Source: Pickover, "Chaos in Wonderland", 1994."""
    a, b, c, d = np.array(CLIFFORD[random.integers(len(CLIFFORD))]) + random.normal(0, 0.012, 4)
    x, y = random.uniform(-1, 1, (2, 60_000))
    all_x, all_y = [], []
    for turn in steps(70):
        x, y = np.sin(a * y) + c * np.cos(a * x), np.sin(b * x) + d * np.cos(b * y)
        if turn >= 15:
            all_x.append(x)
            all_y.append(y)
    x, y = np.concatenate(all_x), np.concatenate(all_y)
    brightness = density_image(x, y, size * 3 // 2, square_bounds(x, y))
    return to_image(colourise(brightness**1.25, palette), size)


def reaction(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Grow a Gray-Scott reaction-diffusion pattern: the studio's slow model."""
    feed, kill = GRAY_SCOTT[random.integers(len(GRAY_SCOTT))]
    cells = 256
    u = np.ones((cells, cells), dtype=np.float32)
    v = np.zeros((cells, cells), dtype=np.float32)
    for _ in range(46):
        row, column = random.integers(0, cells - 14, 2)
        u[row : row + 12, column : column + 12] = 0.5
        v[row : row + 12, column : column + 12] = 0.25
    v += random.uniform(0, 0.02, v.shape).astype(np.float32)
    for _ in steps(REACTION_STEPS):
        reacted = u * v * v
        u += 0.16 * laplacian(u) - reacted + feed * (1 - u)
        v += 0.08 * laplacian(v) + reacted - (feed + kill) * v
    relief = np.asarray(Image.fromarray(v).resize((size, size), Image.Resampling.BICUBIC))
    relief = relief / max(float(relief.max()), 1e-6)
    slope_y, slope_x = np.gradient(relief)
    light = 1 + np.clip((slope_x + slope_y) * size / 30, -0.45, 0.45)
    return to_image(shade(colourise(0.12 + 0.8 * relief, palette), light), size)


def laplacian(field: Floats) -> Floats:
    """Return the sum of the four neighbours less four times the cell, on a torus."""
    around = np.roll(field, 1, 0) + np.roll(field, -1, 0) + np.roll(field, 1, 1) + np.roll(field, -1, 1)
    return around - 4 * field


def noise(random: Generator, size: int, roughness: float) -> Floats:
    """Return seamless fractal noise from 0 to 1: white noise whose spectrum falls as frequency^-roughness."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(random.standard_normal((size, size))) * frequency**-roughness, (size, size))
    return (field - field.min()) / np.ptp(field)


def flow(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint the traces of particles that drift along a field of noise."""
    grid = size * 3 // 2
    angle = noise(random, grid, 2.1) * 2 * np.pi * random.uniform(1.4, 2.4)
    push_x, push_y = np.cos(angle), np.sin(angle)
    count = grid * 14
    x, y = random.uniform(0, grid, (2, count))
    tone = random.uniform(0.25, 1.0, count) ** 1.4
    ink = np.zeros(grid * grid)
    weight = np.zeros(grid * grid)
    for _ in steps(240):
        column, row = x.astype(int) % grid, y.astype(int) % grid
        cell = row * grid + column
        ink += np.bincount(cell, tone, grid * grid)
        weight += np.bincount(cell, minlength=grid * grid)
        x, y = x + push_x[row, column], y + push_y[row, column]
    traces = np.where(weight > 0, ink / np.maximum(weight, 1), 0) * (1 - np.exp(-weight / 3))
    return to_image(colourise(0.06 + traces.reshape(grid, grid), palette), size)


def sketch(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Draw as a harmonograph does: a pen and its paper hang from pendulums that slowly come to rest."""
    grid, points, rounds = size * 3 // 2, 12_000, 160
    waves = random.choice([1, 2, 3, 4], 4) + random.normal(0, 0.006, 4)
    phases, damping = random.uniform(0, 2 * np.pi, 4), random.uniform(0.006, 0.016, 4)
    ink = np.zeros(grid * grid)
    for turn in steps(rounds):
        # The pen's way is cut into pieces, one for each step.
        at = (turn + np.linspace(0, 1, points, endpoint=False)) * 200 / rounds
        swings = [np.sin(w * at + p) * np.exp(-d * at) for w, p, d in zip(waves, phases, damping, strict=True)]
        x, y = swings[0] + swings[1], swings[2] + swings[3]
        column, row = (((each + 2.1) / 4.2 * grid).astype(int) for each in (x, y))
        ink += np.bincount(row * grid + column, minlength=grid * grid)
    brightness = np.log1p(ink.reshape(grid, grid))
    brightness /= max(float(np.quantile(brightness, 0.999)), 1e-9)
    return to_image(colourise(0.05 + 0.95 * brightness, palette), size)


def nebula(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Paint clouds of noise bent by noise, with stars in front of and behind them."""
    grid = size * 3 // 2
    warp_x, warp_y, cloud, veil = (noise(random, grid, roughness) for roughness in (1.9, 1.9, 1.7, 1.5))
    rows, columns = np.indices((grid, grid))
    reach = grid * random.uniform(0.35, 0.7)
    bent_rows = (rows + (warp_y - 0.5) * reach).astype(int) % grid
    bent_columns = (columns + (warp_x - 0.5) * reach).astype(int) % grid
    gas = equalise(cloud[bent_rows, bent_columns]) ** 2.1 * (0.35 + 0.65 * equalise(veil))
    pixels = colourise(0.03 + gas * 0.95, palette).astype(float)
    warm = colours_of(palette)[-1]
    for _ in range(grid // 2):
        row, column = random.integers(2, grid - 2, 2)
        glow = random.pareto(2.6) * 70
        pixels[row, column] += warm / 255 * min(glow * 2.2, 255)
        pixels[row - 1 : row + 2, column - 1 : column + 2] += warm / 255 * min(glow * 0.5, 110)
    return to_image(np.clip(pixels, 0, 255).astype(np.uint8), size)


def staircase(random: Generator, size: int, palette: str, steps: Steps) -> Image.Image:
    """Refuse to paint, because an endless staircase cannot be built. Raises: ValueError always."""
    steps = int(random.integers(12, 40))
    raise ValueError(f"a staircase of {steps} steps that only goes up cannot return to its start")
