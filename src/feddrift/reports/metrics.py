"""How well a run noticed drifts and got over them: pure functions of its record, defined in docs/metrics.md.

No number stands alone: beside every detector stand dummies that know nothing, computed for the same changes.
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
    changes,
    configurations,
    joined,
    lineage,
    mean_of_known,
    mean_over_cells,
    spread_of,
    truth,
    with_data,
)
from feddrift.runs.record import Record
from feddrift.types import Bools, Floats, Ints

WITHIN = 2  # an alarm counts for a change up to so many time steps after it


@dataclass(frozen=True)
class Detection:
    """Alarms against true changes; each change is credited with its first alarm, all others are false."""

    cells: int  # where a detector can speak: new data, and their concept is known
    changes: int
    alarms: float  # of a dummy the expected number, which need not be whole
    hits: float
    delay: float | None  # mean time steps from change to alarm, a missed one counted as one more than can be

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
    """The numbers of one run; None where nothing can be said. Accuracies are shares."""

    alarms: Detection | None
    switches: Detection | None
    noticed: Detection | None  # an alarm or a switch
    dummies: Mapping[str, Detection]  # always, never, chance: as often as this run's alarms and switches
    lost: float | None  # accuracy lost per drift against the level before it, summed over time steps
    lost_to_oracle: float | None
    mean: float | None
    worst: float | None  # the worst client's mean over time
    tenth: float | None  # the 10th percentile over clients of the same
    ari: float | None
    nmi: float | None
    spare: float | None  # models in use beyond the concepts alive, mean over time
    sent: Mapping[str, float]  # by phase, relative to what one model costs in its time steps
    bytes_sent: Mapping[str, float]  # by purpose: training, scoring; empty where an older record does not say


def measure(record: Record, oracle: Record | None = None) -> Metrics:
    """All metrics of a run; oracle is the run with the same data and seed that knew the concepts, if there is one."""
    concepts, moved = truth(record), switches(record)
    is_known, changed, cells = concepts >= 0, changes(record), scored_cells(record)
    alarms = record.rows.drift
    alarmed, switched, noticed = (detection(a, changed, cells) for a in (alarms, moved, alarms | moved))
    averages = by_client(record)
    averages = averages[~np.isnan(averages)]
    worst, tenth = (np.min, 10) if record.score.higher_is_better else (np.max, 90)
    used, alive = count_in_use(record), concepts_alive(record)
    spare = (used - alive)[alive > 0]
    there = bool(is_known.any())
    return Metrics(
        alarms=alarmed if there else None,
        switches=switched if there else None,
        noticed=noticed if there else None,
        dummies=dummies(changed, cells, noticed.alarms / noticed.cells if noticed.cells else 0.0) if there else {},
        lost=_mean(areas(record)) if there else None,
        lost_to_oracle=_mean(areas(record, oracle)) if there and oracle is not None else None,
        mean=mean_over_cells(record, record.rows.accuracy),
        worst=float(worst(averages)) if averages.size else None,
        tenth=float(np.percentile(averages, tenth)) if averages.size else None,
        ari=adjusted_rand(lineage(record)[is_known], concepts[is_known]) if there else None,
        nmi=mutual_information(lineage(record)[is_known], concepts[is_known]) if there else None,
        spare=_mean(spare.astype(float)),
        sent=sent_by_phase(record),
        bytes_sent=bytes_by_purpose(record),
    )


def numbers(metrics: Metrics) -> dict[str, float | None]:
    """The metrics of a run as single numbers by name, with those of the dummy detectors."""
    plain = ("mean", "worst", "tenth", "lost", "lost_to_oracle", "ari", "nmi", "spare")
    detectors = {"noticed": metrics.noticed, "alarms": metrics.alarms, "switches": metrics.switches, **metrics.dummies}
    return {
        **{name: getattr(metrics, name) for name in plain},
        **{
            f"{name} {what}": getattr(value, what)
            for name, value in detectors.items()
            if value is not None
            for what in ("precision", "recall", "delay")
        },
        **{f"sent {phase}": value for phase, value in metrics.sent.items()},
        **{f"bytes {purpose}": value for purpose, value in metrics.bytes_sent.items()},
    }


def summarise(records: Iterable[Record]) -> list[dict[str, Spread | None]]:
    """The numbers of each configuration over its seeds, in the order of `summary.summarise`."""
    groups = configurations(records)
    oracles = oracles_of(run for group in groups for run in group)
    return [over_seeds([numbers(measure(run, oracles.get(conditions(run)))) for run in group]) for group in groups]


def over_seeds(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    """The mean and deviation of each number over the runs that have it."""
    spreads: dict[str, Spread | None] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [value for run in runs if (value := run.get(name)) is not None]
        spreads[name] = spread_of(values)
    return spreads


def oracles_of(runs: Iterable[Record]) -> dict[str, Record]:
    """The runs of Oracle by their conditions."""
    return {conditions(run): run for run in runs if run.header["algorithm"] == "Oracle"}


def conditions(run: Record) -> str:
    """What an Oracle must share with a run to be compared with: data, training, net and seed."""
    return json.dumps([run.header[key] for key in ("stream", "overrides", "seed")], sort_keys=True)


def scored_cells(record: Record) -> Bools:
    """[t, c], where a detector could be right or wrong: after the first step, with new data of a known concept."""
    cells = with_data(record) & (record.rows.concept >= 0)
    cells[:1] = False
    return cells


def switches(record: Record) -> Bools:
    """[t, c], where a client uses another model than before; that its model was merged is no switch."""
    model = record.rows.model
    before = np.concatenate([model[:1], model[:-1]])
    for event in record.events:  # in order: a merge into what is merged next is followed
        if event["event"] == "merged":
            past = before[event["t"]]
            past[past == event["model"]] = event["cause"]["into"]
    moved: Bools = before != model
    moved[:1] = False
    return moved


def delays(alarms: Bools, changed: Bools, cells: Bools, within: int = WITHIN) -> Ints:
    """Of each change, in the order of `np.argwhere(changed)`, the time steps to its first alarm; -1: missed."""
    owned = _windows(changed, cells, within)
    t, c = np.nonzero(changed)
    at = np.minimum(t[:, None] + np.arange(within + 1), len(changed) - 1)
    heard = owned & alarms[at, c[:, None]]
    return np.where(heard.any(axis=1), heard.argmax(axis=1), -1)


def detection(alarms: Bools, changed: Bools, cells: Bools, within: int = WITHIN) -> Detection:
    """What a detector is worth; alarms outside the cells do not count.

    >>> t = np.array([[0], [1], [0], [0]], dtype=bool)
    >>> late = detection(np.roll(t, 1), t, np.ones_like(t))
    >>> late.precision, late.recall, late.delay
    (1.0, 1.0, 1.0)
    """
    steps_late = delays(alarms, changed, cells, within)
    waited = np.where(steps_late < 0, within + 1, steps_late)
    return Detection(
        cells=int(cells.sum()),
        changes=len(steps_late),
        alarms=float((alarms & cells).sum()),
        hits=float((steps_late >= 0).sum()),
        delay=_mean(waited.astype(float)),
    )


def dummies(changed: Bools, cells: Bools, rate: float, within: int = WITHIN) -> dict[str, Detection]:
    """Detectors that look at nothing: one that always speaks, one that never does, and a coin with this rate."""
    return {
        "always": detection(cells, changed, cells, within),
        "chance": chance(rate, changed, cells, within),
        "never": detection(np.zeros_like(cells), changed, cells, within),
    }


def chance(rate: float, changed: Bools, cells: Bools, within: int = WITHIN) -> Detection:
    """What a coin that says alarm with this rate in each cell is expected to reach."""
    owned = _windows(changed, cells, within)
    tosses: Ints = np.cumsum(owned, axis=1) - owned  # before this one
    first = np.where(owned, rate * (1 - rate) ** tosses, 0.0)  # the chance that a change's first alarm is here
    hits = first.sum(axis=1)
    waited = first @ np.arange(within + 1) + (1 - hits) * (within + 1)
    return Detection(int(cells.sum()), len(hits), rate * int(cells.sum()), float(hits.sum()), _mean(waited))


def _windows(changed: Bools, cells: Bools, within: int) -> Bools:
    """[change, k], whether an alarm k steps after the change is one for it: no later change came between."""
    t, c = np.nonzero(changed)
    owned = np.zeros((len(t), within + 1), dtype=bool)
    still = np.ones(len(t), dtype=bool)
    for k in range(within + 1):
        at = np.minimum(t + k, len(changed) - 1)
        still &= (t + k < len(changed)) & ~(changed[at, c] if k else np.zeros(len(t), dtype=bool))
        owned[:, k] = still & cells[at, c]
    return owned


def around(values: Floats, record: Record, before: int, after: int) -> Floats:
    """[change, k], values[t, c] from `before` rows ahead of each change to `after` behind; NaN beyond other changes.

    Column `before` is the row that the change strikes: trained on the old concept, tested on the new one.
    """
    changed = changes(record)
    strikes = np.concatenate([changed[1:], truth(record)[-1:] != truth(record, of_tests=True)[-1:]])
    t, c = np.nonzero(changed)
    windows = np.full((len(t), before + 1 + after), np.nan)
    for step in (-1, 1):
        still = np.ones(len(t), dtype=bool)
        for k in range(before + 1 if step < 0 else after + 1):
            at = t - 1 + step * k
            inside = (at >= 0) & (at < len(values))
            at = np.clip(at, 0, len(values) - 1)
            still &= inside & (~strikes[at, c] if k else True)
            windows[still, before + step * k] = values[at, c][still]
    return windows


def areas(record: Record, oracle: Record | None = None, within: int = WITHIN) -> Floats:
    """Of each change the accuracy lost, summed from the row that it strikes to `within` + 1 rows later.

    Lost is what is missing to the oracle's accuracy there, or else to the client's own mean over as many rows before
    the change; NaN where neither is known.
    """
    n = within + 1
    own = around(record.rows.accuracy, record, n, n)
    if oracle is None:
        level = mean_of_known(own[:, :n], -1)[:, None]
    else:
        of_oracle = np.full(record.rows.accuracy.shape, np.nan)
        steps = min(record.rows.steps, oracle.rows.steps)
        of_oracle[:steps] = oracle.rows.accuracy[:steps]
        level = around(of_oracle, record, n, n)[:, n:]
    gaps = (level - own[:, n:]) * (1 if record.score.higher_is_better else -1)
    return np.where(np.isnan(gaps).all(axis=1), np.nan, np.nansum(gaps, axis=1))


def by_client(record: Record) -> Floats:
    """[c], each client's mean accuracy over time; NaN where it was never tested."""
    weights = np.where(np.isnan(record.rows.accuracy), 0.0, record.weights)
    total = weights.sum(axis=0)
    return np.asarray(np.nansum(weights * record.rows.accuracy, axis=0) / np.where(total > 0, total, np.nan))


def count_in_use(record: Record) -> Ints:
    """[t], how many different models the clients use."""
    return np.array([len(np.unique(row)) for row in record.rows.model], dtype=np.int64)


def concepts_alive(record: Record) -> Ints:
    """[t], how many different concepts the clients have; 0 where unknown."""
    return np.array([len(np.unique(row[row >= 0])) for row in truth(record)], dtype=np.int64)


def sent_by_phase(record: Record) -> dict[str, float]:
    """`sent_over_time` in the first step, in steps with an alarm, a birth or a merge, and in quiet ones."""
    busy: Bools = np.asarray(record.rows.drift.any(axis=1))
    for event in record.events:
        busy[event["t"]] |= event["event"] in ("created", "merged")
    first = np.arange(record.rows.steps) == 0
    per_step = sent_over_time(record)
    phases = {"first": first, "drift": busy & ~first, "quiet": ~busy & ~first}
    return {name: float(per_step[rows].mean()) for name, rows in phases.items() if rows.any()}


def sent_over_time(record: Record) -> Floats:
    """[t], models sent relative to one model trained by all clients that have joined."""
    single_model = 2.0 * record.header["local"]["rounds"] * joined(record).sum(axis=1)
    return np.asarray(record.rows.models_sent.sum(axis=1) / np.maximum(single_model, 1))


def bytes_by_purpose(record: Record) -> dict[str, float]:
    """Bytes of parameters to and from all clients, for training and for scoring."""
    size, rows = record.header.get("model_bytes"), record.rows
    if size is None or np.isnan(rows.sent_scoring).any():
        return {}
    scoring = float(rows.sent_scoring.sum())
    return {"training": size * (float(rows.models_sent.sum()) - scoring), "scoring": size * scoring}


def mutual_information(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Normalised mutual information of two groupings: 1 for the same groups, 0 where one says nothing of the other.

    >>> mutual_information([0, 0, 1, 1], [7, 7, 4, 4]), mutual_information([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, 0.0)
    """
    _, i = np.unique(np.asarray(a).reshape(-1), return_inverse=True)
    _, j = np.unique(np.asarray(b).reshape(-1), return_inverse=True)
    table = np.zeros((i.max() + 1, j.max() + 1))
    np.add.at(table, (i, j), 1)
    of_a, of_b = _entropy(table.sum(axis=1)), _entropy(table.sum(axis=0))
    if of_a + of_b == 0:
        return 1.0
    shared = of_a + of_b - _entropy(table.reshape(-1))
    return float(np.clip(2 * shared / (of_a + of_b), 0.0, 1.0))  # relative to the mean of both entropies


def _entropy(counts: Floats) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None
