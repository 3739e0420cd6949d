"""The tables of docs/drift-tests.md from the records: `python experiments/detectors.py [RECORDS]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddrift.reports import summary
from feddrift.runs import record

ROOT = Path(__file__).parents[1]
STREAMS = (
    ("sine-2", "circle-2", "sea-4"),
    tuple(f"experiments.variants:{name}_100" for name in ("sine", "circle", "sea")),
)  # a table each
BESIDE = ("Oblivious", "Oracle", "FedDrift")  # from the paper's tables


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


def line(name: str, streams: Sequence[str], groups: Sequence[Sequence[record.Record]]) -> str:
    """One row: accuracy, precision and recall, each on every stream."""
    accuracy = []
    right = []
    seen = []
    for stream in streams:
        (runs,) = (group for group in groups if group[0].header["stream"] == stream)
        percent = [score for run in runs if (score := summary.summarise_run(run).omitting_drifts) is not None]
        raised, true, fresh, found = np.sum([alarms(run) for run in runs], axis=0)
        told = "delta" in runs[0].header["settings"]
        accuracy.append(f"{np.mean(percent):.2f} ± {np.std(percent, ddof=1):.2f}")
        right.append(f"{true} of {raised}" if told else "")
        seen.append(f"{found} of {fresh}" if told else "")
    return "| " + " | ".join([name, *accuracy, *right, *seen]) + " |"


def name_detector(header: Mapping[str, Any]) -> str:
    """Return the algorithm, and its drift test if it has one."""
    settings = header["settings"]
    if "delta" not in settings:
        return str(header["algorithm"])
    delta = "delta=0.05" if settings["delta"] == 0.05 else "the paper's delta"
    return f"{header['algorithm']}: {settings.get('test') or f'threshold, {delta}'}"


def table(folder: Path, streams: Sequence[str]) -> str:
    """A row per algorithm and test, in the order of the grid."""
    rows: dict[str, list[Sequence[record.Record]]] = {}
    known = [run for run in record.read_all(ROOT / "results" / "tables") if run.header["algorithm"] in BESIDE]
    records = [run for run in known if run.header["seed"] < 5] + record.read_all(folder)
    for group in sorted(summary.group_by_configuration(records), key=lambda group: str(group[0].header["started"])):
        if group[0].header["stream"] in streams:
            rows.setdefault(name_detector(group[0].header), []).append(group)
    short = [stream.rpartition(":")[2] for stream in streams]
    head = [f"{kind}{name}" for kind in ("", "right alarms, ", "new seen, ") for name in short]
    lines = [line(name, streams, rows[name]) for name in rows]
    return "\n".join(["| | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|", *lines])


if __name__ == "__main__":
    records = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "detectors"
    print("\n\n".join(table(records, streams) for streams in STREAMS))
