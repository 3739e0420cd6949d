"""What the HTML report draws, as plain JSON values: computed here and tested, only shown there."""

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
from feddrift.reports.caveats import remarks
from feddrift.reports.event_text import alarm_sentence, command, event_sentence, letter
from feddrift.reports.labels import describe, names, shared
from feddrift.reports.summary import changes, deviation_of_known, joined, lineage, mean_of_known, reached, scores, truth
from feddrift.runs.record import Record, Rows, configuration
from feddrift.scores import SCORES
from feddrift.types import Floats, Ints

MAX_CLIENTS = 20_000  # of a run that are shown one by one; of more a sample
MAX_CELLS = 600_000  # of all runs together that are shown cell by cell; beyond, a run has its curves only
MAX_LISTED = 30_000  # drifts and alarms of a run in its list
WORST = 12
BEFORE, AFTER = 2, 4  # rows around a drift


def collect(records: Sequence[Record], name: str) -> dict[str, Any]:
    """All runs, the newest of each, by stream and configuration; another net on the same data is no other stream."""
    by_stream: dict[str, dict[str, list[Record]]] = {}
    for record in newest(records):
        header = record.header
        options = {key: value for key, value in header["overrides"].items() if key != "net"}
        same = header["stream"], options, header["clients"] if record.runs_on else None
        data = json.dumps(same, sort_keys=True)
        by_stream.setdefault(data, {}).setdefault(configuration(record.header), []).append(record)
    shown = _with_cells(by_stream)
    return {
        "name": name,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "score": asdict(records[0].score) if records else {},
        "within": metrics.WITHIN,
        "before": BEFORE,
        "streams": [_stream(list(groups.values()), shown) for _, groups in sorted(by_stream.items())],
    }


def newest(records: Sequence[Record]) -> list[Record]:
    """Of each configuration and seed the run started last, a complete one before any other."""
    latest: dict[tuple[str, int], Record] = {}
    for record in records:
        key = configuration(record.header), record.header["seed"]
        if key not in latest or _rank(record) >= _rank(latest[key]):
            latest[key] = record
    return list(latest.values())


def shown_clients(record: Record) -> Ints:
    """Which clients are shown one by one: all, or of many one of each of MAX_CLIENTS equal parts of them.

    They are drawn by a key of their number alone: all runs on the same clients show the same ones. Those of real
    machines are all shown.
    """
    n = int(record.header["n_clients"])
    if n <= MAX_CLIENTS or record.runs_on:
        return np.arange(n)
    ends = np.arange(MAX_CLIENTS + 1) * n // MAX_CLIENTS
    drawn: Ints = ends[:-1] + rng.bits(rng.derive(n, "shown"), MAX_CLIENTS) % np.diff(ends)
    return drawn


def shown_part(record: Record) -> Record:
    """The record as if it had only the clients that are shown."""
    clients = shown_clients(record)
    if len(clients) == record.header["n_clients"]:
        return record
    place = {c: k for k, c in enumerate(clients.tolist())}
    names = record.header["clients"]
    return replace(
        record,
        header=record.header | {"n_clients": len(clients), "clients": [names[c] for c in clients]},
        rows=Rows(**{column.name: getattr(record.rows, column.name)[:, clients] for column in fields(Rows)}),
        events=tuple(shown for event in record.events if (shown := _among(place, event)) is not None),
        accuracy=None if record.accuracy is None else record.accuracy[:, clients],
        shifts={(t, place[c]): moved for (t, c), moved in record.shifts.items() if c in place},
    )


def _among(place: Mapping[int, int], event: dict[str, Any]) -> dict[str, Any] | None:
    """An event with the places of those of its clients that are shown; None: it was decided for none of these."""
    clients = event["cause"].get("clients")
    if not isinstance(clients, list) or not clients:
        return event
    among = [place[c] for c in clients if c in place]
    if event["event"] == "decided" and not among:  # without clients it would be for all
        return None
    return event | {"cause": event["cause"] | {"clients": among}}


def _rank(record: Record) -> tuple[bool, float]:
    return record.status == "complete", datetime.fromisoformat(record.header["started"]).timestamp()


def _with_cells(by_stream: Mapping[str, Mapping[str, Sequence[Record]]]) -> set[int]:
    """The runs, by identity, that fit: the first seed of every configuration before the second of any."""
    groups = [group for of_stream in by_stream.values() for group in of_stream.values()]
    ranked = sorted(((k, g, run) for g, group in enumerate(groups) for k, run in enumerate(group)), key=lambda r: r[:2])
    fit: set[int] = set()
    room = MAX_CELLS
    for _, _, record in ranked:
        cells = record.rows.steps * len(shown_clients(record))
        if cells <= room or not fit:
            fit.add(id(record))
            room -= cells
    return fit


def _stream(groups: list[list[Record]], shown: set[int]) -> dict[str, Any]:
    header = groups[0][0].header
    order = list(algorithms.ALGORITHMS)
    groups.sort(key=lambda group: _place(group[0].header["algorithm"], order))
    oracles = metrics.oracles_of(run for group in groups for run in group)
    heads = [group[0].header for group in groups]
    options = describe(shared([head["overrides"] for head in heads]))
    return {
        "name": header["stream"] + (f" ({options})" if options else ""),
        "short": header["stream"],
        "options": options,
        "clients": [header["clients"][c] for c in shown_clients(groups[0][0])],
        "n_clients": header["n_clients"],
        "remarks": remarks([run for group in groups for run in group], name_streams=False),
        "groups": [_group(group, label, oracles, shown) for group, label in zip(groups, names(heads), strict=True)],
    }


def _place(name: str, order: Sequence[str]) -> tuple[int, str]:
    """FedDrift's family first, what it is compared with after it, then the floor and the ceiling."""
    ends = {"Oblivious": 3, "Oracle": 4}
    family = 0 if name == "FedDrift" else 1 if name.startswith("FedDrift") or name not in order else 2
    return ends.get(name, family), f"{order.index(name):03d}" if name in order else name


def _group(group: Sequence[Record], label: str, oracles: Mapping[str, Record], shown: set[int]) -> dict[str, Any]:
    header = group[0].header
    entry = algorithms.ALGORITHMS.get(header["algorithm"])
    parts = [shown_part(run) for run in group]
    runs = [
        _run(run, part, oracles.get(metrics.conditions(run)), id(run) in shown)
        for run, part in zip(group, parts, strict=True)
    ]
    curves = np.full((len(group), max(run.rows.steps for run in group)), np.nan)
    for curve, run in zip(curves, group, strict=True):
        curve[: run.rows.steps] = mean_of_known(run.rows.accuracy, 1)
    return {
        "algorithm": header["algorithm"],
        "label": label,
        "summary": entry.summary if entry else "",
        "mean": _rounded(mean_of_known(curves.T, 1)),
        "std": _rounded(deviation_of_known(curves)) if len(group) > 1 else None,
        "numbers": {
            name: [None, None] if value is None else [value.mean, value.std]
            for name, value in metrics.over_seeds([run["numbers"] for run in runs]).items()
        },
        "around": _around(group),
        "alarms": _agreement(parts),
        "runs": runs,
    }


def _run(record: Record, part: Record, oracle: Record | None, with_cells: bool) -> dict[str, Any]:
    """One run: numbers are of all clients, what names single ones is of the part that is shown."""
    header, rows = record.header, record.rows
    measured, total = metrics.measure(record, oracle), scores(record)
    rerun, notes = command(header)
    moves = _moves(part)
    if part is not record:
        moves |= {key: count for key, count in _moves(record).items() if key in ("by_time", "n_moves")}
    concepts = metrics.concepts_alive(record)
    detections = {
        "alarms": measured.alarms,
        "switches": measured.switches,
        "noticed": measured.noticed,
        **measured.dummies,
    }
    config = {
        **{f"setting {key}": value for key, value in header["settings"].items()},
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
            **metrics.numbers(measured),
            "omitting": _level(record, total.omitting_drifts),
            **{name: _known_mean(getattr(rows, name)) for name in SCORES},
            "accuracy": _known_mean(rows.accuracy if record.accuracy is None else record.accuracy),
            "sent": total.models_sent_ratio,
            "models": None if total.models_final is None else float(total.models_final),
        },
        "detection": {name: _detection(value) for name, value in detections.items() if value is not None},
        "worst": _worst(part),
        **moves,
        "used": metrics.count_in_use(record).tolist(),
        "exist": rows.n_models.max(axis=1).tolist() if rows.steps else [],
        "concepts": concepts.tolist() if concepts.any() else None,
        "sent": _rounded(metrics.sent_over_time(record)),
        "exchanges": exchanges.for_page(record),
        "events": [_event(event) for event in part.events],
        "shifts": {f"{t},{c}": alarm_sentence(of, t) for (t, c), of in islice(part.shifts.items(), MAX_LISTED)},
        "cells": _cells(part) if with_cells else None,
        "command": rerun,
        "notes": notes,
        "config": {key: "none" if value is None else str(value) for key, value in config.items()},
    }


def _detection(value: metrics.Detection) -> dict[str, Any]:
    return {**asdict(value), "precision": value.precision, "recall": value.recall}


def _worst(record: Record) -> list[list[Any]]:
    """[client, its mean, the time of its lowest accuracy] of the worst, worst first."""
    mean = metrics.by_client(record)
    better = 1 if record.score.higher_is_better else -1
    seen = [int(c) for c in np.argsort(better * mean, kind="stable") if not np.isnan(mean[c])][:WORST]
    return [[c, round(float(mean[c]), 4), int(np.nanargmin(better * record.rows.accuracy[:, c]))] for c in seen]


def _moves(record: Record) -> dict[str, Any]:
    """The true changes with how long they waited (-1: missed), and the alarms and switches that answer none.

    Where nobody knows the changes, all alarms and switches, and how many there are: alarms, switches without one.
    A change is [t, c, from, to, delay, how], a false move [t, c, how]; how adds 1 for an alarm and 2 for a switch.
    """
    drift, moved, cells = record.rows.drift, metrics.switches(record), metrics.scored_cells(record)
    how = drift * 1 + moved * 2
    changed = changes(record)
    if not (record.rows.concept >= 0).any():
        loose = np.argwhere(how > 0).tolist()
        listed = [[t, c, int(how[t, c])] for t, c in loose[:MAX_LISTED]]
        n_moves = [int(drift.sum()), int((moved & ~drift).sum())]
        return {"drifts": None, "false": listed, "n_false": len(loose), "n_moves": n_moves}
    waited, concepts = metrics.delays(drift | moved, changed, cells), truth(record)
    before = _newest_before(record, concepts)
    drifts, answered = [], np.zeros_like(changed)
    for (t, c), delay in zip(np.argwhere(changed).tolist(), waited.tolist(), strict=True):
        at = t + max(delay, 0)
        answered[at, c] |= delay >= 0
        drifts.append([t, c, int(before[t, c]), int(concepts[t, c]), delay, int(how[at, c]) if delay >= 0 else 0])
    loose = np.argwhere((how > 0) & cells & ~answered).tolist()
    return {
        "drifts": drifts[:MAX_LISTED],
        "n_drifts": len(drifts),
        "false": [[t, c, int(how[t, c])] for t, c in loose[:MAX_LISTED]],
        "n_false": len(loose),
        "by_time": _by_time(record.rows.steps, drifts, loose),
    }


def _by_time(steps: int, drifts: Sequence[Sequence[int]], loose: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """How many clients changed at each time, of these noticed at once, late or never; and the false moves."""
    counts = {kind: [0] * steps for kind in ("at once", "late", "missed", "false")}
    for t, _, _, _, delay, _ in drifts:
        counts["at once" if delay == 0 else "late" if delay > 0 else "missed"][t] += 1
    for t, _ in loose:
        counts["false"][t] += 1
    return counts


def _newest_before(record: Record, concepts: Ints) -> Ints:
    """[t, c], the concept of the data that the client had before t."""
    before, received = concepts.copy(), np.concatenate([[concepts[0] >= 0], record.rows.tested[:-1] > 0])
    for t in range(1, len(concepts)):
        before[t] = np.where(received[t - 1], concepts[t - 1], before[t - 1])
    return before


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    cause = event["cause"]
    shown = {"t": event["t"], "kind": event["event"], "model": event["model"], "why": event_sentence(event)}
    named = {key: cause[key] for key in ("from", "into") if isinstance(cause.get(key), int)}
    if isinstance(cause.get("clients"), list):
        named["clients"] = cause["clients"]
    return shown | named


def _cells(record: Record) -> dict[str, Any]:
    """What a cell shows, one time step after the other.

    Accuracy is in thousandths, -1 without test data, -2 where it is not tested yet.
    """
    rows = record.rows
    accuracy = np.where(np.isnan(rows.accuracy), -1, np.round(1000 * np.nan_to_num(rows.accuracy)))
    accuracy[record.tested :] = -2
    flat: dict[str, Any] = {
        "model": rows.model.reshape(-1).tolist(),
        "accuracy": accuracy.astype(int).reshape(-1).tolist(),
        "alarms": np.flatnonzero(rows.drift).tolist(),
        "switches": np.flatnonzero(metrics.switches(record)).tolist(),
        "changes": np.flatnonzero(changes(record)).tolist(),
        "nothing": np.flatnonzero(~reached(record)).tolist(),
        "absent": np.flatnonzero(~joined(record)).tolist(),
    }
    if not np.isnan(rows.loss).all():
        flat["loss"] = [None if np.isnan(loss) else round(float(loss), 3) for loss in rows.loss.reshape(-1)]
    became, roots = lineage(record), {}
    for model, root in zip(rows.model.reshape(-1).tolist(), became.reshape(-1).tolist(), strict=True):
        if model != root:
            roots[str(model)] = root
    flat["roots"] = roots
    if (rows.concept >= 0).any():
        flat["concept"] = rows.concept.reshape(-1).tolist()
        same = record.header["same"]
        names = {int(k): letter(int(k)) for k in np.unique(rows.concept[rows.concept >= 0])}
        flat["concepts"] = {k: n + (f" (= {letter(same[str(k)])})" if str(k) in same else "") for k, n in names.items()}
    return flat


def _around(group: Sequence[Record]) -> list[float | None] | None:
    """Mean accuracy from BEFORE rows ahead of a drift to AFTER rows behind, over all drifts of all seeds."""
    windows = [metrics.around(run.rows.accuracy, run, BEFORE, AFTER) for run in group if changes(run).any()]
    return _rounded(mean_of_known(np.concatenate(windows).T, 1)) if windows else None


def _rounded(values: Floats) -> list[float | None]:
    return [None if np.isnan(v) else round(float(v), 4) for v in values]


def _level(record: Record, value: float | None) -> float | None:
    """A summary's number, which has shares in percent, as the page has it."""
    return None if value is None else value / 100 if record.score.share else value


def _known_mean(values: Floats) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))


def _agreement(group: Sequence[Record]) -> dict[str, int] | None:
    """Of each alarm, by "t,c", in how many seeds it occurs; nothing where there is only one."""
    if len(group) < 2:
        return None
    alarms = Counter(f"{t},{c}" for run in group for t, c in np.argwhere(run.rows.drift).tolist())
    return dict(alarms.most_common(MAX_LISTED))
