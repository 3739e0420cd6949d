"""Write the tables of docs/auto.md from results/auto and others: `python experiments/auto.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import feddrift as fd
from feddrift.reports.summary import interval
from feddrift.runs import record
from feddrift.runs.record import Record

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "auto.md", ROOT / "results"
AUTO = "FedDrift-Auto"
STREAMS = {
    "sine-2": "sine-2", "circle-2": "circle-2", "sea-2": "sea-2", "sea-4": "sea-4",
    "plane": "hyperplane that turns, two groups", "fashion_100": "Fashion swaps, 100 rows",
    "fashion_500": "Fashion swaps, 500 rows", "air-quality": "air-quality", "without_date": "the same without date",
    "air-beijing": "air-beijing", "elec2-hours": "elec2-hours",
}  # fmt: skip
TOLD = {"air-quality": "by_city", "without_date": "by_city_without_date"}  # where the city is told to Oracle
COLUMNS = ("Oblivious", "Local", "FineTuned", "IFCA", "FedDrift", "FedDrift-Trunk", "Oracle")
ONE = {"delta": 0.05, "n_models": 4, "own_rounds": 2}  # the setting that all streams share
MNIST = ("mnist-2", "mnist-4", "mnist-r", "mnist-l-4")


def main() -> None:
    PAGE.write_text(rendered(PAGE.read_text()))


def rendered(text: str) -> str:
    """The page, with what stands between its marks made anew."""
    for name, made in {"streams": _streams(), "mnist": _mnist()}.items():
        begin, end = f"<!-- {name}: written by experiments/auto.py -->\n", f"<!-- end of {name} -->"
        assert begin in text and end in text, name
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made}\n{end}", text)  # noqa: B023
    return text


def _streams() -> str:
    """Accuracy on the reported seeds, and the paired distance to the best of the others."""
    levels = _levels(record.read_all(RESULTS / "auto"))
    lines = [_row(["", AUTO, "sent", *COLUMNS, "best of these", "Auto minus it"])]
    for stream, title in STREAMS.items():
        mine, sent = levels[stream, AUTO]
        cells, others = [], dict[str, dict[int, float]]()
        for name in COLUMNS:
            there = levels.get((TOLD.get(stream, stream) if name == "Oracle" else stream, name))
            cells.append(f"{np.mean(list(there[0].values())):.2f}" if there else "-")
            if there:
                others[name] = there[0]
        best = max(others, key=lambda name: np.mean(list(others[name].values())))
        cells = [f"**{np.mean(list(mine.values())):.2f}**", f"{np.mean(list(sent.values())):.2f}", *cells]
        lines.append(_row([title, *cells, best, _paired(mine, others[best])]))
    lines.insert(1, "|---" * (len(COLUMNS) + 5) + "|")
    return "\n".join(lines)


def _mnist() -> str:
    """Runs on the data of seed 0, omitting and including drifts."""
    names = ("Oblivious", "FedDrift", "FedDrift-Trunk", "Oracle", "Oracle-Trunk", "Local", "FineTuned", AUTO)
    records = [run for folder in ("auto", "tables", "trunk") for run in record.read_all(RESULTS / folder)]
    lines = [_row(["", *names]), "|---" * (len(names) + 1) + "|"]
    for stream in MNIST:
        cells = []
        for name in names:
            runs = [r for r in records if (r.header["stream"], r.header["algorithm"]) == (stream, name) and _plain(r)]
            numbers = [[fd.summary(r)[f"{which}_drifts"][0] for r in runs] for which in ("omitting", "including")]
            seeds = f" ({len(runs)})" if runs else ""
            cells.append(" / ".join(f"{np.mean(values):.2f}" for values in numbers) + seeds if runs else "-")
        lines.append(_row([stream, *cells]))
    return "\n".join(lines)


def _plain(run: Record) -> bool:
    """Whether a run has the settings that its stream brings, and no others."""
    given = run.header["settings"]
    usual = {"delta": 0.1, "init": "best" if run.header["algorithm"] == "FedDrift-Trunk" else "warm", "first": "one"}
    return not run.header["overrides"] and all(given.get(key, value) == value for key, value in usual.items())


def _levels(records: Sequence[Record]) -> dict[tuple[str, str], tuple[dict[int, float], dict[int, float]]]:
    """By stream and algorithm, in the one setting: accuracy and traffic of each reported seed."""
    levels: dict[tuple[str, str], tuple[dict[int, float], dict[int, float]]] = {}
    for run in records:
        header = run.header
        if header["seed"] < 2 or any(header["settings"].get(k, v) != v for k, v in ONE.items()):
            continue
        numbers = fd.summary(run)
        key = header["stream"].rpartition(":")[2], header["algorithm"]
        accuracy, sent = levels.setdefault(key, ({}, {}))
        omitting = numbers["omitting_drifts"][0] if key[0] not in TOLD.values() else None
        accuracy[header["seed"]] = omitting if omitting is not None else numbers["including_drifts"][0]
        sent[header["seed"]] = numbers["models_sent_ratio"][0]
    return levels


def _paired(mine: dict[int, float], other: dict[int, float]) -> str:
    gap, _, high = interval([mine[seed] - other[seed] for seed in sorted(set(mine) & set(other))])
    return f"{gap:+.2f} ± {high - gap:.2f}" if high is not None else f"{gap:+.2f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
