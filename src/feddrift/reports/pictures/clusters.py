"""The cluster map as a picture: who used which model when. The page draws its own: `page/map.js`."""

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
from feddrift.reports.event_text import letter
from feddrift.reports.labels import describe
from feddrift.reports.pictures.style import (
    ALARM,
    DPI,
    INK,
    MAX_PANELS,
    OTHER,
    STRONG,
    Picture,
    background,
    fills,
    key,
    settings_apart,
    short,
)
from feddrift.reports.summary import scores
from feddrift.runs.record import Record
from feddrift.types import Bools, Ints


def clusters(records: Sequence[Record]) -> Figure:
    """The cluster map, one panel per run: a cell shows the model in use, its background the true concept.

    Without ground truth the background is the model's. Where cells are too small for a number, a coloured square
    stands for the model.
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
    steps, clients = max(map(_steps, records)), max(record.header["n_clients"] for record in records)
    room = (12.0, 8.5) if n == 1 else (15.0 / n_columns, 6.0)
    cell = min(0.5, room[0] / steps), min(0.4, room[1] / clients)  # inches
    width, height = max(4.2, cell[0] * steps + 0.8), max(2.2, cell[1] * clients + 1.2)
    n_rows = math.ceil(n / n_columns)
    fig = Picture(figsize=(n_columns * width, n_rows * height + 0.4), dpi=DPI, layout="constrained")
    panels = list(fig.subplots(n_rows, n_columns, squeeze=False).flat)
    for ax in panels[n:]:
        ax.remove()

    digits = max(len(str(record.rows.model.max())) for record in records)
    font = min(10.0, 72 * 0.55 * cell[1], 72 * 0.9 * cell[0] / digits)
    numbered = font >= 5
    used = Counter(i for record in records for i in record.rows.model.reshape(-1).tolist())
    models = sorted(used, key=lambda i: (-used[i], i))
    marks = dict(zip(models, STRONG, strict=False))
    concepts = _names_of_concepts(records)
    shades = fills(sorted(concepts))
    legend: dict[str, Artist] = {concepts[k]: Patch(facecolor=shades[k]) for k in sorted(concepts)}
    for ax, record, differs in zip(panels, records, settings_apart(records), strict=False):
        truth = bool((record.rows.concept >= 0).any())
        if truth:
            background(ax, record.rows.concept, shades)
        elif numbered:
            background(ax, record.rows.model, fills(models))
        if numbered:
            for (t, c), model in np.ndenumerate(record.rows.model):
                ax.text(t + 1, c, str(model), ha="center", va="center", fontsize=font, color=INK)
        else:
            _squares(ax, record.rows.model, marks)
        _alarms(ax, record.rows.drift)
        _axes(ax, record, cell)
        ax.set_title(_title(record, differs), loc="left", fontsize=9, linespacing=1.4)
    if not numbered:
        legend |= {f"model {i}": Patch(facecolor=marks[i]) for i in sorted(marks)}
        legend |= {"other models": Patch(facecolor=OTHER)} if len(models) > len(marks) else {}
    if any(record.rows.drift.any() for record in records):
        legend["drift alarm"] = Line2D([], [], linestyle="", marker="^", markersize=7, color=ALARM)
    key(fig, legend)
    return fig


def _names_of_concepts(records: Sequence[Record]) -> dict[int, str]:
    names = {}
    for record in records:
        same = record.header["same"]
        for k in np.unique(record.rows.concept[record.rows.concept >= 0]).tolist():
            names[k] = f"Concept {letter(k)}" + (f" (= {letter(same[str(k)])})" if str(k) in same else "")
    return names


def _squares(ax: Axes, model: Ints, marks: Mapping[int, str]) -> None:
    corners = np.array([(-0.3, -0.25), (0.3, -0.25), (0.3, 0.25), (-0.3, 0.25)])
    cells = [(t + 1, c) for t, c in np.ndindex(model.shape)]
    colours = [marks.get(i, OTHER) for i in model.reshape(-1).tolist()]
    ax.add_collection(PolyCollection([corners + cell for cell in cells], facecolors=colours))


def _alarms(ax: Axes, drift: Bools) -> None:
    corner = np.array([(0.5, -0.5), (0.22, -0.5), (0.5, -0.18)])  # upper right
    where = [corner + np.array([t + 1, c]) for t, c in np.argwhere(drift)]
    ax.add_collection(PolyCollection(where, facecolors=ALARM, label="drift alarm"))


def _axes(ax: Axes, record: Record, cell: tuple[float, float]) -> None:
    steps, clients = _steps(record), record.header["n_clients"]
    every = math.ceil(0.3 / cell[0]), math.ceil(0.13 / cell[1])  # cells between labels
    ax.set_xticks(np.arange(1, steps + 1, every[0]))
    ax.set_yticks(range(0, clients, every[1]), [short(name, 14) for name in record.header["clients"][:: every[1]]])
    ax.set(xlim=(0.5, steps + 0.5), ylim=(clients - 0.5, -0.5), xlabel="time", ylabel="client")
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)


def _steps(record: Record) -> int:
    return int(record.rows.steps if record.runs_on else record.header["n_steps"])


def _title(record: Record, differs: Mapping[str, object]) -> str:
    header, numbers = record.header, scores(record)
    lines = [f"{short(header['stream'])} · {header['algorithm']} · seed {header['seed']}"]
    if differs:
        lines.append(describe(differs))
    omitting, including = numbers.omitting_drifts, numbers.including_drifts
    if including is not None:
        lines.append(f"accuracy {including:.2f} %")
        if omitting is not None:
            lines[-1] = f"accuracy {omitting:.2f} % omitting drifts, {including:.2f} % including"
    if record.status != "complete":
        of = "" if record.runs_on else f" of {header['n_steps']}"
        lines.append(f"{record.status} after {record.rows.steps}{of} time steps")
    return "\n".join(lines)
