"""What the charts of measurements share: whether one can be drawn, an empty one, and the file. Needs matplotlib.

Colours are Okabe and Ito's, which colour-blind people tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from epd_serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, SKY, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
DPI = 130


def check_plot(path: Path) -> None:
    """Raises ConfigError where no chart can be drawn: asked before measuring, which takes minutes."""
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: name a file that ends in .png", param="--plot")
    try:
        import matplotlib  # noqa: F401  (imported late: measuring does not need it)
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'epd-serve[bench]'", param="--plot") from None


@contextmanager
def chart(path: Path, width_in: float, height_in: float, heading: str) -> Iterator[Figure]:
    """An empty figure to draw into, which becomes the PNG at the end of the context."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot's
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained", dpi=DPI)
    yield figure
    figure.suptitle(heading, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
