"""The models of the studio: each has a painter, a gate limit and an expected duration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL.Image import Image

from . import painters
from .painters import Painter, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One kind of picture. Its name is also the name of its gate, the admission limit.

    limit: maximum renders queued or running at once, until somebody changes the Gate row in the admin.
    expected_seconds: for one render at the default size. palette: used when the order names none.
    copies: how many the second button orders.
    is_flaky: some attempts fail at random. is_impossible: the first attempt fails and is not retried.
    """

    name: str
    title: str
    about: str
    limit: int
    expected_seconds: float
    palette: str
    painter: Painter
    copies: int = 5
    is_flaky: bool = False
    is_impossible: bool = False

    def paint(self, *, seed: int, size: int, palette: str = "", steps: Steps = range) -> Image:
        """Paint the picture. The same arguments give the same picture. Raises: ValueError if it is impossible.

        steps: what the painter counts its steps with.
        """
        return self.painter(np.random.default_rng(seed), size, palette or self.palette, steps)


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="mandelbrot",
            title="Mandelbrot set",
            about="Escape times near the edge of the set.",
            limit=4,
            expected_seconds=1,
            palette="ember",
            painter=painters.mandelbrot,
        ),
        Model(
            name="julia",
            title="Julia set",
            about="One constant, one dust of spirals.",
            limit=4,
            expected_seconds=0.5,
            palette="frost",
            painter=painters.julia,
        ),
        Model(
            name="newton",
            title="Newton basins",
            about="Which root is found from where.",
            limit=3,
            expected_seconds=1,
            palette="dusk",
            painter=painters.newton,
        ),
        Model(
            name="fern",
            title="Barnsley fern",
            about="The chaos game, two million throws.",
            limit=3,
            expected_seconds=1,
            palette="moss",
            painter=painters.fern,
        ),
        Model(
            name="attractor",
            title="Clifford attractor",
            about="Where four sines send a cloud of points.",
            limit=3,
            expected_seconds=1.5,
            palette="aurora",
            painter=painters.attractor,
        ),
        Model(
            name="reaction",
            title="Reaction and diffusion",
            about="7,000 steps of Gray and Scott's chemistry: the slow one.",
            limit=2,
            expected_seconds=4,
            palette="lagoon",
            painter=painters.reaction,
        ),
        Model(
            name="flow",
            title="Flow field",
            about="8,000 particles adrift on noise.",
            limit=4,
            expected_seconds=0.5,
            palette="ember",
            painter=painters.flow,
        ),
        Model(
            name="sketch",
            title="Sketches",
            about="Forty at a press: flood the studio, and see that others get their turn.",
            limit=100,
            expected_seconds=0.3,
            palette="aurora",
            painter=painters.sketch,
            copies=40,
        ),
        Model(
            name="nebula",
            title="Nebula",
            about="Clouds bent by clouds. Some attempts fail at random, then one succeeds.",
            limit=4,
            expected_seconds=1,
            palette="dusk",
            painter=painters.nebula,
            is_flaky=True,
        ),
        Model(
            name="staircase",
            title="Endless staircase",
            about="Cannot be built. It fails and is not retried, to show how that looks.",
            limit=2,
            expected_seconds=0.5,
            palette="frost",
            painter=painters.staircase,
            is_impossible=True,
        ),
    )
}
