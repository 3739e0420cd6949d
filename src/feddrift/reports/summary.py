"""Summaries of records over seeds: accuracies, models sent, and the agreement of clusters with concepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError
from feddrift.reports.labels import find_differing_settings, format_settings, select_non_default
from feddrift.runs.record import Record, build_configuration_key
from feddrift.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Scores:
    """The numbers of one run; None: unknown.

    Accuracies and other scores that are shares are in percent.
    """

    omitting_drifts: float | None
    including_drifts: float | None
    models_sent: float
    models_sent_ratio: float | None  # relative to Oblivious: 2 R per time step and client that has joined
    models_final: int | None
    false_alarms: int | None  # alarms without a change of the concept
    ari: float | None


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; one seed has no deviation."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Summary:
    """The numbers of one configuration over its seeds; None: unknown."""

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
    """The difference to a baseline in points, over the seeds that both have: the mean and its 95 % interval."""

    baseline: str
    seeds: tuple[int, ...]
    mean: float
    low: float | None  # None with one seed
    high: float | None


@dataclass(frozen=True)
class PublishedResult:
    """A result of the paper, and whether ours is within max(1.0, twice its deviation) of it."""

    omitting_drifts: Spread
    including_drifts: Spread
    within: dict[str, bool | None]  # by accuracy; None: ours is unknown


def adjusted_rand(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Compute the adjusted Rand index of two groupings: 1 for the same groups, about 0 for chance.

    Args:
        a: The group of each item.
        b: The group of each item in the other grouping.

    >>> adjusted_rand([0, 0, 1, 1], [7, 7, 4, 4]), adjusted_rand([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, -0.5)
    """
    _, i = np.unique(np.asarray(a).reshape(-1), return_inverse=True)
    _, j = np.unique(np.asarray(b).reshape(-1), return_inverse=True)
    table = np.zeros((i.max() + 1, j.max() + 1))
    np.add.at(table, (i, j), 1)

    def count_pairs(n: npt.NDArray[np.float64]) -> float:
        return float((n * (n - 1) / 2).sum())

    both = count_pairs(table)
    in_a = count_pairs(table.sum(axis=1))
    in_b = count_pairs(table.sum(axis=0))
    total = count_pairs(table.sum(keepdims=True))
    # Both values are multiplied by `total`, so that they are whole numbers without rounding.
    chance = in_a * in_b
    highest = total * (in_a + in_b) / 2
    return 1.0 if highest == chance else (total * both - chance) / (highest - chance)


def resolve_merges(record: Record) -> Ints:
    """Return [t, c], the model in use; a model that was merged later is replaced by the model it was merged into."""
    ids = record.rows.model.copy()
    for event in record.events:
        if event["event"] == "merged":
            past = ids[: event["t"] + 1]
            past[past == event["model"]] = event["cause"]["into"]
    return ids


def get_true_concepts(record: Record, test_cells: bool = False) -> Ints:
    """Return [t, c], the concept of each cell; -1 where it is unknown.

    Args:
        record: The record; concepts that it declares equal get one id.
        test_cells: True for the concepts of the test data, False for those of the training data.
    """
    concepts = (record.rows.next_concept if test_cells else record.rows.concept).copy()
    for concept in sorted(record.header["same"], key=int, reverse=True):  # from high to low: resolves chains
        concepts[concepts == int(concept)] = record.header["same"][concept]
    return concepts


def has_new_data(record: Record) -> Bools:
    """Return [t, c], whether the client had new data, reachable or not; True in the first time step."""
    return np.concatenate([np.ones_like(record.rows.tested[:1], dtype=bool), record.rows.tested[:-1] > 0])


def has_usable_data(record: Record) -> Bools:
    """Return [t, c], whether new data of the client could be used; for older records, whether it had new data."""
    received = record.rows.received
    return received > 0 if (received >= 0).all() else has_new_data(record)


def has_joined(record: Record) -> Bools:
    """Return [t, c], whether data of the client could be used in this time step or before."""
    return np.asarray(np.logical_or.accumulate(has_usable_data(record), axis=0))


def find_concept_changes(record: Record) -> Bools:
    """Return [t, c], whether the client's new data have another concept than its last data before."""
    concepts = get_true_concepts(record)
    changed = np.zeros(concepts.shape, dtype=bool)
    last_concept = np.full(concepts.shape[1], -1)
    for t, (concept, has_new) in enumerate(zip(concepts, has_new_data(record), strict=True)):
        has_new = has_new & (concept >= 0)
        changed[t] = has_new & (last_concept >= 0) & (concept != last_concept)
        last_concept = np.where(has_new, concept, last_concept)
    return changed


def summarise_run(record: Record) -> Scores:
    """Return the numbers of one run, over its recorded time steps."""
    rows = record.rows
    stable = (rows.concept == rows.next_concept) & (rows.concept >= 0)
    sent = float(rows.models_sent.sum())
    oblivious = 2 * record.header["local"]["rounds"] * int(has_joined(record).sum())
    concepts = get_true_concepts(record)
    is_known = concepts >= 0
    return Scores(
        omitting_drifts=_average_percent(record, stable),
        including_drifts=_average_percent(record, np.ones_like(stable)),
        models_sent=sent,
        models_sent_ratio=sent / max(1, oblivious) if rows.steps else None,
        models_final=int(rows.n_models[-1].max()) if rows.steps else None,
        false_alarms=int((rows.drift & is_known & ~find_concept_changes(record))[1:].sum()) if is_known.any() else None,
        ari=adjusted_rand(resolve_merges(record)[is_known], concepts[is_known]) if is_known.any() else None,
    )


def is_reportable(record: Record) -> bool:
    """Return whether summaries contain a run: it is complete, or it is a deployment with at least one time step."""
    return record.status == "complete" or (record.runs_on and record.rows.steps > 0)


def select_reportable(records: Iterable[Record]) -> list[Record]:
    """Return the runs that summaries contain; of runs with the same configuration and seed, only the newest."""
    latest: dict[tuple[str, int], Record] = {}
    for record in records:
        if is_reportable(record):
            key = build_configuration_key(record.header), record.header["seed"]
            if key not in latest or get_start_time(record) >= get_start_time(latest[key]):
                latest[key] = record
    return list(latest.values())


def select_unreportable(records: Iterable[Record]) -> list[Record]:
    """Return the runs that summaries leave out because they are not finished."""
    return [record for record in records if not is_reportable(record)]


def group_by_configuration(records: Iterable[Record]) -> list[list[Record]]:
    """Group the finished runs by configuration; each group is in the order of its seeds."""
    groups: dict[str, list[Record]] = {}
    for record in select_reportable(records):
        groups.setdefault(build_configuration_key(record.header), []).append(record)
    return [sorted(group, key=lambda r: int(r.header["seed"])) for group in groups.values()]


def summarise(records: Iterable[Record]) -> list[Summary]:
    """Return a summary of each configuration of the finished runs, in the order of `list_configurations`."""
    return [_summarise_configuration(group) for group in list_configurations(records)]


def compare(records: Iterable[Record], baseline: str) -> list[Difference | None]:
    """Compare each configuration with a baseline on the same stream, seed by seed.

    The comparison uses the accuracy omitting drifts, or including them where drifts are unknown.

    Args:
        records: The runs.
        baseline: An algorithm, or an algorithm and its settings, such as ``IFCA n_models=4``. If several of its
            configurations match, the one with default settings is the baseline.

    Returns:
        The differences, in the order of `summarise`; None: no seed in common.

    Raises:
        ConfigError: No finished run matches the baseline, or it is ambiguous on a stream.
    """
    groups = list_configurations(records)
    name, *settings = baseline.split() or [""]
    candidates = [group[0] for group in groups if group[0].header["algorithm"] == name]
    if candidates and not any(_has_settings(record, settings) for record in candidates):
        existing = "; ".join(
            dict.fromkeys(format_settings(select_non_default(name, record.header["settings"])) for record in candidates)
        )
        raise ConfigError(
            f"no finished runs of '{name}' have the settings {' '.join(settings)} (there are: {existing})"
        )
    if not candidates:
        algorithms = ", ".join(dict.fromkeys(group[0].header["algorithm"] for group in groups))
        raise ConfigError(f"no finished runs of '{baseline}' to compare with (there are: {algorithms})")
    return [compute_difference(group, _find_baseline(group, groups, baseline), baseline) for group in groups]


def list_configurations(records: Iterable[Record]) -> list[list[Record]]:
    """Return the finished runs of each configuration, by stream, with algorithms in the order of their first run."""
    groups = group_by_configuration(records)
    order = list(dict.fromkeys(group[0].header["algorithm"] for group in groups))
    return sorted(groups, key=lambda group: (group[0].header["stream"], order.index(group[0].header["algorithm"])))


def _find_baseline(group: list[Record], groups: list[list[Record]], baseline: str) -> list[Record]:
    """Return the runs of the baseline with the data and training of a group; [] if there are none."""
    header = group[0].header
    name, *settings = baseline.split()
    candidates = [
        candidate
        for candidate in groups
        if candidate[0].header["algorithm"] == name
        and all(candidate[0].header[key] == header[key] for key in ("stream", "overrides"))
        and _has_settings(candidate[0], settings)
    ]
    with_defaults = [
        candidate
        for candidate in candidates
        if set(select_non_default(name, candidate[0].header["settings"])) <= {"delta"}
    ]
    chosen = with_defaults if len(candidates) > 1 else candidates
    if len(chosen) != 1 and candidates:
        differing = find_differing_settings([(name, name, c[0].header["settings"]) for c in candidates])
        raise ConfigError(
            f"{len(candidates)} configurations of '{name}' on {header['stream']}: which one to compare with? "
            f"Name its settings, such as '{name} {format_settings(differing[0])}'"
        )
    return chosen[0] if chosen else []


def _has_settings(record: Record, settings: Sequence[str]) -> bool:
    """Return whether a run has these settings, each of which is key=value."""
    own = {format_settings({key: value}) for key, value in record.header["settings"].items()}
    return {part.rstrip(",") for part in settings} <= own


def compute_difference(group: Sequence[Record], baseline: Sequence[Record], name: str) -> Difference | None:
    """Compute the mean difference of two configurations over their common seeds.

    Args:
        group: Runs of the configuration.
        baseline: Runs of the configuration to compare with.
        name: The name of the baseline.

    Returns:
        The difference; None without common seeds, or if a run has no score.
    """
    baseline_scores = {record.header["seed"]: summarise_run(record) for record in baseline}
    pairs = [
        (r.header["seed"], summarise_run(r), baseline_scores[r.header["seed"]])
        for r in group
        if r.header["seed"] in baseline_scores
    ]
    gaps = []
    for _, a, b in pairs:
        x = a.omitting_drifts
        y = b.omitting_drifts
        if x is None or y is None:
            x = a.including_drifts
            y = b.including_drifts
        gaps.append(np.nan if x is None or y is None else x - y)
    if not gaps or np.isnan(gaps).any():
        return None
    return Difference(name, tuple(seed for seed, _, _ in pairs), *compute_interval(gaps))


def compute_interval(gaps: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean of differences and the limits of its 95 % interval; one difference has no interval."""
    mean = float(np.mean(gaps))
    n = len(gaps)
    if n == 1:
        return mean, None, None
    from scipy.special import stdtrit  # here, since SciPy takes a while to import

    half_width = float(stdtrit(n - 1, 0.975) * np.std(gaps, ddof=1) / np.sqrt(n))
    return mean, mean - half_width, mean + half_width


def _average_percent(record: Record, cells: Bools) -> float | None:
    """Average the score over these cells, in percent if it is a share."""
    mean = average_cells(record, np.where(cells, record.rows.accuracy, np.nan))
    return None if mean is None else (100 if record.score.share else 1) * mean


def get_start_time(record: Record) -> float:
    """Return the time at which a run started, in seconds since 1970."""
    return datetime.fromisoformat(record.header["started"]).timestamp()


def _summarise_configuration(group: Sequence[Record]) -> Summary:
    header = group[0].header
    runs = [summarise_run(record) for record in group]

    def compute_spread_of(name: str) -> Spread | None:
        values = [getattr(run, name) for run in runs]
        return compute_spread([value for value in values if value is not None])

    def compute_mean_of(name: str) -> float:
        return float(np.mean([getattr(run, name) for run in runs]))

    ari = compute_spread_of("ari")
    alarms = compute_spread_of("false_alarms")
    return Summary(
        stream=header["stream"],
        algorithm=header["algorithm"],
        settings=header["settings"],
        overrides=header["overrides"],
        seeds=tuple(record.header["seed"] for record in group),
        omitting_drifts=compute_spread_of("omitting_drifts"),
        including_drifts=compute_spread_of("including_drifts"),
        models_sent=compute_mean_of("models_sent"),
        models_sent_ratio=compute_mean_of("models_sent_ratio"),
        models_final=compute_mean_of("models_final"),
        false_alarms=alarms.mean if alarms else None,
        ari=ari.mean if ari else None,
    )


def average_cells(record: Record, values: Floats) -> float | None:
    """Average known values [t, c] with the weights of the record; None if no value is known."""
    known = ~np.isnan(values) & (record.weights > 0)
    return float(np.average(values[known], weights=record.weights[known])) if known.any() else None


def average_known_values(values: Floats, axis: int) -> Floats:
    """Average over an axis without NaN; NaN where all values are NaN."""
    n = (~np.isnan(values)).sum(axis=axis)
    return np.asarray(np.nansum(values, axis=axis) / np.where(n > 0, n, np.nan))


def compute_deviation(values: Floats) -> Floats:
    """Return the sample standard deviation over the first axis without NaN; NaN with fewer than two values."""
    n = (~np.isnan(values)).sum(axis=0)
    squares = np.nansum((values - average_known_values(values.T, 1)) ** 2, axis=0)
    return np.asarray(np.sqrt(squares / np.where(n > 1, n - 1, np.nan)))


def compute_spread(values: Sequence[float]) -> Spread | None:
    """Return mean and sample standard deviation; None without values."""
    if not values:
        return None
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)
