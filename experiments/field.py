"""Write the tables of docs/field.md and draw its picture: `python -m experiments.field`.

The records are those of `experiments/field.toml`, in results/field, and in results/auto where both plans name a run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from experiments import measured
from experiments.measured import TUNING, Run, mean, table

from feddrift.reports import pictures
from feddrift.reports.summary import interval
from feddrift.runs.record import Record
from feddrift.types import Floats

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PICTURE = DOCS / "field.md", DOCS / "figures" / "field-ranks.png"
AUTO = "FedDrift-Auto"
PICTURES = ("fashion-swap-sudden", "fashion-swap-recurrent", "mnist-g-3", "digits-turn", "digits-shown")
STREAMS = {
    **{f"{name}:components=32": name for name in PICTURES},
    **{name: name for name in ("elec2-hours", "sea-4-mixed", "sea-4-burst", "sine-2", "circle-2", "sea-2", "sea-4")},
    **{name: name for name in ("air-quality", "air-beijing")},
}
ONE = {  # the setting that all streams share
    "FairFedDrift": "delta 0.25", "FedRC": "models 3", "FedEM": "models 3",
    **dict.fromkeys(("IFCA", "IFCA(T)", "IFCA-W"), "models 4"),
}  # fmt: skip
DELTA = "delta 0.05"  # of everybody else who has one
TUNED = ("FedDrift", "FedDrift-Trunk", "FedDrift-Eager", "DriftSurf", "FairFedDrift", "IFCA", "FedRC")
TOLD_NUMBER = "IFCA, told the number"
TOLD = ("Oracle", "Oracle-W", "Oracle-Trunk", TOLD_NUMBER)
MEASURES = {
    "including": ("including drifts, %", 2), "worst": ("worst client, %", 2), "log_loss": ("log loss", 3),
    "sent": ("sent", 2), "models": ("models", 1), "false_alarms": ("false alarms", 1), "ari": ("ARI", 2),
}  # fmt: skip
Method = tuple[str, str]  # its name, and its setting, if it has one that depends on the data


def main() -> None:
    PAGE.write_text(rendered(PAGE.read_text()))
    pictures.save(ranks_picture(), PICTURE)


def rendered(text: str) -> str:
    """The page, with what stands between its marks made anew."""
    for make in (beaten, accuracy, others, chosen):
        begin, end = f"<!-- {make.__name__}: written by experiments/field.py -->\n", f"<!-- end of {make.__name__} -->"
        assert begin in text and end in text, make.__name__
        made = make()
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text)  # noqa: B023
    return text


@cache
def runs() -> Sequence[Run]:
    """The runs of the table, whichever folder has them."""
    records = [run for folder in ("field", "auto") for run in measured.read(folder) if run.header["stream"] in STREAMS]
    return [_numbers(run) for run in records if _in_the_table(run)]


def _in_the_table(run: Record) -> bool:
    """Not a variant of FedDrift-Auto, and nothing but the seed and settings moved."""
    return "." not in run.header["algorithm"] and not set(run.header["overrides"]) - {"data_seed"}


def _numbers(run: Record) -> Run:
    found = measured.numbers(run)
    told = found.algorithm == "IFCA" and run.header["settings"].get("first") == "choose"
    return replace(found, algorithm=TOLD_NUMBER, setting="") if told else found


def methods() -> list[Method]:
    """Every name in the setting that all streams share, and the told ones."""
    found = {(run.algorithm, run.setting) for run in runs()}
    return sorted(m for m in found if m[1] in ("", ONE.get(m[0], DELTA)))


@cache
def _values() -> dict[tuple[str, str, str], dict[int, Run]]:
    found: dict[tuple[str, str, str], dict[int, Run]] = {}
    for run in runs():
        found.setdefault((run.stream, run.algorithm, run.setting), {})[run.seed] = run
    return found


def level(method: Method, stream: str, measure: str = "accuracy") -> dict[int, float]:
    """By reported seed."""
    by_seed = _values().get((stream, *method), {})
    return {seed: getattr(run, measure) for seed, run in by_seed.items() if seed in reported(stream)}


@cache
def reported(stream: str) -> frozenset[int]:
    """The seeds, not those of tuning, that everybody ran with who ran there at all."""
    everybody = [set(_values()[stream, *m]) for m in methods() if (stream, *m) in _values()]
    return frozenset(set.intersection(*everybody) - set(TUNING))


@cache
def ranks() -> tuple[list[Method], Floats]:
    """The methods that ran on all streams without being told anything, and their ranks [method, stream], 1: best."""
    from scipy.stats import rankdata

    every = [m for m in methods() if m[0] not in TOLD and all(level(m, stream) for stream in STREAMS)]
    means = np.array([[np.mean(list(level(m, stream).values())) for stream in STREAMS] for m in every])
    found = np.apply_along_axis(rankdata, 0, -means.round(6))
    order = np.argsort(found.mean(axis=1), kind="stable")
    return [every[k] for k in order], found[order]


def critical_difference(n_methods: int, n_streams: int) -> float:
    """How far mean ranks must be apart to differ at 5 % (Nemenyi).

    >>> round(critical_difference(4, 14), 2)  # q = 2.569 for four (Demsar 2006)
    1.25
    """
    from scipy.stats import studentized_range

    q = studentized_range.ppf(0.95, n_methods, np.inf) / np.sqrt(2)
    return float(q * np.sqrt(n_methods * (n_methods + 1) / (6 * n_streams)))


def beaten() -> str:
    """Where somebody who is told nothing is better than FedDrift-Auto, beyond the interval."""
    rows = list[list[str]]()
    for stream, title in STREAMS.items():
        mine, better = level((AUTO, ""), stream), list[tuple[float, float, str]]()
        for method in ranks()[0]:
            theirs = level(method, stream)
            gap, _, high = interval([theirs[seed] - mine[seed] for seed in sorted(theirs)])
            if method[0] != AUTO and high is not None and gap > high - gap:
                better.append((gap, high - gap, words(method)))
        better.sort(reverse=True)
        told = [f"{name} +{gap:.2f} ± {half:.2f}" for gap, half, name in better[:3]]
        more = [f"and {len(better) - 3} others"] if len(better) > 3 else []
        rows.append([title, mean(mine), ", ".join(told + more) or "nobody"])
    return table(["", AUTO, "better, beyond the 95 % interval"], rows)


def accuracy() -> str:
    """Everybody on every stream, the best rank first, then who is told."""
    ranked, places = ranks()
    rows = [["seeds", "", *(str(len(reported(stream))) for stream in STREAMS)]]
    best = {stream: max(float(mean(level(m, stream))) for m in ranked) for stream in STREAMS}
    for method in [*ranked, *(m for m in methods() if m not in ranked)]:
        place = f"{places[ranked.index(method)].mean():.1f}" if method in ranked else "told"
        cells = [mean(level(method, stream)) for stream in STREAMS]
        if method in ranked:
            cells = [f"**{x}**" if float(x) == best[s] else x for x, s in zip(cells, STREAMS, strict=True)]
        rows.append([words(method), place, *cells])
    return table(["", "mean rank", *STREAMS.values()], rows)


def others() -> str:
    """The other measures, as means over the streams where they are known."""
    rows = []
    for method in [*ranks()[0], *(m for m in methods() if m[0] in TOLD)]:
        cells = []
        for measure, (_, digits) in MEASURES.items():
            known = {s: list(level(method, s, measure).values()) for s in STREAMS}
            cells.append(mean({k: float(np.mean(v)) for k, v in enumerate(known.values()) if v}, digits))
        rows.append([words(method), *cells])
    return table(["", *(title for title, _ in MEASURES.values())], rows)


def best_setting(name: str, stream: str) -> str:
    """The best of five on the tuning seeds; of equals the one that all streams share."""
    tried = {
        setting: round(float(np.mean([by_seed[seed].accuracy for seed in TUNING])), 6)
        for (s, algorithm, setting), by_seed in _values().items()
        if (s, algorithm) == (stream, name) and set(TUNING) <= set(by_seed)
    }
    return max(tried, key=lambda setting: (tried[setting], setting == ONE.get(name, DELTA)))


def chosen() -> str:
    """What the best of five settings, chosen on the tuning seeds, has on the reported ones."""
    rows = []
    for name in TUNED:
        cells = []
        for stream in STREAMS:
            setting = best_setting(name, stream)
            cells.append(f"{mean(level((name, setting), stream))} ({setting.rpartition(' ')[2]})")
        rows.append([name, *cells])
    return table(["", *STREAMS.values()], rows)


def words(method: Method) -> str:
    """As the tables have it."""
    return " ".join(filter(None, method))


def ranks_picture() -> Any:
    """The rank on each stream, the mean, and how far apart means must be to differ."""
    from matplotlib.figure import Figure

    ranked, places = ranks()
    averages, apart = places.mean(axis=1), critical_difference(*places.shape)
    fig = Figure(figsize=(8, 0.24 * len(ranked) + 1.2), layout="constrained")
    axes, at = fig.subplots(), np.arange(len(ranked))[::-1]
    color = ["#c2570c" if name == AUTO else "#1f5fa8" for name, _ in ranked]
    axes.axvspan(averages[0], averages[0] + apart, color="#1f5fa8", alpha=0.08, linewidth=0)
    axes.scatter(places.T, np.tile(at, (places.shape[1], 1)), s=9, color="#9aa3ad", linewidths=0)
    axes.scatter(averages, at, s=42, color=color, zorder=3)
    axes.set_yticks(at, [words(m) for m in ranked], fontsize=8)
    axes.set_ylim(-0.8, len(ranked) - 0.2)
    axes.set_xlabel("rank on each stream (grey) and their mean; within the band: not different from the first at 5 %")
    axes.spines[["top", "right"]].set_visible(False)
    return fig


if __name__ == "__main__":
    main()
