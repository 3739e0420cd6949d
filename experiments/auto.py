"""Write the tables of docs/auto.md from results/auto and others: `python -m experiments.auto`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from experiments import measured
from experiments.constants import FIELDS
from experiments.measured import TUNING, Run, mean, paired, table

import feddrift as fd
from feddrift.reports.summary import compute_interval
from feddrift.runs.record import Record

PAGE = Path(__file__).parent.parent / "docs" / "auto.md"
AUTO = "FedDrift-Auto"
MADE = {
    "sine-2": "sine-2", "circle-2": "circle-2", "sea-2": "sea-2", "sea-4": "sea-4", "plane": "hyperplane",
    "fashion_100": "Fashion, 100 rows", "fashion_500": "Fashion, 500 rows",
}  # fmt: skip
REAL = {
    "air-quality": "air-quality", "without_date": "without date", "air-beijing": "air-beijing",
    "elec2-hours": "elec2-hours",
}  # fmt: skip
TOLD = {"by_city": "air-quality", "by_city_without_date": "without_date"}  # where Oracle is told the city
ONE = ("delta 0.05", "models 4")  # the settings that all streams share
SETTINGS = {"FedDrift": ONE[0], "FedDrift-Trunk": ONE[0], "IFCA": ONE[1]}
MNIST = ("mnist-2", "mnist-4", "mnist-r", "mnist-l-4")
BESIDE = ("Oblivious", "Local", "FineTuned", "FedDrift", "FedDrift-Trunk", "Oracle", AUTO)
CONDITIONS = {
    "5_clients": "5 clients", "50_clients": "50 clients", "100_rows": "100 rows a cell", "2000_rows": "2,000 rows",
    "participation": "20 % take part", "bursts": "bursts of noise", "gradual": "gradual drift",
}  # fmt: skip

UNSEEN = {  # experiments/unseen.py
    "moved": "labels move on, three groups", "few": "the same, 40 rows a cell", "corners": "exclusive or, and back",
    "together": "all drift at once", "places": "a rule for each place", "seasons": "seasons, one bent rule",
    "swing": "class shares swing",
}  # fmt: skip
NEAR = ("Oblivious", "Window", "Local", "FineTuned", "CFL-W", "FedDrift", "FedDrift-Trunk", "IFCA", AUTO)


def main() -> None:
    PAGE.write_text(rendered(PAGE.read_text()))


def rendered(text: str) -> str:
    """The page, with what stands between its marks made anew."""
    makers = (distance, names, beside, mnist, ablations, constants, harder, unseen)
    for name, made in {make.__name__: make() for make in makers}.items():
        begin, end = f"<!-- {name}: written by experiments/auto.py -->\n", f"<!-- end of {name} -->"
        assert begin in text and end in text, name
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text)  # noqa: B023
    return text


@dataclass(frozen=True)
class Gap:
    """FedDrift-Auto on one stream beside what was best on the tuning data."""

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
    """Of made streams the best is chosen on the tuning seeds, of real ones there on the first half of the time steps,
    and the second half is reported, then the whole run."""
    found = []
    for stream, title in MADE.items():
        found.append(_gap(stream, title, choice(stream, "accuracy"), "accuracy"))
    for stream, title in REAL.items():
        best = choice(stream, "first")
        found += [_gap(stream, title, best, "second"), _gap(stream, f"{title}, whole run", best, "accuracy")]
    return found


def _gap(stream: str, title: str, best: tuple[str, str], measure: str) -> Gap:
    mine, sent = (_values(stream, AUTO, "", what) for what in (measure, "sent"))
    oblivious, other = _values(stream, "Oblivious", "", measure), _values(stream, *best, measure)
    return Gap(title, " ".join(filter(None, best)), mine, sent, oblivious, other)


def distance() -> str:
    """How far FedDrift-Auto is from the best."""
    header = ["", AUTO, "sent", "Oblivious", "best of all, chosen on tuning data", "it has", "Auto minus it"]
    rows = list[list[str]]()
    for gap in gaps():
        numbers = [f"**{mean(gap.mine)}**", mean(gap.sent), mean(gap.oblivious), gap.best, mean(gap.other)]
        rows.append([gap.stream, *numbers, f"{gap.mean:+.2f} ± {gap.half:.2f}"])
    return table(header, rows)


def choice(stream: str, measure: str) -> tuple[str, str]:
    """The algorithm and setting that was best on the tuning seeds; every setting of everybody else was tried there."""
    tried: dict[tuple[str, str], list[float]] = {}
    for run in _runs():
        if run.stream == stream and run.seed in TUNING and run.algorithm != AUTO:
            tried.setdefault((run.algorithm, run.setting), []).append(getattr(run, measure))
    level = {method: round(float(np.mean(values)), 6) for method, values in tried.items()}
    return max(level, key=lambda method: (level[method], _is_the_one(method[1])))  # of equals the plainest


def names() -> str:
    """Everybody with one setting, on the reported seeds."""
    streams = {**MADE, **REAL}
    found = {
        (run.algorithm, run.setting)
        for run in _runs()
        if run.stream in streams and _is_the_one(run.setting) and not run.algorithm.startswith("experiments.")
    }
    header, rows = ["", *streams.values()], list[list[str]]()
    for method in sorted(found, key=lambda method: (method[0] != AUTO, method)):
        rows.append([" ".join(filter(None, method)), *(_level(stream, method) for stream in streams)])
    return table(header, rows)


def _level(stream: str, method: tuple[str, str]) -> str:
    """On the reported seeds; else, slanted, on the tuning ones."""
    if reported := _values(stream, *method, "accuracy"):
        return mean(reported)
    wanted = (stream, *method)
    tried = {run.seed: run.accuracy for run in _runs() if (run.stream, run.algorithm, run.setting) == wanted}
    return f"*{mean(tried)}*" if tried else "-"


def beside() -> str:
    """Including drifts, the worst client and the log loss."""
    header, rows = ["", *BESIDE], list[list[str]]()
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
    """Runs on the data of seed 0, omitting and including drifts."""
    algorithms = ("Oblivious", "FedDrift", "FedDrift-Trunk", "Oracle", "Oracle-Trunk", "Local", "FineTuned", AUTO)
    records = [run for folder in ("auto", "tables", "trunk") for run in measured.read(folder)]
    header, rows = ["", *algorithms], list[list[str]]()
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
    """What halving and doubling each constant does."""
    return _changed("constants", ("sine-2", "sea-4", "air-quality", "air-beijing", "elec2-hours"))


def ablations() -> str:
    """What is lost without each part."""
    return _changed("ablations", ("sine-2", "sea-4", "fashion_500", "air-quality", "air-beijing", "elec2-hours"))


def _changed(module: str, streams: Sequence[str]) -> str:
    """What the classes of a module of experiments do, paired by seed with the method as it is."""
    changed = dict.fromkeys(run.algorithm for run in _runs() if run.algorithm.startswith(f"experiments.{module}:"))
    header, rows = ["", *streams], list[list[str]]()
    for name in changed:
        gaps = [
            paired(_values(stream, name, "", "accuracy"), _values(stream, AUTO, "", "accuracy")) for stream in streams
        ]
        constant, _, change = name.rpartition(":")[2].rpartition("_")
        title = f"`{FIELDS[constant]}` {change}" if constant in FIELDS else name.rpartition(":")[2].replace("_", " ")
        rows.append([title, *gaps])
    return table(header, rows)


def harder() -> str:
    """The same methods where there are other numbers of clients and rows, fewer who take part, and noise."""
    titles = {
        f"{stream} {condition}" if condition == "participation" else f"{of}_{condition}": f"{stream}, {title}"
        for of, stream in {"sine": "sine-2", "sea": "sea-4", "air": "air-quality"}.items()
        for condition, title in CONDITIONS.items()
    }
    return _against_each(titles, BESIDE)


def unseen() -> str:
    """Streams that came after everything was built."""
    return _against_each(UNSEEN, NEAR)


def _against_each(titles: Mapping[str, str], methods: Sequence[str]) -> str:
    """These methods in their one setting on each stream that was run, and FedDrift-Auto beside the best of them."""
    rows = list[list[str]]()
    for stream, title in titles.items():
        values = {name: _values(stream, name, SETTINGS.get(name, ""), "accuracy") for name in methods}
        if not values[AUTO]:
            continue
        others = {name: float(np.mean(list(v.values()))) for name, v in values.items() if v and name != AUTO}
        best = max(others, key=lambda name: others[name])
        rows.append([title, *map(mean, values.values()), best, paired(values[AUTO], values[best])])
    return table(["", *methods, "best of the others", "Auto minus it"], rows)


def _values(stream: str, algorithm: str, setting: str, measure: str) -> dict[int, float]:
    return measured.values(_runs(), stream, algorithm, setting, measure)


@cache
def _runs() -> Sequence[Run]:
    return [_run(run) for run in measured.read("auto") if run.header["stream"] not in MNIST]


def _run(run: Record) -> Run:
    stream = run.header["stream"].rpartition(":")[2]
    found = measured.numbers(run, told=stream in TOLD)
    if stream in TOLD:
        return replace(found, stream=TOLD[stream], setting="told the city")
    return replace(found, stream=f"{stream} participation" if "participation" in run.header["overrides"] else stream)


def _is_the_one(setting: str) -> bool:
    return not setting or setting in ONE or setting.startswith("told")


def _plain(run: Record) -> bool:
    """Whether a run has the settings that its stream brings, and no others."""
    given = run.header["settings"]
    usual = {"delta": 0.1, "init": "best" if run.header["algorithm"] == "FedDrift-Trunk" else "warm", "first": "one"}
    return not run.header["overrides"] and all(given.get(key, value) == value for key, value in usual.items())


if __name__ == "__main__":
    main()
