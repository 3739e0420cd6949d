"""Measure the condition `share_from`: what it costs, who receives models of one client, and what these reveal.

`python -m experiments.share_from measure` repeats the measurement (about half an hour) and writes
results/share_from/measured.json. Without `measure` the tables of docs/faults-measured.md are written from that file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from experiments.measured import table

import feddrift as fd
from feddrift.engines.conditions.unsupported_models import find_holders
from feddrift.engines.server.federation import TimeStep
from feddrift.models import get_params
from feddrift.nets import default_net
from feddrift.simulation import add_newcomers, run_steps
from feddrift.types import Floats, Ints, Models, State, Tournament

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "share_from" / "measured.json"
PAGE = ROOT / "docs" / "faults-measured.md"
FIRST = "<!-- measured: written by experiments/share_from.py -->\n"
LAST = "<!-- end of share_from -->\n"

FASHION = "fashion-swap-sudden:components=32"
STREAMS = {"sine-2": range(2, 7), "sea-4": range(2, 7), FASHION: range(2, 5)}  # the data seeds
METHODS = ("FedDrift", "FedDrift-Auto")
DELTAS = {FASHION: 0.1}  # of FedDrift; the other streams have published ones

# The attack: 30 inputs, 60 rows at each client and time step, and a fifth of the labels is wrong.
ATTACK_SEEDS = range(3)
INPUTS = 30
ROWS = 60
HELD_OUT = 2_000
CLIENTS = 10
DRIFT = 3  # the time step at which client 0 reaches the second concept
FOLLOW = 5  # that of client 1
STEPS = 7
WRONG = 0.2
ATTACKED = {"FedDrift": {"delta": 0.2}, "FedDrift-Auto": {}}  # the methods with their settings


@dataclass
class Sends:
    """Models of one client, and the clients that received them while they were such models."""

    tau: int = 0
    in_contest: bool = False
    single: dict[int, Ints] = field(default_factory=dict)  # by id, the clients that have the model
    known: frozenset[int] = frozenset()  # ids of the models before the time step
    received: dict[tuple[int, ...], set[int]] = field(default_factory=dict)  # by model: clients other than its own

    def add(self, clients: Ints, models: Models) -> None:
        """Count models that are sent to clients for scoring."""
        for i, owner in zip(models.ids, models.owner, strict=True):
            if i in self.single and owner < 0:
                others = set(clients.tolist()) - set(self.single[i].tolist())
                self.received[0, i] = self.received.get((0, i), set()) | others
            elif i not in self.known and owner < 0 and self.in_contest:  # the candidate of a founder
                found = self.received.setdefault((1, self.tau, i), set())
                found |= set(clients.tolist())


class LoggedEngine:
    """A simulator that reports what is sent for scoring."""

    def __init__(self, stream: fd.Stream, conditions: fd.Conditions) -> None:
        self._engine = fd.engines.engine("simulator")(stream, default_net(stream), stream.local, 0, conditions)
        self.sends = Sends()
        self.state: State | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def at(self, tau: int) -> TimeStep:
        """Return the federation of a time step, whose traffic is also counted here."""
        fed = self._engine.at(tau)
        self.sends.tau = tau
        if self.state is not None:
            before = add_newcomers(self.state, fed.n_clients)
            self.sends.single = dict(find_holders(before, fed.counts, 2))
            self.sends.known = frozenset(before.models.ids)
            for i in self.sends.single:
                self.sends.received.setdefault((0, i), set())
        count = fed._traffic.add_scoring

        def add_scoring(clients: Ints, models: Models) -> None:
            self.sends.add(clients, models)
            count(clients, models)

        contest = fed.contest

        def count_contest(*args: Any) -> Tournament:
            self.sends.in_contest = tau > 0
            result = contest(*args)
            self.sends.in_contest = False
            return result

        fed._traffic.add_scoring = add_scoring  # type: ignore[method-assign]
        fed.contest = count_contest  # type: ignore[method-assign]
        return fed


def run_and_log(stream: fd.Stream, name: str, share_from: int, **settings: float) -> tuple[list[fd.Step], Sends]:
    """Run a method on a stream; return its steps, and what was sent for scoring."""
    engine = LoggedEngine(stream, fd.Conditions(share_from=share_from))
    steps = []
    for step in run_steps(engine, fd.algorithm(name, stream, **settings)):  # type: ignore[arg-type]
        engine.state = step.state
        steps.append(step)
    return steps, engine.sends


def measure_cost(stream: str, name: str, seed: int, share_from: int) -> dict[str, Any]:
    """Return accuracy, sends and receivers of one run."""
    data = fd.stream(stream, data_seed=seed)
    settings = {"delta": DELTAS[stream]} if name == "FedDrift" and stream in DELTAS else {}
    steps, sends = run_and_log(data, name, share_from, **settings)
    others = {key: len(clients) for key, clients in sends.received.items()}
    candidates = [n - 1 for key, n in others.items() if key[0] == 1]
    return {
        "stream": stream,
        "algorithm": name,
        "data_seed": seed,
        "share_from": share_from,
        "accuracy": 100 * float(np.mean([np.nanmean(step.accuracy) for step in steps])),
        "sent_scoring": float(sum(step.sent_scoring.sum() for step in steps)),
        "models": int((~steps[-1].state.models.private).sum()),
        "clients": data.n_clients,
        "receivers": [n for key, n in others.items() if key[0] == 0],  # by model of one client: other clients
        "receivers_of_candidates": candidates,
    }


def build_attacked_stream(seed: int) -> tuple[fd.Stream, fd.Stream]:
    """Return a stream in which client 0 reaches the second concept before client 1, and held-out rows of both."""
    rng = np.random.default_rng(seed)
    rules = rng.normal(size=(2, INPUTS))

    def draw(t: int, c: int, n: int) -> tuple[Floats, Ints]:
        x = rng.normal(size=(n, INPUTS)).astype(np.float32)
        concept = int((c == 0 and t >= DRIFT) or (c == 1 and t >= FOLLOW))
        y = (x @ rules[concept] > 0).astype(np.int64)
        return x, np.where(rng.random(n) < WRONG, 1 - y, y)

    def build(n: int) -> fd.Stream:
        return fd.Stream.from_arrays([[draw(t, c, n) for c in range(CLIENTS)] for t in range(STEPS + 1)])

    return build(ROWS), build(HELD_OUT)


def compute_losses(models: Models, m: int, x: Floats, y: Ints, net: fd.Net) -> Floats:
    """Return the cross-entropy of each row with the model at position m."""
    logits = np.asarray(net.apply(get_params(models, m), x), dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y])


def compute_auc(member: Floats, other: Floats) -> float:
    """Return the probability that the loss of a training row is below that of another row."""
    below = member[:, None] < other[None]
    equal = member[:, None] == other[None]
    return float((below + 0.5 * equal).mean())


def measure_attack(name: str, seed: int, share_from: int) -> dict[str, Any]:
    """Return the AUC of the attack on each shared model by the number of its clients, and who received such models.

    The attack distinguishes the rows of a client that the last time step trained the model on from other rows of the
    same client and concept. The attacker needs the model only.
    """
    stream, held_out = build_attacked_stream(seed)
    net = default_net(stream)
    steps, sends = run_and_log(stream, name, share_from, **ATTACKED[name])
    found: dict[int, list[float]] = {}
    for step in steps:
        w = step.state.w
        for m in np.flatnonzero(~step.state.models.private):
            clients = np.unique(np.nonzero(w.model == m)[1])
            for c in np.flatnonzero(w.model[-1] == m):
                rows, others = (
                    compute_losses(step.state.models, m, *part.cell(step.tau, c), net) for part in (stream, held_out)
                )
                found.setdefault(len(clients), []).append(compute_auc(rows, others))
    return {
        "algorithm": name,
        "seed": seed,
        "share_from": share_from,
        "auc": {str(n): float(np.mean(values)) for n, values in sorted(found.items())},
        "accuracy": 100 * float(np.mean([np.nanmean(step.accuracy) for step in steps])),
        "receivers": [len(clients) for key, clients in sends.received.items() if key[0] == 0],
    }


def measure() -> None:
    """Repeat all runs that results/share_from/measured.json does not contain yet."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cost": [], "attack": []}
    done = {(r["stream"], r["algorithm"], r["data_seed"], r["share_from"]) for r in found["cost"]}
    for key in [(s, a, n, k) for s, seeds in STREAMS.items() for n in seeds for a in METHODS for k in (0, 2)]:
        if key not in done:
            found["cost"].append(measure_cost(*key))
            write_results(found)
    done = {(r["algorithm"], r["seed"], r["share_from"]) for r in found["attack"]}
    for attack in [(a, n, k) for n in ATTACK_SEEDS for a in METHODS for k in (0, 2)]:
        if attack not in done:
            found["attack"].append(measure_attack(*attack))
            write_results(found)


def write_results(found: dict[str, Any]) -> None:
    """Write the measurements, one run in each line."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    parts = (f'"{name}": [\n' + ",\n".join(map(json.dumps, runs)) + "\n]" for name, runs in found.items())
    RESULTS.write_text("{" + ",\n".join(parts) + "}\n")


def render(page: str) -> str:
    """Return the page with the tables of the measurements."""
    found = json.loads(RESULTS.read_text())
    tables = f"\n{tabulate_cost(found['cost'])}\n\n{tabulate_attack(found['attack'])}\n\n"
    return page[: page.index(FIRST) + len(FIRST)] + tables + page[page.index(LAST) :]


def tabulate_cost(runs: list[dict[str, Any]]) -> str:
    """Return a table of accuracy, scored models and receivers, with and without the condition."""
    rows = []
    for stream in STREAMS:
        for name in METHODS:
            off, on = ([r for r in runs if _is_run(r, name, k) and r["stream"] == stream] for k in (0, 2))
            before, after = (np.array([r["accuracy"] for r in part]) for part in (off, on))
            sent = [float(np.mean([r["sent_scoring"] for r in part])) for part in (off, on)]
            others = off[0]["clients"] - 1
            rows.append(
                [
                    f"{stream.split(':')[0]}, {name}",
                    str(len(on)),
                    f"{before.mean():.2f}",
                    f"{after.mean():.2f}",
                    _format_mean(after - before, "+.2f"),
                    f"{sent[0]:.0f}, {sent[1]:.0f}",
                    *(_format_share(part, others) for part in (off, on)),
                ]
            )
    header = ["stream, method", "seeds", "accuracy: off", "on", "difference", "models scored: off, on"]
    return table([*header, "received by others: off", "on"], rows)


def tabulate_attack(runs: list[dict[str, Any]]) -> str:
    """Return a table of the AUC by the number of clients that trained a model, and of the receivers."""
    rows = []
    for name in METHODS:
        off, on = ([r for r in runs if _is_run(r, name, k)] for k in (0, 2))
        aucs = (_format_mean(np.array([r["auc"][n] for r in off if n in r["auc"]]), ".2f") for n in ("1", "2", "10"))
        change = np.array([b["accuracy"] - a["accuracy"] for a, b in zip(off, on, strict=True)])
        shares = (_format_share(part, CLIENTS - 1) for part in (off, on))
        rows.append([name, str(len(off)), *aucs, *shares, _format_mean(change, "+.2f")])
    header = ["method", "seeds", "AUC: 1 client", "2 clients", "10 clients"]
    return table([*header, "received by others: off", "on", "difference of accuracy"], rows)


def _is_run(run: dict[str, Any], name: str, share_from: int) -> bool:
    return (run["algorithm"], run["share_from"]) == (name, share_from)


def _format_mean(values: Floats, form: str) -> str:
    """Return the mean with its standard error in brackets."""
    error = f" ({values.std(ddof=1) / np.sqrt(len(values)):.2f})" if len(values) > 1 else ""
    return f"{values.mean():{form}}{error}" if len(values) else "-"


def _format_share(runs: list[dict[str, Any]], others: int) -> str:
    """Return the mean share of the other clients that received a model of one client, and the number of such models."""
    receivers = [n for r in runs for n in r["receivers"]]
    return f"{100 * np.mean(receivers) / others:.0f} % of {len(receivers)}" if receivers else "-"


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    PAGE.write_text(render(PAGE.read_text()))
