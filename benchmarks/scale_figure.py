"""Draw what scale.json holds into docs/figures/scale.png: `python benchmarks/scale_figure.py`."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from feddrift.reports.pictures import style

HERE = Path(__file__).parent
NUMBERS = HERE / "scale.json"
FIGURE = HERE.parent / "docs" / "figures" / "scale.png"
PANELS = {
    "cpu_us_per_client_step": "CPU time per client\nand time step, us",
    "peak_gb": "peak memory, GB",
    "mb_sent": "models sent, MB",
    "page_mb": "HTML page, MB",
}


def main() -> None:
    """A panel for each number, a line for each method."""
    found = json.loads(NUMBERS.read_text())["few"]
    fig = Figure(figsize=(11, 3), dpi=style.DPI, layout="constrained")
    for ax, (key, title) in zip(fig.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for (name, rows), colour, marker in zip(found.items(), style.STRONG, style.MARKERS, strict=False):
            sizes = sorted(rows, key=int)
            values = [rows[n][key] for n in sizes]
            ax.plot([int(n) for n in sizes], values, color=colour, marker=marker, markersize=5, label=name)
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_xscale("log")
        ax.set_xlabel("clients", fontsize=9)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        if key == "mb_sent":
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
    fig.axes[1].legend(frameon=False, fontsize=8, loc="upper left")
    style.save_picture(fig, FIGURE)


if __name__ == "__main__":
    main()
