"""Write the tables of docs/auto.md and docs/auto-measured.md from the records: `python -m experiments.auto`.

The records are in results/auto, those of MNIST also in results/tables and results/trunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from experiments import measured
from experiments.constants import FIELDS
from experiments.measured import TUNING, Run, format_difference, mean, table

import feddrift as fd
from feddrift.reports.summary import compute_interval
from feddrift.runs.record import Record

DOCS = Path(__file__).parent.parent / "docs"
AUTO = "FedDrift-Auto"
MADE = {
    "sine-2": "sine-2", "circle-2": "circle-2", "sea-2": "sea-2", "sea-4": "sea-4", "plane": "hyperplane",
    "fashion_100": "Fashion, 100 rows", "fashion_500": "Fashion, 500 rows",
}  # fmt: skip
REAL = {
    "air-quality": "air-quality", "without_date": "without date", "air-beijing": "air-beijing",
    "elec2-hours": "elec2-hours",
}  # fmt: skip
DIFFERENCES = {  # between clients or over time
    "sine-2": "labels are swapped", "circle-2": "another circle", "sea-2": "another threshold, 10 % label noise",
    "sea-4": "three close thresholds, 10 % label noise", "plane": "two groups, whose rules turn at every time step",
    "fashion_100": "labels of some classes are swapped", "fashion_500": "the same, more rows",
    "air-quality": "real: five cities, seasons", "without_date": "the same, the date is not an input",
    "air-beijing": "real: seasons; all clients are in one city", "elec2-hours": "real: hours of the day, a new market",
}  # fmt: skip
TOLD = {"by_city": "air-quality", "by_city_without_date": "without_date"}  # streams on which Oracle knows the city
BY_CITY = "by city"  # the setting of these runs in the tables
ONE = ("delta 0.05", "models 4")  # the settings that all streams share
SETTINGS = {"FedDrift": ONE[0], "FedDrift-Trunk": ONE[0], "IFCA": ONE[1]}
MNIST = ("mnist-2", "mnist-4", "mnist-r", "mnist-l-4")
BESIDE = ("Oblivious", "Local", "FineTuned", "FedDrift", "FedDrift-Trunk", "Oracle", AUTO)
CONDITIONS = {
    "5_clients": "5 clients", "50_clients": "50 clients", "100_rows": "100 rows per cell",
    "2000_rows": "2,000 rows per cell", "participation": "20 % of clients per round", "bursts": "bursts of noise",
    "gradual": "gradual drift",
}  # fmt: skip

UNSEEN = {  # experiments/unseen.py
    "moved": "labels are shifted, three groups", "few": "the same, 40 rows per cell",
    "corners": "exclusive or, and its inverse", "together": "all clients drift at once",
    "places": "a rule for each client, no drift", "seasons": "seasons, one nonlinear rule",
    "swing": "class shares oscillate",
}  # fmt: skip
ABLATIONS = {  # experiments/ablations.py
    "all_trusted": "every alarm is acted on", "error_alone": "a risen error is always evidence",
    "never_merged": "models never merge", "never_split": "no alarms: one shared model",
    "private_always": "private models always vote", "shared_alone": "private models never vote",
}  # fmt: skip
NEAR = ("Oblivious", "Window", "Local", "FineTuned", "CFL-W", "FedDrift", "FedDrift-Trunk", "IFCA", AUTO)


def main() -> None:
    for page in PAGES:
        page.write_text(render_page(page))


def render_page(page: Path) -> str:
    """Return the text of a page with new tables between its markers."""
    text = page.read_text()
    for make in PAGES[page]:
        name = make.__name__
        begin = f"<!-- {name}: written by experiments/auto.py -->\n"
        end = f"<!-- end of {name} -->"
        assert begin in text and end in text, name
        made = make()
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text)  # noqa: B023
    return text


@dataclass(frozen=True)
class Gap:
    """FedDrift-Auto on one stream, compared with the method that was best on the tuning data."""

    stream: str
    best: str
    mine: dict[int, float]  # by reported seed
    sent: dict[int, float]
    oblivious: dict[int, float]
    other: dict[int, float]

    @property
    def mean(self) -> float:
        return self._interval()[0]

    @property
    def half(self) -> float:
        """Half of the 95 % interval."""
        mean, _, high = self._interval()
        return 0.0 if high is None else high - mean

    def _interval(self) -> tuple[float, float | None, float | None]:
        return compute_interval(
            [self.mine[seed] - self.other[seed] for seed in sorted(set(self.mine) & set(self.other))]
        )


def gaps() -> list[Gap]:
    """Return the comparison with the best other method on every stream.

    On synthetic streams that method is chosen on the tuning seeds. On real streams it is chosen there on the first half
    of the time steps; the second half is reported, then the whole run.
    """
    found = []
    for stream, title in MADE.items():
        found.append(_gap(stream, title, choice(stream, "accuracy"), "accuracy"))
    for stream, title in REAL.items():
        best = choice(stream, "first")
        found += [_gap(stream, title, best, "second"), _gap(stream, f"{title}, whole run", best, "accuracy")]
    return found


def _gap(stream: str, title: str, best: tuple[str, str], measure: str) -> Gap:
    mine, sent = (_values(stream, AUTO, "", what) for what in (measure, "sent"))
    oblivious = _values(stream, "Oblivious", "", measure)
    other = _values(stream, *best, measure)
    return Gap(title, " ".join(filter(None, best)), mine, sent, oblivious, other)


def expectations() -> str:
    """Compare with one model and with fine-tuned models on every stream."""
    header = ["", "what differs", "Oblivious", "FineTuned", AUTO, "Auto minus Oblivious", "Auto minus FineTuned"]
    rows = list[list[str]]()
    for stream, title in {**MADE, **REAL}.items():
        mine, *others = (_values(stream, name, "", "accuracy") for name in (AUTO, "Oblivious", "FineTuned"))
        gaps = [format_difference(mine, other) for other in others]
        rows.append([title, DIFFERENCES[stream], *map(mean, others), f"**{mean(mine)}**", *gaps])
    return table(header, rows)


def distance() -> str:
    """Compare with the best other method on every stream."""
    header = ["", AUTO, "sent", "Oblivious", "best other method", "its accuracy", "Auto minus it"]
    rows = list[list[str]]()
    for gap in gaps():
        numbers = [f"**{mean(gap.mine)}**", mean(gap.sent), mean(gap.oblivious), gap.best, mean(gap.other)]
        rows.append([gap.stream, *numbers, f"{gap.mean:+.2f} ± {gap.half:.2f}"])
    return table(header, rows)


def choice(stream: str, measure: str) -> tuple[str, str]:
    """Return the other algorithm and setting that was best on the tuning seeds."""
    tried: dict[tuple[str, str], list[float]] = {}
    for run in _runs():
        if run.stream == stream and run.seed in TUNING and run.algorithm != AUTO:
            tried.setdefault((run.algorithm, run.setting), []).append(getattr(run, measure))
    level = {method: round(float(np.mean(values)), 6) for method, values in tried.items()}
    return max(level, key=lambda method: (level[method], _is_the_one(method[1])))  # of equals the shared setting


def names() -> str:
    """Compare all methods with one setting each, on the reported seeds."""
    streams = {**MADE, **REAL}
    found = {
        (run.algorithm, run.setting)
        for run in _runs()
        if run.stream in streams and _is_the_one(run.setting) and not run.algorithm.startswith("experiments.")
    }
    header = ["", *streams.values()]
    rows = list[list[str]]()
    for method in sorted(found, key=lambda method: (method[0] != AUTO, method)):
        rows.append([" ".join(filter(None, method)), *(_level(stream, method) for stream in streams)])
    return table(header, rows)


def _level(stream: str, method: tuple[str, str]) -> str:
    """Return the accuracy on the reported seeds; if there are none, that on the tuning seeds in italics."""
    if reported := _values(stream, *method, "accuracy"):
        return mean(reported)
    wanted = (stream, *method)
    tried = {run.seed: run.accuracy for run in _runs() if (run.stream, run.algorithm, run.setting) == wanted}
    return f"*{mean(tried)}*" if tried else "-"


def beside() -> str:
    """Compare accuracy including drifts, the worst client and the log loss."""
    header = ["", *BESIDE]
    rows = list[list[str]]()
    for stream, title in {**MADE, **REAL}.items():
        cells = []
        for name in BESIDE:
            setting = "delta 0.05" if name in ("FedDrift", "FedDrift-Trunk") else ""
            values = [_values(stream, name, setting, measure) for measure in ("including", "worst")]
            loss = _values(stream, name, setting, "log_loss")
            cells.append(" / ".join([*map(mean, values), f"{np.mean(list(loss.values())):.3f}"]) if loss else "-")
        rows.append([title, *cells])
    return table(header, rows)


def mnist() -> str:
    """Compare accuracy omitting and including drifts on MNIST, with the data of seed 0."""
    algorithms = ("Oblivious", "FedDrift", "FedDrift-Trunk", "Oracle", "Oracle-Trunk", "Local", "FineTuned", AUTO)
    records = [run for folder in ("auto", "tables", "trunk") for run in measured.read(folder)]
    header = ["", *algorithms]
    rows = list[list[str]]()
    for stream in MNIST:
        cells = []
        for name in algorithms:
            runs = [r for r in records if (r.header["stream"], r.header["algorithm"]) == (stream, name) and _plain(r)]
            numbers = [[fd.summary(r)[f"{which}_drifts"][0] for r in runs] for which in ("omitting", "including")]
            seeds = f" ({len(runs)})" if runs else ""
            cells.append(" / ".join(f"{np.mean(values):.2f}" for values in numbers) + seeds if runs else "-")
        rows.append([stream, *cells])
    return table(header, rows)


def constants() -> str:
    """Show the effect of halving and doubling each constant."""
    return _compare_variants("constants", ("sine-2", "sea-4", "air-quality", "air-beijing", "elec2-hours"))


def ablations() -> str:
    """Show the effect of each part of the method."""
    return _compare_variants(
        "ablations", ("sine-2", "sea-4", "fashion_500", "air-quality", "air-beijing", "elec2-hours")
    )


def _compare_variants(module: str, streams: Sequence[str]) -> str:
    """Compare the variants in a module of experiments with the unchanged method, paired by seed."""
    changed = dict.fromkeys(run.algorithm for run in _runs() if run.algorithm.startswith(f"experiments.{module}:"))
    titles = {**MADE, **REAL}
    header = ["", *(titles[stream] for stream in streams)]
    rows = list[list[str]]()
    for name in changed:
        gaps = [
            format_difference(_values(stream, name, "", "accuracy"), _values(stream, AUTO, "", "accuracy"))
            for stream in streams
        ]
        variant = name.rpartition(":")[2]
        constant, _, change = variant.rpartition("_")
        rows.append([ABLATIONS.get(variant) or f"`{FIELDS[constant]}` {change}", *gaps])
    return table(header, rows)


def harder() -> str:
    """Compare under other conditions: numbers of clients and rows, participation, noise, gradual drift."""
    titles = {
        f"{stream} {condition}" if condition == "participation" else f"{of}_{condition}": f"{stream}, {title}"
        for of, stream in {"sine": "sine-2", "sea": "sea-4", "air": "air-quality"}.items()
        for condition, title in CONDITIONS.items()
    }
    return _against_each(titles, BESIDE)


def unseen() -> str:
    """Compare on the streams that were added after the method was built."""
    return _against_each(UNSEEN, NEAR)


def _against_each(titles: Mapping[str, str], methods: Sequence[str]) -> str:
    """Compare methods with one setting each, and FedDrift-Auto with the best of them, on each stream with runs."""
    rows = list[list[str]]()
    for stream, title in titles.items():
        values = {name: _values(stream, name, SETTINGS.get(name, ""), "accuracy") for name in methods}
        if not values[AUTO]:
            continue
        others = {name: float(np.mean(list(v.values()))) for name, v in values.items() if v and name != AUTO}
        best = max(others, key=lambda name: others[name])
        rows.append([title, *map(mean, values.values()), best, format_difference(values[AUTO], values[best])])
    return table(["", *methods, "best other method", "Auto minus it"], rows)


def _values(stream: str, algorithm: str, setting: str, measure: str) -> dict[int, float]:
    return measured.values(_runs(), stream, algorithm, setting, measure)


@cache
def _runs() -> Sequence[Run]:
    return [_run(run) for run in measured.read("auto") if run.header["stream"] not in MNIST]


def _run(run: Record) -> Run:
    stream = run.header["stream"].rpartition(":")[2]
    found = measured.numbers(run, told=stream in TOLD)
    if stream in TOLD:
        return replace(found, stream=TOLD[stream], setting=BY_CITY)
    return replace(found, stream=f"{stream} participation" if "participation" in run.header["overrides"] else stream)


def _is_the_one(setting: str) -> bool:
    return not setting or setting in (*ONE, BY_CITY)


def _plain(run: Record) -> bool:
    """Return whether a run has the default settings of its stream."""
    given = run.header["settings"]
    usual = {"delta": 0.1, "init": "best" if run.header["algorithm"] == "FedDrift-Trunk" else "warm", "first": "one"}
    return not run.header["overrides"] and all(given.get(key, value) == value for key, value in usual.items())


PAGES: Mapping[Path, Sequence[Callable[[], str]]] = {
    DOCS / "auto.md": (expectations,),
    DOCS / "auto-measured.md": (distance, names, beside, mnist, ablations, constants, harder, unseen),
}

if __name__ == "__main__":
    main()
