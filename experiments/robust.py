"""Measure `defend=robust` against all kinds of Byzantine clients.

`feddrift sweep experiments/robust.toml --out DIR` makes the records. `python experiments/publish.py DIR results/robust
--by-stream` adds them to the results. `python -m experiments.robust --backdoor` measures how often backdoors succeed.
`python -m experiments.robust` writes the tables of docs/faults-measured.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments.measured import table

import feddrift as fd
from feddrift.data import Stream
from feddrift.runs import record
from feddrift.runs.config import RunConfig
from feddrift.runs.poison import add_trigger, parse_poison
from feddrift.runs.record import Record

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults-measured.md"
RESULTS = ROOT / "results" / "robust"
BACKDOORS = RESULTS / "backdoor.json"
BEGIN = "<!-- robust: written by experiments/robust.py -->\n"
END = "<!-- end of robust -->\n"
STREAMS = ("sine-2", "sea-4")
METHODS = ("FedDrift", "FedDrift-Auto")
N_CLIENTS = 10
N_SEEDS = 5  # of a cell, unless it names another number
SMALL_CLUSTER = 3  # a cluster with fewer clients: the median of two updates is their mean
TARGETS = {0: 0.2, 1: 1.0, 3: 3.0}  # largest loss of the honest clients in points, by the number of Byzantine clients
KINDS = (
    "", "flip", "relabel", "backdoor", "garbage", "reverse", "collude", "stale", "claims", "alarms", "glue", "losses",
    "flip+claims", "claims+relabel", "claims+reverse", "claims+glue",
)  # fmt: skip
BACKDOOR_SEEDS = (2, 3)
MOST_BYZANTINE = (0, 4, 8)  # left out of the success of backdoors in all runs

Floats = npt.NDArray[np.float64]
Key = tuple[str, str, Any, str, int]  # method, kinds, defend, clients, seed


@dataclass(frozen=True)
class Loss:
    """Change of the honest clients' accuracy in points, over all cells and over those in small clusters."""

    every_cell: float
    small_clusters: float  # NaN if there are none
    small_share: float  # share of the honest clients' cells in small clusters


def main(words: Sequence[str]) -> None:
    if "--backdoor" in words:
        BACKDOORS.write_text(json.dumps(measure_backdoors(), indent=1) + "\n")
    PAGE.write_text(render_page(PAGE.read_text()))


def render_page(text: str) -> str:
    """Return the page with new tables between the marks."""
    return text[: text.index(BEGIN) + len(BEGIN)] + render_tables() + text[text.index(END) :]


def render_tables() -> str:
    """Return the tables of all streams, and that of backdoors."""
    records = record.read_all(RESULTS)
    sections = []
    for stream in STREAMS:
        losses = measure_losses([run for run in records if run.header["stream"] == stream])
        sections += [render_losses(stream, losses), render_small_clusters(stream, losses)]
        sections.append(render_versions(stream, losses))
    return "\n" + "\n\n".join([*sections, render_backdoors()]) + "\n\n"


def measure_losses(records: Sequence[Record]) -> dict[tuple[str, str, Any, int], list[Loss]]:
    """Return, by method, kinds, defend and number of Byzantine clients, the loss for each seed.

    A run is compared with one of the same seed in which all clients are honest and the server has no limits.
    """
    runs = {_get_key(run): run for run in records}
    losses: dict[tuple[str, str, Any, int], list[Loss]] = {}
    for (method, kinds, defend, clients, seed), run in sorted(runs.items(), key=lambda item: repr(item[0])):
        honest = runs.get((method, "", False, "", seed))
        if honest is not None:
            byzantine = [int(c) for c in clients.split(",") if c]
            loss = compare_runs(run, honest, byzantine)
            losses.setdefault((method, kinds, defend, len(byzantine)), []).append(loss)
    return losses


def _get_key(run: Record) -> Key:
    given = run.header["overrides"]
    poison = given.get("poison", "")
    kinds = "+".join(part.split(":")[0] for part in poison.split("+") if part)
    clients = parse_poison(poison, N_CLIENTS).clients if poison else ()
    defend = given.get("defend", False)
    return run.header["algorithm"], kinds, defend, ",".join(map(str, clients)), run.header["seed"]


def compare_runs(run: Record, honest: Record, byzantine: Sequence[int]) -> Loss:
    """Compare a run with the run in which all clients are honest, over the clients that are honest in both."""
    change = 100 * (run.rows.accuracy - honest.rows.accuracy)
    model = np.asarray(run.rows.model)
    members = (model[:, :, None] == model[:, None, :]).sum(axis=2)
    small = np.delete(members < SMALL_CLUSTER, byzantine, axis=1)
    change = np.delete(change, byzantine, axis=1)
    in_small = float(np.mean(change[small])) if small.any() else np.nan
    return Loss(float(np.mean(change)), in_small, float(np.mean(small)))


def format_losses(losses: Sequence[Loss]) -> str:
    """Return the mean over seeds, the worst seed in brackets, and the number of seeds if it is not N_SEEDS."""
    if not losses:
        return ""
    values = [loss.every_cell for loss in losses]
    seeds = "" if len(values) == N_SEEDS else f", {len(values)} seed{'s' * (len(values) > 1)}"
    return f"{np.mean(values):+.2f} ({min(values):+.2f}){seeds}"


def render_losses(stream: str, losses: dict[tuple[str, str, Any, int], list[Loss]]) -> str:
    """Return the table of losses with defend=robust."""
    rows = []
    misses = []
    for kinds in KINDS:
        cells = []
        for method in METHODS:
            for n in (1, 3):
                found = losses.get((method, kinds, "robust", n if kinds else 0), [])
                cells.append(format_losses(found) if kinds or n == 1 else "")
                if kinds or n == 1:
                    misses += list_misses(method, kinds, n if kinds else 0, found)
        rows.append([_describe_kinds(kinds), *cells])
    header = ["Byzantine clients", *(f"{method}, {n} of 10" for method in METHODS for n in (1, 3))]
    text = "Cells beyond the targets: " + ("; ".join(misses) if misses else "none") + "."
    return (
        f"### {stream}: loss of the honest clients with `defend=robust`, in points\n\n{text}\n\n{table(header, rows)}"
    )


def list_misses(method: str, kinds: str, n: int, losses: Sequence[Loss]) -> list[str]:
    """Return a description of a cell whose mean loss is beyond its target, as a list of one; else none."""
    loss = float(np.mean([loss.every_cell for loss in losses])) if losses else 0.0
    return [f"{method}, {n} of 10: {_describe_kinds(kinds)} ({loss:+.2f})"] if loss < -TARGETS[n] else []


def render_small_clusters(stream: str, losses: dict[tuple[str, str, Any, int], list[Loss]]) -> str:
    """Return the table of honest clients in clusters with fewer than three clients."""
    rows = []
    for kinds in KINDS:
        cells = []
        for method in METHODS:
            for n in (1, 3):
                found = losses.get((method, kinds, "robust", n if kinds else 0), []) if kinds or n == 1 else []
                known = [loss.small_clusters for loss in found if np.isfinite(loss.small_clusters)]
                share = 100 * np.mean([loss.small_share for loss in found]) if found else 0.0
                cells.append(f"{np.mean(known):+.1f} ({share:.0f} %)" if known else "")
        rows.append([_describe_kinds(kinds), *cells])
    header = ["Byzantine clients", *(f"{method}, {n} of 10" for method in METHODS for n in (1, 3))]
    title = f"### {stream}: the part of these losses in clusters of one or two clients"
    return f"{title}\n\nThe share of the honest clients' results is in brackets.\n\n{table(header, rows)}"


def render_versions(stream: str, losses: dict[tuple[str, str, Any, int], list[Loss]]) -> str:
    """Return the table that compares the two versions of defend."""
    measured = [key for key in losses if key[2] is True]
    rows = []
    for n in (1, 3):
        for kinds in [kinds for kinds in KINDS if any(key[1] == kinds and key[3] == n for key in measured)]:
            cells = [
                format_losses(losses.get((method, kinds, v, n), [])) for method in METHODS for v in (True, "robust")
            ]
            rows.append([f"{n} of 10: {_describe_kinds(kinds)}", *cells])
    header = ["Byzantine clients", *(f"{method}, {version}" for method in METHODS for version in ("true", "robust"))]
    return f"### {stream}: both versions of `defend`, loss in points\n\n{table(header, rows)}"


def _describe_kinds(kinds: str) -> str:
    return " and ".join(kinds.split("+")) if kinds else "none"


def measure_backdoors() -> list[dict[str, Any]]:
    """Return the success of backdoors after the last time step: one result for each run."""
    results = []
    for stream in STREAMS:
        for method in METHODS:
            for seed in BACKDOOR_SEEDS:
                for clients, defend in (
                    ("", False),
                    ("0", False),
                    ("0", "robust"),
                    ("0,4,8", False),
                    ("0,4,8", "robust"),
                ):
                    success = measure_backdoor(stream, method, clients, defend, seed)
                    sys.stderr.write(f"{stream} {method} seed {seed} clients {clients} {defend}: {success:.3f}\n")
                    results.append(
                        {"stream": stream, "algorithm": method, "seed": seed, "clients": clients, "defend": defend,
                         "success": round(success, 4)}
                    )  # fmt: skip
    return results


def measure_backdoor(stream: str, method: str, clients: str, defend: Any, seed: int) -> float:
    """Return the share of honest clients' rows of other classes that get the last class if they have the trigger."""
    poison = f"backdoor:{clients}" if clients else None
    config = RunConfig.from_values(
        stream=stream, algorithm=method, poison=poison, defend=defend, seed=seed, data_seed="seed"
    )
    data = config.load_stream()
    honest_data = config.model_copy(update={"poison": None}).load_stream()
    algorithm, local = config.resolve_algorithm(data)
    conditions = config.build_conditions(data)
    *_, last = fd.run(replace_test(data, honest_data), algorithm, local=local, seed=seed, conditions=conditions)
    return float(np.nanmean(np.delete(last.accuracy, MOST_BYZANTINE)))


def replace_test(stream: Stream, honest: Stream) -> Stream:
    """Return the stream with another last test: rows of all but the last class, with the trigger and the last class.

    The accuracy on this test is the success rate of the backdoor.
    """

    def make_cell(t: int, c: int) -> Any:
        if t < stream.n_steps:
            return stream.cell(t, c)
        x, y = honest.cell(t, c)
        label = stream.n_classes - 1
        chosen = x[y != label]
        return add_trigger(chosen, honest), np.full(len(chosen), label, dtype=np.int32)

    cells = [[make_cell(t, c) for c in range(stream.n_clients)] for t in range(stream.n_steps + 1)]
    made = Stream.from_arrays(cells, name=stream.name, n_classes=stream.n_classes, concepts=stream.concepts)
    return replace(made, family=stream.family, net=stream.net)


def render_backdoors() -> str:
    """Return the table of successful backdoors."""
    results = json.loads(BACKDOORS.read_text())
    columns = [("", False), ("0", False), ("0", "robust"), ("0,4,8", False), ("0,4,8", "robust")]
    rows = []
    for stream in STREAMS:
        for method in METHODS:
            cells = []
            for clients, defend in columns:
                found = [
                    result["success"]
                    for result in results
                    if [result[name] for name in ("stream", "algorithm", "clients", "defend")]
                    == [stream, method, clients, defend]
                ]
                cells.append(f"{100 * np.mean(found):.0f} %")
            rows.append([f"{stream}, {method}", *cells])
    header = ["", "none", "1 of 10", "1 of 10, robust", "3 of 10", "3 of 10, robust"]
    return f"### Success of backdoors after the last time step\n\n{table(header, rows)}"


if __name__ == "__main__":
    main(sys.argv[1:])
