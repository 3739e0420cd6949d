"""The cluster map: the model that each client uses at each time step. `page/map.js` draws it on the HTML page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from feddrift.errors import ConfigError, DataError
from feddrift.reports.event_text import format_concept
from feddrift.reports.labels import format_settings
from feddrift.reports.pictures.style import (
    ALARM,
    DPI,
    INK,
    MAX_PANELS,
    OTHER,
    STRONG,
    Picture,
    add_legend,
    choose_pale_colours,
    compare_settings,
    draw_background,
    shorten_name,
)
from feddrift.reports.summary import summarise_run
from feddrift.runs.record import Record
from feddrift.types import Bools, Ints


def draw_clusters(records: Sequence[Record]) -> Figure:
    """Draw the cluster map, a panel for each run: cells show the model in use, their background the true concept.

    If the true concepts are unknown, the background shows the model. If cells are too small for a number, a coloured
    square shows the model.

    Raises:
        ConfigError: There are more runs than panels.
        DataError: No run has a time step.
    """
    records = [record for record in records if record.rows.steps]
    n = len(records)
    if not records:
        raise DataError("no time steps to draw: every run ended before its first")
    if n > MAX_PANELS:
        raise ConfigError(
            f"the cluster map has room for 1 to {MAX_PANELS} runs, got {n}: "
            "choose fewer, for example one seed of each algorithm"
        )
    n_columns = n if n <= 3 else 2 if n == 4 else 3 if n <= 9 else 4
    steps = max(map(_count_steps, records))
    clients = max(record.header["n_clients"] for record in records)
    max_width, max_height = (12.0, 8.5) if n == 1 else (15.0 / n_columns, 6.0)
    cell = min(0.5, max_width / steps), min(0.4, max_height / clients)  # inches
    width = max(4.2, cell[0] * steps + 0.8)
    height = max(2.2, cell[1] * clients + 1.2)
    n_rows = math.ceil(n / n_columns)
    fig = Picture(figsize=(n_columns * width, n_rows * height + 0.4), dpi=DPI, layout="constrained")
    panels = list(fig.subplots(n_rows, n_columns, squeeze=False).flat)
    for ax in panels[n:]:
        ax.remove()

    digits = max(len(str(record.rows.model.max())) for record in records)
    font = min(10.0, 72 * 0.55 * cell[1], 72 * 0.9 * cell[0] / digits)
    has_numbers = font >= 5
    n_cells = Counter(i for record in records for i in record.rows.model.reshape(-1).tolist())
    models = sorted(n_cells, key=lambda i: (-n_cells[i], i))
    colours = dict(zip(models, STRONG, strict=False))
    concepts = _label_concepts(records)
    shades = choose_pale_colours(sorted(concepts))
    legend: dict[str, Artist] = {concepts[k]: Patch(facecolor=shades[k]) for k in sorted(concepts)}
    for ax, record, differs in zip(panels, records, compare_settings(records), strict=False):
        if (record.rows.concept >= 0).any():
            draw_background(ax, record.rows.concept, shades)
        elif has_numbers:
            draw_background(ax, record.rows.model, choose_pale_colours(models))
        if has_numbers:
            for (t, c), model in np.ndenumerate(record.rows.model):
                ax.text(t + 1, c, str(model), ha="center", va="center", fontsize=font, color=INK)
        else:
            _draw_squares(ax, record.rows.model, colours)
        _draw_alarms(ax, record.rows.drift)
        _format_axes(ax, record, cell)
        ax.set_title(_build_title(record, differs), loc="left", fontsize=9, linespacing=1.4)
    if not has_numbers:
        legend |= {f"model {i}": Patch(facecolor=colours[i]) for i in sorted(colours)}
        legend |= {"other models": Patch(facecolor=OTHER)} if len(models) > len(colours) else {}
    if any(record.rows.drift.any() for record in records):
        legend["drift alarm"] = Line2D([], [], linestyle="", marker="^", markersize=7, color=ALARM)
    add_legend(fig, legend)
    return fig


def _label_concepts(records: Sequence[Record]) -> dict[int, str]:
    names = {}
    for record in records:
        same = record.header["same"]
        for k in np.unique(record.rows.concept[record.rows.concept >= 0]).tolist():
            names[k] = f"Concept {format_concept(k)}" + (
                f" (= {format_concept(same[str(k)])})" if str(k) in same else ""
            )
    return names


def _draw_squares(ax: Axes, model: Ints, colour_of_model: Mapping[int, str]) -> None:
    corners = np.array([(-0.3, -0.25), (0.3, -0.25), (0.3, 0.25), (-0.3, 0.25)])
    cells = [(t + 1, c) for t, c in np.ndindex(model.shape)]
    colours = [colour_of_model.get(i, OTHER) for i in model.reshape(-1).tolist()]
    ax.add_collection(PolyCollection([corners + cell for cell in cells], facecolors=colours))


def _draw_alarms(ax: Axes, drift: Bools) -> None:
    corner = np.array([(0.5, -0.5), (0.22, -0.5), (0.5, -0.18)])  # upper right
    triangles = [corner + np.array([t + 1, c]) for t, c in np.argwhere(drift)]
    ax.add_collection(PolyCollection(triangles, facecolors=ALARM, label="drift alarm"))


def _format_axes(ax: Axes, record: Record, cell: tuple[float, float]) -> None:
    steps = _count_steps(record)
    clients = record.header["n_clients"]
    steps_per_label = math.ceil(0.3 / cell[0])
    clients_per_label = math.ceil(0.13 / cell[1])
    names = [shorten_name(name, 14) for name in record.header["clients"][::clients_per_label]]
    ax.set_xticks(np.arange(1, steps + 1, steps_per_label))
    ax.set_yticks(range(0, clients, clients_per_label), names)
    ax.set(xlim=(0.5, steps + 0.5), ylim=(clients - 0.5, -0.5), xlabel="time", ylabel="client")
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)


def _count_steps(record: Record) -> int:
    return int(record.rows.steps if record.runs_on else record.header["n_steps"])


def _build_title(record: Record, differs: Mapping[str, object]) -> str:
    header = record.header
    scores = summarise_run(record)
    lines = [f"{shorten_name(header['stream'])} · {header['algorithm']} · seed {header['seed']}"]
    if differs:
        lines.append(format_settings(differs))
    omitting = scores.omitting_drifts
    including = scores.including_drifts
    if including is not None:
        lines.append(f"accuracy {including:.2f} %")
        if omitting is not None:
            lines[-1] = f"accuracy {omitting:.2f} % omitting drifts, {including:.2f} % including"
    if record.status != "complete":
        total = "" if record.runs_on else f" of {header['n_steps']}"
        lines.append(f"{record.status} after {record.rows.steps}{total} time steps")
    return "\n".join(lines)
