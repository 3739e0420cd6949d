"""Write the tables of docs/field.md and draw its figure: `python -m experiments.field`.

The runs of `experiments/field.toml` are in results/field, or in results/auto if `experiments/auto.toml` has them too.
The runs on full pictures (`experiments/pictures.toml`) are in results/pictures.
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
PAGE = DOCS / "field.md"
PICTURE = DOCS / "figures" / "field-ranks.png"
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
DELTA = "delta 0.05"  # of all other methods with a delta
TUNED = ("FedDrift", "FedDrift-Trunk", "FedDrift-Eager", "DriftSurf", "FairFedDrift", "IFCA", "FedRC")
NUMBER_KNOWN = "IFCA, number of concepts known"
CONCEPTS_KNOWN = ("Oracle", "Oracle-W", "Oracle-Trunk", NUMBER_KNOWN)
MEASURES = {
    "including": ("including drifts, %", 2), "worst": ("worst client, %", 2), "log_loss": ("log loss", 3),
    "sent": ("sent", 2), "models": ("models", 1), "false_alarms": ("false alarms", 1), "ari": ("ARI", 2),
}  # fmt: skip
Method = tuple[str, str]  # its name, and its setting, if it has one that depends on the data


def main() -> None:
    PAGE.write_text(render_page(PAGE.read_text()))
    pictures.save_picture(pictures.draw_ranks(ranking(), AUTO), PICTURE)


def render_page(text: str) -> str:
    """Return the text of the page with new tables between its markers."""
    for make in (beaten, accuracy, others, tuning, full, effort):
        begin = f"<!-- {make.__name__}: written by experiments/field.py -->\n"
        end = f"<!-- end of {make.__name__} -->"
        assert begin in text and end in text, make.__name__
        made = make()
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text)  # noqa: B023
    return text


@cache
def records() -> Sequence[Record]:
    """Return the records of the runs in the tables."""
    every = [run for folder in ("field", "auto") for run in measured.read(folder) if run.header["stream"] in STREAMS]
    return [run for run in every if _in_the_table(run)]


@cache
def runs() -> Sequence[Run]:
    """Return the numbers of these records."""
    return [_numbers(run) for run in records()]


def _in_the_table(run: Record) -> bool:
    """Return whether a run is of a method of the catalogue, and changes nothing except seed and settings."""
    return "." not in run.header["algorithm"] and not set(run.header["overrides"]) - {"data_seed"}


def _numbers(run: Record) -> Run:
    found = measured.numbers(run)
    number_known = found.algorithm == "IFCA" and run.header["settings"].get("first") == "choose"
    return replace(found, algorithm=NUMBER_KNOWN, setting="") if number_known else found


def methods() -> list[Method]:
    """Return all methods in the setting that all streams share."""
    found = {(run.algorithm, run.setting) for run in runs()}
    return sorted(m for m in found if m[1] in ("", ONE.get(m[0], DELTA)))


@cache
def _values() -> dict[tuple[str, str, str], dict[int, Run]]:
    found: dict[tuple[str, str, str], dict[int, Run]] = {}
    for run in runs():
        found.setdefault((run.stream, run.algorithm, run.setting), {})[run.seed] = run
    return found


def level(method: Method, stream: str, measure: str = "accuracy") -> dict[int, float]:
    """Return a measure of a method on a stream by reported seed, or nothing if a seed is missing."""
    by_seed = _values().get((stream, *method), {})
    if not list_reported_seeds(stream) <= set(by_seed):
        return {}
    return {seed: getattr(by_seed[seed], measure) for seed in list_reported_seeds(stream)}


@cache
def list_reported_seeds(stream: str) -> frozenset[int]:
    """Return the seeds, except those for tuning, that all methods with enough seeds on a stream have in common."""
    seeds_per_method = [set(_values().get((stream, *m), ())) - set(TUNING) for m in methods()]
    return frozenset(set.intersection(*(seeds for seeds in seeds_per_method if len(seeds) >= LEAST)))


@cache
def complete() -> tuple[str, ...]:
    """Return the streams on which all methods without knowledge of the true concepts ran."""
    ranked = [m for m in methods() if m[0] not in CONCEPTS_KNOWN]
    return tuple(s for s in STREAMS if all(level(m, s) for m in ranked))


@cache
def ranking() -> Ranking:
    """Return the ranks of the methods without knowledge of the true concepts."""
    ranked = [m for m in methods() if m[0] not in CONCEPTS_KNOWN]
    means = {words(m): [float(np.mean(list(level(m, s).values()))) for s in complete()] for m in ranked}
    return build_ranking(means, complete())


def in_order() -> list[Method]:
    """Return the methods by mean rank, then those that know the true concepts."""
    place = {name: k for k, name in enumerate(ranking().methods)}
    return sorted(methods(), key=lambda m: (m[0] in CONCEPTS_KNOWN, place.get(words(m), 0), m))


def beaten() -> str:
    """List the methods with a higher mean than FedDrift-Auto, in bold if the 95 % interval excludes 0.

    Methods that know the true concepts are left out.
    """
    rows = list[list[str]]()
    for stream in STREAMS:
        mine = level((AUTO, ""), stream)
        ahead = list[tuple[float, str]]()
        for method in (m for m in in_order() if m[0] not in CONCEPTS_KNOWN):
            if not (theirs := level(method, stream)):
                continue
            gap, low, high = compute_interval([theirs[seed] - mine[seed] for seed in sorted(theirs)])
            if gap > 0 and low is not None and high is not None:
                lead = f"{words(method)} +{gap:.2f} ± {high - gap:.2f}"
                ahead.append((gap, f"**{lead}**" if low > 0 else lead))
        ahead.sort(reverse=True)
        more = [f"and {len(ahead) - 4} more"] if len(ahead) > 4 else []
        rows.append([STREAMS[stream], mean(mine), ", ".join([lead for _, lead in ahead[:4]] + more) or "none"])
    return table(["", AUTO, "methods with a higher mean, and their lead in points"], rows)


def accuracy() -> str:
    """Compare all methods on every stream, the best rank first, then those that know the true concepts."""
    rows = [["seeds", "", *(str(len(list_reported_seeds(stream))) for stream in STREAMS)]]
    ranked = [m for m in methods() if m[0] not in CONCEPTS_KNOWN]
    first = {s: max(ranked, key=lambda m: np.mean(list(level(m, s).values())) if level(m, s) else 0) for s in STREAMS}
    mean_rank = dict(zip(ranking().methods, ranking().mean, strict=True))
    for method in in_order():
        cells = []
        for stream in STREAMS:
            cell = mean(level(method, stream))
            cells.append(f"**{cell}**" if method == first[stream] else cell)
        place = "-" if method[0] in CONCEPTS_KNOWN else f"{mean_rank[words(method)]:.1f}"
        rows.append([words(method), place, *cells])
    return table(["", "mean rank", *STREAMS.values()], rows)


def others() -> str:
    """Compare the other measures, as means over the streams on which they are known."""
    rows = []
    for method in in_order():
        cells = []
        for measure, (_, digits) in MEASURES.items():
            known = [list(level(method, stream, measure).values()) for stream in complete()]
            cells.append(mean({k: float(np.mean(v)) for k, v in enumerate(known) if v}, digits))
        rows.append([words(method), *cells])
    return table(["", *(title for title, _ in MEASURES.values())], rows)


def best_setting(name: str, stream: str) -> str:
    """Return the best of five settings on the tuning seeds; of equal ones that which all streams share."""
    tried = {
        setting: round(float(np.mean([by_seed[seed].accuracy for seed in TUNING])), 6)
        for (s, algorithm, setting), by_seed in _values().items()
        if (s, algorithm) == (stream, name) and set(TUNING) <= set(by_seed)
    }
    return max(tried, key=lambda setting: (tried[setting], setting == ONE.get(name, DELTA)), default="")


def tuning() -> str:
    """Compare on the reported seeds the best of five settings, chosen on the tuning seeds."""
    rows = [[AUTO, *(mean(level((AUTO, ""), stream)) for stream in complete())]]
    for name in TUNED:
        cells = []
        for stream in complete():
            setting = best_setting(name, stream)
            cells.append(f"{mean(level((name, setting), stream))} ({setting.rpartition(' ')[2]})" if setting else "-")
        rows.append([name, *cells])
    return table(["", *(STREAMS[stream] for stream in complete())], rows)


def full() -> str:
    """Compare full pictures with their principal components, with the same seed."""
    every = measured.read("pictures")
    found = {(run.stream, run.algorithm, run.setting): run for run in map(measured.numbers, every)}
    seen = {words(m): m for m in in_order() if all((stream, *m) in found for stream in PICTURES)}
    whole = {name: [found[s, *m].accuracy for s in PICTURES] for name, m in seen.items()}
    parts = {
        name: [_values()[f"{s}:components=32", *m][found[s, *m].seed].accuracy for s in PICTURES]
        for name, m in seen.items()
    }
    now = build_ranking(whole, PICTURES)
    then = build_ranking(parts, PICTURES)
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
    times = f"{min(seconds):.0f} to {max(seconds):.0f} s each"
    sentence = f"{len(every)} runs of {times}, while other runs used the same machine."
    return f"{table(['', 'mean rank', *PICTURES], rows)}\n\n{sentence}"


def effort() -> str:
    """Report the number of runs and their total time."""
    hours = sum(run.seconds or 0.0 for run in records()) / 3600
    times = f"They took {hours:.1f} hours of one core, while other runs used the same machine."
    return f"{len(records()):,} runs, including those for tuning. {times}"


def words(method: Method) -> str:
    """Return a method as the tables name it."""
    return " ".join(filter(None, method))


if __name__ == "__main__":
    main()
