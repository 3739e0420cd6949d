"""One time step over the network: every verb is an exchange, and what comes back is checked before it counts.

A client that misses an exchange, or answers with something that cannot be used, sits out the rest of the time step:
its identity is carried over, averages are formed without it, and a model without any reply stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array

from feddrift.averaging import averaged
from feddrift.engines import base
from feddrift.engines.base import TimeStep
from feddrift.engines.entries import Entries
from feddrift.engines.flower import messages
from feddrift.engines.flower import parts as model_parts
from feddrift.engines.flower.messages import Refused, numbers, whole
from feddrift.engines.flower.parts import Body, Part
from feddrift.errors import ConfigError
from feddrift.models import one
from feddrift.trees import per_axis, split, trunk_of, unsplit
from feddrift.types import Floats, Ints, Local, Metric, Models, Start, Tournament, Updates, Weights

if TYPE_CHECKING:
    from feddrift.engines.flower.federation import Flower

Request = tuple[Body, dict[str, Part]]
Raw = Mapping[str, list[Array]]
Check = Callable[[int, Body, Raw], Any]


class FlowerStep(TimeStep):
    """One time step over the network."""

    def __init__(self, engine: Flower, tau: int) -> None:
        super().__init__(engine, tau)
        self.engine = engine
        self.reachable = np.isin(np.arange(self.n_clients), list(engine.present))
        # By client, model and metric: the sum over the new batch, and by stored cell how many rows and their sum.
        self._scores: dict[tuple[int, str, str], tuple[float | None, dict[int, tuple[int, float]]]] = {}

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"reachable": self.reachable, "counts": self.counts}

    def restore(self, progress: dict[str, Any]) -> None:
        super().restore(progress)
        self.reachable = self.reachable & progress["reachable"]
        self.counts = progress["counts"]  # what the known answers are about

    def _moments(self) -> Any:
        return None  # they are where the training is

    def _recall(self, moments: Any) -> None:
        pass

    def _evaluate(self, models: Models, metric: Metric) -> Floats:
        if metric not in ("error", "loss", "brier"):
            raise ConfigError(f"metric must be error, loss or brier, got {metric!r}")
        clients = self._new_data()
        self._count_scoring(clients, models)
        names = self._score(clients, models, metric)
        loss = np.full((self.n_clients, len(models)), np.nan)
        for c in np.flatnonzero(np.isin(np.arange(self.n_clients), clients) & self.reachable):
            sums = [self._scores[int(c), name, metric][0] for name in names]
            loss[c] = np.array(sums, dtype=np.float64) / self.counts[self.tau, c]
        return loss

    def confusion(self, models: Models) -> Ints:
        counts = np.zeros((self.n_clients, len(models), self.n_classes, self.n_classes), dtype=np.int64)
        clients = self._new_data()
        self._count_scoring(clients, models)
        specs, parts = model_parts.described(self.engine.net, models)

        def check(c: int, body: Body, raw: Raw) -> Ints:
            n, shape = int(self.counts[self.tau, c]), counts.shape[1:]
            found = np.array(body["confusion"])
            if (
                found.shape != shape
                or found.dtype.kind != "i"
                or (found < 0).any()
                or (found.sum(axis=(1, 2)) != n).any()
            ):
                raise Refused(f"expected counts of shape {shape}, each model's adding up to {n}")
            return found

        request = {"metric": "confusion", "models": specs}, parts
        for c, found in self._ask("evaluate", {int(c): request for c in clients}, check).items():
            counts[c] = found
        return counts

    def cross_evaluate(self, models: Models, w: Weights, metric: Metric = "error") -> Floats:
        entries = Entries.of(w, (self.tau + 1, self.n_clients, len(models)))
        entries = entries.only((self.counts[entries.t, entries.c] > 0) & self.reachable[entries.c])
        clients = np.unique(entries.c)
        self._count_scoring(clients, models)
        names = self._score(clients, models, metric)
        entries = entries.only(self.reachable[entries.c])
        by_model = np.lexsort([entries.t * self.n_clients + entries.c, entries.m])  # the order of all engines
        t, c, m, behind = entries.t[by_model], entries.c[by_model], entries.m[by_model], entries.value[by_model]
        behind = behind * self.counts[t, c]
        L, total = np.zeros((len(models),) * 2), np.bincount(m, behind, len(models))
        if len(m):
            stored = np.array(
                [
                    [self._scores[k, name, metric][1][at] for at, k in zip(t.tolist(), c.tolist(), strict=True)]
                    for name in names
                ]
            )  # [m, entry, (rows, sum)]
            theirs, begins = np.unique(m, return_index=True)
            L[:, theirs] += np.add.reduceat(stored[..., 1] / stored[..., 0] * behind, begins, axis=1)
        with np.errstate(invalid="ignore"):  # a model without data: 0 / 0
            return np.asarray(L / total)

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        entries = Entries.of(w, (self.tau, self.n_clients, len(models)))
        if parent.shape != (self.n_clients,):
            raise ValueError(f"a tournament needs a parent for each of {self.n_clients} clients, got {parent.shape}")
        found = Tournament.nobody(self.n_clients, len(starts))
        clients = np.flatnonzero((parent >= 0) & (self.counts[self.tau] > 1) & self.reachable)
        specs, parts = model_parts.described(self.engine.net, models)

        def check(c: int, body: Body, raw: Raw) -> tuple[int, Ints]:
            rows = whole(body["rows"], 1, int(self.counts[self.tau, c]))
            wrong = np.array(body["wrong"])
            if (
                wrong.shape != (len(starts),) * 2
                or wrong.dtype.kind != "i"
                or not ((wrong >= 0) & (wrong <= rows)).all()
            ):
                raise Refused(f"expected a table of {len(starts)} by {len(starts)} counts up to {rows}")
            return rows, wrong

        requests = {}
        for c in clients.tolist():
            here = entries.only((entries.c == c) & (self.counts[entries.t, entries.c] > 0))
            body = {
                "models": specs,
                "parent": int(parent[c]),
                "starts": list(starts),
                "local": asdict(self.local),
                "w": [here.t.tolist(), here.m.tolist(), here.value.tolist()],
            }
            requests[c] = body, parts
        for c, (rows, wrong) in self._ask("tournament", requests, check).items():
            found.rows[c], found.wrong[c] = rows, wrong
        return found

    def _score(self, clients: Ints, models: Models, metric: Metric) -> list[str]:
        """Have these clients score what they have not scored yet; the names under which the models' scores are kept."""
        specs, parts = model_parts.described(self.engine.net, models)
        names = [f"{spec['trunk']} {spec['head']} {spec['mask']}" for spec in specs]
        asked: dict[int, list[int]] = {}
        for c in clients.tolist():
            lacking = [m for m, name in enumerate(names) if (c, name, metric) not in self._scores]
            if lacking:
                asked[c] = lacking

        def check(c: int, body: Body, raw: Raw) -> Any:
            return self._checked_scores(c, body, len(asked[c]), metric)

        requests = {}
        for c, some in asked.items():
            wanted = [specs[m] for m in some]
            body = {"metric": metric, "models": wanted}
            requests[c] = body, {name: parts[name] for name in model_parts.named(wanted)}
        for c, (new, stored) in self._ask("evaluate", requests, check).items():
            for k, m in enumerate(asked[c]):
                cells = {t: (size, sums[k]) for t, (size, sums) in stored.items()}
                self._scores[c, names[m], metric] = None if new is None else new[k], cells
        return names

    def _checked_scores(
        self, c: int, body: Body, n_models: int, metric: Metric
    ) -> tuple[list[float] | None, dict[int, tuple[int, list[float]]]]:
        mistakes, new, n = metric == "error", None, int(self.counts[self.tau, c])
        if n:
            new = numbers(body["new"], n_models, n if mistakes else np.finfo(np.float64).max, mistakes)
        stored = {}
        for t, size, sums in body["stored"]:
            known = int(self.counts[t, c]) if isinstance(t, int) and 0 <= t <= self.tau else 0
            if known:  # else it came too late for this time step
                size = whole(size, min(known, base.SCORE_ROWS), min(known, base.SCORE_ROWS))
                stored[t] = size, numbers(sums, n_models, size if mistakes else np.finfo(np.float64).max, mistakes)
        if set(stored) != set(np.flatnonzero(self.counts[:, c]).tolist()):
            raise Refused("expected sums for every stored time step")
        return new, stored

    def _local_updates(self, models: Models, lanes: Updates, w: Entries, local: Local) -> Updates:
        return self._round(models, lanes, w, self.round, local)

    def _train(self, models: Models, lanes: Updates, w: Entries, rounds: int, local: Local) -> Models:
        for i in range(rounds):
            models = averaged(models, self._round(models, lanes, w, self.round + i, local))
        return models

    def _round(self, models: Models, lanes: Updates, w: Entries, round: int, local: Local) -> Updates:
        """What the clients trained in one round; those that gave no usable reply are left out."""
        net = self.engine.net
        specs, parts = model_parts.described(net, models)
        like = model_parts.like(net)
        shape = trunk_of(net, like)
        trunk_shapes, head_shapes = (model_parts.shapes(part) for part in split(like, shape))
        lanes_of: dict[int, list[int]] = {}  # by client, the trunk that each of its models stands on, counted from 0
        requests = {}
        for c in np.unique(lanes.client[self.reachable[lanes.client]]).tolist():
            mine, here = lanes.model[lanes.client == c], w.only(w.c == c)
            families = [models.family[m] for m in mine]
            lanes_of[c] = [list(dict.fromkeys(families)).index(name) for name in families]
            wanted = [specs[m] for m in mine]
            body = {
                "round": round,
                "local": asdict(local),
                "models": wanted,
                "w": [here.t.tolist(), np.searchsorted(mine, here.m).tolist(), here.value.tolist()],
            }
            requests[c] = body, {name: parts[name] for name in model_parts.named(wanted)}

        def check(c: int, body: Body, raw: Raw) -> tuple[list[Part], list[Part]]:
            whole(body["round"], round, round)
            n_trunks = (max(lanes_of[c]) + 1) * (local.trains == "all" and bool(trunk_shapes))
            n_heads = len(lanes_of[c]) * bool(head_shapes)
            legal = {f"trunk-{k}" for k in range(n_trunks)} | {f"head-{k}" for k in range(n_heads)}
            if set(raw) != legal:
                raise Refused(f"it brings {len(raw)} parts of models, expected {len(legal)}")
            return (
                [messages.arrays(raw[f"trunk-{k}"], trunk_shapes, "a trunk") for k in range(n_trunks)],
                [messages.arrays(raw[f"head-{k}"], head_shapes, "a head") for k in range(n_heads)],
            )

        found = self._ask("train", requests, check, round)
        kept = np.flatnonzero(np.isin(lanes.client, list(found)))
        lane_names, lane = np.unique(lanes.lane[kept], return_inverse=True)
        some = Updates(None, lanes.client[kept], lanes.model[kept], lanes.size[kept], lane)
        if not len(kept):
            return replace(some, params=per_axis(lambda leaf, _: leaf[:0], models, None, None))
        trunks: list[Part] = [[] for _ in lane_names]
        heads: list[Part] = []
        place = dict.fromkeys(found, 0)
        for pair, k in zip(kept.tolist(), lane.tolist(), strict=True):
            c, m = int(lanes.client[pair]), int(lanes.model[pair])
            at = place[c]
            place[c] += 1
            of_trunk, of_head = found[c]
            old, _ = split(one(models, m), shape)
            trunks[k] = of_trunk[lanes_of[c][at]] if of_trunk else old
            heads.append(of_head[at] if of_head else [])
        stacked = [[np.stack(rows) for rows in zip(*part, strict=True)] for part in (trunks, heads)]
        return replace(some, params=unsplit(stacked[0], stacked[1], shape))

    def _ask(
        self, kind: str, requests: Mapping[int, Request], check: Check, round: int | None = None
    ) -> dict[int, Any]:
        """An exchange; who fails in it is out of reach until the next time step, unless a quorum needs it back."""
        found: dict[int, Any] = {}
        waiting, end = dict(requests), 0.0
        while waiting:
            found |= self.engine.ask(kind, self.tau, waiting, check, round)
            lost = [c for c in waiting if c not in found]
            self.reachable[lost] = False
            if not lost or self.reachable.sum() >= self.engine.rules.quorum:
                break
            where = f"{kind}" + ("" if round is None else f" of round {round}")
            here = set(np.flatnonzero(self.reachable).tolist())
            end = end or time.monotonic() + self.engine.rules.patience
            back = self.engine.wait_for(self.tau, here, where, end)
            self.reachable[list(back)] = True
            waiting = {c: requests[c] for c in back if c in requests}
        return dict(sorted(found.items()))
