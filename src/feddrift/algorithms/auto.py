"""research version"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from feddrift import cluster
from feddrift.cluster import Clustering
from feddrift.memory import ALL
from feddrift.models import join, mix, put, take
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Ints, Local, Models, State, Tournament

KIND = 2**20  # ids of private models: (kind + 1) * KIND + client
STAY, NEW, FRESH, TUNED, OWN = 0, 2, 4, 6, 7  # trial kinds have two folds


def private_ids(kind: int, clients: Sequence[int] | Ints) -> list[int]:
    return [(kind + 1) * KIND + int(c) for c in clients]


@dataclass(frozen=True, repr=False)
class AutoState(State):
    w: Clusters
    good: float = 0.0
    bad: float = 0.0
    helped: float = 0.0
    born: int = 1
    reference: Floats = field(default_factory=lambda: np.zeros(0), metadata={"newcomer": np.nan})  # [c]
    size: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64), metadata={"newcomer": 0})
    came_from: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64), metadata={"newcomer": -1})  # id of the cluster before, where acted
    alarmed: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool), metadata={"newcomer": False})
    tried: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool), metadata={"newcomer": False})
    log: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Auto:
    short: float = 0.25
    own_rounds: float = 0.5
    alarm_z: float = 2.33
    filter_z: float = 1.0
    cross: bool = True
    use_trust: bool = True
    plain: bool = True
    vote_trust: bool = True
    merge_se: float = 2.0
    verbose: bool = False
    group: bool = True
    lonely: bool = True

    def init(self, fed: Federation) -> AutoState:
        n = fed.n_clients
        nan = np.full(n, np.nan)
        return AutoState(
            fed.fresh(), cluster.nobody(n), np.ones((n, 1)), "soft", reference=nan, size=np.zeros(n, dtype=np.int64),
            came_from=np.full(n, -1), alarmed=np.zeros(n, dtype=bool), tried=np.zeros(n, dtype=bool),
        )

    def step(self, state: State, fed: Federation) -> AutoState:
        assert isinstance(state, AutoState)
        n, tau = fed.n_clients, fed.tau
        everything = state.models
        at_shared = np.flatnonzero(~everything.private)
        shared = take(everything, at_shared, [everything.ids[m] for m in at_shared])
        home = Clusters(state.w.model, len(shared))
        cur = home.model[-1].copy() if tau else np.zeros(n, dtype=np.int64)
        cur = last_home(home) if tau else cur
        loss = fed.evaluate(shared)
        scored = ~np.isnan(loss[:, 0])
        good, bad, helped = state.good, state.bad, state.helped
        events: list[Event] = []
        log = []
        # 0 judge
        if tau:
            place = {i: m for m, i in enumerate(everything.ids)}
            voters = [[m for m in np.flatnonzero(state.votes[c] > 0)] for c in range(n)]
            gate_clients = np.array([scored[c] and self._has(place, TUNED, c) for c in range(n)])
            if gate_clients.any():
                v = 3
                teams = np.full((2, n, v), -1)
                for c in np.flatnonzero(gate_clients):
                    teams[0, c, 0] = cur[c]
                    teams[1, c, :] = cur[c], place[private_ids(TUNED, [c])[0]], place[private_ids(OWN, [c])[0]]
                res = fed.contest(everything, teams)
                ok = res.rows > 0
                helped += float(((res.wrong[ok, 0, 0] - res.wrong[ok, 1, 1]) / res.rows[ok]).sum())
            judged = scored & state.tried
            if judged.any():
                teams = np.full((2, n, 2), -1)
                for c in np.flatnonzero(judged):
                    teams[0, c] = [place[i] for i in trial_ids(STAY, c, self.cross)]
                    acted = state.came_from[c] >= 0
                    if acted:
                        teams[1, c, 0] = cur[c]
                    else:
                        teams[1, c] = [place[i] for i in trial_ids(NEW, c, self.cross)]
                res = fed.contest(everything, teams)
                for c in np.flatnonzero(judged & (res.rows > 0)):
                    z = zscore(res.wrong[c], 1, 0)
                    if state.alarmed[c]:
                        if z > 1.645:
                            good += 1
                        elif z < -1.645:
                            bad += 1
                            if state.came_from[c] >= 0 and state.came_from[c] in shared.ids:
                                back = shared.ids.index(state.came_from[c])
                                if home.model[-1, c] >= 0:
                                    home.model[-1, c] = back
                                cur[c] = back
                                log.append(("back", c, int(state.came_from[c])))
                    elif z < -4:
                        bad += 0.5
                used = np.unique(np.concatenate([home.model[home.model >= 0], cur]))
                gone = np.setdiff1d(np.arange(len(shared)), used)
                if len(gone):
                    now = Clustering(shared, home).drop(gone, "rolled back")
                    new_at = np.cumsum(~np.isin(np.arange(len(shared)), gone)) - 1
                    events += list(now.events)
                    shared, home, cur = now.models, now.w, new_at[cur]
                    loss = loss[:, ~np.isin(np.arange(loss.shape[1]), gone)]
        trust = (good + 2) / (good + bad + 3)
        # 1 try
        best, lowest = cluster.best_models(loss, cur)
        own = np.where(scored, loss[np.arange(n), cur], np.nan)
        rows = fed.counts[tau]
        se = np.sqrt(own * (1 - own) / np.maximum(rows, 1) + state.reference * (1 - state.reference) / np.maximum(state.size, 1))
        with np.errstate(invalid="ignore", divide="ignore"):
            rise = np.nan_to_num((own - state.reference) / np.maximum(se, 1e-9), nan=0.0)
        suspicious = scored & (tau > 0) & ((rise > self.filter_z) | (best != cur) | np.isnan(state.reference)) & (rows > 1)
        trial_models: list[Models] = []
        alarmed, acted = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        target = cur.copy()
        founders: list[int] = []
        if suspicious.any():
            trial_models, result = self._try(shared, home, cur, best, suspicious, fed)
            for c in np.flatnonzero(suspicious & (result.rows > 0)):
                wrong = result.wrong[c]  # stay, new, best, cur, fresh
                new = 1
                if wrong.shape[0] > 4 and cluster.beats(wrong, 4, 1):
                    new = 4
                alt = 2 if best[c] != cur[c] and not cluster.beats(wrong, new, 2) else new
                z = zscore(wrong, alt, 0)
                up = zscore(wrong, 2, 3) if alt == 2 else rise[c]
                alarmed[c] = z > self.alarm_z or (up > self.alarm_z and z > -1)
                if alarmed[c]:
                    plain = wrong[alt, alt] * 2 < wrong[0, 0] and z > self.alarm_z
                    acted[c] = (trust > 0.5 or not self.use_trust) if tau > 1 else plain
                    if self.plain and plain:
                        acted[c] = True
                    log.append((("act" if acted[c] else "alarm"), int(c), "to" if alt == 2 else ("fresh" if new == 4 else "new"), round(float(z), 1), round(float(up), 1),
                                [int(x) for x in np.diag(wrong)], int(result.rows[c])))
                if acted[c]:
                    if alt == 2:
                        target[c] = best[c]
                    else:
                        founders.append((int(c), new == 4))
        # 2 act
        came_from = np.where(acted, np.asarray(shared.ids)[cur], -1)
        now = Clustering(shared, home)
        n_old = len(shared)
        D = None
        if n_old > 1:
            L = fed.cross_evaluate(shared, np.asarray(home) if False else cluster.assign(home, np.full(n, -1)), "error")
            D = self._distances(L, int(np.median(rows[rows > 0])) if (rows > 0).any() else 1)
        born = state.born
        groups: list[list[int]] = []
        ftarget = target.copy()
        for c, _ in founders:
            ftarget[c] = -1
        now = now.assign(np.where(scored | (fed.counts[tau] > 0), ftarget, -1))
        if founders:
            groups, newborn = self._found(founders, shared, best, born, fed)
            now = now.add(newborn, groups)
            events += [Event("created", i, {"clients": g, "reason": "new data contradict old ones"}) for i, g in zip(newborn.ids, groups, strict=True)]
            born += len(groups)
        if D is not None:
            full = np.full((len(now.models),) * 2, np.inf)
            full[:n_old, :n_old] = D
            models, w, merged = cluster.merge_closest(now.models, now.w, full, fed.counts, 1.0)
            now = Clustering(models, w)
            events += merged
            if merged:
                log.append(("merged", [(e.model, e.cause["into"]) for e in merged]))
        # 3 train
        ids_before = now.models.ids
        models = fed.train(now.models, now.w)
        at_home = last_home(now.w, now.w.model[-1])
        # where unscored
        ids = np.asarray(models.ids)
        # 4 home
        reach = fed.reachable & ((now.w.model == at_home) & (fed.counts > 0)).any(axis=0)
        who = np.arange(n)
        tuned = take(models, at_home, private_ids(TUNED, who), private_ids(TUNED, who), who)
        w_home = Clusters(np.where(now.w.model == at_home, who, -1), n)
        R = fed.local.rounds
        tuned = fed.train(tuned, w_home, max(1, round(R * self.short)))
        old_own = {c: i for c, i in ((c, private_ids(OWN, [c])[0]) for c in range(n)) if i in everything.ids}
        changed = np.ones(n, dtype=bool)
        stack = models
        if old_own:
            at = [everything.ids.index(i) for i in old_own.values()]
            stack = join(models, take(everything, at, list(old_own.values())))
            prev_ids = np.asarray(take_ids(state))
            for c in old_own:
                # anew from K_home after a change
                changed[c] = prev_ids[c] != ids[at_home[c]] 
        positions = [at_home[c] if changed[c] or c not in old_own else stack.ids.index(old_own[c]) for c in range(n)]
        own_models = take(stack, positions, private_ids(OWN, who), private_ids(OWN, who), who)
        own_models = fed.train(own_models, w_home, max(1, round(R * self.own_rounds)))
        everything = join(join(models, tuned), own_models)
        for trial in trial_models:
            everything = join(everything, trial)
        # votes
        votes = np.zeros((n, len(everything)))
        k = len(models)
        votes[who, at_home] = 1.0
        if helped >= 0:
            votes[who, k + who] = 1.0
            votes[who, k + n + who] = 1.0
        votes /= votes.sum(axis=1, keepdims=True)
        if self.vote_trust:
            pos = {i: m for m, i in enumerate(everything.ids)}
            for c in np.flatnonzero(acted):
                stay = [pos[i] for i in trial_ids(STAY, c, self.cross)]
                votes[c] *= trust
                votes[c, stay] += (1 - trust) / len(stay)
        # reference: K_home error on this batch before training (if it is an old model)
        new_reference = np.where(scored, loss[np.arange(n), np.clip(target, 0, loss.shape[1] - 1)], state.reference)
        for c, _ in founders:
            new_reference[c] = np.nan
        if tau == 0:
            new_reference[:] = np.nan
        w_all = Clusters(now.w.model, len(everything))
        if self.verbose:
            print(f"t={tau} models={models.ids} trust={trust:.2f} good={good} bad={bad} helped={helped:.3f} home={ids[at_home].tolist()}", log)
        return AutoState(
            everything, w_all, votes, "soft", tuple(events), alarmed, good=good, bad=bad, helped=helped, born=born,
            reference=new_reference, size=np.where(scored, rows, state.size), came_from=came_from, alarmed=alarmed,
            tried=suspicious, log=tuple(log),
        )

    def _has(self, place: dict[int, int], kind: int, c: int) -> bool:
        return private_ids(kind, [c])[0] in place

    def _try(self, shared: Models, home: Clusters, cur: Ints, best: Ints, who: Bools, fed: Federation) -> tuple[list[Models], Tournament]:
        n, tau = fed.n_clients, fed.tau
        clients = np.flatnonzero(who)
        place = np.full(n, -1)
        place[clients] = np.arange(len(clients))
        R = max(1, round(fed.local.rounds * self.short))
        total = None
        kept: list[Models] = []
        past = np.where((home.model == cur) & who, place, -1)  # own cells of cur
        now = place[None]
        for fold, holds in enumerate(("last", "first") if self.cross else ("last",)):
            local = replace(fed.local, hold_out=0.5, holds=holds)
            stay = self._copies(shared, cur[clients], STAY + fold, clients)
            stay = fed.train(stay, Clusters(np.concatenate([past, now]), len(clients)), R, local)
            fresh_w = Clusters(np.concatenate([np.full_like(past, -1), now]), len(clients))
            new = fed.train(self._copies(shared, best[clients], NEW + fold, clients), fresh_w, R, local)
            fresh = fed.train(self._copies(fed.fresh(), np.zeros_like(clients), FRESH + fold, clients), fresh_w, R, local)
            stack = join(join(join(shared, stay), new), fresh)
            teams = np.full((5, n, 1), -1)
            k = len(shared)
            teams[0, clients, 0] = k + np.arange(len(clients))
            teams[1, clients, 0] = k + len(clients) + np.arange(len(clients))
            teams[2, clients, 0] = best[clients]
            teams[3, clients, 0] = cur[clients]
            teams[4, clients, 0] = k + 2 * len(clients) + np.arange(len(clients))
            res = fed.contest(stack, teams, local)
            total = res if total is None else Tournament(total.rows + res.rows, total.wrong + res.wrong)
            kept += [stay, new]
        return kept, total

    def _copies(self, models: Models, at: Ints, kind: int, clients: Ints) -> Models:
        ids = private_ids(kind, clients)
        return take(models, at, ids, ids, clients)

    def _found(self, founders: list[tuple[int, bool]], shared: Models, best: Ints, born: int, fed: Federation) -> tuple[list[list[int]], Models]:
        n = fed.n_clients
        clients = [c for c, _ in founders]
        ids = list(range(born, born + len(founders)))
        newborn = take(shared, best[clients], ids)
        for k, (c, fresh) in enumerate(founders):
            if fresh:
                newborn = put(newborn, k, fed.fresh())
        if not self.group or len(clients) == 1:
            return [[c] for c in clients], newborn
        # short training of shared candidates on half, then compared
        local = replace(fed.local, hold_out=0.5)
        model = np.full((fed.tau + 1, n), -1)
        model[-1, clients] = np.arange(len(clients))
        cand = fed.train(newborn, Clusters(model, len(clients)), max(1, round(fed.local.rounds * self.short)), local)
        teams = np.full((len(clients), n, 1), -1)
        for k in range(len(clients)):
            teams[k, clients, 0] = k
        res = fed.contest(cand, teams, local)
        m = len(clients)
        apart = np.zeros((m, m))
        for a, c in enumerate(clients):
            for b, d in enumerate(clients):
                if a != b:
                    apart[a, b] = zscore(res.wrong[c], a, b)  # at a's client, how much a's own is better than b's
        D = np.maximum(apart, apart.T)
        np.fill_diagonal(D, np.inf)
        fake = Models({"x": np.zeros((m, 1))}, tuple(range(m)))
        pairs, into = cluster.Pairs(D), np.arange(m)
        while m > 1 and (closest := pairs.closest())[2] <= 0.84:
            i, j, _ = closest
            pairs.unite(i, j)
            into[into == j] = i
        left, new = np.unique(into, return_inverse=True)
        groups = [[clients[k] for k in np.flatnonzero(new == g)] for g in range(len(left))]
        A = np.zeros((len(left), m))
        for k in range(m):
            A[new[k], k] = 1
        A /= A.sum(axis=1, keepdims=True)
        return groups, mix(cand, A, list(range(born, born + len(left))))

    def _distances(self, L: Floats, n: int) -> Floats:
        D = cluster.distances(L)
        e = np.maximum.outer(np.diag(L), np.diag(L))
        limit = self.merge_se * np.sqrt(2 * e * (1 - e) / n)
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(D), D / np.maximum(limit, 1e-12), np.inf)


def take_ids(state: AutoState) -> Ints:
    ids = np.asarray(state.models.ids)
    return ids[last_home(state.w)]


def last_home(w: Clusters, newest: Ints | None = None) -> Ints:
    """[c], the newest cluster each client's data went to."""
    home = np.zeros(w.model.shape[1], dtype=np.int64)
    for row in w.model:
        home = np.where(row >= 0, row, home)
    return home


def trial_ids(kind: int, c: int, cross: bool) -> list[int]:
    first = private_ids(kind, [c])[0]
    return [first, private_ids(kind + 1, [c])[0]] if cross else [first]


def zscore(wrong: Ints, a: int, b: int) -> float:
    """How much better a is than b, in standard errors."""
    won, lost = int(wrong[b, b] - wrong[a, b]), int(wrong[a, a] - wrong[a, b])
    return (won - lost) / math.sqrt(max(1, won + lost))
