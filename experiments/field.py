"""Write the tables of docs/field.md and draw its picture: `python -m experiments.field`.

The records are those of `experiments/field.toml`, in results/field, and in results/auto where both plans name a run;
full pictures are those of `experiments/pictures.toml`, in results/pictures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from experiments import measured
from experiments.measured import TUNING, Run, mean, table
from scipy.stats import spearmanr

from feddrift.reports import pictures
from feddrift.reports.ranks import Ranking, build_ranking
from feddrift.reports.summary import compute_interval
from feddrift.runs.record import Record

DOCS = Path(__file__).parent.parent / "docs"
LEAST = 3  # seeds
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
    pictures.save_picture(pictures.draw_ranks(ranking(), AUTO), PICTURE)


def rendered(text: str) -> str:
    """The page, with what stands between its marks made anew."""
    for make in (beaten, accuracy, others, chosen, full, effort):
        begin, end = f"<!-- {make.__name__}: written by experiments/field.py -->\n", f"<!-- end of {make.__name__} -->"
        assert begin in text and end in text, make.__name__
        made = make()
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text)  # noqa: B023
    return text


@cache
def records() -> Sequence[Record]:
    """Those of the table, whichever folder has them."""
    every = [run for folder in ("field", "auto") for run in measured.read(folder) if run.header["stream"] in STREAMS]
    return [run for run in every if _in_the_table(run)]


@cache
def runs() -> Sequence[Run]:
    """Their numbers."""
    return [_numbers(run) for run in records()]


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
    if not reported(stream) <= set(by_seed):  # it has not run with all of them yet
        return {}
    return {seed: getattr(by_seed[seed], measure) for seed in reported(stream)}


@cache
def reported(stream: str) -> frozenset[int]:
    """The seeds, not those of tuning, that everybody ran with who ran there with enough of them."""
    everybody = [set(_values().get((stream, *m), ())) - set(TUNING) for m in methods()]
    return frozenset(set.intersection(*(seeds for seeds in everybody if len(seeds) >= LEAST)))


@cache
def complete() -> tuple[str, ...]:
    """The streams on which everybody ran who is told nothing."""
    untold = [m for m in methods() if m[0] not in TOLD]
    return tuple(s for s in STREAMS if all(level(m, s) for m in untold))


@cache
def ranking() -> Ranking:
    """Of everybody who is told nothing."""
    untold = [m for m in methods() if m[0] not in TOLD]
    means = {words(m): [float(np.mean(list(level(m, s).values()))) for s in complete()] for m in untold}
    return build_ranking(means, complete())


def in_order() -> list[Method]:
    """The best first, then who is told."""
    place = {name: k for k, name in enumerate(ranking().methods)}
    return sorted(methods(), key=lambda m: (m[0] in TOLD, place.get(words(m), 0), m))


def beaten() -> str:
    """Who of those that are told nothing is ahead of FedDrift-Auto on average, in bold beyond the 95 % interval."""
    rows = list[list[str]]()
    for stream in STREAMS:
        mine, ahead = level((AUTO, ""), stream), list[tuple[float, str]]()
        for method in (m for m in in_order() if m[0] not in TOLD):
            if not (theirs := level(method, stream)):
                continue
            gap, low, high = compute_interval([theirs[seed] - mine[seed] for seed in sorted(theirs)])
            if gap > 0 and low is not None and high is not None:
                told = f"{words(method)} +{gap:.2f} ± {high - gap:.2f}"
                ahead.append((gap, f"**{told}**" if low > 0 else told))
        ahead.sort(reverse=True)
        more = [f"and {len(ahead) - 4} more"] if len(ahead) > 4 else []
        rows.append([STREAMS[stream], mean(mine), ", ".join([told for _, told in ahead[:4]] + more) or "nobody"])
    return table(["", AUTO, "ahead of it, in points"], rows)


def accuracy() -> str:
    """Everybody on every stream, the best rank first, then who is told."""
    rows = [["seeds", "", *(str(len(reported(stream))) for stream in STREAMS)]]
    untold = [m for m in methods() if m[0] not in TOLD]
    first = {s: max(untold, key=lambda m: np.mean(list(level(m, s).values())) if level(m, s) else 0) for s in STREAMS}
    mean_rank = dict(zip(ranking().methods, ranking().mean, strict=True))
    for method in in_order():
        cells = []
        for stream in STREAMS:
            cell = mean(level(method, stream))
            cells.append(f"**{cell}**" if method == first[stream] else cell)
        place = "told" if method[0] in TOLD else f"{mean_rank[words(method)]:.1f}"
        rows.append([words(method), place, *cells])
    return table(["", "mean rank", *STREAMS.values()], rows)


def others() -> str:
    """The other measures, as means over the streams where they are known."""
    rows = []
    for method in in_order():
        cells = []
        for measure, (_, digits) in MEASURES.items():
            known = [list(level(method, stream, measure).values()) for stream in complete()]
            cells.append(mean({k: float(np.mean(v)) for k, v in enumerate(known) if v}, digits))
        rows.append([words(method), *cells])
    return table(["", *(title for title, _ in MEASURES.values())], rows)


def best_setting(name: str, stream: str) -> str:
    """The best of five on the tuning seeds; of equals the one that all streams share."""
    tried = {
        setting: round(float(np.mean([by_seed[seed].accuracy for seed in TUNING])), 6)
        for (s, algorithm, setting), by_seed in _values().items()
        if (s, algorithm) == (stream, name) and set(TUNING) <= set(by_seed)
    }
    return max(tried, key=lambda setting: (tried[setting], setting == ONE.get(name, DELTA)), default="")


def chosen() -> str:
    """What the best of five settings, chosen on the tuning seeds, has on the reported ones."""
    rows = [[AUTO, *(mean(level((AUTO, ""), stream)) for stream in complete())]]
    for name in TUNED:
        cells = []
        for stream in complete():
            setting = best_setting(name, stream)
            cells.append(f"{mean(level((name, setting), stream))} ({setting.rpartition(' ')[2]})" if setting else "-")
        rows.append([name, *cells])
    return table(["", *(STREAMS[stream] for stream in complete())], rows)


def full() -> str:
    """The streams of pictures as they are, beside their components, with the same seed: does the order stay?"""
    every = measured.read("pictures")
    found = {(run.stream, run.algorithm, run.setting): run for run in map(measured.numbers, every)}
    seen = {words(m): m for m in in_order() if all((stream, *m) in found for stream in PICTURES)}
    whole = {name: [found[s, *m].accuracy for s in PICTURES] for name, m in seen.items()}
    parts = {
        name: [_values()[f"{s}:components=32", *m][found[s, *m].seed].accuracy for s in PICTURES]
        for name, m in seen.items()
    }
    now, then = build_ranking(whole, PICTURES), build_ranking(parts, PICTURES)
    at = [then.methods.index(name) for name in now.methods]
    ranks = np.column_stack([now.mean, now.ranks]), np.column_stack([then.mean, then.ranks])[at]
    rows = []
    for name, rank, old in zip(now.methods, ranks[0][:, 0], ranks[1][:, 0], strict=True):
        cells = [f"{a:.2f} ({b:.2f})" for a, b in zip(whole[name], parts[name], strict=True)]
        best = [a == max(column) for a, column in zip(whole[name], zip(*whole.values(), strict=True), strict=True)]
        cells = [f"**{cell}**" if first else cell for cell, first in zip(cells, best, strict=True)]
        rows.append([name, f"{rank:.1f} ({old:.1f})", *cells])
    alike = [spearmanr(*pair).statistic for pair in zip(*map(np.transpose, ranks), strict=True)]
    rows.append(["rank correlation", *(f"{rho:.2f}" for rho in alike)])
    seconds = [run.seconds or 0.0 for run in every]
    took = f"{len(every)} runs, of {min(seconds):.0f} to {max(seconds):.0f} s each, others beside them."
    return f"{table(['', 'mean rank', *PICTURES], rows)}\n\n{took}"


def effort() -> str:
    """How many runs the plan has had, and how long they took."""
    hours = sum(run.seconds or 0.0 for run in records()) / 3600
    return f"{len(records()):,} runs, tuning included, which took {hours:.1f} hours of a core, others beside them."


def words(method: Method) -> str:
    """As the tables have it."""
    return " ".join(filter(None, method))


if __name__ == "__main__":
    main()
