"""Numbers of single records for the pages on methods, and their format in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import feddrift as fd
from feddrift.reports import metrics
from feddrift.reports.summary import compute_interval
from feddrift.runs import record
from feddrift.runs.record import Record

RESULTS = Path(__file__).parent.parent / "results"
TUNING = (0, 1)  # the seeds on which settings are chosen; the others are reported


@dataclass(frozen=True)
class Run:
    """The numbers of one record, in percent but the last four and the log loss."""

    stream: str
    algorithm: str
    setting: str  # its threshold or number of clusters, if it has one
    seed: int
    accuracy: float  # omitting drifts where there is truth, else over all time steps
    first: float  # the first half of the time steps
    second: float
    including: float
    worst: float  # client
    log_loss: float
    sent: float  # over what one model sends
    models: float  # at the end
    false_alarms: float  # NaN if the true concepts are unknown
    ari: float


def read(folder: str) -> list[Record]:
    """All records below results/."""
    return record.read_all(RESULTS / folder)


def numbers(run: Record, told: bool = False) -> Run:
    """Return the numbers of a record; if the concepts are only those of Oracle, no drifts are omitted."""
    header = run.header
    found = fd.summary(run)
    n = run.rows.steps
    halves = [float(np.nanmean(run.rows.accuracy[part])) * 100 for part in (slice(n // 2), slice(n // 2, n))]
    omitting = found["omitting_drifts"][0]
    including = found["including_drifts"][0]
    return Run(
        stream=header["stream"],
        algorithm=header["algorithm"],
        setting=setting(header),
        seed=header["seed"],
        accuracy=including if omitting is None or told else omitting,
        first=halves[0],
        second=halves[1],
        including=including,
        worst=100 * float(np.nanmin(metrics.average_over_time(run))),
        log_loss=float(np.nanmean(run.rows.log_loss)),
        sent=found["models_sent_ratio"][0],
        models=found["models_final"][0],
        false_alarms=_replace_none(found["false_alarms"][0]),
        ari=_replace_none(found["ari"][0]),
    )


def _replace_none(value: float | None) -> float:
    return np.nan if value is None else value


def setting(header: Mapping[str, Any]) -> str:
    """The threshold or number of clusters, which is what depends on the data."""
    settings = header["settings"]
    if "n_models" in settings and header["algorithm"].startswith(("IFCA", "FedRC", "FedEM")):
        return f"models {settings['n_models']}"
    return f"delta {settings['delta']}" if "delta" in settings else ""


def values(runs: Sequence[Run], stream: str, algorithm: str, of: str, measure: str) -> dict[int, float]:
    """A measure of one method in one setting, by reported seed."""
    wanted = (stream, algorithm, of)
    return {
        run.seed: getattr(run, measure)
        for run in runs
        if (run.stream, run.algorithm, run.setting) == wanted and run.seed not in TUNING
    }


def mean(by_seed: Mapping[int, float], digits: int = 2) -> str:
    """As a table has it; a dash of nothing."""
    known = [value for value in by_seed.values() if not np.isnan(value)]
    return f"{np.mean(known):.{digits}f}" if known else "-"


def format_difference(mine: Mapping[int, float], other: Mapping[int, float]) -> str:
    """Return the difference over the seeds of both, with its 95 % interval."""
    shared = sorted(set(mine) & set(other))
    if not shared:
        return "-"
    gap, _, high = compute_interval([mine[seed] - other[seed] for seed in shared])
    return f"{gap:+.2f} ± {high - gap:.2f}" if high is not None else f"{gap:+.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
