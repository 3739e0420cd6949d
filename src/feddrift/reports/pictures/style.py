"""Common parts of all pictures: colours, markers, panels, legends, and files."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from feddrift._internal.system import atomic_write
from feddrift.errors import ConfigError
from feddrift.reports.labels import find_differing_settings
from feddrift.runs.record import Record
from feddrift.types import Ints

MAX_PANELS = 12
FORMATS = (".pdf", ".png", ".svg")
DPI = 150
# Okabe and Ito's palette for colour-blind people, with grey instead of yellow, which is too pale for lines.
STRONG = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Blue, green, yellow and orange as in the paper's figure, then others.
PALE = ("#B5D3EE", "#A5D6A0", "#FFF2A8", "#F7B98B", "#E3C4E8", "#D4D4D4", "#A2E4E4", "#F2B3BE")
INK = "#222222"
ALARM = "#B00020"
OTHER = "#A8A8A8"


class Picture(Figure):
    """Figure that a notebook shows as an image."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def save_picture(fig: Figure, path: str | Path) -> None:
    """Write a figure as .png, .pdf or .svg, by the suffix of the path.

    Raises:
        ConfigError: The path has another suffix.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"a figure's file must end in {', '.join(FORMATS)}, got '{path}'")
    file = io.BytesIO()
    fig.savefig(file, format=Path(path).suffix[1:].lower())
    atomic_write(Path(path), file.getvalue())


def compare_settings(records: Sequence[Record]) -> list[dict[str, object]]:
    """Return for each run the settings in which it differs from others of its stream and algorithm."""
    headers = [record.header for record in records]
    return find_differing_settings(
        [(h["stream"], h["algorithm"], {**h["settings"], **h["overrides"]}) for h in headers]
    )


def choose_pale_colours(ids: Sequence[int]) -> dict[int, str]:
    """Choose a pale colour for each id."""
    if len(ids) <= len(PALE):
        return dict(zip(ids, PALE, strict=False))
    shades = mpl.colormaps["turbo"](np.linspace(0.05, 0.95, len(ids)))
    return {i: to_hex(0.5 + 0.5 * shade[:3]) for i, shade in zip(ids, shades, strict=True)}


def draw_background(ax: Axes, ids: Ints, colour_of: Mapping[int, str]) -> None:
    """Draw cells ids[t, c] in the colours of their ids."""
    steps, clients = ids.shape
    colours = np.ones((clients, steps, 3))
    for i, fill in colour_of.items():
        colours[np.equal(ids.T, i)] = to_rgb(fill)
    x = np.arange(steps + 1) + 0.5
    y = np.arange(clients + 1) - 0.5
    ax.pcolormesh(x, y, colours, edgecolors="white", linewidth=min(0.8, 16 / max(ids.shape)))


def add_legend(fig: Figure, entries: Mapping[str, Artist]) -> None:
    """Add a legend below a figure, unless it would be empty."""
    if entries:
        column_width = 0.066 * max(len(label) for label in entries) + 0.4  # inches
        n_columns = max(1, min(len(entries), int(fig.get_figwidth() / column_width)))
        style = {"frameon": False, "fontsize": 9, "handlelength": 1.6, "columnspacing": 1.2, "handletextpad": 0.5}
        fig.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=n_columns, **style)


def shorten_name(name: str, length: int = 40) -> str:
    """Replace the middle of a name that is longer than `length` characters by an ellipsis."""
    return name if len(name) <= length else f"{name[: length // 2]}…{name[1 - length // 2 :]}"


def create_panels(n: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Create a figure with n panels of this size, width and height in inches."""
    n_columns = n if n <= 3 else 2 if n == 4 else 3
    n_rows = math.ceil(n / n_columns)
    fig = Picture(figsize=(n_columns * size[0], n_rows * size[1] + 0.4), dpi=DPI, layout="constrained")
    panels = list(fig.subplots(n_rows, n_columns, squeeze=False).flat)
    for ax in panels[n:]:
        ax.remove()
    return fig, panels[:n]
