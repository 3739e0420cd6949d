"""Figures, drawn from records alone: the cluster map, and accuracy over time."""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from feddrift.errors import ConfigError, DataError
from feddrift.record import Record
from feddrift.report import describe, differences, grouped, scores
from feddrift.story import letter
from feddrift.types import Bools, Floats, Ints

MAX_PANELS = 12
FORMATS = (".pdf", ".png", ".svg")
DPI = 150

# Okabe and Ito's palette, which the colour-blind can tell apart; a grey for its yellow, too pale for a line.
STRONG = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
LAYERS = {"Oblivious": 0, "Oracle": 0, "FedDrift": 2}  # the later lies above
KNOWN = {"FedDrift": 2, "Oblivious": 6, "Oracle": 7}  # green, black, grey
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")
# Blue, green, yellow and orange as in the paper's figure, then more.
PALE = ("#B5D3EE", "#A5D6A0", "#FFF2A8", "#F7B98B", "#E3C4E8", "#D4D4D4", "#A2E4E4", "#F2B3BE")
INK, ALARM, OTHER = "#222222", "#B00020", "#A8A8A8"


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
    steps, clients = (max(record.header[key] for record in records) for key in ("n_steps", "n_clients"))
    room = (12.0, 8.5) if n == 1 else (15.0 / n_columns, 6.0)
    cell = min(0.5, room[0] / steps), min(0.4, room[1] / clients)  # inches
    width, height = max(4.2, cell[0] * steps + 0.8), max(2.2, cell[1] * clients + 1.2)
    n_rows = math.ceil(n / n_columns)
    fig = Figure(figsize=(n_columns * width, n_rows * height + 0.4), dpi=DPI, layout="constrained")
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
    for ax, record, differs in zip(panels, records, _differences(records), strict=False):
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


def accuracy(records: Sequence[Record]) -> Figure:
    """Accuracy over time, mean over clients: a line per algorithm and settings, its spread over seeds shaded."""
    groups = grouped(records)
    if not groups:
        raise DataError(f"no complete runs to draw, got {len(records)} unfinished")
    lines: dict[str, dict[str, list[Record]]] = {}  # stream -> label -> runs
    for group, differs in zip(groups, _differences([group[0] for group in groups]), strict=True):
        header = group[0].header
        label = header["algorithm"] + (f" ({describe(differs)})" if differs else "")
        lines.setdefault(header["stream"], {}).setdefault(label, []).extend(group)
    streams = sorted(lines)
    styles = _styles(list(dict.fromkeys(label for s in streams for label in lines[s])))
    n_columns = min(len(streams), 3 if len(streams) != 4 else 2)
    n_rows = math.ceil(len(streams) / n_columns)
    width, height = (7.0, 4.2) if len(streams) == 1 else (4.8, 3.4)
    fig = Figure(figsize=(n_columns * width, n_rows * height + 0.4), dpi=DPI, layout="constrained")
    panels = list(fig.subplots(n_rows, n_columns, squeeze=False).flat)
    for ax in panels[len(streams) :]:
        ax.remove()

    legend: dict[str, Artist] = {}
    for ax, stream in zip(panels, streams, strict=False):
        layered = sorted(lines[stream].items(), key=lambda line: LAYERS.get(line[0], 1))
        for label, group in layered:
            legend[label] = _line(ax, group, styles[label])
        counts = sorted({len(group) for group in lines[stream].values()})
        seeds = "-".join(str(k) for k in sorted({counts[0], counts[-1]})) + (" seeds" if counts[-1] > 1 else " seed")
        ax.set_title(f"{short(stream)} ({seeds})", loc="left", fontsize=11)
        ax.set_xlabel("time")
        ax.set_ylabel("accuracy on the next time step")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1), min(high, 101))
        ax.grid(axis="y", color="#E4E4E4")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    key(fig, {label: legend[label] for label in styles})
    return fig


def _styles(labels: Sequence[str]) -> dict[str, int]:
    """The style of each line: some algorithms look the same in all pictures, the others take what is left.

    >>> _styles(["CFL", "FedDrift", "IFCA", "KUE", "Oracle"])
    {'CFL': 0, 'FedDrift': 2, 'IFCA': 1, 'KUE': 3, 'Oracle': 7}
    """
    taken = {KNOWN[label] for label in labels if label in KNOWN}
    free = (style for style in itertools.count() if style not in taken)
    return {label: KNOWN[label] if label in KNOWN else next(free) for label in labels}


def save(fig: Figure, path: str | Path) -> None:
    """Write a figure as png, pdf or svg, by the ending of the path."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"a figure's file must end in {', '.join(FORMATS)}, got '{path}'")
    try:
        drawn = io.BytesIO()
        fig.savefig(drawn, format=Path(path).suffix[1:].lower())
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        part = Path(f"{path}.part")  # an older picture stays until the new one is whole
        try:
            part.write_bytes(drawn.getvalue())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None


def _differences(records: Sequence[Record]) -> list[dict[str, object]]:
    headers = [record.header for record in records]
    return differences([(h["stream"], h["algorithm"], {**h["settings"], **h["overrides"]}) for h in headers])


def _names_of_concepts(records: Sequence[Record]) -> dict[int, str]:
    names = {}
    for record in records:
        same = record.header["same"]
        for k in np.unique(record.rows.concept[record.rows.concept >= 0]).tolist():
            names[k] = f"Concept {letter(k)}" + (f" (= {letter(same[str(k)])})" if str(k) in same else "")
    return names


def fills(ids: Sequence[int]) -> dict[int, str]:
    """A pale colour for each."""
    if len(ids) <= len(PALE):
        return dict(zip(ids, PALE, strict=False))
    shades = mpl.colormaps["turbo"](np.linspace(0.05, 0.95, len(ids)))
    return {i: to_hex(0.5 + 0.5 * shade[:3]) for i, shade in zip(ids, shades, strict=True)}


def background(ax: Axes, ids: Ints, colour_of: Mapping[int, str]) -> None:
    """Cells [t, c] in the colours of their ids."""
    steps, clients = ids.shape
    colours = np.ones((clients, steps, 3))
    for i, fill in colour_of.items():
        colours[np.equal(ids.T, i)] = to_rgb(fill)
    x, y = np.arange(steps + 1) + 0.5, np.arange(clients + 1) - 0.5
    ax.pcolormesh(x, y, colours, edgecolors="white", linewidth=min(0.8, 16 / max(ids.shape)))


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
    steps, clients = record.header["n_steps"], record.header["n_clients"]
    every = math.ceil(0.3 / cell[0]), math.ceil(0.13 / cell[1])  # cells between labels
    ax.set_xticks(np.arange(1, steps + 1, every[0]))
    ax.set_yticks(range(0, clients, every[1]), [short(name, 14) for name in record.header["clients"][:: every[1]]])
    ax.set(xlim=(0.5, steps + 0.5), ylim=(clients - 0.5, -0.5), xlabel="time", ylabel="client")
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)


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
        lines.append(f"{record.status} after {record.rows.steps} of {header['n_steps']} time steps")
    return "\n".join(lines)


def _line(ax: Axes, group: Sequence[Record], style: int) -> Line2D:
    values = np.full((len(group), max(record.rows.steps for record in group)), np.nan)  # [seed, t]
    for row, record in zip(values, group, strict=True):
        row[: record.rows.steps] = 100 * _mean(record.rows.accuracy.T)
    mean = _mean(values)
    time = np.arange(1, len(mean) + 1)
    colour, dash = STRONG[style % len(STRONG)], DASHES[style // len(STRONG) % len(DASHES)]
    marker = MARKERS[style % len(MARKERS)] if len(mean) <= 40 else None
    (line,) = ax.plot(time, mean, color=colour, linestyle=dash, marker=marker, markersize=5, linewidth=1.8)
    if len(group) > 1:
        n = (~np.isnan(values)).sum(axis=0)
        std = np.sqrt(_mean((values - mean) ** 2) * n / np.where(n > 1, n - 1, np.nan))  # sample std
        ax.fill_between(time, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
    return line


def _mean(values: Floats) -> Floats:
    """Over the first axis, leaving NaN out; NaN where nothing is left."""
    n = (~np.isnan(values)).sum(axis=0)
    return np.asarray(np.nansum(values, axis=0) / np.where(n > 0, n, np.nan))


def key(fig: Figure, entries: Mapping[str, Artist]) -> None:
    """The legend below a figure."""
    if entries:
        column = 0.066 * max(len(label) for label in entries) + 0.4  # inches
        n_columns = max(1, min(len(entries), int(fig.get_figwidth() / column)))
        style = {"frameon": False, "fontsize": 9, "handlelength": 1.6, "columnspacing": 1.2, "handletextpad": 0.5}
        fig.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=n_columns, **style)


def short(name: str, length: int = 40) -> str:
    """A long name without its middle."""
    return name if len(name) <= length else f"{name[: length // 2]}…{name[1 - length // 2 :]}"
