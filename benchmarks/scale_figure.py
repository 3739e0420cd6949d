"""Draw what scale.json holds into docs/figures/scale.png: `python benchmarks/scale_figure.py`."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from feddrift.reports.pictures import style

HERE = Path(__file__).parent
NUMBERS, FIGURE = HERE / "scale.json", HERE.parent / "docs" / "figures" / "scale.png"
PANELS = {"relative": "CPU time per client and time step, relative to 1,000 clients", "peak_gb": "peak memory, GB"}


def main() -> None:
    """One panel for time, one for memory, a line per method."""
    found = json.loads(NUMBERS.read_text())
    fig = Figure(figsize=(9, 3.4), dpi=style.DPI, layout="constrained")
    for ax, (key, title) in zip(fig.subplots(1, 2), PANELS.items(), strict=True):
        for (name, rows), colour, marker in zip(found.items(), style.STRONG, style.MARKERS, strict=False):
            sizes = sorted(rows, key=int)
            ax.plot([int(n) for n in sizes], [rows[n][key] for n in sizes], color=colour, marker=marker, label=name)
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_xscale("log")
        ax.set_ylim(bottom=0)
        ax.set_xlabel("clients")
    fig.axes[0].legend(frameon=False)
    style.save(fig, FIGURE)


if __name__ == "__main__":
    main()
