"""Write the tables of docs/faults.md from the records in results/: `python experiments/faults.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from feddrift.reports import summary
from feddrift.runs import record
from feddrift.runs.record import Record

ROOT = Path(__file__).parent.parent
PAGE, MARK = ROOT / "docs" / "faults.md", "<!-- measured: written by experiments/faults.py -->\n"
ORDER = ("Oblivious", "FedDrift-Eager", "FedDrift", "Oracle")


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(MARK)] + measured())


def measured() -> str:
    """All below the mark."""
    away = record.read_all(ROOT / "results" / "participation")
    harm = record.read_all(ROOT / "results" / "poison")
    streams = ("sine-2", "sea-4")
    return MARK + "\n".join([*(presence(s, away) for s in streams), *(poison(s, harm) for s in streams)])


def presence(stream: str, records: Iterable[Record]) -> str:
    """Accuracy and adjusted Rand index by participation and dropout."""
    groups: dict[tuple[float, float, str], list[Record]] = {}
    for r in records:
        if r.header["stream"] == stream:
            given = r.header["overrides"]
            key = given.get("participation", 1.0), given.get("dropout", 0.0), r.header["algorithm"]
            groups.setdefault(key, []).append(r)
    lines = [
        f"\n### {stream}: who takes part, who drops out\n",
        "| take part in a round | miss a time step | " + " | ".join(ORDER) + " |",
        "|---|---|" + "---|" * len(ORDER),
    ]
    for share, dropout in sorted({key[:2] for key in groups}, key=lambda k: (k[1], -k[0])):
        cells = []
        for name in ORDER:
            scores = [summary.scores(r) for r in groups.get((share, dropout, name), [])]
            accuracy = np.mean([s.omitting_drifts for s in scores if s.omitting_drifts is not None])
            index = np.mean([s.ari for s in scores if s.ari is not None])
            cells.append(f"{accuracy:.1f}" + (f" ({index:.2f})" if name.startswith("FedDrift") else ""))
        lines.append(f"| {100 * share:.0f} % | {100 * dropout:.0f} % | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def poison(stream: str, records: Iterable[Record]) -> str:
    """Accuracy of the honest clients, by harm and way to average."""
    rules = ("mean", "median", "trimmed", "clipped")
    found: dict[tuple[str, str, str, bool], list[float]] = {}
    for r in records:
        if r.header["stream"] == stream:
            given = r.header["overrides"]
            key = given["poison"], r.header["algorithm"], given.get("average", "mean")
            found.setdefault((*key, r.header["settings"].get("quarantine", False)), []).append(honest(r))

    def cell(harm: str, name: str, rule: str, quarantine: bool = False) -> str:
        values = found.get((harm, name, rule, quarantine), [])
        return f"{np.mean(values):.1f}" if values else ""

    lines = [
        f"\n### {stream}: accuracy of the honest clients\n",
        "| harm | algorithm | " + " | ".join(rules) + " | mean, quarantine |",
        "|---|---|" + "---|" * (len(rules) + 1),
    ]
    for harm in sorted({key[0] for key in found}, key=lambda h: (h.split(":")[0], len(h))):
        for name in [n for n in ORDER if any(key[:2] == (harm, n) for key in found)]:
            cells = [cell(harm, name, rule) for rule in rules] + [cell(harm, name, "mean", True)]
            lines.append(f"| {told(harm)} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def honest(r: Record) -> float:
    """Percent right, omitting drifts, over the clients that do no harm."""
    liars = [int(c) for c in r.header["overrides"]["poison"].split(":")[1].split(",")]
    stable = (r.rows.concept == r.rows.next_concept) & ~np.isin(np.arange(r.header["n_clients"]), liars)
    return float(100 * np.mean(r.rows.accuracy[stable]))


def told(harm: str) -> str:
    kind, _, clients = harm.partition(":")
    who = f"{clients.count(',') + 1} of 10"
    return f"{who} send noise" if kind == "garbage" else f"{who} with flipped labels"


if __name__ == "__main__":
    main()
