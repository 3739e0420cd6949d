"""What records say: accuracies, models sent and how well the clusters match the concepts, over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError
from feddrift.reports.labels import describe, differences, notable
from feddrift.runs.record import Record, configuration
from feddrift.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Scores:
    """The numbers of one run; accuracies in percent (another score as it is, unless it is a share), None where nothing
    can be said."""

    omitting_drifts: float | None
    including_drifts: float | None
    models_sent: float
    models_sent_ratio: float | None  # relative to Oblivious: 2 R for each client and time step since it joined
    models_final: int | None
    false_alarms: int | None  # alarms where the concept had not changed since the step before
    ari: float | None


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; one seed has no deviation."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Summary:
    """The numbers of one configuration over its seeds; None where nothing can be said."""

    stream: str
    algorithm: str
    settings: Mapping[str, Any]
    overrides: Mapping[str, Any]
    seeds: tuple[int, ...]
    omitting_drifts: Spread | None
    including_drifts: Spread | None
    models_sent: float
    models_sent_ratio: float
    models_final: float
    false_alarms: float | None
    ari: float | None


@dataclass(frozen=True)
class Difference:
    """How much higher than a baseline's, in points, over the seeds both have: the mean and its 95 % interval."""

    baseline: str
    seeds: tuple[int, ...]
    mean: float
    low: float | None  # one seed has no interval
    high: float | None


@dataclass(frozen=True)
class Published:
    """What the paper has for a cell of its tables, and whether ours is within max(1.0, twice its deviation) of it."""

    omitting_drifts: Spread
    including_drifts: Spread
    within: dict[str, bool | None]  # by accuracy; None: ours was not measured


def adjusted_rand(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """How far two groupings of the same things agree: 1 for the same groups, about 0 for chance.

    >>> adjusted_rand([0, 0, 1, 1], [7, 7, 4, 4]), adjusted_rand([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, -0.5)
    """
    _, i = np.unique(np.asarray(a).reshape(-1), return_inverse=True)
    _, j = np.unique(np.asarray(b).reshape(-1), return_inverse=True)
    table = np.zeros((i.max() + 1, j.max() + 1))
    np.add.at(table, (i, j), 1)

    def pairs(n: npt.NDArray[np.float64]) -> float:
        return float((n * (n - 1) / 2).sum())

    both, in_a, in_b = pairs(table), pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    total = pairs(table.sum(keepdims=True))
    chance, highest = in_a * in_b, total * (in_a + in_b) / 2  # all times total: whole numbers, no rounding
    return 1.0 if highest == chance else (total * both - chance) / (highest - chance)


def lineage(record: Record) -> Ints:
    """The model in use [t, c], a model that was merged later replaced by what it became part of."""
    ids = record.rows.model.copy()
    for event in record.events:
        if event["event"] == "merged":
            past = ids[: event["t"] + 1]
            past[past == event["model"]] = event["cause"]["into"]
    return ids


def truth(record: Record, of_tests: bool = False) -> Ints:
    """The concept of each training cell [t, c], or of each test cell, equal ones under one id; -1 where unknown."""
    concepts = (record.rows.next_concept if of_tests else record.rows.concept).copy()
    for concept in sorted(record.header["same"], key=int, reverse=True):  # high to low: chains resolve, too
        concepts[concepts == int(concept)] = record.header["same"][concept]
    return concepts


def with_data(record: Record) -> Bools:
    """[t, c], whether there was anything new at the client, in reach or not; of the first step nobody knows, so yes."""
    return np.concatenate([np.ones_like(record.rows.tested[:1], dtype=bool), record.rows.tested[:-1] > 0])


def reached(record: Record) -> Bools:
    """[t, c], whether anything new at the client could be used; an older record says only whether there was."""
    received = record.rows.received
    return received > 0 if (received >= 0).all() else with_data(record)


def joined(record: Record) -> Bools:
    """[t, c], whether anything of the client could be used by then."""
    return np.asarray(np.logical_or.accumulate(reached(record), axis=0))


def changes(record: Record) -> Bools:
    """[t, c], where a client's new data are of another concept than the newest it had before."""
    concepts, received = truth(record), with_data(record)
    changed, newest = np.zeros(concepts.shape, dtype=bool), np.full(concepts.shape[1], -1)
    for t, (now, has_new) in enumerate(zip(concepts, received, strict=True)):
        has_new = has_new & (now >= 0)
        changed[t] = has_new & (newest >= 0) & (now != newest)
        newest = np.where(has_new, now, newest)
    return changed


def scores(record: Record) -> Scores:
    """The numbers of one run, over the time steps it has."""
    rows = record.rows
    stable = (rows.concept == rows.next_concept) & (rows.concept >= 0)
    sent = float(rows.models_sent.sum())
    oblivious = 2 * record.header["local"]["rounds"] * int(joined(record).sum())
    real = truth(record)
    is_known = real >= 0
    return Scores(
        omitting_drifts=_percent(record, stable),
        including_drifts=_percent(record, np.ones_like(stable)),
        models_sent=sent,
        models_sent_ratio=sent / max(1, oblivious) if rows.steps else None,
        models_final=int(rows.n_models[-1].max()) if rows.steps else None,
        false_alarms=int((rows.drift & is_known & ~changes(record))[1:].sum()) if is_known.any() else None,
        ari=adjusted_rand(lineage(record)[is_known], real[is_known]) if is_known.any() else None,
    )


def is_reported(record: Record) -> bool:
    """Whether summaries hold a run: a complete one, or a federation that goes on, as far as it has come."""
    return record.status == "complete" or (record.runs_on and record.rows.steps > 0)


def finished(records: Iterable[Record]) -> list[Record]:
    """The runs that count, in order; of the same run twice only the one started last."""
    latest: dict[tuple[str, int], Record] = {}
    for record in records:
        if is_reported(record):
            key = configuration(record.header), record.header["seed"]
            if key not in latest or _started(record) >= _started(latest[key]):
                latest[key] = record
    return list(latest.values())


def unfinished(records: Iterable[Record]) -> list[Record]:
    """The runs that summaries leave out."""
    return [record for record in records if not is_reported(record)]


def grouped(records: Iterable[Record]) -> list[list[Record]]:
    """The finished runs by configuration, each group by seed."""
    groups: dict[str, list[Record]] = {}
    for record in finished(records):
        groups.setdefault(configuration(record.header), []).append(record)
    return [sorted(group, key=lambda r: int(r.header["seed"])) for group in groups.values()]


def summarise(records: Iterable[Record]) -> list[Summary]:
    """One summary per configuration of the finished runs: by stream, algorithms in the order of appearance."""
    return [_summary(group) for group in configurations(records)]


def compare(records: Iterable[Record], baseline: str) -> list[Difference | None]:
    """Each configuration, in the order of `summarise`, against an algorithm on the same stream, seed by seed.

    Compared is the accuracy omitting drifts, or including them where drifts are not known. Of several configurations
    of the baseline the one with its default settings counts, or the one with the settings behind its name, such as
    ``IFCA n_models=4``.
    """
    groups = configurations(records)
    name, *asked = baseline.split() or [""]
    named = [group[0] for group in groups if group[0].header["algorithm"] == name]
    if named and not any(_has(record, asked) for record in named):
        settings = "; ".join(dict.fromkeys(describe(notable(name, record.header["settings"])) for record in named))
        raise ConfigError(f"no finished runs of '{name}' have the settings {' '.join(asked)} (there are: {settings})")
    if not named:
        have = ", ".join(dict.fromkeys(group[0].header["algorithm"] for group in groups))
        raise ConfigError(f"no finished runs of '{baseline}' to compare with (there are: {have})")
    return [difference_of(group, _baseline_of(group, groups, baseline), baseline) for group in groups]


def configurations(records: Iterable[Record]) -> list[list[Record]]:
    """The finished runs of each configuration: by stream, algorithms in the order of appearance."""
    groups = grouped(records)
    order = list(dict.fromkeys(group[0].header["algorithm"] for group in groups))
    return sorted(groups, key=lambda group: (group[0].header["stream"], order.index(group[0].header["algorithm"])))


def _baseline_of(group: list[Record], groups: list[list[Record]], baseline: str) -> list[Record]:
    """The runs of the baseline with the same data and training, or none."""
    header, (name, *asked) = group[0].header, baseline.split()
    alike = [
        candidate
        for candidate in groups
        if candidate[0].header["algorithm"] == name
        and all(candidate[0].header[key] == header[key] for key in ("stream", "overrides"))
        and _has(candidate[0], asked)
    ]
    plain = [candidate for candidate in alike if set(notable(name, candidate[0].header["settings"])) <= {"delta"}]
    best = plain if len(alike) > 1 else alike
    if len(best) != 1 and alike:
        told = describe(differences([(name, name, c[0].header["settings"]) for c in alike])[0])
        raise ConfigError(
            f"{len(alike)} configurations of '{name}' on {header['stream']}: which one to compare with? "
            f"Name its settings, such as '{name} {told}'"
        )
    return best[0] if best else []


def _has(record: Record, asked: Sequence[str]) -> bool:
    """Whether these are settings of the run, each as key=value."""
    own = {describe({key: value}) for key, value in record.header["settings"].items()}
    return {part.rstrip(",") for part in asked} <= own


def difference_of(group: Sequence[Record], baseline: Sequence[Record], name: str) -> Difference | None:
    """How far a configuration is above another, seed by seed; None where no seed can be compared."""
    baseline_scores = {record.header["seed"]: scores(record) for record in baseline}
    pairs = [
        (r.header["seed"], scores(r), baseline_scores[r.header["seed"]])
        for r in group
        if r.header["seed"] in baseline_scores
    ]
    gaps = []
    for _, a, b in pairs:
        x, y = (a.omitting_drifts, b.omitting_drifts)
        if x is None or y is None:
            x, y = a.including_drifts, b.including_drifts
        gaps.append(np.nan if x is None or y is None else x - y)
    if not gaps or np.isnan(gaps).any():
        return None
    return Difference(name, tuple(seed for seed, _, _ in pairs), *interval(gaps))


def interval(gaps: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean of a difference over seeds and its 95 % interval, which one seed does not have."""
    mean, n = float(np.mean(gaps)), len(gaps)
    if n == 1:
        return mean, None, None
    from scipy.special import stdtrit  # here, since SciPy takes a while to import

    half = float(stdtrit(n - 1, 0.975) * np.std(gaps, ddof=1) / np.sqrt(n))
    return mean, mean - half, mean + half


def _percent(record: Record, cells: Bools) -> float | None:
    mean = mean_over_cells(record, np.where(cells, record.rows.accuracy, np.nan))
    return None if mean is None else (100 if record.score.share else 1) * mean


def _started(record: Record) -> float:
    return datetime.fromisoformat(record.header["started"]).timestamp()


def _summary(group: Sequence[Record]) -> Summary:
    header, runs = group[0].header, [scores(record) for record in group]

    def over_seeds(name: str) -> Spread | None:
        return spread_of([value for run in runs if (value := getattr(run, name)) is not None])

    def mean(name: str) -> float:
        return float(np.mean([getattr(run, name) for run in runs]))

    ari, alarms = over_seeds("ari"), over_seeds("false_alarms")
    return Summary(
        stream=header["stream"],
        algorithm=header["algorithm"],
        settings=header["settings"],
        overrides=header["overrides"],
        seeds=tuple(record.header["seed"] for record in group),
        omitting_drifts=over_seeds("omitting_drifts"),
        including_drifts=over_seeds("including_drifts"),
        models_sent=mean("models_sent"),
        models_sent_ratio=mean("models_sent_ratio"),
        models_final=mean("models_final"),
        false_alarms=alarms.mean if alarms else None,
        ari=ari.mean if ari else None,
    )


def mean_over_cells(record: Record, values: Floats) -> float | None:
    """The mean of values [t, c] over the cells where they are known, weighed as the record says; None of nothing."""
    known = ~np.isnan(values) & (record.weights > 0)
    return float(np.average(values[known], weights=record.weights[known])) if known.any() else None


def mean_of_known(values: Floats, axis: int) -> Floats:
    """The mean over an axis, leaving NaN out; NaN where nothing is left."""
    n = (~np.isnan(values)).sum(axis=axis)
    return np.asarray(np.nansum(values, axis=axis) / np.where(n > 0, n, np.nan))


def deviation_of_known(values: Floats) -> Floats:
    """The sample standard deviation over the first axis; NaN where fewer than two are known."""
    n = (~np.isnan(values)).sum(axis=0)
    squares = np.nansum((values - mean_of_known(values.T, 1)) ** 2, axis=0)
    return np.asarray(np.sqrt(squares / np.where(n > 1, n - 1, np.nan)))


def spread_of(values: Sequence[float]) -> Spread | None:
    """Mean and deviation; None of nothing."""
    if not values:
        return None
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)
