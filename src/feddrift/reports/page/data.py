"""Data of the HTML page as plain JSON values, which the scripts of the page show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np

from feddrift import algorithms, rng
from feddrift._version import __version__
from feddrift.reports import exchanges, metrics
from feddrift.reports.caveats import find_caveats
from feddrift.reports.event_text import build_run_command, explain_alarm, explain_event, format_concept
from feddrift.reports.labels import build_labels, find_common_settings, format_settings
from feddrift.reports.summary import (
    Difference,
    average_known_values,
    compare,
    compute_deviation,
    find_concept_changes,
    get_start_time,
    get_true_concepts,
    has_joined,
    has_usable_data,
    list_configurations,
    resolve_merges,
    summarise_run,
)
from feddrift.reports.verdict import AlarmCounts, find_common_alarms, find_verdicts
from feddrift.runs.record import Record, Rows, build_configuration_key
from feddrift.scores import SCORES
from feddrift.types import Floats, Ints

MAX_SHOWN_CLIENTS = 20_000  # clients of a run that are shown individually; of more clients a sample is shown
MAX_SHOWN_CELLS = 600_000  # cells of all runs together that are shown; other runs have only curves
MAX_LISTED_EVENTS = 30_000  # drifts and alarms in the list of a run
MAX_WORST_CLIENTS = 12
MAX_NAMED_CAUSES = 2  # of the alarms of a time step with a common cause
ROWS_BEFORE_DRIFT = 2
ROWS_AFTER_DRIFT = 4

# Kinds of reactions, which are added up.
ALARM = 1
SWITCH = 2
COMMON_CAUSE = 4  # of an alarm: everything that changed also changed at most clients


def collect_page_data(records: Sequence[Record], name: str, against: str | None = None) -> dict[str, Any]:
    """Collect the data of all runs by stream and configuration; of repeated runs only the newest is used.

    Runs with different nets on the same data belong to the same stream.

    Args:
        records: The records.
        name: The title of the report.
        against: The baseline of the differences in the table of methods, as for `compare`; None: no differences.

    Returns:
        Plain values, which `build_page` writes as JSON.

    Raises:
        ConfigError: No finished run matches the baseline, or it is ambiguous on a stream.
    """
    by_stream: dict[str, dict[str, list[Record]]] = {}
    for record in select_newest(records):
        header = record.header
        source = header["stream"], _select_data_options(header), header["clients"] if record.runs_on else None
        stream_key = json.dumps(source, sort_keys=True)
        by_stream.setdefault(stream_key, {}).setdefault(build_configuration_key(record.header), []).append(record)
    ids_with_cells = _select_runs_with_cells(by_stream)
    gaps = _compare_configurations(records, against) if against else {}
    streams = [list(groups.values()) for _, groups in sorted(by_stream.items())]
    stream_names = _name_streams([groups[0][0].header for groups in streams])
    return {
        "name": name,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "score": asdict(records[0].score) if records else {},
        "within": metrics.MAX_DELAY_STEPS,
        "before": ROWS_BEFORE_DRIFT,
        "against": against,
        "streams": [
            _collect_stream(groups, stream_name, ids_with_cells, gaps)
            for groups, stream_name in zip(streams, stream_names, strict=True)
        ],
    }


def _compare_configurations(records: Sequence[Record], baseline: str) -> dict[str, Difference | None]:
    """Return the difference of each configuration to the baseline, by configuration key."""
    differences = compare(records, baseline)
    groups = list_configurations(records)
    return {build_configuration_key(group[0].header): gap for group, gap in zip(groups, differences, strict=True)}


def _name_streams(headers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a short name for each stream of the page.

    Streams of the same name have the options that differ, and then a number, so that all names are different.
    """
    names: list[str] = []
    n_seen: Counter[str] = Counter()
    for header in headers:
        peers = [_select_data_options(peer) for peer in headers if peer["stream"] == header["stream"]]
        common = find_common_settings(peers)
        own = {key: value for key, value in _select_data_options(header).items() if key not in common}
        name = header["stream"] + (f" ({format_settings(own)})" if own else "")
        n_seen[name] += 1
        names.append(name if n_seen[name] == 1 else f"{name}, number {n_seen[name]}")
    return names


def _select_data_options(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run without its net; runs with the same options belong to the same stream."""
    return {key: value for key, value in header["overrides"].items() if key != "net"}


def select_newest(records: Sequence[Record]) -> list[Record]:
    """Return one run of each configuration and seed: the newest complete run, or else the newest."""
    latest: dict[tuple[str, int], Record] = {}
    for record in records:
        key = build_configuration_key(record.header), record.header["seed"]
        if key not in latest or _build_recency_key(record) >= _build_recency_key(latest[key]):
            latest[key] = record
    return list(latest.values())


def select_shown_clients(record: Record) -> Ints:
    """Return the ids of the clients that are shown individually.

    Of more than MAX_SHOWN_CLIENTS simulated clients, one is drawn from each of MAX_SHOWN_CLIENTS equal parts. The draw
    depends only on the number of clients, so all runs on the same clients show the same sample. Clients on real
    machines are all shown.
    """
    n = int(record.header["n_clients"])
    if n <= MAX_SHOWN_CLIENTS or record.runs_on:
        return np.arange(n)
    ends = np.arange(MAX_SHOWN_CLIENTS + 1) * n // MAX_SHOWN_CLIENTS
    drawn: Ints = ends[:-1] + rng.draw_words(rng.derive_key(n, "shown"), MAX_SHOWN_CLIENTS) % np.diff(ends)
    return drawn


def restrict_to_shown_clients(record: Record) -> Record:
    """Return the record of the shown clients only."""
    clients = select_shown_clients(record)
    if len(clients) == record.header["n_clients"]:
        return record
    position = {c: k for k, c in enumerate(clients.tolist())}
    names = record.header["clients"]
    events = [_restrict_event(position, event) for event in record.events]
    return replace(
        record,
        header=record.header | {"n_clients": len(clients), "clients": [names[c] for c in clients]},
        rows=Rows(**{column.name: getattr(record.rows, column.name)[:, clients] for column in fields(Rows)}),
        events=tuple(event for event in events if event is not None),
        accuracy=None if record.accuracy is None else record.accuracy[:, clients],
        shifts={(t, position[c]): shift for (t, c), shift in record.shifts.items() if c in position},
    )


def _restrict_event(position: Mapping[int, int], event: dict[str, Any]) -> dict[str, Any] | None:
    """Return an event with the positions of its shown clients; None for a decision about other clients only."""
    clients = event["cause"].get("clients")
    if not isinstance(clients, list) or not clients:
        return event
    positions = [position[c] for c in clients if c in position]
    if event["event"] == "decided" and not positions:  # an empty list would mean all clients
        return None
    return event | {"cause": event["cause"] | {"clients": positions}}


def _build_recency_key(record: Record) -> tuple[bool, float]:
    return record.status == "complete", get_start_time(record)


def _select_runs_with_cells(by_stream: Mapping[str, Mapping[str, Sequence[Record]]]) -> set[int]:
    """Return the `id` of each run whose cells are shown, beginning with the first run of each configuration."""
    groups = [group for configurations in by_stream.values() for group in configurations.values()]
    ranked = sorted(((k, g, run) for g, group in enumerate(groups) for k, run in enumerate(group)), key=lambda r: r[:2])
    selected: set[int] = set()
    n_left = MAX_SHOWN_CELLS
    for _, _, record in ranked:
        n_cells = record.rows.steps * len(select_shown_clients(record))
        if n_cells <= n_left or not selected:
            selected.add(id(record))
            n_left -= n_cells
    return selected


def _collect_stream(
    groups: list[list[Record]], name: str, ids_with_cells: set[int], gaps: Mapping[str, Difference | None]
) -> dict[str, Any]:
    header = groups[0][0].header
    order = list(algorithms.ALGORITHMS)
    groups.sort(key=lambda group: _get_algorithm_position(group[0].header["algorithm"], order))
    runs = [run for group in groups for run in group]
    oracles = metrics.find_oracles(runs)
    labels = build_labels([group[0].header for group in groups])
    return {
        "name": name,
        "short": header["stream"],
        "clients": [header["clients"][c] for c in select_shown_clients(groups[0][0])],
        "n_clients": header["n_clients"],
        # A deployment runs one method, so advice on which other methods to run does not apply to it.
        "verdicts": [] if all(run.runs_on for run in runs) else find_verdicts(runs),
        "remarks": find_caveats(runs, name_streams=False),
        "opens": _find_opening_group(groups),
        "groups": [
            _collect_group(group, label, oracles, ids_with_cells, gaps.get(build_configuration_key(group[0].header)))
            for group, label in zip(groups, labels, strict=True)
        ],
    }


def _find_opening_group(groups: Sequence[Sequence[Record]]) -> int:
    """Return the position of the configuration with which the page opens: the one whose first run started first.

    `feddrift run` starts the runs in the order in which the methods were named. Of configurations that started at the
    same time, the default method is chosen.
    """

    def build_key(position: int) -> tuple[float, bool]:
        group = groups[position]
        return min(map(get_start_time, group)), group[0].header["algorithm"] != algorithms.RECOMMENDED

    return min(range(len(groups)), key=build_key)


def _get_algorithm_position(name: str, order: Sequence[str]) -> tuple[int, str]:
    """Return a sort key: FedDrift and its variants first, then other algorithms, then Oblivious and Oracle."""
    last_families = {"Oblivious": 3, "Oracle": 4}
    family = 0 if name == "FedDrift" else 1 if name.startswith("FedDrift") or name not in order else 2
    return last_families.get(name, family), f"{order.index(name):03d}" if name in order else name


def _collect_group(
    group: Sequence[Record],
    label: str,
    oracles: Mapping[str, Record],
    ids_with_cells: set[int],
    gap: Difference | None,
) -> dict[str, Any]:
    header = group[0].header
    entry = algorithms.ALGORITHMS.get(header["algorithm"])
    parts = [restrict_to_shown_clients(run) for run in group]
    runs = [
        _collect_run(run, part, oracles.get(metrics.build_conditions_key(run)), id(run) in ids_with_cells)
        for run, part in zip(group, parts, strict=True)
    ]
    curves = np.full((len(group), max(run.rows.steps for run in group)), np.nan)
    for curve, run in zip(curves, group, strict=True):
        curve[: run.rows.steps] = average_known_values(run.rows.accuracy, 1)
    return {
        "algorithm": header["algorithm"],
        "label": label,
        "summary": entry.summary if entry else "",
        "mean": _round_values(average_known_values(curves.T, 1)),
        "std": _round_values(compute_deviation(curves)) if len(group) > 1 else None,
        "numbers": {
            name: [None, None] if value is None else [value.mean, value.std]
            for name, value in metrics.compute_spreads([run["numbers"] for run in runs]).items()
        },
        "against": None if gap is None else [gap.mean, gap.low, gap.high, len(gap.seeds)],
        "around": _average_around_drifts(group),
        "alarms": _count_alarms_by_cell(parts),
        "runs": runs,
    }


def _collect_run(record: Record, part: Record, oracle: Record | None, with_cells: bool) -> dict[str, Any]:
    """Collect the data of one run.

    Args:
        record: The record of all clients, for the numbers of the run.
        part: The record of the shown clients, for lists of clients and cells.
        oracle: The run of Oracle on the same stream, if there is one.
        with_cells: True to include all cells.
    """
    header = record.header
    rows = record.rows
    measured = metrics.compute_metrics(record, oracle)
    scores = summarise_run(record)
    command, notes = build_run_command(header)
    changes = _collect_changes(part)
    if part is not record:
        changes |= {key: count for key, count in _collect_changes(record).items() if key in ("by_time", "n_moves")}
    concepts = metrics.count_concepts(record)
    detections = {
        "alarms": measured.alarms,
        "switches": measured.switches,
        "noticed": measured.noticed,
        **measured.dummies,
    }
    config = {
        **{f"setting {key}": value for key, value in header["settings"].items()},
        **{f"option {key}": value for key, value in header["overrides"].items()},
        **{f"local {key}": value for key, value in header["local"].items()},
        "engine": header["engine"],
        "device": header["device"],
        "started": header["started"],
        **{f"{key} version": value for key, value in header["versions"].items()},
    }
    return {
        "seed": header["seed"],
        "net": header["overrides"].get("net"),
        "status": record.status,
        "steps": rows.steps,
        "n_steps": header["n_steps"],
        "tested": record.tested,
        "started": header["started"],
        "times": header.get("times", []),
        "truth": bool((rows.concept >= 0).any()),
        "metric": str(header["settings"].get("metric", "loss")),
        "numbers": {
            **metrics.flatten_metrics(measured),
            "omitting": _convert_percent(record, scores.omitting_drifts),
            **{name: _average_or_none(getattr(rows, name)) for name in SCORES},
            "accuracy": _average_or_none(rows.accuracy if record.accuracy is None else record.accuracy),
            "sent": scores.models_sent_ratio,
            "models": None if scores.models_final is None else float(scores.models_final),
        },
        "alarms": asdict(AlarmCounts.of([record])),
        "causes": _describe_common_causes(part),
        "detection": {name: _convert_detection(value) for name, value in detections.items() if value is not None},
        "worst": _find_worst_clients(part),
        **changes,
        "used": metrics.count_models_in_use(record).tolist(),
        "exist": rows.n_models.max(axis=1).tolist() if rows.steps else [],
        "concepts": concepts.tolist() if concepts.any() else None,
        "sent": _round_values(metrics.compute_relative_traffic(record)),
        "exchanges": exchanges.collect_exchanges(record),
        "events": [_convert_event(event) for event in part.events],
        "shifts": {
            f"{t},{c}": explain_alarm(shift, t) for (t, c), shift in islice(part.shifts.items(), MAX_LISTED_EVENTS)
        },
        "cells": _collect_cells(part) if with_cells else None,
        "command": command,
        "notes": notes,
        "config": {key: "none" if value is None else str(value) for key, value in config.items()},
    }


def _convert_detection(value: metrics.Detection) -> dict[str, Any]:
    return {**asdict(value), "precision": value.precision, "recall": value.recall}


def _find_worst_clients(record: Record) -> list[list[Any]]:
    """Return [client, mean, time of its worst score] of the clients with the worst means, the worst first."""
    mean = metrics.average_over_time(record)
    sign = 1 if record.score.higher_is_better else -1
    worst = [int(c) for c in np.argsort(sign * mean, kind="stable") if not np.isnan(mean[c])][:MAX_WORST_CLIENTS]
    return [[c, round(float(mean[c]), 4), int(np.nanargmin(sign * record.rows.accuracy[:, c]))] for c in worst]


def _collect_changes(record: Record) -> dict[str, Any]:
    """Collect the true changes of concepts, and the alarms and switches without a change.

    A change is [t, c, from, to, delay, kind], with delay -1 if it was missed. A false reaction is [t, c, kind]. The
    kind of a reaction is ALARM, plus SWITCH if the model changed; that of a false alarm also has COMMON_CAUSE. If the
    true concepts are unknown, all reactions are listed, and "n_moves" contains the number of alarms and the number of
    switches without an alarm.
    """
    alarms = record.rows.drift
    switches = metrics.find_switches(record)
    cells = metrics.find_scored_cells(record)
    kind = alarms * ALARM + switches * SWITCH
    kind_of_false = kind.copy()
    for t, c in find_common_alarms(record):
        kind_of_false[t, c] |= COMMON_CAUSE
    changed = find_concept_changes(record)
    if not (record.rows.concept >= 0).any():
        reactions = np.argwhere(kind > 0).tolist()
        listed = [[t, c, int(kind_of_false[t, c])] for t, c in reactions[:MAX_LISTED_EVENTS]]
        n_moves = [int(alarms.sum()), int((switches & ~alarms).sum())]
        return {"drifts": None, "false": listed, "n_false": len(reactions), "n_moves": n_moves}
    delays = metrics.compute_delays(alarms | switches, changed, cells)
    concepts = get_true_concepts(record)
    previous = _get_previous_concepts(record, concepts)
    drifts = []
    is_explained = np.zeros_like(changed)
    for (t, c), delay in zip(np.argwhere(changed).tolist(), delays.tolist(), strict=True):
        t_noticed = t + max(delay, 0)
        is_explained[t_noticed, c] |= delay >= 0
        reaction = int(kind[t_noticed, c]) if delay >= 0 else 0
        drifts.append([t, c, int(previous[t, c]), int(concepts[t, c]), delay, reaction])
    false = np.argwhere((kind > 0) & cells & ~is_explained).tolist()
    return {
        "drifts": drifts[:MAX_LISTED_EVENTS],
        "n_drifts": len(drifts),
        "false": [[t, c, int(kind_of_false[t, c])] for t, c in false[:MAX_LISTED_EVENTS]],
        "n_false": len(false),
        "by_time": _count_by_time(record.rows.steps, drifts, false),
    }


def _count_by_time(steps: int, drifts: Sequence[Sequence[int]], false: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Count at each time the changes that were noticed at once, late or never, and the false reactions."""
    counts = {kind: [0] * steps for kind in ("at once", "late", "missed", "false")}
    for t, _, _, _, delay, _ in drifts:
        counts["at once" if delay == 0 else "late" if delay > 0 else "missed"][t] += 1
    for t, _ in false:
        counts["false"][t] += 1
    return counts


def _describe_common_causes(record: Record) -> dict[int, str]:
    """Return by time step the most frequent changes at the alarms whose cause is common to most clients."""
    counts: dict[int, Counter[str]] = {}
    for t, c in find_common_alarms(record):
        causes = dict.fromkeys(_describe_direction(shift) for shift in record.shifts[t, c]["moved"])
        counts.setdefault(t, Counter()).update(causes.keys())
    return {
        t: _join_first([cause for cause, _ in count.most_common()], MAX_NAMED_CAUSES) for t, count in counts.items()
    }


def _describe_direction(shift: Mapping[str, Any]) -> str:
    """Describe a change without its values, which differ between clients.

    >>> _describe_direction({"what": "mean", "name": "temperature", "before": 12.0, "after": 21.3})
    'mean of temperature rose'
    """
    quantities = {
        "deviation": "standard deviation of",
        "missing": "share of missing values of",
        "class": "share of class",
    }
    quantity = quantities.get(shift["what"], f"{shift['what']} of")
    within = f" within class {shift['within']}" if shift.get("within") is not None else ""
    return f"{quantity} {shift['name']}{within} {'rose' if shift['after'] > shift['before'] else 'fell'}"


def _join_first(texts: Sequence[str], n: int) -> str:
    """Join the first n texts, and add the number of further ones."""
    n_more = len(texts) - n
    return ", ".join(texts[:n]) + (f" and {n_more} more" if n_more > 0 else "")


def _get_previous_concepts(record: Record, concepts: Ints) -> Ints:
    """Return [t, c], the concept of the last data that the client received before t."""
    previous = concepts.copy()
    has_data = np.concatenate([[concepts[0] >= 0], record.rows.tested[:-1] > 0])
    for t in range(1, len(concepts)):
        previous[t] = np.where(has_data[t - 1], concepts[t - 1], previous[t - 1])
    return previous


def _convert_event(event: Mapping[str, Any]) -> dict[str, Any]:
    cause = event["cause"]
    converted = {"t": event["t"], "kind": event["event"], "model": event["model"], "why": explain_event(event)}
    converted |= {key: cause[key] for key in ("from", "into") if isinstance(cause.get(key), int)}
    if isinstance(cause.get("clients"), list):
        converted["clients"] = cause["clients"]
    return converted


def _collect_cells(record: Record) -> dict[str, Any]:
    """Collect the values of all cells, in the order of time steps, then clients.

    Accuracy is in thousandths; -1: no test data; -2: not tested yet.
    """
    rows = record.rows
    accuracy = np.where(np.isnan(rows.accuracy), -1, np.round(1000 * np.nan_to_num(rows.accuracy)))
    accuracy[record.tested :] = -2
    values: dict[str, Any] = {
        "model": rows.model.reshape(-1).tolist(),
        "accuracy": accuracy.astype(int).reshape(-1).tolist(),
        "alarms": np.flatnonzero(rows.drift).tolist(),
        "switches": np.flatnonzero(metrics.find_switches(record)).tolist(),
        "changes": np.flatnonzero(find_concept_changes(record)).tolist(),
        "nothing": np.flatnonzero(~has_usable_data(record)).tolist(),
        "absent": np.flatnonzero(~has_joined(record)).tolist(),
    }
    if not np.isnan(rows.loss).all():
        values["loss"] = [None if np.isnan(loss) else round(float(loss), 3) for loss in rows.loss.reshape(-1)]
    merged_into: dict[str, int] = {}
    resolved = resolve_merges(record)
    for model, target in zip(rows.model.reshape(-1).tolist(), resolved.reshape(-1).tolist(), strict=True):
        if model != target:
            merged_into[str(model)] = target
    values["roots"] = merged_into
    if (rows.concept >= 0).any():
        values["concept"] = rows.concept.reshape(-1).tolist()
        same = record.header["same"]
        names = {int(k): format_concept(int(k)) for k in np.unique(rows.concept[rows.concept >= 0])}
        values["concepts"] = {
            k: name + (f" (= {format_concept(same[str(k)])})" if str(k) in same else "") for k, name in names.items()
        }
    return values


def _average_around_drifts(group: Sequence[Record]) -> list[float | None] | None:
    """Return the mean accuracy at each time step around a drift, over all drifts of all runs of the group."""
    windows = [
        metrics.cut_windows(run.rows.accuracy, run, ROWS_BEFORE_DRIFT, ROWS_AFTER_DRIFT)
        for run in group
        if find_concept_changes(run).any()
    ]
    return _round_values(average_known_values(np.concatenate(windows).T, 1)) if windows else None


def _round_values(values: Floats) -> list[float | None]:
    return [None if np.isnan(v) else round(float(v), 4) for v in values]


def _convert_percent(record: Record, value: float | None) -> float | None:
    """Convert a score of a summary, in which shares are in percent, to a value of the page, in which they are not."""
    return None if value is None else value / 100 if record.score.share else value


def _average_or_none(values: Floats) -> float | None:
    """Return the mean of all values that are not NaN; None if there are none."""
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _count_alarms_by_cell(group: Sequence[Record]) -> dict[str, int] | None:
    """Count the runs with an alarm in each cell, by "t,c"; None if the group has only one run."""
    if len(group) < 2:
        return None
    alarms = Counter(f"{t},{c}" for run in group for t, c in np.argwhere(run.rows.drift).tolist())
    return dict(alarms.most_common(MAX_LISTED_EVENTS))
