"""Draw the pictures of docs/auto.md: `python -m experiments.auto_pictures`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments import auto

from feddrift.reports import pictures

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
OLD = 0.25  # opacity of points
NEW = 0.9
COLOURS = ("#c2570c", "#1f5fa8")  # of the two classes
ROWS = 250
Array = npt.NDArray[np.float64]


def main() -> None:
    pictures.save_picture(conflict(), FIGURES / "auto-conflict.png")
    pictures.save_picture(distances(), FIGURES / "auto-distance.png")


def conflict() -> Any:
    """A season, which one rule can learn along with the old data, and swapped labels, which none can."""
    from matplotlib.figure import Figure

    random = np.random.default_rng(1)
    old, moved, same = (random.random((ROWS, 2)) * scale + shift for scale, shift in
                        (((0.55, 1), (0, 0)), ((0.55, 1), (0.45, 0)), ((0.55, 1), (0, 0))))  # fmt: skip
    fig = Figure(figsize=(10, 4.4), layout="constrained")
    titles = ("A season: other inputs, the same rule", "A conflict: the same inputs, another rule")
    for axes, new, turned, title in zip(
        fig.subplots(1, 2, sharey=True), (moved, same), (False, True), titles, strict=True
    ):
        labels = [_above(old), _above(new) ^ turned]
        half = np.arange(ROWS) < ROWS // 2
        stay = _fit(np.concatenate([old, new[half]]), np.concatenate([labels[0], labels[1][half]]))
        alone = _fit(new[half], labels[1][half])
        for points, of, strength in ((old, labels[0], OLD), (new, labels[1], NEW)):
            axes.scatter(*points.T, s=14, c=np.array(COLOURS)[of.astype(int)], alpha=strength, linewidths=0)
        reach = max(old[:, 0].max(), new[:, 0].max())  # no data are beyond it
        grid = np.stack(np.meshgrid(np.linspace(0, reach, 200), np.linspace(0, 1, 200)), axis=-1)
        for weights, style in ((stay, "solid"), (alone, "dashed")):
            level = (_powers(grid.reshape(-1, 2)) @ weights).reshape(200, 200)
            axes.contour(grid[..., 0], grid[..., 1], level, [0.0], colors="black", linestyles=style, linewidths=1.6)
        wrong = [100 * np.mean((_powers(new[~half]) @ w > 0) != labels[1][~half]) for w in (stay, alone)]
        axes.set_title(f"{title}\nwrong on held-out new rows: stay {wrong[0]:.0f} %, new {wrong[1]:.0f} %", fontsize=11)
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    fig.supxlabel("pale: old data, strong: new data; solid line: stay, dashed line: new", fontsize=10)
    return fig


def _above(points: Array) -> npt.NDArray[np.bool_]:
    return np.asarray(points[:, 1] > 0.5 + 0.25 * np.sin(5 * points[:, 0]))


def _powers(points: Array) -> Array:
    a, b = points.T
    return np.stack([a**i * b**j for i in range(4) for j in range(4 - i)], axis=1)


def _fit(points: Array, labels: npt.NDArray[np.bool_]) -> Array:
    """Return the coefficients of logistic regression on cubic features."""
    x = _powers(points)
    weights = np.zeros(x.shape[1])
    for _ in range(50):
        chance = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        curvature = x.T @ (x * (chance * (1 - chance))[:, None]) + 1e-2 * np.eye(len(weights))
        weights -= np.linalg.solve(curvature, x.T @ (chance - labels) + 1e-2 * weights)
    return weights


def distances() -> Any:
    """FedDrift-Auto minus the best of all others, with its interval."""
    from matplotlib.figure import Figure

    rows = auto.gaps()
    fig = Figure(figsize=(8, 0.42 * len(rows) + 1.2), layout="constrained")
    axes = fig.subplots()
    place = np.arange(len(rows))[::-1]
    means = np.array([gap.mean for gap in rows])
    halves = np.array([gap.half for gap in rows])
    axes.axvspan(-0.3, 0, color="#dddddd", linewidth=0)
    axes.axvline(0, color="black", linewidth=1)
    axes.errorbar(means, place, xerr=halves, fmt="o", color=COLOURS[1], capsize=3)
    axes.set_yticks(place, [f"{gap.stream}\n({gap.best})" for gap in rows], fontsize=8)
    axes.set_xlabel("FedDrift-Auto minus the best of the others, percentage points, 95 % interval")
    return fig


if __name__ == "__main__":
    main()
