"""Write the tables of docs/auto.md from results/auto and others: `python experiments/auto.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import feddrift as fd
from feddrift.reports import metrics
from feddrift.reports.summary import interval
from feddrift.runs import record
from feddrift.runs.record import Record

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "auto.md", ROOT / "results"
AUTO, TUNING = "FedDrift-Auto", (0, 1)  # the seeds on which settings are chosen; the others are reported
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
MNIST = ("mnist-2", "mnist-4", "mnist-r", "mnist-l-4")
BESIDE = ("Oblivious", "Local", "FineTuned", "FedDrift", "FedDrift-Trunk", "Oracle", AUTO)
CONDITIONS = {
    "5_clients": "5 clients", "50_clients": "50 clients", "100_rows": "100 rows a cell", "2000_rows": "2,000 rows",
    "participation": "20 % take part", "bursts": "bursts of noise", "gradual": "gradual drift",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The numbers of one record, in percent but the log loss and what was sent."""

    stream: str
    algorithm: str
    setting: str  # its threshold or number of models, if it has one
    seed: int
    accuracy: float  # omitting drifts where there is truth, else over all time steps
    first: float  # the first half of the time steps
    second: float
    including: float
    worst: float
    log_loss: float
    sent: float


def main() -> None:
    PAGE.write_text(rendered(PAGE.read_text()))


def rendered(text: str) -> str:
    """The page, with what stands between its marks made anew."""
    makers = (distance, names, beside, mnist, ablations, constants, harder)
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
        return interval([self.mine[seed] - self.other[seed] for seed in sorted(set(self.mine) & set(self.other))])


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
    lines = [_row(header), _row(["---"] * len(header))]
    for gap in gaps():
        numbers = [f"**{_mean(gap.mine)}**", _mean(gap.sent), _mean(gap.oblivious), gap.best, _mean(gap.other)]
        lines.append(_row([gap.stream, *numbers, f"{gap.mean:+.2f} ± {gap.half:.2f}"]))
    return "\n".join(lines)


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
    lines = [_row(["", *streams.values()]), _row(["---"] * (len(streams) + 1))]
    for method in sorted(found, key=lambda method: (method[0] != AUTO, method)):
        of_streams = [_mean(_values(stream, *method, "accuracy")) for stream in streams]
        lines.append(_row([" ".join(filter(None, method)), *of_streams]))
    return "\n".join(lines)


def beside() -> str:
    """Including drifts, the worst client and the log loss."""
    lines = [_row(["", *BESIDE]), _row(["---"] * (len(BESIDE) + 1))]
    for stream, title in {**MADE, **REAL}.items():
        cells = []
        for name in BESIDE:
            setting = "delta 0.05" if name in ("FedDrift", "FedDrift-Trunk") else ""
            values = [_values(stream, name, setting, measure) for measure in ("including", "worst")]
            loss = _values(stream, name, setting, "log_loss")
            cells.append(" / ".join([*map(_mean, values), f"{np.mean(list(loss.values())):.3f}"]) if loss else "-")
        lines.append(_row([title, *cells]))
    return "\n".join(lines)


def mnist() -> str:
    """Runs on the data of seed 0, omitting and including drifts."""
    algorithms = ("Oblivious", "FedDrift", "FedDrift-Trunk", "Oracle", "Oracle-Trunk", "Local", "FineTuned", AUTO)
    records = [run for folder in ("auto", "tables", "trunk") for run in _records(folder)]
    lines = [_row(["", *algorithms]), _row(["---"] * (len(algorithms) + 1))]
    for stream in MNIST:
        cells = []
        for name in algorithms:
            runs = [r for r in records if (r.header["stream"], r.header["algorithm"]) == (stream, name) and _plain(r)]
            numbers = [[fd.summary(r)[f"{which}_drifts"][0] for r in runs] for which in ("omitting", "including")]
            seeds = f" ({len(runs)})" if runs else ""
            cells.append(" / ".join(f"{np.mean(values):.2f}" for values in numbers) + seeds if runs else "-")
        lines.append(_row([stream, *cells]))
    return "\n".join(lines)


def constants() -> str:
    """What halving and doubling each constant does."""
    return _changed("constants", ("sine-2", "sea-4", "air-quality", "air-beijing", "elec2-hours"))


def ablations() -> str:
    """What is lost without each part."""
    return _changed("ablations", ("sine-2", "sea-4", "fashion_500", "air-quality", "air-beijing", "elec2-hours"))


def _changed(module: str, streams: Sequence[str]) -> str:
    """What the classes of a module of experiments do, paired by seed with the method as it is."""
    changed = dict.fromkeys(run.algorithm for run in _runs() if run.algorithm.startswith(f"experiments.{module}:"))
    lines = [_row(["", *streams]), _row(["---"] * (len(streams) + 1))]
    for name in changed:
        gaps = [
            _paired(_values(stream, name, "", "accuracy"), _values(stream, AUTO, "", "accuracy")) for stream in streams
        ]
        lines.append(_row([name.rpartition(":")[2].replace("_", " "), *gaps]))
    return "\n".join(lines)


def harder() -> str:
    """The same methods where there are other numbers of clients and rows, fewer who take part, and noise."""
    lines = [_row(["", *BESIDE, "best of the others", "Auto minus it"]), _row(["---"] * (len(BESIDE) + 3))]
    for of, stream in {"sine": "sine-2", "sea": "sea-4", "air": "air-quality"}.items():
        for condition, title in CONDITIONS.items():
            key = f"{stream} {condition}" if condition == "participation" else f"{of}_{condition}"
            values = {
                name: _values(key, name, "delta 0.05" if name in ("FedDrift", "FedDrift-Trunk") else "", "accuracy")
                for name in BESIDE
            }
            if not values[AUTO]:
                continue
            others = {
                name: np.mean(list(of_seeds.values())) for name, of_seeds in values.items() if of_seeds and name != AUTO
            }
            best = max(others, key=lambda name: float(others[name]))
            gap = _paired(values[AUTO], values[best])
            lines.append(_row([f"{stream}, {title}", *map(_mean, values.values()), best, gap]))
    return "\n".join(lines)


def _values(stream: str, algorithm: str, setting: str, measure: str) -> dict[int, float]:
    """By reported seed."""
    wanted = (stream, algorithm, setting)
    return {
        run.seed: getattr(run, measure)
        for run in _runs()
        if (run.stream, run.algorithm, run.setting) == wanted and run.seed not in TUNING
    }


def _mean(values: dict[int, float]) -> str:
    return f"{np.mean(list(values.values())):.2f}" if values else "-"


def _paired(mine: dict[int, float], other: dict[int, float]) -> str:
    shared = sorted(set(mine) & set(other))
    if not shared:
        return "-"
    gap, _, high = interval([mine[seed] - other[seed] for seed in shared])
    return f"{gap:+.2f} ± {high - gap:.2f}" if high is not None else f"{gap:+.2f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@cache
def _records(folder: str) -> Sequence[Record]:
    return record.read_all(RESULTS / folder)


@cache
def _runs() -> Sequence[Run]:
    return [_run(run) for run in _records("auto") if run.header["stream"] not in MNIST]


def _run(run: Record) -> Run:
    header, numbers, n = run.header, fd.summary(run), run.rows.steps
    stream = header["stream"].rpartition(":")[2]
    if "participation" in header["overrides"]:
        stream += " participation"
    told = stream in TOLD
    halves = [np.nanmean(run.rows.accuracy[part]) * 100 for part in (slice(n // 2), slice(n // 2, n))]
    omitting, including = numbers["omitting_drifts"][0], numbers["including_drifts"][0]
    return Run(
        stream=TOLD.get(stream, stream),
        algorithm=header["algorithm"],
        setting=_setting(header) or ("told the city" if told else ""),
        seed=header["seed"],
        accuracy=including if omitting is None or told else omitting,
        first=float(halves[0]),
        second=float(halves[1]),
        including=including,
        worst=100 * float(np.nanmin(metrics.by_client(run))),
        log_loss=float(np.nanmean(run.rows.log_loss)),
        sent=numbers["models_sent_ratio"][0],
    )


def _setting(header: dict[str, Any]) -> str:
    """The threshold or number of clusters, which is what depends on the data."""
    settings, clusters = header["settings"], header["algorithm"].startswith("IFCA")
    if "n_models" in settings and clusters:
        return f"models {settings['n_models']}"
    return f"delta {settings['delta']}" if "delta" in settings else ""


def _is_the_one(setting: str) -> bool:
    return not setting or setting in ONE or setting.startswith("told")


def _plain(run: Record) -> bool:
    """Whether a run has the settings that its stream brings, and no others."""
    given = run.header["settings"]
    usual = {"delta": 0.1, "init": "best" if run.header["algorithm"] == "FedDrift-Trunk" else "warm", "first": "one"}
    return not run.header["overrides"] and all(given.get(key, value) == value for key, value in usual.items())


if __name__ == "__main__":
    main()
