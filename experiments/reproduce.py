"""Write docs/reproduce.md and its pictures from the records in results/: `python experiments/reproduce.py`."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path

from feddrift import algorithms
from feddrift.algorithms.baselines.ifca import IFCA
from feddrift.reports import labels, paper, pictures, tables
from feddrift.reports import summary as report
from feddrift.reports.summary import PublishedResult, Spread, Summary
from feddrift.runs import record

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
DOCS = ROOT / "docs"
STREAMS = ("sine-2", "circle-2", "sea-2", "sea-4", "mnist-2", "mnist-4", "mnist-r", "mnist-l-4")
APART = "mnist-l-4"  # its construction is not published
SHOWN = ["Oblivious", "DriftSurf", "CFL-W", "IFCA-W", "FedDrift-Eager", "FedDrift", "FedDrift-Trunk", "Oracle"]
MAX_LINE_LENGTH = 118  # of prose
NOTES = tomllib.loads((Path(__file__).parent / "notes.toml").read_text())

Cell = tuple[Summary, PublishedResult | None]


def main() -> None:
    (DOCS / "reproduce.md").write_text(page())
    draw()


def page() -> str:
    """The whole text."""
    cells = [
        (summary, paper.find_published_result(summary))
        for summary in report.summarise(record.read_all(RESULTS / "tables"))
    ]
    fmow = report.summarise(record.read_all(RESULTS / "fmow-labels"))
    parts = [HEAD, score(cells), orders(cells), *(table(stream, cells) for stream in STREAMS), outside(cells)]
    return "\n".join([*parts, figures(), fmow_table(fmow)])


HEAD = """# Reproduction of the paper's results

This page compares feddrift's results with those of the FedDrift paper, for every algorithm and stream, with the command
that repeats each result. `python experiments/reproduce.py` writes the page from the records in `results/`; only the
remarks on single cells are written by hand.

- Accuracies are percent, as mean and sample standard deviation over seeds. They omit or include the time steps at which
  a client's concept changed.
- *Difference* is feddrift's mean minus the paper's. A star marks a difference outside the band, which is max(1.0, twice
  the paper's standard deviation).
- FedDrift-Trunk and Oracle-Trunk are not in the paper.

To repeat whole tables:

- Small streams: `feddrift sweep experiments/tables-small.toml --out runs/tables` (about 15 minutes on two CPU cores).
- MNIST: `feddrift sweep experiments/tables-mnist.toml --out runs/tables` (needs a GPU).
- Comparison with the paper: `feddrift report runs/tables --paper`.
"""


def score(cells: list[Cell]) -> str:
    lines = ["| | cells run | accuracies within the band |", "|---|---|---|"]
    for name, chosen in (("seven streams", [s for s in STREAMS if s != APART]), (APART, [APART])):
        flags = [flag for s, p in cells if p and s.stream in chosen for flag in p.within.values() if flag is not None]
        if flags:
            share = 100 * sum(flags) / len(flags)
            lines.append(f"| {name} | {len(flags) // 2} | {sum(flags)} of {len(flags)} ({share:.1f} %) |")
    return "\n".join(lines) + "\n"


def table(stream: str, cells: list[Cell]) -> str:
    order = list(algorithms.ALGORITHMS)
    rows = sorted((c for c in cells if c[0].stream == stream), key=lambda c: order.index(c[0].algorithm))
    if not rows:
        return f"## {stream}\n\nNot run yet.\n"
    lines = [
        f"## {stream}", "",
        "| algorithm | seeds | omitting drifts, feddrift | paper | difference | including drifts, feddrift | paper "
        "| difference | command |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for summary, theirs in rows:
        line = [summary.algorithm, labels.format_ranges(summary.seeds)]
        for name in paper.ACCURACIES:
            mine: Spread = getattr(summary, name)
            line += [tables.format_spread(mine), *beside(mine, theirs, name)]
        lines.append(f"| {' | '.join(line)} | `{command(summary)}` |")
    return "\n".join(lines) + "\n"


def beside(mine: Spread, theirs: PublishedResult | None, name: str) -> list[str]:
    if theirs is None:
        return ["-", "-"]
    other: Spread = getattr(theirs, name)
    return [
        tables.format_spread(other),
        f"{mine.mean - other.mean:+.2f}" + (" \\*" if theirs.within[name] is False else ""),
    ]


def command(summary: Summary) -> str:
    """Return the command that repeats these runs."""
    given = {
        k: v
        for k, v in labels.select_non_default(summary.algorithm, summary.settings).items()
        if not default(summary, k, v)
    }
    settings = "".join(f" --set {k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items())
    name = f'"{summary.algorithm}"' if "(" in summary.algorithm else summary.algorithm
    seeds = labels.format_ranges(summary.seeds).replace(" ", "")
    return f"feddrift run --stream {summary.stream} --algorithm {name}{settings} --seeds {seeds}"


def default(summary: Summary, setting: str, value: object) -> bool:
    """Return True if a setting is the default of the stream's family."""
    cls = algorithms.find_entry(summary.algorithm).cls
    family = summary.stream.split("-")[0]
    options = algorithms.get_options(cls)
    known = algorithms.get_family_defaults(cls).get(setting, {}).get(family, options[setting].default)
    if family == "fmow":
        known = algorithms.FMOW_DEFAULTS.get(summary.algorithm, {}).get(setting, known)
    by_stream = setting == "n_models" and cls is IFCA and family != "fmow"
    return bool(known == value) or by_stream


def orders(cells: list[Cell]) -> str:
    mean = {(s.stream, s.algorithm): s.omitting_drifts.mean for s, _ in cells if s.omitting_drifts}
    lines = ["## Ranking, omitting drifts", ""]
    lines += ["| stream | FedDrift | best baseline | FedDrift-Eager | Oracle |", "|---|---|---|---|---|"]
    ours = {"FedDrift", "FedDrift-C", "FedDrift-W", "FedDrift-Trunk", "FedDrift-Eager", "FedDrift-Eager-W"}
    for stream in STREAMS:
        others = {a: m for (s, a), m in mean.items() if s == stream and a not in ours and not a.startswith("Oracle")}
        if others and (stream, "FedDrift") in mean:
            best = max(others, key=lambda a: others[a])
            eager = mean.get((stream, "FedDrift-Eager"))
            oracle = mean.get((stream, "Oracle"))
            told = [f"{mean[stream, 'FedDrift']:.2f}", f"{others[best]:.2f} ({best})"]
            told += ["-" if value is None else f"{value:.2f}" for value in (eager, oracle)]
            lines.append(f"| {stream} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def outside(cells: list[Cell]) -> str:
    lines = ["## Cells outside the band", "", "*Open* means that the cause is not known.", ""]
    for summary, theirs in cells:
        if theirs and False in theirs.within.values():
            which = " and ".join(k.replace("_", " ") for k, flag in theirs.within.items() if flag is False)
            note = NOTES.get(summary.stream, {}).get(summary.algorithm, "Open.")
            remark = f"- **{summary.stream}, {summary.algorithm}** ({which}). {note}"
            lines.append(textwrap.fill(remark, MAX_LINE_LENGTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines if len(lines) > 4 else [*lines[:2], "None."]) + "\n"


PICTURES = {  # title, and what draws it
    "patterns": ("Drift patterns", "results/tables patterns"),
    "accuracy": ("Accuracy over time", "results/tables accuracy " + " ".join(f"--algorithm {name}" for name in SHOWN)),
    "clusters": ("Learned clusterings", "results/figure-clusters clusters"),
    "delta": ("Accuracy against delta", "results/figure-delta delta"),
    "traffic": ("Accuracy against traffic", "results/figure-delta traffic"),
}


def figures() -> str:
    text = [
        "## Figures",
        "",
        "The figures use the runs of the tables and those of `experiments/figure-clusters.toml` and",
        "`figure-delta.toml`. The runs on MNIST-4, with one seed, are those of `figure-delta-mnist.toml`.",
        "",
    ]
    for name, (title, how) in PICTURES.items():
        text += [
            f"**{title}**, drawn by `feddrift plot {how} --out {name}.png`.",
            "",
            f"![{title}](figures/paper-{name}.png)",
            "",
        ]
    text += ["**FMoW's classes over time**, from the counts that are part of the package.", ""]
    return "\n".join([*text, "![Shares of FMoW's classes](figures/paper-classes.png)", ""])


def draw() -> None:
    """The pictures that the text shows."""
    runs = record.read_all(RESULTS / "tables")
    delta = record.read_all(RESULTS / "figure-delta")
    drawn = {
        "patterns": pictures.draw_patterns(runs),
        "accuracy": pictures.draw_accuracy([r for r in runs if r.header["algorithm"] in SHOWN]),
        "clusters": pictures.draw_clusters(record.read_all(RESULTS / "figure-clusters")),
        "delta": pictures.draw_threshold(delta),
        "traffic": pictures.draw_traffic(delta),
        "classes": pictures.draw_class_shares(),
    }
    for name, fig in drawn.items():
        pictures.save_picture(fig, DOCS / "figures" / f"paper-{name}.png")


def fmow_table(summaries: list[Summary]) -> str:
    order = list(algorithms.ALGORITHMS)
    lines = [FMOW, "| algorithm | seeds | accuracy | sent | models | command |", "|---|---|---|---|---|---|"]
    for s in sorted(summaries, key=lambda s: order.index(s.algorithm)):
        told = [
            s.algorithm,
            labels.format_ranges(s.seeds),
            tables.format_spread(s.including_drifts),
            f"{s.models_sent_ratio:.2f}",
        ]
        lines.append(f"| {' | '.join(told)} | {s.models_final:.3g} | `{command(s)}` |")
    return "\n".join(lines) + "\n"


FMOW = """## FMoW

FMoW itself has **not** been run, because its images (54 GB) and ImageNet's weights were not available. The stream
`fmow-labels` replaces it. It has the real counts of the ten classes in five regions from 2002 to 2017 (the paper's
partition D). One class of Fashion-MNIST stands for each class, and the paper's perceptron replaces the ResNet.

- Only the shares of the classes drift, and the images of a class do not change. So one model can serve all regions, and
  clusters can gain little. The numbers show what clusters cost.
- The true clustering is not known. So Oracle cannot be run, and the accuracy includes all time steps.
- As in the paper, FedDrift and FedDrift-W start with a model per region, and IFCA starts with five models. FedDrift-C,
  FedDrift-Eager and FedDrift-Trunk start with one model.
- `sent` is traffic relative to Oblivious, and `models` is the number of models at the end.
"""


if __name__ == "__main__":
    main()
