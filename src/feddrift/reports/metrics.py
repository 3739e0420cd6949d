"""Metrics of drift detection and recovery as functions of a record; docs/metrics.md defines them.

Each detector is compared with dummy detectors, which use no data, on the same changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feddrift.reports.summary import (
    Spread,
    adjusted_rand,
    average_cells,
    average_known_values,
    compute_spread,
    find_concept_changes,
    get_true_concepts,
    has_joined,
    has_new_data,
    list_configurations,
    resolve_merges,
)
from feddrift.runs.record import Record
from feddrift.types import Bools, Floats, Ints

MAX_DELAY_STEPS = 2  # largest delay of an alarm that counts as the detection of a change


@dataclass(frozen=True)
class Detection:
    """Alarms compared with true changes: the first alarm after a change is a hit, all other alarms are false."""

    cells: int  # cells with new data of a known concept, in which a detector can raise an alarm
    changes: int
    alarms: float  # for a dummy the expected number, which may be a fraction
    hits: float
    delay: float | None  # mean time steps from change to alarm; for a missed change the longest delay + 1

    @property
    def precision(self) -> float | None:
        """The share of alarms that are hits; None without alarms."""
        return self.hits / self.alarms if self.alarms else None

    @property
    def recall(self) -> float | None:
        """The share of changes that are hit; None without changes."""
        return self.hits / self.changes if self.changes else None


@dataclass(frozen=True)
class Metrics:
    """The metrics of one run; None: unknown. Accuracies are shares."""

    alarms: Detection | None
    switches: Detection | None
    noticed: Detection | None  # an alarm or a switch
    dummies: Mapping[str, Detection]  # always, never, and chance: random at the rate of this run's alarms and switches
    lost: float | None  # per drift: the accuracy lost compared with that before it, summed over time steps
    lost_to_oracle: float | None
    mean: float | None
    worst: float | None  # the worst client's mean over time
    tenth: float | None  # the 10th percentile of the clients' means over time
    ari: float | None
    nmi: float | None
    spare: float | None  # models in use minus concepts in use, mean over time
    sent: Mapping[str, float]  # by phase, relative to the traffic of one model in the same time steps
    bytes_sent: Mapping[str, float]  # by purpose: training, scoring; empty for older records


def compute_metrics(record: Record, oracle: Record | None = None) -> Metrics:
    """Compute all metrics of a run.

    Args:
        record: The run.
        oracle: The run of Oracle with the same data and seed, if there is one.
    """
    concepts = get_true_concepts(record)
    is_known = concepts >= 0
    has_truth = bool(is_known.any())
    changed = find_concept_changes(record)
    cells = find_scored_cells(record)
    alarms = record.rows.drift
    switches = find_switches(record)
    by_alarms, by_switches, noticed = (score_detector(a, changed, cells) for a in (alarms, switches, alarms | switches))
    averages = average_over_time(record)
    averages = averages[~np.isnan(averages)]
    find_worst, percentile = (np.min, 10) if record.score.higher_is_better else (np.max, 90)
    n_concepts = count_concepts(record)
    spare = (count_models_in_use(record) - n_concepts)[n_concepts > 0]
    return Metrics(
        alarms=by_alarms if has_truth else None,
        switches=by_switches if has_truth else None,
        noticed=noticed if has_truth else None,
        dummies=score_dummies(changed, cells, noticed.alarms / noticed.cells if noticed.cells else 0.0)
        if has_truth
        else {},
        lost=_average_or_none(sum_accuracy_loss(record)) if has_truth else None,
        lost_to_oracle=_average_or_none(sum_accuracy_loss(record, oracle))
        if has_truth and oracle is not None
        else None,
        mean=average_cells(record, record.rows.accuracy),
        worst=float(find_worst(averages)) if averages.size else None,
        tenth=float(np.percentile(averages, percentile)) if averages.size else None,
        ari=adjusted_rand(resolve_merges(record)[is_known], concepts[is_known]) if has_truth else None,
        nmi=mutual_information(resolve_merges(record)[is_known], concepts[is_known]) if has_truth else None,
        spare=_average_or_none(spare.astype(float)),
        sent=compute_traffic_by_phase(record),
        bytes_sent=count_bytes_by_purpose(record),
    )


def flatten_metrics(metrics: Metrics) -> dict[str, float | None]:
    """Return the metrics of a run as single numbers by name, with those of the dummy detectors."""
    plain = ("mean", "worst", "tenth", "lost", "lost_to_oracle", "ari", "nmi", "spare")
    detectors = {"noticed": metrics.noticed, "alarms": metrics.alarms, "switches": metrics.switches, **metrics.dummies}
    return {
        **{name: getattr(metrics, name) for name in plain},
        **{
            f"{name} {metric}": getattr(detection, metric)
            for name, detection in detectors.items()
            if detection is not None
            for metric in ("precision", "recall", "delay")
        },
        **{f"sent {phase}": value for phase, value in metrics.sent.items()},
        **{f"bytes {purpose}": value for purpose, value in metrics.bytes_sent.items()},
    }


def summarise_metrics(records: Iterable[Record]) -> list[dict[str, Spread | None]]:
    """Return the metrics of each configuration over its seeds, in the order of `summary.summarise`."""
    groups = list_configurations(records)
    oracles = find_oracles(run for group in groups for run in group)
    return [
        compute_spreads(
            [flatten_metrics(compute_metrics(run, oracles.get(build_conditions_key(run)))) for run in group]
        )
        for group in groups
    ]


def compute_spreads(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    """Return the mean and deviation of each number over the runs that have it."""
    spreads: dict[str, Spread | None] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run.get(name) for run in runs]
        spreads[name] = compute_spread([value for value in values if value is not None])
    return spreads


def find_oracles(runs: Iterable[Record]) -> dict[str, Record]:
    """Return the runs of Oracle by their conditions."""
    return {build_conditions_key(run): run for run in runs if run.header["algorithm"] == "Oracle"}


def build_conditions_key(run: Record) -> str:
    """Build a key of the data, training, net and seed of a run, which are equal for its Oracle."""
    return json.dumps([run.header[key] for key in ("stream", "overrides", "seed")], sort_keys=True)


def find_scored_cells(record: Record) -> Bools:
    """Return [t, c], whether an alarm counts: after the first time step, and with new data of a known concept."""
    cells = has_new_data(record) & (record.rows.concept >= 0)
    cells[:1] = False
    return cells


def find_switches(record: Record) -> Bools:
    """Return [t, c], whether a client uses another model than before; a merge of its model is not a switch."""
    model = record.rows.model
    previous = np.concatenate([model[:1], model[:-1]])
    for event in record.events:  # the order of the events follows a model through several merges
        if event["event"] == "merged":
            row = previous[event["t"]]
            row[row == event["model"]] = event["cause"]["into"]
    switches: Bools = previous != model
    switches[:1] = False
    return switches


def compute_delays(alarms: Bools, changed: Bools, cells: Bools, max_delay: int = MAX_DELAY_STEPS) -> Ints:
    """Return [change], the time steps from each change to its first alarm; -1: missed.

    Args:
        alarms: [t, c], the alarms.
        changed: [t, c], the true changes; the result is in the order of `np.argwhere(changed)`.
        cells: [t, c], where alarms count.
        max_delay: The longest delay of an alarm that counts.
    """
    windows = _find_alarm_windows(changed, cells, max_delay)
    t, c = np.nonzero(changed)
    times = np.minimum(t[:, None] + np.arange(max_delay + 1), len(changed) - 1)
    detected = windows & alarms[times, c[:, None]]
    return np.where(detected.any(axis=1), detected.argmax(axis=1), -1)


def score_detector(alarms: Bools, changed: Bools, cells: Bools, max_delay: int = MAX_DELAY_STEPS) -> Detection:
    """Score the alarms of a detector.

    Args:
        alarms: [t, c], the alarms.
        changed: [t, c], the true changes.
        cells: [t, c], where alarms count.
        max_delay: The longest delay of an alarm that counts.

    >>> t = np.array([[0], [1], [0], [0]], dtype=bool)
    >>> late = score_detector(np.roll(t, 1), t, np.ones_like(t))
    >>> late.precision, late.recall, late.delay
    (1.0, 1.0, 1.0)
    """
    delays = compute_delays(alarms, changed, cells, max_delay)
    penalised_delays = np.where(delays < 0, max_delay + 1, delays)
    return Detection(
        cells=int(cells.sum()),
        changes=len(delays),
        alarms=float((alarms & cells).sum()),
        hits=float((delays >= 0).sum()),
        delay=_average_or_none(penalised_delays.astype(float)),
    )


def score_dummies(changed: Bools, cells: Bools, rate: float, max_delay: int = MAX_DELAY_STEPS) -> dict[str, Detection]:
    """Score detectors that use no data: alarms in all cells, in none, and at random with this rate."""
    return {
        "always": score_detector(cells, changed, cells, max_delay),
        "chance": score_coin(rate, changed, cells, max_delay),
        "never": score_detector(np.zeros_like(cells), changed, cells, max_delay),
    }


def score_coin(rate: float, changed: Bools, cells: Bools, max_delay: int = MAX_DELAY_STEPS) -> Detection:
    """Return the expected score of a detector that raises an alarm in each cell with this probability."""
    windows = _find_alarm_windows(changed, cells, max_delay)
    n_before: Ints = np.cumsum(windows, axis=1) - windows  # number of earlier cells of the window
    first = np.where(windows, rate * (1 - rate) ** n_before, 0.0)  # probability of the first alarm in this cell
    hits = first.sum(axis=1)
    delays = first @ np.arange(max_delay + 1) + (1 - hits) * (max_delay + 1)
    return Detection(int(cells.sum()), len(hits), rate * int(cells.sum()), float(hits.sum()), _average_or_none(delays))


def _find_alarm_windows(changed: Bools, cells: Bools, max_delay: int) -> Bools:
    """Return [change, k], whether an alarm k steps after a change counts for it: no other change is in between."""
    t, c = np.nonzero(changed)
    windows = np.zeros((len(t), max_delay + 1), dtype=bool)
    is_open = np.ones(len(t), dtype=bool)
    for k in range(max_delay + 1):
        times = np.minimum(t + k, len(changed) - 1)
        is_open &= (t + k < len(changed)) & ~(changed[times, c] if k else np.zeros(len(t), dtype=bool))
        windows[:, k] = is_open & cells[times, c]
    return windows


def cut_windows(values: Floats, record: Record, n_before: int, n_after: int) -> Floats:
    """Return [change, k], the values of a client around each of its changes; NaN beyond other changes.

    Column `n_before` is the row of the change itself: trained on the old concept, tested on the new one.

    Args:
        values: [t, c], for example accuracies.
        record: The record with the changes.
        n_before: Number of rows before the row of the change.
        n_after: Number of rows after the row of the change.
    """
    changed = find_concept_changes(record)
    changes_next = np.concatenate(
        [changed[1:], get_true_concepts(record)[-1:] != get_true_concepts(record, test_cells=True)[-1:]]
    )
    t, c = np.nonzero(changed)
    windows = np.full((len(t), n_before + 1 + n_after), np.nan)
    for step in (-1, 1):
        is_open = np.ones(len(t), dtype=bool)
        for k in range(n_before + 1 if step < 0 else n_after + 1):
            times = t - 1 + step * k
            is_inside = (times >= 0) & (times < len(values))
            times = np.clip(times, 0, len(values) - 1)
            is_open &= is_inside & (~changes_next[times, c] if k else True)
            windows[is_open, n_before + step * k] = values[times, c][is_open]
    return windows


def sum_accuracy_loss(record: Record, oracle: Record | None = None, max_delay: int = MAX_DELAY_STEPS) -> Floats:
    """Return [change], the accuracy lost, summed from the row of the change to `max_delay` + 1 rows later.

    The loss is the difference to the oracle's accuracy, or else to the client's own mean over as many rows before the
    change; NaN where neither is known.

    Args:
        record: The run.
        oracle: The run of Oracle to compare with; None: compare with the accuracy before the change.
        max_delay: The largest delay of a detection in time steps; the sum has one more row.
    """
    n = max_delay + 1
    own = cut_windows(record.rows.accuracy, record, n, n)
    if oracle is None:
        level = average_known_values(own[:, :n], -1)[:, None]
    else:
        oracle_accuracy = np.full(record.rows.accuracy.shape, np.nan)
        n_steps = min(record.rows.steps, oracle.rows.steps)
        oracle_accuracy[:n_steps] = oracle.rows.accuracy[:n_steps]
        level = cut_windows(oracle_accuracy, record, n, n)[:, n:]
    gaps = (level - own[:, n:]) * (1 if record.score.higher_is_better else -1)
    return np.where(np.isnan(gaps).all(axis=1), np.nan, np.nansum(gaps, axis=1))


def average_over_time(record: Record) -> Floats:
    """Return [c], the mean accuracy of each client over time; NaN for clients that were never tested."""
    weights = np.where(np.isnan(record.rows.accuracy), 0.0, record.weights)
    total = weights.sum(axis=0)
    return np.asarray(np.nansum(weights * record.rows.accuracy, axis=0) / np.where(total > 0, total, np.nan))


def count_models_in_use(record: Record) -> Ints:
    """Return [t], the number of different models that the clients use."""
    return np.array([len(np.unique(row)) for row in record.rows.model], dtype=np.int64)


def count_concepts(record: Record) -> Ints:
    """Return [t], the number of different concepts of the clients; 0 where all are unknown."""
    return np.array([len(np.unique(row[row >= 0])) for row in get_true_concepts(record)], dtype=np.int64)


def compute_traffic_by_phase(record: Record) -> dict[str, float]:
    """Average the relative traffic of the first step, of steps with alarms, new models or merges, and of all others."""
    has_drift: Bools = np.asarray(record.rows.drift.any(axis=1))
    for event in record.events:
        has_drift[event["t"]] |= event["event"] in ("created", "merged")
    first = np.arange(record.rows.steps) == 0
    per_step = compute_relative_traffic(record)
    phases = {"first": first, "drift": has_drift & ~first, "quiet": ~has_drift & ~first}
    return {name: float(per_step[rows].mean()) for name, rows in phases.items() if rows.any()}


def compute_relative_traffic(record: Record) -> Floats:
    """Return [t], the models sent relative to one model that all clients that have joined train."""
    single_model = 2.0 * record.header["local"]["rounds"] * has_joined(record).sum(axis=1)
    return np.asarray(record.rows.models_sent.sum(axis=1) / np.maximum(single_model, 1))


def count_bytes_by_purpose(record: Record) -> dict[str, float]:
    """Return the bytes of parameters to and from all clients, for training and for scoring; {} if unknown."""
    size = record.header.get("model_bytes")
    rows = record.rows
    if size is None or np.isnan(rows.sent_scoring).any():
        return {}
    scoring = float(rows.sent_scoring.sum())
    return {"training": size * (float(rows.models_sent.sum()) - scoring), "scoring": size * scoring}


def mutual_information(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Compute the normalised mutual information of two groupings: 1 for the same groups, 0 for independent ones.

    >>> mutual_information([0, 0, 1, 1], [7, 7, 4, 4]), mutual_information([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, 0.0)
    """
    _, i = np.unique(np.asarray(a).reshape(-1), return_inverse=True)
    _, j = np.unique(np.asarray(b).reshape(-1), return_inverse=True)
    table = np.zeros((i.max() + 1, j.max() + 1))
    np.add.at(table, (i, j), 1)
    entropy_a = _compute_entropy(table.sum(axis=1))
    entropy_b = _compute_entropy(table.sum(axis=0))
    if entropy_a + entropy_b == 0:
        return 1.0
    shared = entropy_a + entropy_b - _compute_entropy(table.reshape(-1))
    return float(np.clip(2 * shared / (entropy_a + entropy_b), 0.0, 1.0))  # relative to the mean of both entropies


def _compute_entropy(counts: Floats) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _average_or_none(values: Floats) -> float | None:
    """Average values without NaN; None if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None
