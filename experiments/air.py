"""Write the tables of docs/air-quality.md from results/air and results/real: `python experiments/air.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddrift.reports import labels, tables
from feddrift.reports import summary as report
from feddrift.runs import record
from feddrift.runs.record import Record

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "air-quality.md"
WITH = "air-quality"
CONTROL = "air-beijing"
WITHOUT = "experiments.variants:without_date"
BY_CITY = {WITH: "experiments.variants:by_city", WITHOUT: "experiments.variants:by_city_without_date"}
WINTERS = ("2013 Q4", "2014 Q4")
ONE_PER_CLIENT = ("Local", "FineTuned")
ORDER = ("Oblivious", "Window", *ONE_PER_CLIENT, "FedDrift", "FedDrift-Eager", "FedDrift-Trunk", "IFCA")


def main() -> None:
    PAGE.write_text(render_page(PAGE.read_text()))


def render_page(text: str) -> str:
    """Return the text of the page with new tables between its markers."""
    records = record.read_all(ROOT / "results" / "air")
    records += [run for run in record.read_all(ROOT / "results" / "real") if run.header["algorithm"] in ONE_PER_CLIENT]
    for name, made in (("accuracy", accuracy), ("clusters", clusters), ("without-date", without_date)):
        begin = f"<!-- {name}: written by experiments/air.py -->\n"
        end = f"<!-- end of {name} -->"
        assert begin in text and end in text, name
        text = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n{made(records)}\n{end}", text)  # noqa: B023
    return text


def accuracy(records: Sequence[Record]) -> str:
    """Compare the accuracy on the next quarter, on both streams."""
    rows: dict[str, dict[str, list[str]]] = {}
    for stream in (WITH, CONTROL):
        for _, summary, gap in _compare_configurations(records, stream):
            cells = [tables.format_spread(summary.including_drifts), gap]
            if stream == WITH:
                cells += [f"{summary.models_final:.1f}", f"{summary.models_sent_ratio:.2f}"]
            rows.setdefault(_name(summary), {})[stream] = cells
    lines = [_row([name, *found[WITH], *found.get(CONTROL, ["", ""])]) for name, found in rows.items()]
    head = [
        "", f"`{WITH}`", "minus Oblivious", "models at the end", "sent", f"`{CONTROL}`", "minus Oblivious",
    ]  # fmt: skip
    return "\n".join([_row(head), "|---" * len(head) + "|", *lines, _row([*_by_city(records, WITH), "", ""])])


def clusters(records: Sequence[Record]) -> str:
    """Count alarms, and the cities whose posts use the same model."""
    lines = []
    for group, summary, _ in _compare_configurations(records, WITH):
        alarms = np.array([run.rows.drift.sum(axis=1) for run in group])  # [seed, t]
        shares = [share for run in group for share in _agreement(run)]
        if not shares or summary.algorithm in ONE_PER_CLIENT:
            continue
        at = [group[0].header["times"].index(time) for time in WINTERS]
        counts = [f"{alarms.sum(axis=1).mean():.1f}", *(f"{alarms[:, t].mean():.1f}" for t in at)]
        lines.append(_row([_name(summary), *counts, f"{100 * np.mean(shares):.0f} %"]))
    head = ["", "alarms per run", *(f"alarms in {time}" for time in WINTERS), "cities with one model"]
    return "\n".join([_row(head), "|---" * len(head) + "|", *lines])


def without_date(records: Sequence[Record]) -> str:
    """Compare the accuracy without the date as an input."""
    lines = [
        _row([_name(summary), tables.format_spread(summary.including_drifts), gap])
        for _, summary, gap in _compare_configurations(records, WITHOUT)
    ]
    head = ["without the date", "accuracy", "minus Oblivious"]
    return "\n".join([_row(head), "|---" * 3 + "|", *lines, _row(_by_city(records, WITHOUT)[:3])])


def _compare_configurations(records: Sequence[Record], stream: str) -> list[tuple[list[Record], report.Summary, str]]:
    """Return the runs of each configuration on a stream, their summary, and their difference from Oblivious."""
    runs = [run for run in records if run.header["stream"] == stream]
    gaps = [tables.format_difference(gap) for gap in report.compare(runs, "Oblivious")]
    found = list(zip(report.list_configurations(runs), report.summarise(runs), gaps, strict=True))
    return sorted(found, key=lambda row: (ORDER.index(row[1].algorithm), _name(row[1])))


def _by_city(records: Sequence[Record], stream: str) -> list[str]:
    """Return the row of Oracle with the cities as concepts."""
    (summary,) = report.summarise(run for run in records if run.header["stream"] == BY_CITY[stream])
    numbers = f"{summary.models_final:.1f}", f"{summary.models_sent_ratio:.2f}"
    return ["Oracle, one model per city", tables.format_spread(summary.including_drifts), "", *numbers]


def _name(summary: report.Summary) -> str:
    settings = summary.settings
    shown = {key: settings[key] for key in ("test", "first", "n_models", "delta") if settings.get(key) is not None}
    if shown.get("first") == "one":
        del shown["first"]
    if "test" in shown:
        shown.pop("delta", None)
    return summary.algorithm + (f" ({labels.format_settings(shown)})" if shown else "")


def _agreement(run: Record) -> list[bool]:
    """Return whether all posts of a city use one model, for each city and each quarter with several models in use."""
    cities = np.array([name.split()[0] for name in run.header["clients"]])
    quarters = [row for row in run.rows.model if len(np.unique(row)) > 1]
    return [len(np.unique(row[cities == city])) == 1 for row in quarters for city in np.unique(cities)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
