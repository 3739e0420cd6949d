"""The tables of docs/drift-tests.md from the records: `python experiments/detectors.py [RECORDS]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddrift import record, report

ROOT = Path(__file__).parents[1]
STREAMS = ("sine-2", "circle-2", "sea-4")


def alarms(run: record.Record) -> tuple[int, int, int, int]:
    """Alarms, those at a client whose concept had changed, drifts to a concept new to all, those of them with an alarm.

    A drift to a concept that some model serves already needs no alarm: the client changes to that model.
    """
    truth = run.rows.concept.copy()
    for concept, lower in sorted(run.header["same"].items(), key=lambda pair: int(pair[0]), reverse=True):
        truth[truth == int(concept)] = lower
    changed = np.zeros_like(run.rows.drift)
    changed[1:] = truth[1:] != truth[:-1]
    fresh = np.zeros_like(changed)
    for t in range(1, len(truth)):
        fresh[t] = changed[t] & ~np.isin(truth[t], truth[:t])
    raised = run.rows.drift
    return int(raised.sum()), int((raised & changed).sum()), int(fresh.sum()), int((raised & fresh).sum())


def line(name: str, groups: Sequence[Sequence[record.Record]]) -> str:
    """One row: for each stream accuracy, precision, recall and models."""
    cells = [name]
    for stream in STREAMS:
        runs = next((group for group in groups if group[0].header["stream"] == stream), None)
        if runs is None:
            cells += ["", "", "", ""]
            continue
        scores = [report.scores(run) for run in runs]
        accuracy = [score.omitting_drifts for score in scores if score.omitting_drifts is not None]
        raised, right, fresh, found = np.sum([alarms(run) for run in runs], axis=0)
        cells.append(f"{np.mean(accuracy):.2f} ± {np.std(accuracy, ddof=1):.2f}")
        told = raised > 0 or "test" in runs[0].header["settings"] or "delta" in runs[0].header["settings"]
        cells.append(f"{right} of {raised}" if told else "")
        cells.append(f"{found} of {fresh}" if told else "")
        cells.append(f"{np.mean([score.models_final for score in scores if score.models_final is not None]):.1f}")
    return "| " + " | ".join(cells) + " |"


def table(folder: Path) -> str:
    """Both tables, a row per algorithm and test."""
    groups = report.grouped(record.read_all(folder))
    rows: dict[str, list[Sequence[record.Record]]] = {}
    for group in groups:
        header = group[0].header
        tuned = header["algorithm"] == "FedDrift" and "test" not in header["settings"]
        name = header["settings"].get("test", "")
        if not name and "delta" in header["settings"]:
            name = "threshold, delta=0.05" if header["settings"]["delta"] == 0.05 else "threshold, the paper's delta"
        assert name != "threshold" or tuned
        rows.setdefault(f"{header['algorithm']}: {name}" if name else header["algorithm"], []).append(group)
    head = "| | " + " | ".join(f"{s}, % | right alarms | new concepts seen | models" for s in STREAMS) + " |"
    return "\n".join([head, "|---" * (1 + 4 * len(STREAMS)) + "|", *(line(name, rows[name]) for name in rows)])


if __name__ == "__main__":
    print(table(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "detectors"))
